// The list of entry points an instruction set offers, one table for float and one for double compute.
#pragma once

#include "linear_rows.h"
#include "params.h"

namespace mha_ext::kernels {

struct KernelTable {
  // out and lse of one block of queries against all keys: O = softmax(scale Q K^T + mask) V.
  void (*forward_block)(const ForwardParams&, const QueryBlock&, void* scratch);
  size_t (*forward_scratch_bytes)(const AttentionParams&);

  // Forward for few queries: rows of a group of heads against a range of their keys. `partial`, where it is set, takes
  // forward_few_partial_size numbers of the compute type a row as [range][B][H][T_q], else the range is the whole.
  void (*forward_few)(const ForwardParams&, const GroupRows&, const KeyRange&, void* scratch);
  void (*merge_few)(const ForwardParams&, const QueryBlock& one_query, int64_t ranges, void* scratch);
  size_t (*forward_few_scratch_bytes)(const AttentionParams&);
  int64_t (*forward_few_partial_size)(const AttentionParams&);
  int64_t few_rows;  // at most so many run together
  // Measured against the other kernel at D = 40, 64, 128, T_kv = 128 ... 512 (AMD Zen 4): even at 9 of 16 lanes with
  // AVX-512 in float, at 6 of 8 in double; with AVX2 at 8 of 8 and 12 of 16 in float, 3 of 4 in double; portable at 16.
  int few_sixteenths;  // queries are few while they fill no more than so many sixteenths of the vectors they would take

  // Gradients of one key/value head over one range of its keys, or all of them, from every query of its group of heads:
  // dK and dV complete, dQ complete when all keys are given, else the range's share.
  void (*backward_range)(const BackwardParams&, const KeyRange&, void* scratch);
  size_t (*backward_scratch_bytes)(const AttentionParams&, int64_t range_keys);

  // The same for few queries.
  void (*backward_few)(const BackwardParams&, const KeyRange&, void* scratch);
  size_t (*backward_few_scratch_bytes)(const AttentionParams&);

  // Adds dS of one block of queries against keys [key_begin, key_end) to the gradient of a mask.
  void (*mask_gradient_block)(const BackwardParams&, const QueryBlock&, int64_t key_begin, int64_t key_end,
                              const MaskGradientView&, void* scratch);
  size_t (*mask_gradient_scratch_bytes)(const AttentionParams&);

  // Tangents of out and lse of one block of queries, and then of the gradients, as their plain counterparts above.
  // All numbers are finite. Null in a table for bfloat16.
  void (*tangent_block)(const TangentParams&, const QueryBlock&, void* scratch);
  size_t (*tangent_scratch_bytes)(const AttentionParams&);
  void (*tangent_backward_range)(const TangentParams&, const KeyRange&, void* scratch);
  size_t (*tangent_backward_scratch_bytes)(const AttentionParams&, int64_t range_keys);
  void (*tangent_mask_gradient_block)(const TangentParams&, const QueryBlock&, int64_t key_begin, int64_t key_end,
                                      const MaskGradientView&, void* scratch);

  // out, lse and the weights of one block of queries, for `head_count` heads.
  void (*weights_block)(const WeightsParams&, const QueryBlock&, void* scratch);
  size_t (*weights_scratch_bytes)(const WeightsParams&);

  // Up to so many rows of a linear map the two ways below were measured to be no slower than MKL and oneDNN (AMD Zen 4,
  // widths 128 to 1024): AVX-512 as fast at 128 and 5 % slower at 197, AVX2 2 % slower at 64, portable slower from 16
  // on.
  int64_t most_linear_rows;
  // Outputs [begin, end) of a linear map of a few rows.
  void (*linear_rows)(const LinearRows&, int64_t begin, int64_t end);
  // Of more rows: first the input turned into columns [depth][lanes], terms [begin, end) of it, then outputs [begin,
  // end), up to kLinearBlock of either. `columns` has whole vectors both ways.
  void (*turn_linear_input)(const LinearRows&, int64_t begin, int64_t end, void* columns, void* scratch);
  void (*linear_columns)(const LinearRows&, const void* columns, int64_t begin, int64_t end, void* scratch);
  size_t (*linear_scratch_bytes)(const LinearRows&);
  // Of the gradient of its weight, kLinearBlock rows from `begin` on.
  void (*sum_of_rows)(const SumOfRows&, int64_t begin);

  // One row of a Bool mask's map: `keys` keys of `rows` queries from m.data on.
  void (*map_mask_rows)(const MaskView& m, int64_t rows, int64_t keys, uint8_t* map);

  int vector_width;  // lanes; blocks of queries are padded to a multiple of it
};

// What runs tensors of a type; where `bfloat16` is not set, float32 widens them.
struct InstructionSet {
  const char* name;
  KernelTable float32, float64;
  const KernelTable* bfloat16 = nullptr;
};

extern const InstructionSet kPortable;
// Defined where the compiler had the instructions (setup.py).
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
extern const KernelTable kAvx512Bf16;
KernelTable with_amx(const KernelTable& widening);  // AVX-512's for float, which widen bfloat16

}  // namespace mha_ext::kernels
