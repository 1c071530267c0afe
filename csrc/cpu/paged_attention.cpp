// paged_attention on CPU: the kernel for few queries reads keys and values where their pages lie.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../checks.h"
#include "../layout.h"
#include "../signatures.h"
#include "arguments.h"
#include "few_queries.h"
#include "forward_into.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

// The table's entries as far as keys are seen; what lies behind is never read.
void check_pages(const PagedArguments& a, int64_t num_keys) {
  const int64_t used = divide_up(num_keys, a.key_pages.size(2));
  TORCH_CHECK_VALUE(used <= a.page_table.size(1), "paged_attention: key_range must end within the page_table's ",
                    a.page_table.size(1), " pages of ", a.key_pages.size(2), ", got ", num_keys);
  if (used == 0) return;
  const at::Tensor table = a.page_table.narrow(1, 0, used);
  const int64_t least = table.min().item<int64_t>(), most = table.max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0 && most < a.key_pages.size(0), "paged_attention: page_table must have entries in [0, ",
                    a.key_pages.size(0), "), got ", least, " to ", most);
}

AttentionResult paged_attention(const PagedArguments& a) {
  check_paged_attention(a);
  const AttentionArguments arguments = on_keys(a, a.key_pages, a.value_pages);
  const kernels::KernelTable& kernel = kernels_for(arguments);
  const at::Tensor out = empty_like_query(a.query, a.value_pages.size(3));
  const at::Tensor lse =
      at::empty({a.query.size(0), a.query.size(1), a.query.size(2)}, a.query.options().dtype(compute_type(a.query)));
  if (lse.numel() == 0) return {out, lse};
  const int64_t num_keys = std::max<int64_t>(0, a.key_range[1].max().item<int64_t>());
  check_pages(a, num_keys);
  if (!runs_as_few(a.query.size(2), kernel)) {  // many read each key often enough to be worth a copy
    const at::Tensor key = gather_pages(a.key_pages, a.page_table), value = gather_pages(a.value_pages, a.page_table);
    return {out, attention_into(on_keys(a, key, value), {out})};
  }
  const BoundArguments bound = bind(arguments);
  kernels::ForwardParams forward = bind_outputs(bound, {out});
  forward.lse = lse.mutable_data_ptr();
  kernels::AttentionParams& p = forward.attention;
  const at::Tensor table = a.page_table.contiguous();
  p.num_keys = num_keys;
  p.pages = table.const_data_ptr<int32_t>();
  p.pages_stride_b = table.stride(0);
  p.page_size = a.key_pages.size(2);
  attend_few(forward, kernel, lse.options());
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("paged_attention", &paged_attention_kernel<paged_attention>); }

}  // namespace mha_ext::cpu
