"""Attention over several processes: the layer with its heads on many devices, and DTensor rules for the operators.

Data parallelism needs nothing of this: ``DistributedDataParallel`` and ``fully_shard`` take the layer as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call

from mha_ext import _sharding as _sharding  # registers the operators' rules
from mha_ext import checks, layer, layer_variants, plain
from mha_ext.errors import InvalidTypeError, InvalidValueError
from mha_ext.module import MultiheadAttention
from mha_ext.seeds import draw_seed

__all__ = ["HeadParallel", "HeadParallelAttention"]

_WHERE = "HeadParallel"
_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_ODD = 0x5851F42D4C957F2D  # far apart: what the kernels make of neighbouring seeds has nothing in common either way
_BY_HEAD = {  # what is cut by heads, and along which axis; the rest is whole everywhere
    "q_proj_weight": 0,
    "k_proj_weight": 0,
    "v_proj_weight": 0,
    "bias_k": 2,
    "bias_v": 2,
    "sink": 0,
    "out_proj.weight": 1,
}


class HeadParallel(ParallelStyle):
    """Tensor parallelism of a ``mha_ext.MultiheadAttention`` by heads, for ``parallelize_module``.

    Each of n devices projects, attends with and multiplies by ``out_proj`` its H / n query heads and G / n key and
    value heads, on the fused kernels; one sum over the devices makes the output. Values, weights and gradients are
    those of one process, except under dropout, where every device draws its own mask.

    The packed ``in_proj_weight``, whose rows are query's, key's and value's, becomes ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight``, as PyTorch names them where they are apart: DTensors cut along their rows.
    ``out_proj.weight`` is cut along its columns, ``bias_k``, ``bias_v`` and ``sink`` by heads; biases and norms are
    whole. ``load_state_dict`` takes what one process saved (the same on every device) as well as what this layer saves.

    Args:
        input_layouts: how plain query, key and value lie over the mesh: ``Replicate()``, or for instance ``Shard(1)``
            for equal parts of the sequence (batch_first), which are gathered. DTensors say so themselves. Masks are
            whole.
        output_layouts: how the output lies: ``Replicate()``, or ``Shard`` for a part of it on every device.
        use_local_output: give a plain tensor in place of a DTensor.

    Raises:
        TypeError: the module is not a ``mha_ext.MultiheadAttention``, or is of a subclass.
        ValueError: the mesh has several axes, heads do not divide by its size, or ``out_proj`` is not a plain linear
            layer.

    Returned weights are whole on every device. A ``kv_cache`` holds the device's G / n heads. Nested tensors are
    refused.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> def build(block):  # in every process of torchrun
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return parallelize_module(block, mesh, {"self_attn": HeadParallel()})
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        assert isinstance(module, MultiheadAttention)
        shard = _shard_of(module, device_mesh)
        _take_apart(module)
        _distribute(module, device_mesh)
        module.__class__ = HeadParallelAttention
        # Past Module.__setattr__: the shard is no part of the model.
        module.__dict__.update(_shard=shard, _style=self, _mesh=device_mesh)
        return module


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """The module can be cut by heads over the mesh.

    Raises:
        TypeError: it is of another class.
        ValueError: the sizes do not fit, or ``out_proj`` is more than a linear layer.
    """
    if type(module) is not MultiheadAttention:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        hint = " (mha_ext.convert makes one of torch.nn.MultiheadAttention)"
        raise InvalidTypeError(f"{_WHERE}: module must be a mha_ext.MultiheadAttention itself, got {kind}{hint}")
    if mesh.ndim != 1:
        raise InvalidValueError(f"{_WHERE}: device_mesh must have one axis, got {mesh.ndim} (pass a part: mesh['tp'])")
    for name in ("num_heads", "num_kv_heads"):
        count = getattr(module, name)
        if count % mesh.size():
            raise InvalidValueError(f"{_WHERE}: {name} must divide by the mesh's {mesh.size()} devices, got {count}")
    _check_plain(module)


def _check_plain(module: MultiheadAttention) -> None:
    if not plain.is_linear(module.out_proj):
        raise InvalidValueError(
            f"{_WHERE}: out_proj must be a plain linear layer without hooks, got {type(module.out_proj).__qualname__}"
        )


def _shard_of(module: MultiheadAttention, mesh: DeviceMesh) -> _Shard:
    """A layer of one device's heads, whose parameters every call brings."""
    shard = _Shard(
        module.embed_dim,
        module.num_heads // mesh.size(),
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=bool(module.batch_first),
        device="meta",
        num_kv_heads=module.num_kv_heads // mesh.size(),
        head_dim=module.head_dim,
        **layer_variants.used(module),
    )
    _take_apart(shard)
    shard.out_proj.register_parameter("bias", None)
    shard.__dict__["_rank"] = mesh.get_local_rank()
    return shard


def _take_apart(module: MultiheadAttention) -> None:
    """Three weights of the input projections in place of a packed one."""
    packed = module.in_proj_weight
    if packed is None:
        return
    module._qkv_same_embed_dim = False
    module.register_parameter("in_proj_weight", None)
    rows = _rows(module, packed)
    for name, weight in zip(_PROJECTIONS, rows, strict=True):
        parameter = nn.Parameter(weight.detach().clone(), requires_grad=packed.requires_grad)
        module.register_parameter(name, parameter)


