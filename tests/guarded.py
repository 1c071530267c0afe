"""Memory beside pages that nobody may touch: who reads or writes past its end, or before its start, is killed."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

PLAIN, END, START = "plain", "end", "start"
ALLOCATOR = Path(__file__).with_name("guarded_allocator.c")
_GUARD = 16 * mmap.PAGESIZE
_NOTHING, _READ = 0, 1  # PROT_NONE, PROT_READ
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _span(x: Tensor) -> int:
    """Elements from the first to the last one."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def guarded(x: Tensor, side: str) -> Tensor:
    """The numbers of x with its sizes and strides, in read-only memory that holds just what lies between the first
    and the last of them. NaN (or True) lies between the numbers; the end or the start of that memory is the end or the
    start of a page, and the pages beyond it may not be touched."""
    if x.numel() == 0:
        return x
    size = _span(x) * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * _GUARD)
    offset = _GUARD + (pages - size if side == END else 0)
    flat = torch.frombuffer(memory, dtype=x.dtype, count=_span(x), offset=offset)
    flat.fill_(math.nan if x.is_floating_point() else 1)
    sizes = [1 if step == 0 else n for n, step in zip(x.shape, x.stride(), strict=True)]
    flat.as_strided(sizes, x.stride()).copy_(x.as_strided(sizes, x.stride(), x.storage_offset()))
    begin = flat.data_ptr() - offset
    _protect(begin, _GUARD, _NOTHING)
    _protect(begin + _GUARD, pages, _READ)
    _protect(begin + _GUARD + pages, _GUARD, _NOTHING)
    return flat.as_strided(x.shape, x.stride())


def guard_allocations(side: str) -> None:
    """Which side of torch's own allocations from now on lies at such pages, where tests/guarded_allocator.c was
    preloaded."""
    _libc.guard_allocations((PLAIN, END, START).index(side))
