"""Arguments of a wrong type or shape, from Python: refused by name before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_errors import GOOD, HEADS, forward, module, sdpa, x

import mha_ext
from mha_ext import chapter, cost, functional

np = pytest.importorskip("numpy")


# --------------------------------------------------------------------------------------------- is_causal is a yes or no
def plain(**changes: Any) -> Any:
    """A good call of the function, T=5, S=7, B=2, E=12, H=4, with some arguments replaced."""
    good: dict[str, Any] = {
        "query": x(5, 2, 12), "key": x(7, 2, 12), "value": x(7, 2, 12), "embed_dim_to_check": 12, "num_heads": 4,
        "in_proj_weight": x(36, 12), "in_proj_bias": x(36), "bias_k": None, "bias_v": None, "add_zero_attn": False,
        "dropout_p": 0.0, "out_proj_weight": x(10, 12), "out_proj_bias": x(10),
    }  # fmt: skip
    return functional.multi_head_attention_forward(**{**good, **changes})


def separate(**changes: Any) -> Any:
    weights = {"q_proj_weight": x(12, 12), "k_proj_weight": x(12, 8), "v_proj_weight": x(12, 6)}
    inputs = {"key": x(7, 2, 8), "value": x(7, 2, 6), "in_proj_weight": None, "use_separate_proj_weight": True}
    return plain(**{**inputs, **weights, **changes})


@pytest.mark.parametrize("is_causal", [2, 1, np.True_, True])
def test_is_causal_is_a_truth_value(is_causal: Any) -> None:
    lower_left = torch.ones(5, 7).tril()
    expected = lower_left / lower_left.sum(1, keepdim=True)
    torch.testing.assert_close(module(12, 4)(*map(torch.zeros_like, GOOD), is_causal=is_causal)[1][0], expected)
    torch.testing.assert_close(plain(is_causal=is_causal)[1][0], expected)


# - the layer's parameters
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"in_proj_weight": x(35, 12)}, ValueError, r"in_proj_weight must have shape \(36, 12\), got \(35, 12\)"),
        ({"in_proj_weight": x(36)}, ValueError, r"in_proj_weight must have shape \(36, 12\), got \(36,\)"),
        ({"in_proj_weight": x(36, 12).double()}, TypeError, "in_proj_weight must have .* dtype .*32, got .*64"),
        ({"in_proj_weight": [1.0]}, TypeError, "in_proj_weight must be a tensor, got list"),
        ({"in_proj_bias": x(12)}, ValueError, r"in_proj_bias must have shape \(36,\), got \(12,\)"),
        ({"in_proj_bias": x(36).double()}, TypeError, "in_proj_bias must have .* dtype .*32, got .*64"),
        ({"bias_k": x(1, 1, 11), "bias_v": x(1, 1, 12)}, ValueError, r"bias_k must have shape \(1, 1, 12\), got"),
        ({"bias_k": x(1, 1, 12), "bias_v": x(11)}, ValueError, r"bias_v must have shape \(12,\), got \(11,\)"),
        ({"bias_k": x(1, 1, 12), "bias_v": x(2, 12)}, ValueError, r"bias_v must have shape \(1, 12\), got \(2, 12\)"),
        (
            {"bias_k": x(1, 1, 12), "bias_v": x(1, 1, 1, 12)},
            ValueError,
            r"bias_v must have shape \(1, 1, 12\), got \(1,",
        ),
        ({"bias_k": x(1, 1, 12), "bias_v": x(1, 1, 12).half()}, TypeError, "bias_v must have .* dtype .*32, got .*16"),
        ({"out_proj_weight": x(10, 11)}, ValueError, r"out_proj_weight must have shape \(E_out, 12\), got \(10, 11\)"),
        ({"out_proj_weight": None}, TypeError, "out_proj_weight must be a tensor, got None"),
        ({"out_proj_bias": x(12)}, ValueError, r"out_proj_bias must have shape \(10,\), got \(12,\)"),
        ({"out_proj_bias": np.zeros(10)}, TypeError, "out_proj_bias must be a tensor, got ndarray"),
        ({"query": None}, TypeError, "query must be a tensor, got NoneType"),
        ({"dropout_p": 1.5, "training": False}, ValueError, r"dropout_p must be in \[0, 1\), got 1.5"),
        ({"dropout_p": "0.5", "training": False}, TypeError, "dropout_p must be a number, got str"),
    ],
)
def test_function(need_weights: bool, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    plain(need_weights=need_weights)
    with pytest.raises(kind, match=f"multi_head_attention_forward: {message}"):
        plain(need_weights=need_weights, **changes)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"q_proj_weight": x(12, 11)}, ValueError, r"q_proj_weight must have shape \(12, 12\), got \(12, 11\)"),
        ({"k_proj_weight": x(8)}, ValueError, r"k_proj_weight must have shape \(12, kdim\), got \(8,\)"),
        ({"v_proj_weight": x(11, 6)}, ValueError, r"v_proj_weight must have shape \(12, vdim\), got \(11, 6\)"),
        ({"v_proj_weight": x(12, 6).double()}, TypeError, "v_proj_weight must have .* dtype .*32, got .*64"),
    ],
)
def test_function_with_separate_weights(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    separate()
    with pytest.raises(kind, match=f"multi_head_attention_forward: {message}"):
        separate(**changes)


# - types, on heads and on layers
NESTED = torch.nested.nested_tensor([x(4, 5, 8), x(4, 3, 8)])
JAGGED = torch.nested.nested_tensor([x(5, 4, 8), x(3, 4, 8)], layout=torch.jagged).transpose(1, 2)
CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (sdpa(None, *HEADS[1:]), TypeError, "query must be a tensor, got NoneType"),
    (sdpa(HEADS[0], HEADS[1].numpy(), HEADS[2]), TypeError, "key must be a tensor, got ndarray"),
    (sdpa(*HEADS[:2], [1.0]), TypeError, "value must be a tensor, got list"),
    (sdpa(*HEADS, np.ones((5, 7))), TypeError, "attn_mask must be a tensor, got ndarray"),
    (sdpa(*HEADS, key_padding_mask=[True]), TypeError, "key_padding_mask must be a tensor, got list"),
    (sdpa(*HEADS, causal_alignment=1), TypeError, "causal_alignment must be a str, .*got int"),
    (sdpa(*HEADS, causal_alignment=["upper_left"]), TypeError, "causal_alignment must be a str, .*got list"),
    (sdpa(*HEADS, scale="1"), TypeError, "scale must be a number, got str"),
    (sdpa(*HEADS, dropout_p=None), TypeError, "dropout_p must be a number, got NoneType"),
    (sdpa(NESTED, NESTED, NESTED), NotImplementedError, "query must be a dense tensor .*got a nested tensor"),
    (sdpa(HEADS[0], JAGGED, JAGGED), NotImplementedError, "key must be a dense tensor .*got a nested tensor"),
    (sdpa(*HEADS[:2], HEADS[2].to_sparse()), NotImplementedError, "value must be a dense tensor .*got .*sparse_coo"),
    (forward(None, *GOOD[1:]), TypeError, "query must be a tensor, got NoneType"),
    (forward(GOOD[0], GOOD[1].numpy(), GOOD[2]), TypeError, "key must be a tensor, got ndarray"),
    (forward(*GOOD[:2], [1.0]), TypeError, "value must be a tensor, got list"),
    (forward(*GOOD, attn_mask=[[0.0]]), TypeError, "attn_mask must be a tensor, got list"),
    (forward(*GOOD, key_padding_mask=np.zeros((2, 7))), TypeError, "key_padding_mask must be a tensor, got ndarray"),
    (lambda: module(12, 4, dropout="0.1"), TypeError, "dropout must be a number, got str"),
    (lambda: module(12, 4, dropout=None), TypeError, "dropout must be a number, got NoneType"),
]


@pytest.mark.parametrize(("call", "kind", "message"), CALLS)
def test_types(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f": {message}"):
        call()


@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim"])
@pytest.mark.parametrize(
    ("value", "kind", "expectation"),
    [
        (4.0, TypeError, "be an int, got float"),
        (True, TypeError, "be an int, got bool"),
        ("4", TypeError, "be an int, got str"),
        (0, ValueError, "be greater than 0, got 0"),
        (-4, ValueError, "be greater than 0, got -4"),
    ],
)
def test_sizes_of_the_module(name: str, value: Any, kind: type[Exception], expectation: str) -> None:
    with pytest.raises(kind, match=f"MultiheadAttention: {name} must {expectation}"):
        module(**{"embed_dim": 12, "num_heads": 4, name: value})


def test_integers_and_numbers_of_numpy_are_accepted() -> None:
    attention = module(np.int64(12), np.int32(4), dropout=np.float32(0.5))
    assert type(attention.embed_dim) is type(attention.num_heads) is int
    attention(*GOOD)
    sdpa(*HEADS, scale=np.float32(0.5), dropout_p=np.float64(0.5))()
    sdpa(*HEADS, scale=1, dropout_p=0)()
    sdpa(*HEADS, scale=torch.tensor(0.5))()


# --------------------------------------------------------------------------------------------------------- the chapter
EYES = (torch.eye(4),) * 4


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: chapter.split_heads(x(1, 3, 4), 2.0), TypeError, "split_heads: num_heads must be an int, got float"),
        (lambda: layer(EYES, 2.0), TypeError, "forward: num_heads must be an int, got float"),
        (lambda: layer(EYES, None), TypeError, "forward: num_heads must be an int, got NoneType"),
        (lambda: layer(None, 2), TypeError, r"forward: params must be \(W_Q, W_K, W_V, W_O\), got NoneType"),
        (lambda: layer(EYES[:3], 2), ValueError, r"forward: params must be \(W_Q, W_K, W_V, W_O\), got 3 of them"),
        (
            lambda: chapter.attention_backward(x(3, 4), (x(3, 4),)),
            TypeError,
            r"cache must be the AttentionCache of attention_forward\(.*, got tuple",
        ),
        (
            lambda: chapter.multi_head_attention_backward(x(1, 3, 4), None),
            TypeError,
            r"cache must be the MultiHeadAttentionCache of multi_head_attention_forward\(.*, got NoneType",
        ),
    ],
)
def test_chapter(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def layer(params: Any, num_heads: Any) -> Any:
    return chapter.multi_head_attention_forward(x(1, 3, 4), x(1, 3, 4), x(1, 3, 4), params, num_heads)


def test_integers_of_numpy_count_without_overflow() -> None:
    size, wide = np.int64, np.int32(2**20)
    assert str(mha_ext.shape_trace(size(2), size(5), size(12), size(4), num_kv_heads=size(2))) == str(
        mha_ext.shape_trace(2, 5, 12, 4, num_kv_heads=2)
    )
    assert cost.self_attention_flops(wide, wide, wide) == cost.self_attention_flops(2**20, 2**20, 2**20)
    assert cost.parameter_count(wide, num_heads=size(8), num_kv_heads=size(2)) == cost.parameter_count(
        2**20, num_heads=8, num_kv_heads=2
    )
    assert cost.kv_cache_bytes(wide, wide, wide, wide) == 2 * 4 * 2**80
    assert layer(EYES, size(2)).shape == (1, 3, 4)


# ------------------------------------------------------------------------------------------------------- command lines
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a readable file, got No such file"),
        ("no JSON", "must be a run that an earlier benchmark wrote, got JSONDecodeError"),
        ("[]", "must be a run that an earlier benchmark wrote, got ValueError"),
    ],
)
def test_benchmark_load(text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from benchmarks import run

    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run.main(["--load", str(path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: argument --load: " in last and message in last


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_benchmark_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from benchmarks import run

    with pytest.raises(SystemExit, match="2"):
        run.main(["--seconds", seconds, "--list"])
    assert "--seconds must be finite and positive, got" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_demo_seed(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from mha_ext.demo.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--seed", str(seed)])
    assert f"--seed must be from -2**63 to 2**64 - 1, got {seed}" in capsys.readouterr().err.splitlines()[-1]