def _rows(module: MultiheadAttention, packed: Tensor) -> tuple[Tensor, ...]:
    """Query's, key's and value's part of what is packed by rows."""
    counts = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    return packed.split_with_sizes([count * module.head_dim for count in counts])


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter as a DTensor, what belongs to a head on its device; values are those of the first."""
    for name, parameter in list(module.named_parameters()):
        placement = Shard(_BY_HEAD[name]) if name in _BY_HEAD else Replicate()
        values = distribute_tensor(parameter.detach(), mesh, [placement])
        *path, leaf = name.split(".")
        owner = module.get_submodule(".".join(path))
        owner.register_parameter(leaf, nn.Parameter(values, requires_grad=parameter.requires_grad))


class _Shard(MultiheadAttention):
    """The heads of one device, in dropout with a mask of their own."""

    _rank = 0

    def _attend(self, inputs: layer.QKV, options: layer.Options) -> tuple[Tensor, Tensor | None]:
        if options.dropout_p:
            seed = draw_seed(inputs[0].device) + self._rank * _ODD
            options = options._replace(dropout_seed=seed)
        return super()._attend(inputs, options)


class _DifferentiatedOnce(torch.autograd.Function):
    """A tensor whose gradient has no derivative: the sums over devices behind it would be left out silently."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{_WHERE}: create_graph must be False, got True: PyTorch's sums over devices have no second "
                "derivatives (cut the batch instead: DistributedDataParallel, or DTensors cut along samples)"
            )
        return gradient


def _once(x: Tensor) -> Tensor:
    once: Tensor = _DifferentiatedOnce.apply(x)  # type: ignore[no-untyped-call]
    return once


class HeadParallelAttention(MultiheadAttention):
    """What :class:`HeadParallel` makes of a layer: the same call, computed by the heads of every device."""

    _shard: _Shard
    _style: HeadParallel
    _mesh: DeviceMesh

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        kv_cache: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`mha_ext.MultiheadAttention.forward`, inputs and output laid out as the style says."""
        checks.tensor(_WHERE, "query", query)
        given = {id(x): x for x in (query, key, value) if x is not None}
        for name, x in zip(("query", "key", "value"), (query, key, value), strict=True):
            if x is not None:
                checks.strided(_WHERE, name, x)
        _check_plain(self)
        layout = self._style.input_layouts
        whole = {i: self._whole(x, layout) for i, x in given.items()}
        inputs = [None if x is None else whole[id(x)] for x in (query, key, value)]
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        masks = {n: None if x is None else self._whole(x, Replicate()) for n, x in masks.items()}
        if masks["attn_mask"] is not None:
            masks["attn_mask"] = self._heads_of_mask(masks["attn_mask"], whole[id(query)])
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
        shard = self._shard
        shard.training, shard.dropout = self.training, self.dropout
        out, weights = functional_call(
            shard, self._local_parameters(), tuple(inputs), {**masks, **flags, "kv_cache": kv_cache}, strict=True
        )
        if weights is not None:
            weights = _once(weights)
            weights = self._joined_weights(weights, average_attn_weights, whole[id(query)].dim() == 3)
        return self._sum(_once(out)), weights

    def project_keys(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Any:
        """Not for heads on several devices.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{_WHERE}: project_keys must be called before parallelize_module's layer, got one by heads "
            "(pass key and value to every call)"
        )

    def _whole(self, x: Tensor, layout: Placement) -> Tensor:
        """A tensor gathered, whose gradient is the sum of every device's."""
        if not isinstance(x, DTensor):
            if layout.is_replicate() and not (torch.is_grad_enabled() and x.requires_grad):
                return x
            x = DTensor.from_local(x, self._mesh, [layout], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _heads_of_mask(self, mask: Tensor, query: Tensor) -> Tensor:
        """The part of a mask that is for this device's heads."""
        rank, total = self._mesh.get_local_rank(), self.num_heads
        count = total // self._mesh.size()
        batch = 1 if query.dim() == 2 else query.shape[0 if self.batch_first else 1]
        if mask.dim() == 3 and mask.shape[0] == batch * total and mask.shape[0] not in (1, batch):
            mask = mask.view(batch, total, *mask.shape[1:])
        return mask.narrow(1, rank * count, count) if mask.dim() == 4 and mask.shape[1] == total else mask

    def _local_parameters(self) -> dict[str, Tensor]:
        """This device's part of every parameter but the output's bias."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        parameters.pop("out_proj.bias", None)
        local = {
            name: p.to_local() if name in _BY_HEAD else self._whole(p, Replicate()) for name, p in parameters.items()
        }
        if "in_proj_bias" in local:
            rank, count = self._mesh.get_local_rank(), self._mesh.size()
            parts = [part.chunk(count)[rank] for part in _rows(self, local["in_proj_bias"])]
            local["in_proj_bias"] = torch.cat(parts)
        return local

    def _sum(self, out: Tensor) -> Tensor:
        """The sum over all heads, with the bias, as the style lays it out."""
        placements = [self._style.output_layouts]
        result = DTensor.from_local(out, self._mesh, [Partial()], run_check=False).redistribute(placements=placements)
        bias: Any = self.out_proj.bias
        if bias is not None:
            result = result + bias
        return result.to_local() if self._style.use_local_output else result

    def _joined_weights(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        mesh, axis = self._mesh, 1 if batched else 0
        if average:
            parts = DTensor.from_local(weights / mesh.size(), mesh, [Partial()], run_check=False)
        else:
            parts = DTensor.from_local(weights, mesh, [Shard(axis)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        packed = state_dict.pop(f"{prefix}in_proj_weight", None)
        if packed is not None:
            parts = zip(_PROJECTIONS, _rows(self, packed), strict=True)
            state_dict.update({prefix + name: rows for name, rows in parts})
        for name, parameter in self.named_parameters():
            saved = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(saved, Tensor) and not isinstance(saved, DTensor):
                # Every device has the whole: none has to send it.
                saved = distribute_tensor(saved, self._mesh, parameter.placements, src_data_rank=None)
                state_dict[prefix + name] = saved
        super()._load_from_state_dict(state_dict, prefix, *rest)
