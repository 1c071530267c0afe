"""``MultiheadAttention``: a drop-in for ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mha_ext import _ops, checks, layer, layer_cached, layer_variants, nested, parameters, plain, unused_rows
from mha_ext.rotary import RotaryEmbedding

__all__ = ["MultiheadAttention"]

_WHERE = "MultiheadAttention"
_PACKED, _SEPARATE = ("in_proj_weight",), ("q_proj_weight", "k_proj_weight", "v_proj_weight")

# What the code of PyTorch's encoder layer and encoder mentions, and code copied from them: it goes on to read the
# weights and skip `forward`.
_BYPASS = frozenset({"_transformer_encoder_layer_fwd", "use_nested_tensor"})
_PASSING_ON = frozenset({"__getattr__", "__getattribute__", "_qkv_same_embed_dim", "<lambda>"})  # as wrappers do


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention (Vaswani et al. 2017): ``concat(O_1 ... O_H) W_O``, ``O_h = softmax(Q_h K_hᵀ / √D) V_h``.

    Signature, attributes, parameters, initialisation (same seed, same values) and ``state_dict`` are those of
    ``torch.nn.MultiheadAttention``; checkpoints load both ways. No tensor of T x S numbers is held unless weights are
    asked for, and none per head unless they are asked for per head.

    Args:
        embed_dim: E, width of queries and output.
        num_heads: H.
        dropout: probability in [0, 1) of dropping an attention weight, in training only.
        bias: learned biases of the input and output projections.
        add_bias_kv: append a learned key and value to every sequence.
        add_zero_attn: append a key and a value of zeros to every sequence.
        kdim: width of keys, E by default.
        vdim: width of values, E by default.
        batch_first: inputs and output are ``(B, T, E)`` instead of ``(T, B, E)``.
        device: where the parameters are created.
        dtype: dtype of the parameters.
        num_kv_heads: number of key and value heads, divides H; query head h uses head ``h // (H / num_kv_heads)``.
            ``in_proj_weight`` then has ``(H + 2 num_kv_heads) * head_dim`` rows, in the order query, key, value.
        head_dim: width of a head, ``E / H`` by default.
        window: ``(left, right)``: query i sees keys ``i - left`` to ``i + right``, besides all masks; None or -1 for no
            limit. Time grows with T times the window's width. Appended keys stay visible.
        softcap: c: scaled scores s become ``c tanh(s / c)`` before biases are added (Gemma 2).
        sink: a learned logit for each head, ``sink`` (H,), initialised to 0, takes part in the softmax without a value.
        qk_norm: queries and keys go through ``q_norm`` and ``k_norm``, ``torch.nn.RMSNorm(head_dim)``.
        rope: True or a ``mha_ext.RotaryEmbedding``: queries and keys, counted from 0 each, are turned by their
            positions, after the norms. Appended keys are neither normed nor turned.

    Raises:
        TypeError: a size is not an integer, a number not a number, or ``dtype`` not a floating one.
        ValueError: sizes are not positive or do not divide, or an option is out of range.

    Differs from PyTorch: a query with every key masked attends to nothing (attention output, weights and gradients are
    0); what is stored behind a mask, NaN included, reaches nothing; ``is_causal`` needs no mask, and with one both
    apply; appended keys are visible under it; floating masks may have any dtype, and masks more shapes; hooks and
    adapters on ``out_proj`` act; train, eval and no-grad agree; the output is contiguous.

    Example:
        >>> import torch
        >>> from mha_ext import MultiheadAttention
        >>> attention = MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> out, weights = attention(x, x, x, is_causal=True)
        >>> out.shape, weights.shape, weights[0, 0].tolist()
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]), [1.0, 0.0, 0.0, 0.0, 0.0])
    """

    # On the module only where they differ: else it has the original's attributes.
    _num_kv_heads: int | None = None
    _has_variants: bool = False  # whether one of the last five keywords was set

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sink: bool = False,
        qk_norm: bool = False,
        rope: bool | RotaryEmbedding | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not the original's: it would create parameters of other shapes
        checks.dropout_probability(_WHERE, "dropout", dropout)
        if dtype is not None:
            checks.float_dtype(_WHERE, "dtype", dtype)
        self.embed_dim = embed_dim = checks.size(_WHERE, "embed_dim", embed_dim)
        self.kdim = embed_dim if kdim is None else checks.size(_WHERE, "kdim", kdim)
        self.vdim = embed_dim if vdim is None else checks.size(_WHERE, "vdim", vdim)
        self.num_heads = num_heads = checks.size(_WHERE, "num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else checks.size(_WHERE, "num_kv_heads", num_kv_heads)
        self.head_dim = checks.head_dim(_WHERE, embed_dim, num_heads, self.num_kv_heads, head_dim)
        wanted = layer_variants.checked(
            _WHERE, self.head_dim, window=window, softcap=softcap, sink=sink, qk_norm=qk_norm, rope=rope
        )
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        factory = {"device": device, "dtype": dtype}
        self._create_parameters(bias, add_bias_kv, factory)
        self._reset_parameters()
        if wanted is not None:
            layer_variants.add(self, wanted, factory)

    def _create_parameters(self, bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
        """Create the parameters in the original's order, which is also the order of their random numbers."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = width + 2 * kv_width
        packed = {"in_proj_weight": (rows, self.embed_dim)}
        separate = {
            "q_proj_weight": (width, self.embed_dim),
            "k_proj_weight": (kv_width, self.kdim),
            "v_proj_weight": (kv_width, self.vdim),
        }
        used, unused = (packed, separate) if self._is_packed() else (separate, packed)
        shapes: dict[str, tuple[int, ...] | None] = {**used, **dict.fromkeys(unused)}
        shapes["in_proj_bias"] = (rows,) if bias else None
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))
        self.out_proj = NonDynamicallyQuantizableLinear(width, self.embed_dim, bias=bias, **factory)
        if add_bias_kv:
            self.bias_k = nn.Parameter(torch.empty((1, 1, kv_width), **factory))
            self.bias_v = nn.Parameter(torch.empty((1, 1, kv_width), **factory))
        else:
            self.bias_k = self.bias_v = None

    def _reset_parameters(self) -> None:
        """Initialise what this module owns, with the random numbers of the original."""
        for name in _PACKED if self._is_packed() else _SEPARATE:
            nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.constant_(self.in_proj_bias, 0.0)
            nn.init.constant_(self.out_proj.bias, 0.0)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def reset_parameters(self) -> None:
        """Initialise every parameter again, ``out_proj`` included: the values of a new module from the same seed."""
        self.out_proj.reset_parameters()
        self._reset_parameters()
        if self._has_variants:
            layer_variants.reset(self)

    def _is_packed(self) -> bool:
        """Whether one weight projects query, key and value."""
        packed: bool = self.__dict__["_qkv_same_embed_dim"]
        return packed

    def _has_original_shapes(self) -> bool:
        """Whether the parameters have the shapes that they have in the original: H · D = E, and no shared heads."""
        packed = self._is_packed()
        weight, rows = (self.in_proj_weight, 3 * self.embed_dim) if packed else (self.q_proj_weight, self.embed_dim)
        if weight is None or self.num_kv_heads != self.num_heads:
            return False
        return bool(weight.shape[0] == rows)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether ``in_proj_weight`` holds three E x E matrices, as in the original.

        False also for PyTorch's encoder, which would otherwise read the weights and skip ``forward``.
        """
        if torch.compiler.is_compiling() or self._has_variants:
            return False
        if not (self._is_packed() and self._has_original_shapes()):
            return False
        reader: FrameType | None = sys._getframe(1)
        while reader is not None and reader.f_code.co_name in _PASSING_ON:
            reader = reader.f_back
        return reader is None or _BYPASS.isdisjoint(reader.f_code.co_names)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    @property
    def num_kv_heads(self) -> int:
        """The number of key and value heads; where it was not given, that of the query's, also when that changes."""
        given = self._num_kv_heads
        return self.num_heads if given is None else given

    @num_kv_heads.setter
    def num_kv_heads(self, value: int) -> None:
        self.__dict__.pop("_num_kv_heads", None)
        if value != self.num_heads:
            self._num_kv_heads = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        embed_dim, num_heads = state["embed_dim"], state["num_heads"]
        state = {"batch_first": False, "kdim": embed_dim, "vdim": embed_dim, "head_dim": embed_dim // num_heads} | state
        state.setdefault("_qkv_same_embed_dim", state["kdim"] == state["vdim"] == embed_dim)
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, after ``embed_dim`` and ``num_heads``."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        defaults = {
            "dropout": 0.0,
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "add_zero_attn": False,
            "batch_first": False,
            "num_kv_heads": self.num_heads,
            "head_dim": self.embed_dim // self.num_heads,
        }
        shown += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        shown += ["bias=False"] if self.in_proj_bias is None else []
        shown += ["add_bias_kv=True"] if self.bias_k is not None else []
        return ", ".join(shown + layer_variants.shown(self))

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
        """Attend from queries to keys and values.

        Args:
            query: ``(T, B, E)``, ``(B, T, E)`` when ``batch_first``, or unbatched ``(T, E)``; or, when
                ``batch_first``, a nested tensor of B parts ``(length, E)``, without masks.
            key: ``(S, B, kdim)``, ``(B, S, kdim)``, ``(S, kdim)``, or nested like query.
            value: ``(S, B, vdim)``, ``(B, S, vdim)``, ``(S, vdim)``, or nested like query.
            key_padding_mask: ``(B, S)`` or ``(S,)``; bool, True = ignore the key; floating, added to the scores.
            need_weights: also return the weights.
            attn_mask: ``(T, S)``, ``(B * H, T, S)`` batch-major, ``(B, T, S)``, ``(B, H, T, S)``, ``(S,)``, with
                size 1 where it does not vary; bool, True = may not attend; floating of any dtype, added to the scores.
            average_attn_weights: the weights' mean over heads instead of one matrix a head.
            is_causal: query i sees key j only if ``j <= i``, besides all masks; appended keys stay visible.
            kv_cache: a :class:`mha_ext.KVCache` of this layer alone, to which the call's keys and values (of query's
                length) are appended; the queries see what it then holds causally, the last one all of it.
                ``key_padding_mask`` is bool ``(B, T)`` then and may hide the end of a row. Or what
                :meth:`project_keys` gave, with key and value None. A cache takes no ``attn_mask``.

        Returns:
            The output, contiguous, in query's layout, and the weights after dropout, ``(B, T, S)`` averaged or
            ``(B, H, T, S)`` (S including appended keys; no B when unbatched), or None.

        Raises:
            ValueError: shapes or devices do not fit.
            TypeError: a dtype does not fit, or an argument is not a tensor.
        """
        inputs: Any = (query, key, value)
        if key_padding_mask is None and attn_mask is None and kv_cache is None and not torch.compiler.is_compiling():
            results = self._directly(inputs, need_weights, average_attn_weights, is_causal)
            if results is not None:
                return results
        are_tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        if kv_cache is None and not are_tensors:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
            wanted = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            return self._symbolic_call(inputs, {**masks, **wanted})  # type: ignore[no-any-return]
        need_weights, average_attn_weights, is_causal = checks.layer_flags(
            _WHERE, need_weights, average_attn_weights, is_causal
        )
        dropout_p = self.dropout if self.training else 0.0
        causal = 1 if is_causal else 0
        options = layer.Options(
            attn_mask, key_padding_mask, dropout_p, None, causal, need_weights, average_attn_weights
        )
        if kv_cache is not None:
            return layer_cached.attend(self, _WHERE, inputs, kv_cache, options)
        if query.is_nested or inputs[1].is_nested or inputs[2].is_nested:
            return nested.attend(_WHERE, inputs, options, bool(self.batch_first), self._attend)
        return self._attend(inputs, options)

    def project_keys(
        self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> layer_cached.CrossCache:
        """Project keys and values once (an encoder's output), for the ``kv_cache`` of many calls without key and value.

        Args:
            key: as in :meth:`forward`, as are the others.
            value: of key's length.
            key_padding_mask: it hides keys from every query to come.

        Raises:
            ValueError: shapes do not fit, or the layer has ``rope``, ``window`` or keys of its own.
        """
        return layer_cached.project_keys(self, f"{_WHERE}.project_keys", (key, value), key_padding_mask)

    def _symbolic_call(self, inputs: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
        """The call as one node of the graph that is being traced, as ``torch.fx`` treats PyTorch's own modules."""
        tracers: list[Any] = [given.tracer for given in inputs if isinstance(given, Proxy)]
        if not tracers:
            checks.tensors(_WHERE, *inputs)
        return tracers[0].create_proxy("call_module", tracers[0].path_of_module(self), inputs, options)

    def _directly(
        self, inputs: layer.QKV, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """The results by one call where the module and its inputs are plain, without masks and dropout; else None."""
        state, dropout_p = self.__dict__, self.dropout if self.training else 0.0
        out_proj = state["_modules"].get("out_proj")
        if (
            not (type(need_weights) is type(average) is type(is_causal) is bool and state["_qkv_same_embed_dim"])
            or self._has_variants
            or self.add_zero_attn
            or not (state.get("bias_k", self) is state.get("bias_v", self) is None)
            or dropout_p != 0.0
            or (need_weights and is_causal and torch.is_grad_enabled())  # may have unused rows
            or not plain.is_linear(out_proj)
        ):
            return None
        own, projection = state["_parameters"], out_proj._parameters
        try:
            parameters = own["in_proj_weight"], own["in_proj_bias"], projection["weight"], projection["bias"]
        except KeyError:  # computed ones
            return None
        numbers = (self.embed_dim, self.num_heads, self.num_kv_heads, self.batch_first, 0.0, 1 if is_causal else 0)
        if need_weights:
            return _ops.layer_with_weights_directly(*inputs, *parameters, None, None, None, *numbers, average)
        out = _ops.layer_directly(*inputs, *parameters, None, None, None, *numbers)
        return None if out is None else (out, None)

    def _attend(self, inputs: layer.QKV, options: layer.Options) -> tuple[Tensor, Tensor | None]:
        """The layer on dense inputs: as one operator where everything is plain, otherwise in pieces."""
        batch_first, bias = bool(self.batch_first), self.in_proj_bias
        weights = self._input_weights()
        sizes = checks.layer_sizes(_WHERE, inputs, (self.embed_dim, self.kdim, self.vdim), batch_first)
        checks.same_kind(_WHERE, inputs, weights[0])
        options = layer_variants.options(self, options) if self._has_variants else options
        options = layer.resolve(_WHERE, options, sizes, self.num_heads, inputs[0].device)
        if not sizes.batched:
            inputs = layer.add_batch_axis(inputs, 0 if batch_first else 1)
        bias_k, bias_v, out_proj = self.bias_k, self.bias_v, self.out_proj
        appends = self.add_zero_attn or not (bias_k is bias_v is None)
        is_plain = plain.is_linear(out_proj) and plain.are_tensors((*weights, bias, out_proj.weight, out_proj.bias))
        fused = is_plain and len(weights) == 1 and not (options.need_weights or appends or self._has_variants)

        def compute(inputs: layer.QKV) -> tuple[Tensor, Tensor | None]:
            if not fused:
                return self._in_pieces(inputs, (weights, bias), (bias_k, bias_v), options)
            projections = (weights[0], bias, out_proj.weight, out_proj.bias)
            return layer.fused(inputs, projections, options, self._heads(weights), batch_first), None

        situation = unused_rows.Situation(options, appends, batch_first, fused)
        out, attention_weights = unused_rows.run_without_unused_rows(compute, inputs, situation)
        if not sizes.batched:
            out = out.squeeze(0 if batch_first else 1)
            attention_weights = None if attention_weights is None else attention_weights.squeeze(0)
        return out, attention_weights

    def _input_weights(self) -> tuple[Tensor, ...]:
        """The packed weight of the input projections, or the three; computed here if parametrized."""
        if self._is_packed():
            weight = self.in_proj_weight
            return (weight,) if weight is not None else parameters.given(_WHERE, in_proj_weight=weight)
        return parameters.given(_WHERE, **{name: getattr(self, name) for name in _SEPARATE})

    def _heads(self, weights: tuple[Tensor, ...]) -> tuple[int, int]:
        return parameters.module_heads(_WHERE, weights, self.num_heads, self.num_kv_heads)

    def _in_pieces(
        self,
        inputs: layer.QKV,
        projections: tuple[tuple[Tensor, ...], Tensor | None],
        appended: tuple[Tensor | None, Tensor | None],
        options: layer.Options,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer step by step, calling ``out_proj`` as the module that it is where it is not plain."""
        (weights, bias), (bias_k, bias_v), batch_first = projections, appended, bool(self.batch_first)
        heads = self._heads(weights)
        parameters.both_or_none(_WHERE, ("bias_k", "bias_v"), (bias_k, bias_v))
        parameters.projections(_WHERE, weights, bias, heads, (self.embed_dim, self.kdim, self.vdim))
        q, k, v = layer.project(inputs, weights, bias, heads, batch_first)
        if self._has_variants:
            q, k = layer_variants.norm_and_rotate(self, q, k, batch_first)
        k, v, count = layer.append_keys(k, v, bias_k, bias_v, self.add_zero_attn)
        context, attention_weights = layer.attend(q, k, v, options, count, batch_first)
        return layer.output(self.out_proj, context), attention_weights
