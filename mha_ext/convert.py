"""``convert`` and ``revert``: the attention layers of a model that exists, swapped where they are.

A module is swapped by giving it another class. The object stays the same, and with it its parameters, hooks, submodules
and whoever else holds it: optimisers, shared layers, wrappers, and a model that is itself an attention layer.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import nn
from torch.jit import ScriptModule

from mha_ext import beneath, checks, layer_variants
from mha_ext.module import MultiheadAttention

__all__ = ["ConversionReport", "ModuleReport", "conversion_report", "convert", "revert"]

_ORIGINAL = nn.MultiheadAttention  # as it was at import: somebody may put our class in its place
_ORIGINAL_FORWARD = _ORIGINAL.forward


class ModuleReport(NamedTuple):
    """What became of one attention layer of a model, or what would."""

    name: str
    type_name: str
    converted: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.type_name}, {self.reason}"


class ConversionReport(list[ModuleReport]):
    """A list that prints as one line a layer."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no nn.MultiheadAttention"


class _Swap(NamedTuple):
    """A module's next class, or None and why it keeps its own."""

    target: type[nn.Module] | None
    reason: str


def convert(model: nn.Module, *, inplace: bool = True, subclasses: bool = False) -> nn.Module:
    """Make every ``nn.MultiheadAttention`` in a model a ``mha_ext.MultiheadAttention``, in place.

    Modules stay the objects that they are, with their parameters (optimisers keep working), hooks, parametrizations,
    mode and place in the model. What cannot be swapped is left alone; ``conversion_report`` tells what and why.
    Converting twice is converting once. All is decided before anything is changed: an error leaves the model as it was.

    Args:
        model: any module, also one that is itself an attention layer or a wrapper (``torch.compile``,
            ``DataParallel``) of a model. Layers that are not registered as submodules are not seen.
        inplace: False swaps in a deep copy and leaves the model as it was.
        subclasses: also swap subclasses of ``nn.MultiheadAttention`` whose ``forward`` is inherited or calls
            ``super().forward``: what they override stays, and what they inherit is ours.

    Returns:
        The model, or its converted copy.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch, mha_ext
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> type(mha_ext.convert(model).self_attn)
        <class 'mha_ext.module.MultiheadAttention'>
    """
    _require_module("convert", model)
    model = model if inplace else copy.deepcopy(model)
    swaps = [(module, _to_ours(module, subclasses).target) for _, module in _layers(model)]
    for module, target in swaps:
        if target is not None:
            _become_ours(module, target)
    return model


def revert(model: nn.Module, *, inplace: bool = True) -> nn.Module:
    """Undo ``convert``: every ``mha_ext.MultiheadAttention`` in a model becomes an ``nn.MultiheadAttention`` again.

    Those that were built as ours are reverted too, if the original can express them: not with ``num_kv_heads``,
    ``head_dim`` or another keyword that it lacks. User classes derived from ours stay.

    Args:
        model: as for ``convert``.
        inplace: False swaps in a deep copy and leaves the model as it was.

    Returns:
        The model, or its reverted copy.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch, mha_ext
        >>> model = mha_ext.convert(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True))
        >>> type(mha_ext.revert(model).self_attn)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    _require_module("revert", model)
    model = model if inplace else copy.deepcopy(model)
    swaps = [(module, _to_original(module).target) for _, module in _layers(model)]
    for module, target in swaps:
        if target is not None:
            _become_original(module, target)
    return model


def conversion_report(model: nn.Module, *, subclasses: bool = False) -> ConversionReport:
    """Tell of every ``nn.MultiheadAttention`` in a model whether it is ours, and what ``convert`` would do and why.

    Args:
        model: as for ``convert``, before or after it.
        subclasses: as for ``convert``.

    Returns:
        A list of ``(name, type_name, converted, reason)``, a module that appears twice once, under its first name.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch, mha_ext
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> print(mha_ext.conversion_report(model))
        self_attn: torch.nn.modules.activation.MultiheadAttention, convert would swap it
        >>> print(mha_ext.conversion_report(mha_ext.convert(model)))
        self_attn: mha_ext.module.MultiheadAttention, is mha_ext's; revert would swap it
    """
    _require_module("conversion_report", model)
    report = ConversionReport()
    for name, module in _layers(model):
        if isinstance(module, MultiheadAttention):
            back = _to_original(module)
            reason = (
                "is mha_ext's; revert would swap it"
                if back.target is not None
                else f"is mha_ext's; revert leaves it: {back.reason}"
            )
            report.append(ModuleReport(name, beneath.full_name(type(module)), True, reason))
        else:
            type_name = beneath.full_name(type(module))
            swap = _to_ours(module, subclasses)
            reason = "convert would swap it" if swap.target is not None else f"left alone: {swap.reason}"
            report.append(ModuleReport(name, type_name, False, reason))
    return report


def _require_module(where: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model must be a torch.nn.Module, got {type(model).__name__}")


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every attention layer, scripted ones included."""
    return [(name, module) for name, module in model.named_modules() if _is_layer(module)]


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, ScriptModule):
        return str(getattr(module, "original_name", "")) == _ORIGINAL.__name__
    return isinstance(module, _ORIGINAL)


