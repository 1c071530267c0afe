// AMX: eight tiles of 16 rows of 64 bytes, and their product of bfloat16. GCC 12's intrinsics say nothing of the memory
// that they read and write, so that stores were seen to move past them: the instructions are written out here, and each
// keeps memory as it is around it.
#pragma once

#include <stdint.h>

#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

// What ldtilecfg reads: eight whole tiles.
struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64, "as the instruction takes it");

// Rows of a tile are `ld` numbers of 4 bytes, or pairs, apart.
struct TileInstructions {
  static MHA_EXT_INLINE void configure_tiles() {
    static constexpr TileConfiguration kWholeTiles;
    asm volatile("ldtilecfg %0" ::"m"(kWholeTiles) : "memory");
  }
  static MHA_EXT_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

  template <int kTile>
  static MHA_EXT_INLINE void load_tile(const void* first_row, int64_t ld) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(first_row), "r"(ld), "i"(kTile) : "memory");
  }
  template <int kTile>
  static MHA_EXT_INLINE void store_tile(void* first_row, int64_t ld) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(first_row), "r"(ld), "i"(kTile) : "memory");
  }
  template <int kTile>
  static MHA_EXT_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  static MHA_EXT_INLINE void add_tile_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
  }
};

}  // namespace
}  // namespace mha_ext::kernels
