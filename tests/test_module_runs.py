"""The ways in which PyTorch runs a layer again or elsewhere: checkpoints, traces, graphs, autocast, other processes,
and encoders that would rather not call it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import (
    EMBED,
    HEADS,
    SHARED_HEADS,
    VARIANTS,
    exact_layer,
    inputs_for,
    last_hidden,
    make,
    pair,
    sequence,
)
from switches import threads
from tolerances import assert_within, double_limit, peer_limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ALL = [*VARIANTS, *SHARED_HEADS]


@pytest.mark.parametrize("options", [{**o, "dropout": 0.3} for o in ALL], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same_weights_again(options: dict[str, Any], reentrant: bool) -> None:
    module = make(**options)
    masks = {"key_padding_mask": last_hidden(2, 7), "is_causal": True}

    def call(*given: Tensor, need_weights: bool) -> Tensor:
        return module(*given, need_weights=need_weights, **masks)[0]

    for need_weights in (True, False):
        results = []
        for recomputed in (False, True):
            module.zero_grad()
            leaves = [x.requires_grad_() for x in inputs_for(module)]
            torch.manual_seed(1)
            run = partial(call, need_weights=need_weights)
            out = checkpoint(run, *leaves, use_reentrant=reentrant) if recomputed else run(*leaves)
            out.square().sum().backward()
            results.append([out, *[x.grad for x in (*leaves, *module.parameters())]])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Traced(nn.Module):
    """A layer with padding as a graph of tensors alone."""

    def __init__(self, inner: nn.Module, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = inner, need_weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Any:
        out, weights = self.inner(
            query, key, value, padding, self.need_weights, is_causal=True, average_attn_weights=False
        )
        return (out, weights) if self.need_weights else out


def tensors_of(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_trace_holds_for_other_sizes_and_values(options: dict[str, Any], need_weights: bool) -> None:
    """Also for values that the traced call did not see: NaN where nobody looks stays without effect on gradients."""
    module = Traced(make(**options), need_weights).eval()
    inner = module.inner
    order = (0, 1) if inner.batch_first else (1, 0)
    example = (*inputs_for(inner), last_hidden(2, 7))
    traced = torch.jit.trace(module, example, check_trace=False)
    padding = last_hidden(3, 9)
    other = [sequence(3, 4), sequence(3, 9, inner.kdim, 2), sequence(3, 9, inner.vdim, 3)]
    spoiled = [other[0], *[x.masked_fill(padding[..., None], float("nan")) for x in other[1:]]]
    results = []
    for layer, given in ((module, other), (traced, other), (traced, spoiled)):
        outputs = tensors_of(layer(*[x.permute(*order, 2) for x in given], padding))
        results.append([*outputs, *torch.autograd.grad(outputs[0].square().sum(), list(inner.parameters()))])
    for got, want in (*zip(results[1], results[0], strict=True), *zip(results[2], results[0], strict=True)):
        assert_within(got, want, double_limit(want, 100))


class Block(nn.Module):
    """How models call the layer."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out, _ = self.attention(x, x, value=x, key_padding_mask=padding, need_weights=False)
        return x + out


def test_symbolic_tracing_keeps_the_layer_as_one_call() -> None:
    """As it does with the original, so that what takes graphs apart finds a module it can name."""
    graphs = [torch.fx.symbolic_trace(Block(layer)) for layer in pair()]
    found = [[(n.op, n.target) for n in graph.graph.nodes] for graph in graphs]
    assert found[0] == found[1] and ("call_module", "attention") in found[0]
    x, padding = sequence(2, 5), last_hidden(2, 5)
    want = graphs[1](x, padding)
    assert_within(graphs[0](x, padding), want, double_limit(want, EMBED))
    with pytest.raises(TypeError, match="query must be a tensor, got NoneType"):
        make()(None, x, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "masks", "hook", "unbatched"])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_autocast_on_every_road(options: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    """As exact as the original's (or, for shared heads, as an ordinary layer's) and of the same dtypes."""
    module = make(**{**options, "dtype": torch.float32})
    ordinary = {n: x for n, x in options.items() if n not in ("num_kv_heads", "head_dim")}
    peer = make(nn.MultiheadAttention, **{**ordinary, "dtype": torch.float32})
    if ordinary == options:
        peer.load_state_dict(module.state_dict())
    inputs = [x.float() for x in inputs_for(module)]
    masks: dict[str, Any] = {}
    if kind == "masks":
        masks = {"attn_mask": sequence(1, 5, 7)[0].float(), "key_padding_mask": last_hidden(2, 7).float()}
    if kind == "unbatched":
        inputs = [x.select(0 if module.batch_first else 1, 0) for x in inputs]
    if kind == "hook":
        module.out_proj.register_forward_hook(lambda _, x, y: y * 1)

    def exact(layer: nn.MultiheadAttention) -> Any:
        axis = 0 if layer.batch_first else 1
        given = [x.unsqueeze(axis) if kind == "unbatched" else x for x in inputs]
        return exact_layer(layer, tuple(x if layer.batch_first else x.transpose(0, 1) for x in given), **masks)

    truth, peer_truth = exact(module), exact(peer)

    def batched(out: Tensor) -> Tensor:
        return out.unsqueeze(0) if kind == "unbatched" else out if module.batch_first else out.transpose(0, 1)

    for need_weights in (True, False):
        with torch.autocast("cpu", dtype):
            out, weights = module(*inputs, need_weights=need_weights, average_attn_weights=False, **masks)
            peer_out, peer_weights = peer(*inputs, need_weights=need_weights, average_attn_weights=False, **masks)
        assert out.dtype == peer_out.dtype == dtype
        assert_within(batched(out), truth.out, peer_limit(batched(peer_out), peer_truth.out, dtype))
        if need_weights:
            assert weights.dtype == peer_weights.dtype
            limit = peer_limit(peer_weights.view_as(peer_truth.weights), peer_truth.weights, dtype)
            assert_within(weights.view_as(truth.weights), truth.weights, limit)
        out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in module.parameters())


