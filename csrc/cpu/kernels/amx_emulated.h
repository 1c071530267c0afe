// The instructions of amx_instructions.h in plain C++, for tests (-DMHA_EXT_EMULATE_AMX in .ci/lint): the tiles of a
// thread are memory, and each row that an instruction reads or writes is an access that the sanitizers see.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

struct TileInstructions {
  static void configure_tiles() { tiles_or_none() = {}, tiles_or_none().configured = true; }
  static void release_tiles() { tiles_or_none().configured = false; }

  template <int kTile>
  static void load_tile(const void* first_row, int64_t ld) {
    const auto* row = static_cast<const Number*>(first_row);
    for (Row& numbers : tiles()[kTile]) __builtin_memcpy(numbers, row, sizeof(Row)), row += ld;
  }
  template <int kTile>
  static void store_tile(void* first_row, int64_t ld) {
    auto* row = static_cast<Number*>(first_row);
    for (const Row& numbers : tiles()[kTile]) __builtin_memcpy(row, numbers, sizeof(Row)), row += ld;
  }
  template <int kTile>
  static void zero_tile() {
    __builtin_memset(tiles()[kTile], 0, sizeof(Tile));
  }
  // The sums of the pairs' first numbers and of their second ones join at the end. Subnormal numbers, read or made, are
  // zeros, whatever the thread's own mode is.
  template <int kSum, int kLeft, int kRight>
  static void add_tile_product() {
    const Tile &left = tiles()[kLeft], &right = tiles()[kRight];
    Tile& sum = tiles()[kSum];
    const uint32_t mode = _mm_getcsr(), zeros = 0x9fc0;  // flush to zero, denormals are zeros, no exceptions
    asm volatile("ldmxcsr %0" ::"m"(zeros) : "memory");
    for (int m = 0; m < kTileRows; ++m) {
      V::Vec first{}, second{};
      for (int k = 0; k < kRowNumbers; ++k) {
        const uint32_t a = left[m][k];
        V::HashVec b;
        __builtin_memcpy(&b, right[k], sizeof(b));
        first += __builtin_bit_cast(float, a << 16) * reinterpret_cast<V::Vec>(b << 16);
        second += __builtin_bit_cast(float, a & 0xffff0000u) * reinterpret_cast<V::Vec>(b & 0xffff0000u);
      }
      auto* row = reinterpret_cast<float*>(sum[m]);
      V::store(row, V::load(row) + (first + second));
    }
    asm volatile("ldmxcsr %0" ::"m"(mode) : "memory");
  }

 private:
  using V = Simd<float, 64>;
  static constexpr int kTileCount = 8, kTileRows = 16, kRowNumbers = 16;
  using Number __attribute__((may_alias, aligned(2))) = uint32_t;
  using Row = Number[kRowNumbers];
  using Tile = Row[kTileRows];
  struct Tiles {
    bool configured;
    Tile tiles[kTileCount];
  };

  static Tiles& tiles_or_none() {
    static thread_local Tiles tiles;
    return tiles;
  }
  static Tile* tiles() {
    if (!tiles_or_none().configured) __builtin_trap();
    return tiles_or_none().tiles;
  }
};

}  // namespace
}  // namespace mha_ext::kernels
