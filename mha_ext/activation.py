"""PyTorch's own ``scaled_dot_product_attention`` on the kernels, switched on and off.

A provider in PyTorch's registry of flash-attention implementations (``torch.nn.attention``). The name ``"mha_ext"`` is
registered on import and activated only when asked for.
"""

from __future__ import annotations

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
        self.replaced: str | None = None

    def update(self) -> None:
        """Bring the registry in line; an implementation that was active before comes back afterwards."""
        registry = _registry()
        current = registry.current_flash_attention_impl()
        wanted = bool(self.standing or self.blocks)
        if wanted and current != _NAME:
            self.replaced = current
            registry.activate_flash_attention_impl(_NAME)
        elif not wanted and current == _NAME:
            registry.restore_flash_attention_impl()
            if self.replaced is not None:
                registry.activate_flash_attention_impl(self.replaced)
            self.replaced = None


_switch = _Switch()


class Activation:
    """What ``activate`` returns; as a context manager it ends the activation when the block does."""

    def __enter__(self) -> Activation:
        with _switch.lock:
            if self not in _switch.standing:
                raise RuntimeError("activate: an activation must be entered once and before deactivate(), call it anew")
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
    attention out. Programs that are traced (``torch.compile``, ``torch.export``) keep PyTorch's operators; where these
    are PyTorch's flash attention, they run the kernels while the activation lasts.

    The activation holds for all threads of the process. Blocks may be nested and may overlap in several threads: the
    kernels run until the last one ends.

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
    with _switch.lock:
        _switch.standing.clear()
        if _registry() is not None:
            _switch.update()


if _registry() is not None:
    _registry().register_flash_attention_impl(_NAME, register_fn=_install)
