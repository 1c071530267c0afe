// AMX: the kernels that spend most of their time in products of bfloat16 make them by tiles. The others are AVX-512's,
// which widen bfloat16.
#ifdef MHA_EXT_EMULATE_AMX
#include "amx_emulated.h"
#else
#include "amx_instructions.h"
#endif

#include "avx512.inl.h"
#include "backward_range.inl.h"
#include "forward_tile.inl.h"
#include "kernel_table.h"
#include "mask_gradient.inl.h"
#include "weights_tile.inl.h"

namespace mha_ext::kernels {
namespace {

struct Amx : Avx512<float>, TileInstructions {
  using Term = BFloat16Pair;
  static constexpr bool kMultipliesPairs = true, kMultipliesTiles = true;
};

// The tiles of a thread, which has them only while this lives: they make its state that a switch of threads saves
// 8 KiB larger, and libraries configure them as they need.
struct Tiles {
  Tiles() { Amx::configure_tiles(); }
  ~Tiles() { Amx::release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace

KernelTable with_amx(const KernelTable& widening) {
  KernelTable table = widening;
  table.forward_block = [](const ForwardParams& f, const QueryBlock& block, void* scratch) {
    const Tiles tiles;
    forward_block<Amx>(f, block, scratch);
  };
  table.forward_scratch_bytes = forward_scratch_bytes<Amx>;
  table.backward_range = [](const BackwardParams& b, const KeyRange& range, void* scratch) {
    const Tiles tiles;
    backward_range<Amx>(b, range, scratch);
  };
  table.backward_scratch_bytes = backward_scratch_bytes<Amx>;
  table.mask_gradient_block = [](const BackwardParams& b, const QueryBlock& block, int64_t key_begin, int64_t key_end,
                                 const MaskGradientView& out, void* scratch) {
    const Tiles tiles;
    mask_gradient_block<Amx>(b, block, key_begin, key_end, out, scratch);
  };
  table.mask_gradient_scratch_bytes = mask_gradient_scratch_bytes<Amx>;
  table.weights_block = [](const WeightsParams& w, const QueryBlock& block, void* scratch) {
    const Tiles tiles;
    weights_block<Amx>(w, block, scratch);
  };
  table.weights_scratch_bytes = weights_scratch_bytes<Amx>;
  return table;
}

}  // namespace mha_ext::kernels
