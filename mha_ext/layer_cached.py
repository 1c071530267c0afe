"""The layer with keys and values that are kept from call to call: decoding.

A `KVCache` grows by the keys and values of each call, whose queries attend to all that it holds, causally aligned to
the end. A `CrossCache` holds the projected keys and values of an encoder's output, to which every query attends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mha_ext import _ops, cache_checks, checks, layer, layer_variants, parameters, plain, variants
from mha_ext.cache import KVCache
from mha_ext.errors import InvalidTypeError, InvalidValueError
from mha_ext.uncompiled import outside_graphs, with_open_numbers

__all__ = ["CrossCache", "attend", "project_keys"]


class CrossCache:
    """Keys and values of a sequence that does not change, projected once by `MultiheadAttention.project_keys`.

    Unlike a `KVCache` it passes gradients, when it was made while they were enabled.

    Args:
        key: heads of keys ``(B, G, S, D)``.
        value: heads of values, as key.
        key_padding_mask: ``(B, S)``, bool (True = ignore) or floating (added), or None.

    Example:
        >>> import torch, mha_ext
        >>> attention = mha_ext.MultiheadAttention(16, 4, batch_first=True)
        >>> memory, token = torch.randn(2, 9, 16), torch.randn(2, 1, 16)
        >>> cache = attention.project_keys(memory, memory)
        >>> out, _ = attention(token, None, None, kv_cache=cache, need_weights=False)
        >>> torch.allclose(out, attention(token, memory, memory, need_weights=False)[0], atol=1e-6)
        True
    """

    def __init__(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> None:
        self.key, self.value, self.key_padding_mask = key, value, key_padding_mask

    def __repr__(self) -> str:
        shapes = f"key={tuple(self.key.shape)}, value={tuple(self.value.shape)}"
        return f"CrossCache({shapes}, dtype={self.key.dtype}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return self.key.nbytes + self.value.nbytes

    def reorder(self, batch_indices: Tensor) -> None:
        """Let row b go on with the keys and values of row ``batch_indices[b]`` (beam search).

        Args:
            batch_indices: ``(B,)`` integers from 0 to B - 1, repeated at will.

        Raises:
            TypeError: not integers.
            ValueError: another number of them, or out of range.
        """
        batch = self.key.shape[0]
        batch_indices = torch.tensor(
            cache_checks.integers("CrossCache.reorder", "batch_indices", batch_indices, (batch, 0, batch - 1))
        )
        self.key, self.value = self.key[batch_indices], self.value[batch_indices]
        if self.key_padding_mask is not None and self.key_padding_mask.shape[0] > 1:
            self.key_padding_mask = self.key_padding_mask[batch_indices]


@with_open_numbers
def attend(
    module: Any, where: str, inputs: tuple[Tensor, Any, Any], cache: Any, options: layer.Options
) -> tuple[Tensor, Tensor | None]:
    """The output and the weights, or None, of a module's call with a cache.

    Args:
        module: a `MultiheadAttention`.
        where: its name in messages.
        inputs: query, key, value; the latter two None with a `CrossCache`.
        cache: `KVCache` or `CrossCache`.
        options: of the call, in the layer's conventions; a ``key_padding_mask`` ``(B, T)`` marks padding behind the
            new keys of each row.

    Raises:
        TypeError: the cache is neither, or an input is no tensor.
        ValueError: an option or a shape does not fit; the cache is unchanged then.
    """
    if not isinstance(cache, (KVCache, CrossCache)):
        expected = "a mha_ext.KVCache or mha_ext.CrossCache"
        raise InvalidTypeError(f"{where}: kv_cache must be {expected}, got {type(cache).__name__}")
    _without_other_keys(module, where, options)
    _require_fitting_rest(module, where)
    if isinstance(cache, KVCache):
        _require_window(module, where, cache)
    batched = isinstance(inputs[0], Tensor) and inputs[0].dim() == 3
    if isinstance(cache, CrossCache):
        context, weights = _attend_projected(module, where, inputs, cache, options)
    else:
        context, weights = _attend_grown(module, where, inputs, cache, options)
    out = layer.output(module.out_proj, context)
    if batched:
        return out, weights
    return out.squeeze(0 if module.batch_first else 1), None if weights is None else weights.squeeze(0)


def _attend_projected(
    module: Any, where: str, inputs: tuple[Tensor, Any, Any], cache: CrossCache, options: layer.Options
) -> tuple[Tensor, Tensor | None]:
    """The context and the weights from keys that were projected once."""
    q, options = _cross_query(module, where, inputs, cache, options)
    if module._has_variants:
        options = layer_variants.options(module, options)
    return layer.attend(q, cache.key, cache.value, options, 0, bool(module.batch_first))


def _attend_grown(
    module: Any, where: str, inputs: layer.QKV, cache: KVCache, options: layer.Options
) -> tuple[Tensor, Tensor | None]:
    """The context and the weights from all that the cache holds after this call's keys have joined it."""
    q, options = _grown(module, where, inputs, cache, options)
    if module._has_variants:
        options = _both_windows(layer_variants.options(module, options), options)
    if options.key_range is not None and _reads_pages(cache, options):
        heads, _ = _ops.paged_attention(q, *cache.pages(), options.key_range, options.sink, softcap=options.softcap)
        return layer.combine_heads(heads, bool(module.batch_first)), None
    return layer.attend(q, *cache.key_value(), options, 0, bool(module.batch_first))


