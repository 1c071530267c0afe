"""PyTorch's own ``scaled_dot_product_attention`` on the kernels, switched on and off.

A provider in PyTorch's registry of flash-attention implementations (``torch.nn.attention``). The name ``"mha_ext"`` is
registered on import and activated only when asked for.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from mha_ext import _C

__all__ = ["Activation", "activate", "deactivate"]

_NAME = "mha_ext"


class _Handle:
    """What the registry keeps while the provider is active."""

    def remove(self) -> None:
        _C.uninstall_provider()


def _install() -> _Handle:
    _C.install_provider()
    return _Handle()


def _registry() -> Any:
    """``torch.nn.attention`` where it has a registry, else None."""
    module = getattr(torch.nn, "attention", None)
    return module if hasattr(module, "register_flash_attention_impl") else None


class _Switch:
    """Who wants the provider: activations that were not undone, and ``with`` blocks that are open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.standing: set[Activation] = set()
        self.blocks: set[Activation] = set()
        self.holds = False
        self.before: str | None = None  # what was active when this switch took hold

    def update(self) -> None:
        """Bring the registry in line; what was active before comes back afterwards."""
        registry = _registry()
        current = registry.current_flash_attention_impl()
        wanted = bool(self.standing or self.blocks)
        if wanted and not (self.holds and current == _NAME):
            self.holds, self.before = True, current
            if current != _NAME:
                registry.activate_flash_attention_impl(_NAME)
        elif self.holds and not wanted:
            self.holds = False
            if current == _NAME and self.before != _NAME:
                registry.restore_flash_attention_impl()
                if self.before is not None:
                    registry.activate_flash_attention_impl(self.before)

    def forked(self) -> None:
        """In a child process: the lock may have been another thread's."""
        self.lock = threading.RLock()


_switch = _Switch()
os.register_at_fork(after_in_child=_switch.forked)


class Activation:
    """What ``activate`` returns; as a context manager it ends the activation when the block does."""

    def __enter__(self) -> Activation:
        with _switch.lock:
            if self not in _switch.standing:
                raise RuntimeError(
                    "activate: an activation can be entered once, and not after deactivate(): call activate() again"
                )
            _switch.standing.remove(self)
            _switch.blocks.add(self)
        return self

    def __exit__(self, *exception: object) -> None:
        with _switch.lock:
            _switch.blocks.discard(self)
            _switch.update()


def activate() -> Activation:
    """Compute ``F.scaled_dot_product_attention`` of CPU tensors with the kernels, in any library, until ``deactivate``.

    Dropout, masks that need gradients, values of another width than keys, any strides and 2-D to N-D inputs are
    included, for which PyTorch would hold a T x S tensor. Left to PyTorch: other devices and dtypes, nested and sparse
    tensors, subclasses, empty inputs, errors, and calls for which ``torch.nn.attention.sdpa_kernel`` rules flash
    attention out. In inference mode, under function transforms (``torch.func``) and in traced programs
    (``torch.compile``, ``torch.export``) only PyTorch's flash attention is replaced, not its composition with a T x S
    tensor.

    The activation holds for all threads of the process. Blocks may be nested and may overlap in several threads: the
    kernels run until the last one ends. The backward pass of what was computed inside may run outside, except under
    ``torch.utils.checkpoint``, which computes it again: that must happen inside as well.

    Returns:
        A context manager; a plain call needs none::

            with mha_ext.activate():
                model(x)

    Raises:
        RuntimeError: the running torch has no registry of flash-attention implementations.

    Differs from PyTorch: a query with every key masked gives 0 and gradients 0; what is stored behind a mask (NaN,
    infinity) reaches nothing; dropout draws other random numbers from torch's generator.

    Example:
        >>> import torch, mha_ext
        >>> query, key, value = torch.randn(3, 2, 4, 8, 16).unbind()
        >>> with mha_ext.activate():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 8, 16])
    """
    if _registry() is None:
        raise RuntimeError(
            "activate: torch must have a registry of flash-attention implementations "
            f"(torch.nn.attention.register_flash_attention_impl, in 2.13), got torch {torch.__version__}"
        )
    activation = Activation()
    with _switch.lock:
        _switch.standing.add(activation)
        _switch.update()
    return activation


def deactivate() -> None:
    """Undo every ``activate()`` outside ``with`` blocks; PyTorch's own attention comes back when no block is open."""
    registry = _registry()
    if registry is None:
        return
    with _switch.lock:
        _switch.standing.clear()
        if _switch.before == _NAME:
            _switch.before = None
        _switch.update()
        if not _switch.blocks and registry.current_flash_attention_impl() == _NAME:
            registry.restore_flash_attention_impl()


if _registry() is not None:
    _registry().register_flash_attention_impl(_NAME, register_fn=_install)
