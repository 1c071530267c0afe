"""Every peer computes what we compute, is left out with a reason where it cannot, and runs what its name says."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import peers as peer_list
from benchmarks.cases import Case
from benchmarks.inputs import make_inputs
from benchmarks.peers import OURS, PEERS, Peer, Runner, find_peer, peers_for
from benchmarks.peers.base import ForeignPeer
from benchmarks.peers.compiled import check_compiled
from benchmarks.peers.own import comparisons
from benchmarks.work import TOLERANCES, largest_difference, results, timed_work

CORE = Case("core", "forward", batch=2, heads=4, length=9, head_dim=8)
LAYER = Case("layer", "training", batch=2, heads=2, length=9, head_dim=8)
MASKS = ["none", "bool", "float", "bias", "padding", "bool+padding"]


def is_eager(peer: Peer) -> bool:
    return peer.worker == "torch"


def is_foreign(peer: Peer) -> bool:
    return isinstance(peer, ForeignPeer)


def assert_agree(case: Case, peers: list[Peer]) -> None:
    ours = results(case, OURS[case.level])
    for peer in peers:
        name, difference = largest_difference(ours, results(case, peer))
        assert difference <= TOLERANCES[case.dtype], (peer.name, name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [replace(CORE, task="backward"), replace(CORE, kv_heads=2), LAYER])
def test_all_peers_compute_what_we_compute(case: Case, mask: str, causal: bool) -> None:
    case = replace(case, mask=mask, causal=causal, dropout=0.1)
    peers, reasons = peers_for(case, is_eager)
    assert peers or reasons
    assert_agree(case, peers)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [CORE, replace(CORE, key_length=12), replace(CORE, kv_heads=2), replace(LAYER, task="forward")],
    ids=["core", "cross", "grouped", "layer"],
)
def test_other_libraries_compute_what_we_compute(case: Case, mask: str, causal: bool) -> None:
    case = replace(case, mask=mask, causal=causal)
    peers, reasons = peers_for(case, is_foreign)
    if reasons and all("not installed" in reason for reason in reasons.values()):
        pytest.skip("; ".join(reasons.values()))
    assert peers or reasons
    assert_agree(case, peers)


@pytest.mark.parametrize("name", [peer.name for peer in PEERS if is_foreign(peer) and peer.level == "core"])
def test_a_runner_keeps_the_memory_that_it_reads(name: str) -> None:
    peer = find_peer("core", name)
    if missing := peer.missing():
        pytest.skip(missing)
    case = replace(CORE, length=64)
    wanted = results(case, OURS["core"])["output"]
    runner = peer.build(case, make_inputs(case))  # nobody else holds these inputs
    gc.collect()
    taken = [torch.full_like(wanted, torch.nan) for _ in range(64)]
    assert taken and largest_difference({"output": wanted}, {"output": runner.read(runner.forward())[0]})[1] <= 2e-5


@pytest.mark.parametrize(
    "case",
    [
        replace(CORE, task="backward", causal=True),
        replace(CORE, mask="bool+padding"),
        replace(LAYER, task="forward", causal=True),
    ],
    ids=["backward", "forward", "layer"],
)
def test_compiled_peers_compute_what_we_compute(case: Case) -> None:
    (peer,), _ = peers_for(case, lambda peer: peer.worker == "torch.compile")
    assert_agree(case, [peer])


def test_a_compiled_backward_runs_again_and_again() -> None:
    case = replace(CORE, task="backward")
    inputs = make_inputs(case)
    work = timed_work(case, find_peer("core", "compiled softmax").build(case, inputs), inputs)
    first, second = work(), work()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_eager_code_is_not_taken_for_compiled_nor_fused_attention_for_unfused() -> None:
    inputs = make_inputs(CORE)

    def attention() -> tuple[torch.Tensor, None]:
        return F.scaled_dot_product_attention(*inputs.arguments), None

    with pytest.raises(RuntimeError, match="must run compiled code, got eager operators"):
        check_compiled(CORE, Runner(attention, {}), fused=True)
    compiled = Runner(torch.compile(attention, backend="inductor", fullgraph=True), {})
    with pytest.raises(RuntimeError, match="the attention must not be PyTorch's fused one"):
        check_compiled(CORE, compiled, fused=False)
    assert check_compiled(CORE, compiled, fused=True) is compiled


@pytest.mark.parametrize("need_weights", [False, True])
def test_our_own_layer_compiled_is_compiled_and_gives_the_same(need_weights: bool) -> None:
    task = "forward" if need_weights else "training"
    case = replace(LAYER, task=task, causal=True, need_weights=need_weights, beside="compiled")
    (peer,) = comparisons(case)
    assert peer.worker == OURS["layer"].worker and peer.same_result
    assert_agree(case, [peer])  # building it refuses what is not compiled


def test_every_case_is_compiled() -> None:
    """PyTorch gives a function up after some versions of it; one more case is to be compiled all the same."""
    for length in (2, 3):
        case = replace(LAYER, task="forward", length=length)
        with torch._dynamo.config.patch(recompile_limit=1):
            find_peer("layer", "compiled linear+sdpa+linear").build(case, make_inputs(case))


def test_layers_agree_on_the_weights_and_who_has_none_says_so() -> None:
    case = replace(LAYER, need_weights=True)
    peers, reasons = peers_for(case, lambda peer: is_eager(peer) and peer.by_default)
    assert reasons == {
        "nn.MHA (default call)": "the same as nn.MHA in this case",
        "linear+sdpa+linear": "F.scaled_dot_product_attention returns no weights",
    }
    ours = results(case, OURS["layer"])
    assert ours["weights"].shape == (2, 9, 9)
    assert largest_difference(ours, results(case, peers[0]))[1] <= TOLERANCES["fp32"]


def test_the_exported_layer_returns_the_weights_too() -> None:
    case = replace(LAYER, task="forward", need_weights=True)
    peer = find_peer("layer", "ORT layer")
    if missing := peer.missing():
        pytest.skip(missing)
    assert results(case, peer)["weights"].shape == (2, 9, 9)
    assert_agree(case, [peer])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "backward"}, "measured in inference only"),
        ({"task": "memory"}, "measured in inference only"),
        ({"dtype": "bf16"}, "measured in fp32 only"),
        ({"dropout": 0.1}, "has no dropout in inference"),
        ({"kv_heads": 2}, "has no grouped heads"),
    ],
)
def test_what_another_library_cannot_do_is_left_out_with_a_reason(changes: dict[str, object], reason: str) -> None:
    assert find_peer("core", "OpenVINO").unsupported(replace(CORE, **changes)) == reason
    assert find_peer("core", "OpenVINO").unsupported(CORE) is None


def test_a_library_that_is_not_here_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(ForeignPeer):
        name, level, modules = "absent", "core", ("no_such_library", "json")

        def build(self, case: Case, inputs: object) -> Runner:
            raise AssertionError("it is not here")

    monkeypatch.setattr(peer_list, "PEERS", (Absent(),))
    reason = "no_such_library not installed: pip install -r requirements/peers.txt"
    assert peers_for(CORE, lambda peer: True) == ([], {"absent": reason})


def test_a_library_that_takes_any_instruction_set_is_left_out_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = find_peer("core", "ORT Attention")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for variable in ("ATEN_CPU_CAPABILITY", "MHA_EXT_CPU_CAPABILITY"):
        monkeypatch.delenv(variable, raising=False)
    assert peer.missing() is None
    for variable in ("ATEN_CPU_CAPABILITY", "MHA_EXT_CPU_CAPABILITY"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "avx2")
            assert peer.missing() == f"it cannot be held to the instruction set that {variable} asks for"


def test_compiled_code_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    missing = find_peer("core", "compiled softmax").missing()
    assert missing == "no-such-compiler is missing, which compiles what torch.compile writes"


def test_peers_have_names_of_their_own() -> None:
    for level in OURS:
        names = [peer.name for peer in (OURS[level], *PEERS) if peer.level == level]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "padding", "bool+padding"])
@pytest.mark.parametrize("causal", [False, True])
def test_openvinos_layer_in_bfloat16_computes_what_we_compute(mask: str, causal: bool) -> None:
    peer = find_peer("layer", "OpenVINO layer")
    if missing := peer.missing():
        pytest.skip(missing)
    case = replace(LAYER, task="forward", dtype="bf16", mask=mask, causal=causal)
    assert peer.unsupported(case) is None
    assert_agree(case, [peer])
    assert peer.unsupported(replace(case, need_weights=True)) == "the graph has one output"
    assert peer.unsupported(replace(case, dtype="fp32")) == "measured in bf16 only"