def _to_ours(module: nn.Module, subclasses: bool) -> _Swap:
    """The class that makes a layer ours."""
    if isinstance(module, ScriptModule):
        return _Swap(None, "it is compiled by torch.jit; convert before torch.jit.script or trace")
    if isinstance(module, MultiheadAttention):
        return _Swap(None, "it is mha_ext's already")
    problem = _unlike_the_original(module)
    if problem is not None:
        return _Swap(None, problem)
    base = beneath.parametrized_base(module)
    own = base or type(module)
    if _ORIGINAL.forward is not _ORIGINAL_FORWARD:
        return _Swap(None, "nn.MultiheadAttention.forward was replaced")
    if own is _ORIGINAL:
        ours: type[nn.Module] = MultiheadAttention
    else:
        obstacle = beneath.obstacle(own, _ORIGINAL, MultiheadAttention)
        if obstacle is None and not subclasses:
            obstacle = "pass subclasses=True to swap it"
        if obstacle is not None:
            return _Swap(None, f"a subclass of nn.MultiheadAttention; {obstacle}")
        try:
            ours = beneath.put_beneath(own, MultiheadAttention)
        except Exception as error:  # whatever a metaclass or __init_subclass__ raises
            return _Swap(None, f"a subclass of nn.MultiheadAttention that cannot have another base: {error}")
    return _Swap(ours if base is None else beneath.over(type(module), ours), "")


def _unlike_the_original(module: Any) -> str | None:
    """What in a layer's own attributes keeps our class from doing its work, if anything does."""
    state: dict[str, Any] = module.__dict__
    if "forward" in state:
        return "its forward was replaced on the object"
    missing = sorted({"embed_dim", "num_heads", "head_dim"} - state.keys())
    if missing:
        return f"it lacks the original's attribute {missing[0]}"
    taken = sorted({"_has_variants", "_num_kv_heads", "num_kv_heads"} & state.keys())
    if taken:
        return f"it has an attribute {taken[0]} of its own"
    try:
        checks.dropout_probability("convert", "dropout", module.dropout)
    except (TypeError, ValueError) as error:
        return str(error).removeprefix("convert: ")
    return None


def _to_original(module: nn.Module) -> _Swap:
    """The class that one of our layers had, or would have had."""
    if not isinstance(module, MultiheadAttention):
        return _Swap(None, "it is not mha_ext's")
    if "forward" in module.__dict__:
        return _Swap(None, "its forward was replaced on the object")
    if module.num_kv_heads != module.num_heads:
        return _Swap(None, f"num_kv_heads {module.num_kv_heads} differs from num_heads {module.num_heads}")
    if module._has_variants:
        return _Swap(None, f"it has {', '.join(layer_variants.used(module))}")
    if not module._has_original_shapes():
        return _Swap(None, f"head_dim {module.head_dim} differs from embed_dim / num_heads")
    base = beneath.parametrized_base(module)
    own = base or type(module)
    before = _ORIGINAL if own is MultiheadAttention else beneath.taken_from(own)
    if before is None:
        return _Swap(None, "a subclass of mha_ext.MultiheadAttention")
    return _Swap(before if base is None else beneath.over(type(module), before), "")


def _become_ours(module: nn.Module, target: type[nn.Module]) -> None:
    state: dict[str, Any] = module.__dict__
    object.__setattr__(module, "__class__", target)
    width = state["embed_dim"]
    for name, default in (("batch_first", False), ("kdim", width), ("vdim", width)):
        state.setdefault(name, default)  # missing in modules saved by old releases
    state.setdefault("_qkv_same_embed_dim", state["kdim"] == state["vdim"] == width)


def _become_original(module: nn.Module, target: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", target)
    module.__dict__.pop("_num_kv_heads", None)