# ----------------------------------------------------------------------------------------------------- other processes
class Encoded(torch.utils.data.Dataset[Tensor]):
    """A data set that runs the layer where its items are loaded."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x = module, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        x = self.x[index : index + 1]
        with torch.no_grad():
            return self.module(x, x, x, need_weights=bool(index % 2))[0][0]


def halve(module: nn.Module, x: Tensor, results: Any) -> None:
    """What a training process does with a shared module: an answer, and a change in place."""
    torch.set_num_threads(1)
    with torch.no_grad():
        results.put(module(x, x, x)[0].tolist())
        for parameter in module.parameters():
            parameter.mul_(0.5)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_of_a_data_loader_run_the_layer_after_its_threads_ran() -> None:
    module, x = make(embed_dim=64, dtype=torch.float32), sequence(4, 128, 64, dtype=torch.float32)
    items = Encoded(module, x)
    with threads(2):
        module(x, x, x, need_weights=False)[0].sum().backward()
        loader = torch.utils.data.DataLoader(items, num_workers=2, timeout=60, multiprocessing_context="fork")
        got = torch.cat(list(loader))
    assert torch.equal(got, torch.stack([items[i] for i in range(len(items))]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_share_the_parameters(method: str) -> None:
    module, x = make().share_memory(), sequence(2, 5)
    assert all(p.is_shared() for p in module.parameters())
    want = module(x, x, x)[0]
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    context = torch.multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=halve, args=(module, x, results))
    process.start()
    got = torch.tensor(results.get(timeout=120), dtype=torch.float64)
    process.join(60)
    assert process.exitcode == 0
    assert_within(got, want, double_limit(want, EMBED))
    assert all(torch.equal(p, before[n] / 2) for n, p in module.named_parameters())


# --------------------------------------------------------------------------------------- encoders that skip the layer
class Copied(nn.TransformerEncoderLayer):
    """A layer whose code was copied from PyTorch's, short cut and all."""

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        attention = self.self_attn
        if attention._qkv_same_embed_dim:
            return torch._transformer_encoder_layer_fwd(
                src, EMBED, HEADS, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight,
                attention.out_proj.bias, True, False, 1e-5, self.norm1.weight, self.norm1.bias, self.norm2.weight,
                self.norm2.bias, self.linear1.weight, self.linear1.bias, self.linear2.weight, self.linear2.bias,
                None, None,
            )  # fmt: skip
        return self.norm2(src + self._ff_block(self.norm1(src + attention(src, src, src)[0])))


def read_flag(module: Any) -> bool:
    return bool(module._qkv_same_embed_dim)


def test_the_flag_is_false_for_those_who_would_skip_the_layer() -> None:
    """Everybody else is told what is so, fine-tuning and quantizing libraries among them."""
    ours, theirs = pair()
    assert read_flag(ours) and getattr(ours, "_qkv_same_embed_dim") and copy.deepcopy(ours)._qkv_same_embed_dim  # noqa: B009
    assert not any(map(read_flag, (make(kdim=8), make(num_kv_heads=2), make(head_dim=6))))
    x = sequence(2, 5)
    assert_within(
        nn.MultiheadAttention.forward(ours, x, x, x)[0], theirs(x, x, x)[0], double_limit(x, EMBED)
    )  # code that runs the original's forward on our module finds what it expects
    for kind in (nn.TransformerEncoderLayer, Copied):
        layer = kind(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64).eval()
        layer.self_attn = ours.eval()
        called: list[int] = []
        layer.self_attn.out_proj.forward = lambda y, called=called: (called.append(1), y)[1]
        with torch.no_grad():
            layer(x)
        assert called == [1]
    with pytest.warns(UserWarning, match="self_attn._qkv_same_embed_dim was not True"):
        nn.TransformerEncoder(layer, 1)


class Passing(nn.Module):
    """A wrapper that has all attributes of what it wraps, in one of the usual ways."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        out, weights = self.inner(*args, **options)
        return out + 1, weights


class PassingByProperty(Passing):
    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self.inner._qkv_same_embed_dim


@pytest.mark.parametrize("wrapper", [Passing, PassingByProperty])
def test_wrappers_that_pass_attributes_on_are_called(wrapper: type[Passing]) -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64).eval()
    layer.self_attn = wrapper(make().eval())
    assert read_flag(layer.self_attn)
    x = sequence(2, 5)
    want = layer(x)
    with torch.no_grad():
        assert_within(layer(x), want, double_limit(want, 100))


def test_an_encoder_layer_compiles_in_one_graph_and_calls_the_layer() -> None:
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64).eval()
    layer.self_attn = make().eval()
    layer.self_attn.out_proj.register_forward_hook(lambda _, x, y: y + 1)
    x = sequence(2, 5)
    with torch.no_grad():
        want = layer(x)
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert_within(got, want, double_limit(want, 100))