def project_keys(module: Any, where: str, inputs: tuple[Tensor, Tensor], key_padding_mask: Tensor | None) -> CrossCache:
    """Keys and values through the module's projections, as heads, for queries to come."""
    _without_other_keys(module, where, layer.Options())
    key, value = inputs
    checks.tensors(where, key, key, value)
    call = _checked(module, where, (_like(key, module.embed_dim), key, value))
    k, v = call.heads(1), call.heads(2)
    if module._has_variants:
        _require_no_positions(module, where)
        k = layer_variants.norm_and_rotate(module, k, k, bool(module.batch_first))[1]
    if key_padding_mask is not None:
        given = layer.Options(key_padding_mask=key_padding_mask)
        key_padding_mask = layer.resolve(where, given, call.sizes, module.num_heads, key.device).key_padding_mask
    return CrossCache(k, v, key_padding_mask)


def _without_other_keys(module: Any, where: str, options: layer.Options) -> None:
    given = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
    given["attn_mask"] = options.attn_mask is not None
    for name, is_set in given.items():
        if is_set:
            raise InvalidValueError(f"{where}: {name} must not be set together with kv_cache")


def _require_no_positions(module: Any, where: str) -> None:
    for name in ("rope", "window"):
        if getattr(module, name) is not None:
            raise InvalidValueError(f"{where}: {name} must be None with a CrossCache: queries' positions are not known")


def _require_window(module: Any, where: str, cache: KVCache) -> None:
    """A cache that rolls holds all that the layer's window shows."""
    if cache.window is None:
        return
    window = module.window if module._has_variants else None
    left = variants.NO_LIMIT if window is None else variants.limits(where, window)[0]
    if left < 0 or cache.window <= left:
        expected = (
            "no window" if left < 0 else f"a window of at least {left + 1}, the layer's left side and the query itself"
        )
        raise InvalidValueError(f"{where}: kv_cache must have {expected}, got {cache.window}")


def _require_fitting_rest(module: Any, where: str) -> None:
    """What attention would find wrong after the cache has grown."""
    if module._has_variants:
        layer_variants.options(module, layer.Options())
        sink, heads = module.sink, (module.num_heads,)
        if sink is not None and (tuple(sink.shape) != heads or sink.device != module.out_proj.weight.device):
            got = f"{tuple(sink.shape)} on {sink.device}"
            raise InvalidValueError(f"{where}: sink must have shape {heads} on the layer's device, got {got}")
    if plain.is_linear(module.out_proj):
        weight, width = module.out_proj.weight, module.num_heads * module.head_dim
        if weight.shape[1] != width:
            raise InvalidValueError(f"{where}: out_proj must take {width} features, got {weight.shape[1]}")


class _Call(NamedTuple):
    """A call's inputs with a batch axis, checked, and what projects them."""

    inputs: layer.QKV
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    counts: tuple[int, int]  # heads of query, of key and value
    batch_first: bool
    sizes: checks.LayerSizes

    def heads(self, which: int) -> Tensor:
        """Heads of query (0), key (1) or value (2) alone."""
        weight, bias, count = layer.projection_maps(self.weights, self.bias, self.counts)[which]
        return layer.split_heads(layer.linear(self.inputs[which], weight, bias), count, self.batch_first)


def _checked(module: Any, where: str, inputs: layer.QKV) -> _Call:
    checks.tensors(where, *inputs)
    checks.dense(where, inputs)
    batch_first, weights, bias = bool(module.batch_first), module._input_weights(), module.in_proj_bias
    widths = (module.embed_dim, module.kdim, module.vdim)
    sizes = checks.layer_sizes(where, inputs, widths, batch_first)
    checks.same_kind(where, inputs, weights[0])
    if not sizes.batched:
        inputs = layer.add_batch_axis(inputs, 0 if batch_first else 1)
    heads = module._heads(weights)
    parameters.projections(where, weights, bias, heads, widths)
    return _Call(inputs, weights, bias, heads, batch_first, sizes)


