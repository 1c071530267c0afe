"""Multi-head attention for PyTorch: C++ kernels, a drop-in ``nn.MultiheadAttention``, and the equations behind them.

>>> import torch, mha_ext
>>> attention = mha_ext.MultiheadAttention(embed_dim=32, num_heads=4, batch_first=True)
>>> x = torch.randn(2, 10, 32)
>>> output, _ = attention(x, x, x, need_weights=False, is_causal=True)
>>> output.shape
torch.Size([2, 10, 32])
"""

import contextlib as _contextlib
import sys as _sys

from mha_ext import _decompositions as _decompositions  # registers what ONNX export uses
from mha_ext import _flops as _flops  # registers the operation counts
from mha_ext import errors, functional, reference
from mha_ext._C import available_cpu_capabilities, build_info, cpu_capability, set_cpu_capability
from mha_ext.activation import activate, deactivate
from mha_ext.cache import KVCache
from mha_ext.chapter import (
    attention_backward,
    attention_forward,
    combine_heads,
    multi_head_attention_backward,
    multi_head_attention_forward,
    split_heads,
)
from mha_ext.convert import conversion_report, convert, revert
from mha_ext.cost import parameter_count, self_attention_flops, shape_trace
from mha_ext.grouping import to_grouped_query
from mha_ext.layer_cached import CrossCache
from mha_ext.module import MultiheadAttention
from mha_ext.rotary import RotaryEmbedding

if "torch.distributed.tensor" in _sys.modules:  # else a program that wants it imports mha_ext.distributed
    # It needs what PyTorch may move from release to release: mha_ext.distributed then raises, and the rest works.
    with _contextlib.suppress(ImportError, AttributeError):
        from mha_ext import _sharding as _sharding  # registers how DTensors are cut

__version__ = "0.1.0"

__all__ = [
    "CrossCache",
    "KVCache",
    "MultiheadAttention",
    "RotaryEmbedding",
    "activate",
    "attention_backward",
    "attention_forward",
    "available_cpu_capabilities",
    "build_info",
    "combine_heads",
    "conversion_report",
    "convert",
    "cpu_capability",
    "deactivate",
    "errors",
    "functional",
    "multi_head_attention_backward",
    "multi_head_attention_forward",
    "parameter_count",
    "reference",
    "revert",
    "self_attention_flops",
    "set_cpu_capability",
    "shape_trace",
    "split_heads",
    "to_grouped_query",
]
