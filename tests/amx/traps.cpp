// The AMX instructions on a processor that has none: each raises SIGILL there, and the handler decodes its bytes, does
// what it says and goes on behind it. So the machine code of amx.cpp itself runs, with its registers, strides and tile
// numbers. Encodings and operations: Intel's instruction set reference.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace {

struct Tile {
  int rows, row_bytes;
  unsigned char bytes[16][64];
};

thread_local bool configured = false;
thread_local Tile tiles[8];

[[noreturn]] void refuse(const char* what) {
  fprintf(stderr, "amx traps: %s\n", what);
  _exit(3);
}

Tile& tile(int number) {
  if (!configured) refuse("a tile is used before tiles are configured");
  if (tiles[number].rows == 0) refuse("a tile is used that is not configured");
  return tiles[number];
}

void configure(const unsigned char* from) {
  if (from[0] != 1 || from[1] != 0) refuse("palette 1 from row 0 expected");
  memset(tiles, 0, sizeof(tiles));
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    memcpy(&row_bytes, from + 16 + 2 * i, sizeof(row_bytes));
    const int rows = from[48 + i];
    if (i >= 8 ? row_bytes != 0 || rows != 0 : row_bytes > 64 || rows > 16) refuse("larger tiles than there are");
    if (i < 8) tiles[i].rows = rows, tiles[i].row_bytes = row_bytes;
  }
  configured = true;
}

float normal(float x) { return __builtin_fabsf(x) < __FLT_MIN__ ? __builtin_copysignf(0.0f, x) : x; }

float number(const unsigned char* bf16) {
  uint16_t half;
  memcpy(&half, bf16, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return normal(x);
}

// Subnormal numbers, read or made, are zeros.
void add_product(Tile& sum, const Tile& a, const Tile& b) {
  if (a.rows != sum.rows || b.row_bytes != sum.row_bytes || a.row_bytes != 4 * b.rows) refuse("tiles do not fit");
  for (int m = 0; m < sum.rows; ++m) {
    float first[16] = {}, second[16] = {};
    for (int k = 0; k < b.rows; ++k) {
      for (int n = 0; n < sum.row_bytes / 4; ++n) {
        first[n] = normal(__builtin_fmaf(number(a.bytes[m] + 4 * k), number(b.bytes[k] + 4 * n), first[n]));
        second[n] = normal(__builtin_fmaf(number(a.bytes[m] + 4 * k + 2), number(b.bytes[k] + 4 * n + 2), second[n]));
      }
    }
    for (int n = 0; n < sum.row_bytes / 4; ++n) {
      float x;
      memcpy(&x, sum.bytes[m] + 4 * n, sizeof(x));
      x = normal(normal(x) + normal(first[n] + second[n]));
      memcpy(sum.bytes[m] + 4 * n, &x, sizeof(x));
    }
  }
}

// An instruction with a three-byte VEX prefix, of map 0F38.
struct Instruction {
  int opcode, prefix, vvvv, reg, mod, rm;
  int length;               // up to the end of its operands
  unsigned char* base = 0;  // where its memory begins, and how far its rows are apart
  int64_t stride = 0;

  Instruction(const unsigned char* p, const greg_t* registers) {
    static constexpr int kNumbers[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                       REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || (p[2] & 0x84) != 0) refuse("an illegal instruction that is not AMX");
    const int more_index = (~p[1] >> 6) & 1, more_base = (~p[1] >> 5) & 1;
    prefix = p[2] & 3, vvvv = (~p[2] >> 3) & 15, opcode = p[3];
    mod = p[4] >> 6, reg = (p[4] >> 3) & 7, rm = p[4] & 7;
    length = 5;
    if (mod == 3) return;
    int base_number = rm + 8 * more_base;
    if (rm == 4) {
      const int sib = p[length++], index = ((sib >> 3) & 7) + 8 * more_index;
      base_number = (sib & 7) + 8 * more_base;
      if (index != 4) stride = registers[kNumbers[index]] << (sib >> 6);
    }
    int32_t displacement = 0;
    if (mod == 0 && base_number % 8 == 5) {
      if (rm != 5) refuse("an address without a base");
      memcpy(&displacement, p + length, 4);  // from the next instruction on
      base = const_cast<unsigned char*>(p) + length + 4 + displacement;
      length += 4;
      return;
    }
    if (mod == 1) displacement = static_cast<signed char>(p[length]), length += 1;
    if (mod == 2) memcpy(&displacement, p + length, 4), length += 4;
    base = reinterpret_cast<unsigned char*>(registers[kNumbers[base_number]]) + displacement;
  }

  bool is(int code, int with_prefix, bool has_memory) const {
    return opcode == code && prefix == with_prefix && (mod != 3) == has_memory;
  }
};

void run(const Instruction& x) {
  enum Prefix { kNone, k66, kF3, kF2 };
  if (x.is(0x49, kNone, true)) {
    configure(x.base);
  } else if (x.is(0x49, kNone, false)) {
    configured = false;
  } else if (x.is(0x49, kF2, false)) {
    memset(tile(x.reg).bytes, 0, sizeof(Tile::bytes));
  } else if (x.is(0x4b, kF2, true)) {
    Tile& to = tile(x.reg);
    for (int r = 0; r < to.rows; ++r) memcpy(to.bytes[r], x.base + r * x.stride, static_cast<size_t>(to.row_bytes));
  } else if (x.is(0x4b, kF3, true)) {
    const Tile& from = tile(x.reg);
    for (int r = 0; r < from.rows; ++r) {
      memcpy(x.base + r * x.stride, from.bytes[r], static_cast<size_t>(from.row_bytes));
    }
  } else if (x.is(0x5c, kF3, false)) {
    if (x.reg == x.rm || x.reg == x.vvvv || x.rm == x.vvvv) refuse("tiles of a product must differ");
    add_product(tile(x.reg), tile(x.rm), tile(x.vvvv));
  } else {
    refuse("an instruction that amx.cpp does not use");
  }
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction instruction(reinterpret_cast<const unsigned char*>(registers[REG_RIP]), registers);
  run(instruction);
  registers[REG_RIP] += instruction.length;
}

}  // namespace

bool tiles_are_configured() { return configured; }

void catch_amx_instructions() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}
