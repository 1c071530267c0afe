"""ONNX Runtime and JAX as oracles: attention problems and layers computed without a line of PyTorch's or ours.

Both are optional for whoever runs the tests, and required in CI. They are imported when first used, ONNX Runtime with
one thread a session and JAX on the CPU alone.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import LOWER_RIGHT, NONE, UPPER_LEFT, Case, Problem, build
from hypothesis import strategies as st
from tolerances import assert_within
from torch import Tensor, nn

ORT, JAX = "ONNX Runtime", "JAX"


def need(name: str) -> Any:
    """A module; where it is missing the test is skipped, but fails in CI unless it cannot be had.

    ONNX Runtime is needed from 1.28 on (before, empty rows gave NaN and 3-D inputs wrong numbers), JAX from 0.7.2 on
    (0.6.2 crashes while compiling bfloat16); both have no such release for Python 3.10.
    """
    if sys.version_info < (3, 11):
        pytest.skip(f"{name} is not in requirements/test.txt for Python 3.10, where it is wrong or crashes")
    if importlib.util.find_spec(name) is None:
        message = f"{name} is not installed: pip install -r requirements/test.txt"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return importlib.import_module(name)


# -------------------------------------------------------------------------------------------------------- three judges
def three_way(what: str, name: str, results: tuple[Tensor, Tensor, Tensor], limits: tuple[Tensor, Tensor]) -> None:
    """Ours, the oracle's and the exact result agree; otherwise the message says which of the three is off.

    Args:
        what: the result that is compared.
        name: the oracle's name.
        results: ours, the oracle's, the exact one.
        limits: how far ours and the oracle's may lie from the exact one.
    """
    ours, oracle, truth = results
    pairs = {
        ("ours", "the reference"): (ours, truth, limits[0]),
        (name, "the reference"): (oracle, truth, limits[1]),
        ("ours", name): (ours, oracle, limits[0] + limits[1]),
    }
    misfits = {}
    for pair, (got, want, limit) in pairs.items():
        try:
            assert_within(got, want, limit, what)
        except AssertionError as error:
            misfits[pair] = str(error)
    if misfits:
        off = sorted(set.intersection(*map(set, misfits)))
        found = "; ".join(f"{' and '.join(pair)}: {message}" for pair, message in misfits.items())
        raise AssertionError(f"{' or '.join(off) or 'each one'} is off. {found}")


# ------------------------------------------------------------------------------------------------------------ problems
def problem_of(case: Case, seed: int = 0, empty_rows: bool = True) -> Problem:
    """The problem of a case, with nothing sent back into the log-sum-exp; or one in which every query sees key 0."""
    problem = build(case, seed)
    if not empty_rows:
        mask, padding = problem.attn_mask, problem.key_padding_mask
        if mask is not None:
            mask[..., 0] = True if mask.dtype == torch.bool else 0.0
        if padding is not None:
            padding[..., 0] = False
    return replace(problem, grad_lse=torch.zeros_like(problem.grad_lse))


def typed(sizes: dict[str, Any], dtype: torch.dtype) -> Case:
    """A case whose float mask has the dtype of the rest."""
    name = str(dtype).removeprefix("torch.")
    return Case(**{**sizes, "mask": sizes.get("mask", "none").replace("float:", f"{name}:")}, dtype=dtype)


LETTERS = st.sampled_from(["11TS", "1HTS", "B1TS", "BHTS"])
DRAWN = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "H_kv": st.integers(1, 3),
        "group": st.integers(1, 3),
        "T": st.sampled_from([1, 3, 8, 17]),
        "S": st.sampled_from([1, 5, 8, 33]),
        "D": st.sampled_from([1, 4, 16]),
        "mask": st.one_of(st.just("none"), LETTERS.map("bool:{}".format), LETTERS.map("float:{}".format)),
        "padding": st.sampled_from(["none", "bool"]),
        "causal": st.sampled_from([0, UPPER_LEFT]),
        "scale": st.sampled_from([None, 0.3, 2.0]),
    }
)


def drawn(sizes: dict[str, Any], dtype: torch.dtype) -> Case:
    return typed({**{n: x for n, x in sizes.items() if n != "group"}, "H": sizes["H_kv"] * sizes["group"]}, dtype)


def run_ours(function: Callable[..., Tensor], problem: Problem, grads: bool) -> dict[str, Tensor]:
    """Output and gradients by name, of a function with the signature of ``functional.scaled_dot_product_attention``."""
    case = problem.case
    names = ("query", "key", "value", "attn_mask")
    given = {name: getattr(problem, name) for name in names}
    leaves = {n: x.detach().requires_grad_(grads) for n, x in given.items() if x is not None and x.is_floating_point()}
    given |= leaves
    if problem.key_padding_mask is not None:
        given["key_padding_mask"] = problem.key_padding_mask
    alignment = {"causal_alignment": "lower_right"} if case.causal == LOWER_RIGHT else {}
    grouped = case.heads_kv != case.H
    out = function(**given, is_causal=case.causal != NONE, scale=case.scale, enable_gqa=grouped, **alignment)
    results = {"out": out.detach()}
    if grads:
        results |= zip(leaves, torch.autograd.grad(out, list(leaves.values()), problem.grad_out), strict=True)
    return results


# -------------------------------------------------------------------------------------------------------- ONNX Runtime
def run_onnx(nodes: Sequence[Any], feeds: dict[str, Tensor], outputs: Sequence[str]) -> list[Tensor]:
    """The outputs, of the first feed's dtype, of a graph made of ``nodes``, in operator set 23."""
    helper = need("onnx").helper
    arrays = {name: np.ascontiguousarray(x.detach().numpy()) for name, x in feeds.items()}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    inputs = [helper.make_tensor_value_info(name, kind, arrays[name].shape) for name, kind in kinds.items()]
    kind = next(iter(kinds.values()))
    graph = helper.make_graph(
        list(nodes), "attention", inputs, [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    results = onnx_session(model.SerializeToString()).run(list(outputs), arrays)
    return [torch.from_numpy(result) for result in results]


def onnx_session(model: bytes) -> Any:
    """A session of one thread on the CPU; only errors are logged."""
    ort = need("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def merged_mask(problem: Problem) -> Tensor | None:
    """Mask and padding as one mask, which is all that the standard operator takes."""
    mask, padding = problem.attn_mask, problem.key_padding_mask
    if padding is None:
        return mask
    seen = ~padding[:, None, None, :]
    case = problem.case
    if mask is None:
        return seen.expand(case.B, 1, case.T, case.keys)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def as_bias(mask: Tensor) -> Tensor:
    """A mask as a float64 one."""
    return (
        torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
    )


def ort_attention(problem: Problem) -> Tensor:
    """The output of the standard operator ``Attention`` on heads.

    float64 is a graph of simpler operators there. It takes the square root of the scale in float32 (4e-9 off), so it
    is given scaled queries; and releases before 1.32 take no mask with ``is_causal``, so it is given one float mask.
    """
    node = need("onnx").helper.make_node
    case, mask = problem.case, merged_mask(problem)
    feeds = {"query": problem.query, "key": problem.key, "value": problem.value}
    feeds |= {} if mask is None else {"attn_mask": mask}
    options = {"is_causal": int(case.causal != NONE)} | ({} if case.scale is None else {"scale": case.scale})
    if case.dtype == torch.float64:
        feeds["query"] = feeds["query"] * (case.D**-0.5 if case.scale is None else case.scale)
        options["scale"] = 1.0
        if mask is not None:
            bias = as_bias(mask)
            future = torch.ones(case.T, case.keys, dtype=torch.bool).triu(1)
            feeds["attn_mask"] = bias.masked_fill(future, -math.inf) if options["is_causal"] else bias
            options["is_causal"] = 0
    return run_onnx([node("Attention", list(feeds), ["out"], **options)], feeds, ["out"])[0]


def flat(heads: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, H D)."""
    return heads.transpose(1, 2).flatten(2)


def ort_contrib_attention(problem: Problem) -> Tensor:
    """The output of ``com.microsoft.MultiHeadAttention``; masks are float ones."""
    node = need("onnx").helper.make_node
    case, padding = problem.case, problem.key_padding_mask
    feeds = {"query": flat(problem.query), "key": flat(problem.key), "value": flat(problem.value)}
    names = [*feeds, "", "", ""]
    if padding is not None:
        names[4], feeds["padding"] = "padding", (~padding).int()
    if problem.attn_mask is not None:
        names[5], feeds["bias"] = "bias", problem.attn_mask
    options = {} if case.scale is None else {"scale": case.scale}
    options |= {"num_heads": case.H, "unidirectional": int(case.causal != NONE), "domain": "com.microsoft"}
    (out,) = run_onnx([node("MultiHeadAttention", names, ["out"], **options)], feeds, ["out"])
    return out.unflatten(2, (case.H, -1)).transpose(1, 2)


def ort_grouped_attention(problem: Problem) -> Tensor:
    """The output of ``com.microsoft.GroupQueryAttention``: causal, padded at the end."""
    node = need("onnx").helper.make_node
    case, padding = problem.case, problem.key_padding_mask
    lengths = torch.full((case.B,), case.keys) if padding is None else (~padding).sum(1)
    feeds = {"query": flat(problem.query), "key": flat(problem.key), "value": flat(problem.value)}
    feeds |= {"last": (lengths - 1).int(), "total": torch.tensor([case.keys], dtype=torch.int32)}
    names = ["query", "key", "value", "", "", "last", "total"]
    options = {"num_heads": case.H, "kv_num_heads": case.heads_kv, "domain": "com.microsoft"}
    options |= {} if case.scale is None else {"scale": case.scale}
    (out, *_) = run_onnx([node("GroupQueryAttention", names, ["out", "k", "v"], **options)], feeds, ["out", "k", "v"])
    return out.unflatten(2, (case.H, -1)).transpose(1, 2)


def ort_layer(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and weights per head of a whole layer of standard operators, with the parameters of its state_dict.

    Args:
        module: the layer, perhaps with grouped heads or an appended key.
        inputs: query, key, value, (B, T, E).
        mask: True = may attend, or floating, (B or 1, H or 1, T, S + appended key).
        causal: query i sees key j only if ``j <= i``.
    """
    node = need("onnx").helper.make_node
    state, kv_heads = module.state_dict(), getattr(module, "num_kv_heads", module.num_heads)
    if "in_proj_weight" in state:
        rows = [count * module.head_dim for count in (module.num_heads, kv_heads, kv_heads)]
        weights = state["in_proj_weight"].split(rows)
    else:
        weights = [state[f"{letter}_proj_weight"] for letter in "qkv"]
    biases = state["in_proj_bias"].split([weight.shape[0] for weight in weights])
    feeds: dict[str, Tensor] = {}
    nodes = []
    for letter, x, weight, bias in zip("qkv", inputs, weights, biases, strict=True):
        factor = module.head_dim**-0.5 if letter == "q" else 1.0  # the operator's own would be rounded to float32
        feeds |= {f"x{letter}": x, f"w{letter}": factor * weight.mT, f"b{letter}": factor * bias}
        nodes += [node("MatMul", [f"x{letter}", f"w{letter}"], [f"p{letter}"])]
        nodes += [node("Add", [f"p{letter}", f"b{letter}"], [letter])]
        if f"bias_{letter}" in state:
            feeds[f"a{letter}"] = state[f"bias_{letter}"].expand(x.shape[0], -1, -1)
            nodes += [node("Concat", [letter, f"a{letter}"], [f"{letter}all"], axis=1)]
    names = ["q", *(f"{x}all" if f"bias_{x}" in state else x for x in "kv")]
    if mask is not None:
        names, feeds["mask"] = [*names, "mask"], mask
    options = {"q_num_heads": module.num_heads, "kv_num_heads": kv_heads, "is_causal": int(causal)}
    options |= {"scale": 1.0, "qk_matmul_output_mode": 3}
    nodes += [node("Attention", names, ["context", "", "", "weights"], **options)]
    feeds |= {"wo": state["out_proj.weight"].mT, "bo": state["out_proj.bias"]}
    nodes += [node("MatMul", ["context", "wo"], ["po"]), node("Add", ["po", "bo"], ["out"])]
    out, per_head = run_onnx(nodes, feeds, ["out", "weights"])
    return out, per_head


def ort_packed_layer(module: nn.MultiheadAttention, x: Tensor, masks: dict[str, Tensor], causal: bool) -> Tensor:
    """The output of a layer whose self-attention is ``com.microsoft.Attention``, with packed weights.

    Args:
        module: the layer.
        x: (B, T, E).
        masks: ``padding``, (B, T) int, 1 = may attend; ``bias``, (B or 1, H or 1, T, T), added.
        causal: query i sees key j only if ``j <= i``.
    """
    node = need("onnx").helper.make_node
    state = module.state_dict()
    feeds = {"x": x, "w": state["in_proj_weight"].mT, "b": state["in_proj_bias"], **masks}
    feeds |= {"wo": state["out_proj.weight"].mT, "bo": state["out_proj.bias"]}
    names = ["x", "w", "b", "padding" if "padding" in masks else "", "", "bias" if "bias" in masks else ""]
    options = {"num_heads": module.num_heads, "unidirectional": int(causal), "domain": "com.microsoft"}
    nodes = [node("Attention", names, ["context"], **options)]
    nodes += [node("MatMul", ["context", "wo"], ["po"]), node("Add", ["po", "bo"], ["out"])]
    return run_onnx(nodes, feeds, ["out"])[0]


# ----------------------------------------------------------------------------------------------------------------- JAX
def need_jax() -> Any:
    """JAX on the CPU alone, without threads of its own inside a product, and with float64."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    jax = need("jax")
    jax.config.update("jax_enable_x64", True)
    return jax


def _to_jax(x: Tensor) -> Any:
    import jax.numpy as jnp

    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(x.contiguous().numpy())


def _from_jax(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x.astype("float32") if x.dtype == "bfloat16" else x))


def jax_attention(problem: Problem, query_lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients by name of ``jax.nn.dot_product_attention``; padding is what lies past a length."""
    jax = need_jax()
    case, mask, padding = problem.case, problem.attn_mask, problem.key_padding_mask
    options: dict[str, Any] = {"is_causal": case.causal != NONE, "scale": case.scale}
    arguments = [_to_jax(x.transpose(1, 2)) for x in (problem.query, problem.key, problem.value)]
    if mask is not None and mask.dtype == torch.bool:
        options["mask"] = _to_jax(mask)
    elif mask is not None:
        arguments.append(_to_jax(mask))
    if padding is not None:
        options["key_value_seq_lengths"] = _to_jax((~padding).sum(1).int())
    if query_lengths is not None:
        options["query_seq_lengths"] = _to_jax(query_lengths.int())

    @jax.jit
    def both(grad_out: Any, *arguments: Any) -> Any:
        out, pull = jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, **options), *arguments)
        return out, pull(grad_out)

    out, grads = both(_to_jax(problem.grad_out.transpose(1, 2)), *arguments)
    results = {"out": _from_jax(out).transpose(1, 2)}
    results |= {n: _from_jax(x).transpose(1, 2) for n, x in zip(("query", "key", "value"), grads[:3], strict=True)}
    return results | ({"attn_mask": _from_jax(grads[3])} if len(grads) > 3 else {})