def _like(given: Tensor, width: int) -> Tensor:
    """Something of another width for the checks of all three inputs; nothing reads it."""
    return given.new_zeros(()).expand(*given.shape[:-1], width)


def _cross_query(
    module: Any, where: str, inputs: tuple[Tensor, Any, Any], cache: CrossCache, options: layer.Options
) -> tuple[Tensor, layer.Options]:
    """Query heads, and the options with the cache's padding."""
    query, key, value = inputs
    if not (key is value is None):
        raise InvalidValueError(f"{where}: key and value must be None with a CrossCache, which holds them")
    if options.key_padding_mask is not None or options.causal:
        name = "key_padding_mask" if options.key_padding_mask is not None else "is_causal"
        raise InvalidValueError(f"{where}: {name} must not be set with a CrossCache")
    checks.tensor(where, "query", query)
    call = _checked(module, where, (query, _like(query, module.kdim), _like(query, module.vdim)))
    q, sizes = call.heads(0), call.sizes
    batch = cache.key.shape[0]
    if sizes.batch != batch:
        raise InvalidValueError(f"{where}: query must have kv_cache's batch size {batch}, got {sizes.batch}")
    if module._has_variants:
        _require_no_positions(module, where)
        q = layer_variants.norm_and_rotate(module, q, q, bool(module.batch_first))[0]
    resolved = layer.resolve(where, options, sizes, module.num_heads, query.device)
    return q, resolved._replace(key_padding_mask=cache.key_padding_mask)


def _reads_pages(cache: KVCache, options: layer.Options) -> bool:
    """Whether attention may read the cache's pages where they lie."""
    return cache.page_size is not None and cache.storage is None and not options.need_weights and not options.dropout_p


def _grown(
    module: Any, where: str, inputs: layer.QKV, cache: KVCache, options: layer.Options
) -> tuple[Tensor, layer.Options]:
    """Query heads, after the keys and values of this call have joined the cache, and who sees what."""
    call = _checked(module, where, inputs)
    sizes = call.sizes
    if sizes.num_queries != sizes.num_keys:
        lengths = f"{sizes.num_queries}, got {sizes.num_keys}"
        raise InvalidValueError(f"{where}: key must have query's length with a KVCache, {lengths}")
    padding = options.key_padding_mask
    real = None if padding is None else _real_lengths(where, padding, sizes)
    device = inputs[0].device
    options = layer.resolve(where, options._replace(key_padding_mask=None), sizes, module.num_heads, device)
    q, k, v = layer.project(call.inputs, call.weights, call.bias, call.counts, call.batch_first)
    if module._has_variants:
        if cache.ragged:
            positions = cache.lengths.unsqueeze(-1) + torch.arange(sizes.num_queries, device=device)
            q, k = layer_variants.norm_and_rotate(module, q, k, call.batch_first, positions)
        else:
            q, k = layer_variants.norm_and_rotate(module, q, k, call.batch_first, offset=cache.length)
    cache.append(k, v, real)
    if real is None and not cache.ragged and not _reads_pages(cache, options):
        window = layer.NO_WINDOW if cache.window is None else (cache.window - 1, -1)
        return q, options._replace(causal=2, window=window)
    return q, options._replace(causal=0, key_range=cache.key_range(sizes.num_queries))


@outside_graphs
def _real_lengths(where: str, padding: Any, sizes: checks.LayerSizes) -> Tensor:
    """How many of each row's new keys are real, from a mask of padding behind them."""
    checks.tensor(where, "key_padding_mask", padding)
    expected = (sizes.batch, sizes.num_keys) if sizes.batched else (sizes.num_keys,)
    if padding.dtype != torch.bool or tuple(padding.shape) != expected:
        got = f"{padding.dtype} {tuple(padding.shape)}"
        raise InvalidValueError(f"{where}: key_padding_mask must be bool {expected} with a KVCache, got {got}")
    padding = padding.reshape(sizes.batch, sizes.num_keys)
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        raise InvalidValueError(f"{where}: key_padding_mask must mark padding behind the keys only, with a KVCache")
    real: Tensor = padding.logical_not().sum(1)
    return real


def _both_windows(own: layer.Options, options: layer.Options) -> layer.Options:
    """A module's options with the cache's window, or ranges, as well; queries see nothing behind themselves anyway."""
    left, cache_left = own.window[0], options.window[0]
    if options.key_range is None:
        return own._replace(window=(left if cache_left < 0 else cache_left if left < 0 else min(left, cache_left), -1))
    if left < 0:
        return own._replace(window=layer.NO_WINDOW)
    start, stop = options.key_range
    start = torch.maximum(start, stop - 1 - min(left, 1 << 30))
    return own._replace(window=layer.NO_WINDOW, key_range=torch.stack((start, stop)))
