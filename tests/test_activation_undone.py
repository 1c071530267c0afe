"""PyTorch's own scaled_dot_product_attention on our kernels: what goes on to PyTorch, and undoing it all."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_cases import OURS, PLAIN, TAKEN, Call, K, Q, call, noise, ran, seen, truth
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext

OPERATORS = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)


pytestmark = pytest.mark.usefixtures("nothing_stays_active")


def with_mask(mask: Tensor, **options: Any) -> Call:
    return PLAIN._replace(options={"attn_mask": mask, **options})


LEFT: dict[str, Call] = {
    "causal with a mask": call((3, 9, 8), (3, 13, 8), (3, 13, 8), attn_mask=seen(9, 13), is_causal=True),
    "integer mask": with_mask(seen(9, 13).long()),
    "mask of another dtype": with_mask(noise(9, 13).half()),
    "mask of another shape": with_mask(seen(9, 12)),
    "mask of one axis": with_mask(seen(13)),
    "mask of five axes": with_mask(seen(1, 2, 4, 9, 13)),
    "mask for other heads": with_mask(seen(2, 3, 9, 13)),
    "all dropped": PLAIN._replace(options={"dropout_p": 1.0}),
    "negative dropout": PLAIN._replace(options={"dropout_p": -0.1}),
    "infinite scale": PLAIN._replace(options={"scale": float("inf")}),
    "dtypes differ": PLAIN._replace(query=PLAIN.query.float()),
    "integers": Call(*(x.long() for x in PLAIN[:3]), {}),
    "complex": Call(*(x.to(torch.complex128) for x in PLAIN[:3]), {}),
    "head_dim differs": PLAIN._replace(query=PLAIN.query[..., :5]),
    "lengths differ": PLAIN._replace(key=PLAIN.key[:, :, :5]),
    "batches differ": call(Q, (3, 4, 13, 8), (3, 4, 13, 8)),
    "heads differ": call(Q, (2, 2, 13, 8), (2, 2, 13, 8)),
    "groups do not fit": call(Q, (2, 3, 13, 8), (2, 3, 13, 8), enable_gqa=True),
    "ranks differ": call(Q, (4, 13, 8), (4, 13, 8)),
    "grouped without heads": call((9, 8), (13, 8), (13, 8), enable_gqa=True),
    "mask for values alone": call((1, 1, 3, 8), (1, 1, 3, 8), (1, 3, 3, 8), attn_mask=noise(1, 3, 3, 3)),
    "1-D": call((8,), (8,), (8,)),
    "no keys": call(Q, (2, 4, 0, 8), (2, 4, 0, 8)),
    "no queries": call((2, 4, 0, 8), K, K),
    "no batch": call((0, 4, 9, 8), (0, 4, 13, 8), (0, 4, 13, 8)),
    "meta": Call(*(x.to("meta") for x in PLAIN[:3]), {}),
    "devices differ": PLAIN._replace(key=PLAIN.key.to("meta")),
    "nested": Call(*(torch.nested.nested_tensor([x[0], x[1]]) for x in PLAIN[:3]), {}),
    "jagged": Call(
        *(
            torch.nested.nested_tensor([x[0].transpose(0, 1), x[1].transpose(0, 1)], layout=torch.jagged).transpose(
                1, 2
            )
            for x in PLAIN[:3]
        ),
        {},
    ),
}


def outcome(function: Callable[[], Tensor]) -> object:
    """A result bit by bit, or the error."""
    torch.manual_seed(5)
    try:
        out = function().detach()
    except Exception as error:
        return type(error), str(error)
    parts = out.unbind() if out.is_nested else [out]
    return [(x.shape, x.stride(), None if x.is_meta else x.contiguous().numpy().tobytes()) for x in parts]


@pytest.mark.parametrize("name", LEFT)
def test_the_rest_goes_on_to_pytorch(name: str) -> None:
    """The same bits, or the same error with the same words."""
    with torch.no_grad():
        before = outcome(LEFT[name])
        with mha_ext.activate():
            assert outcome(LEFT[name]) == before
        assert outcome(LEFT[name]) == before


@pytest.mark.parametrize(
    "backends", [[SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]], ids=["math alone", "math first"]
)
def test_sdpa_kernel_has_the_last_word(backends: list[SDPBackend]) -> None:
    with mha_ext.activate():
        with sdpa_kernel(backends, set_priority=True):
            assert OURS not in ran(PLAIN)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            assert OURS in ran(PLAIN)


# ------------------------------------------------------------------------------------------------------------- undoing
def tables() -> list[str]:
    return [torch._C._dispatch_dump_table(name) for name in OPERATORS]


def test_undoing_restores_everything() -> None:
    """The dispatcher's tables and every result bit by bit; nothing is said on the way."""
    tables_before, before = tables(), [outcome(wanted) for wanted in TAKEN.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mha_ext.activate()
        assert tables() != tables_before
        mha_ext.activate()
        mha_ext.deactivate()
        mha_ext.deactivate()
    assert tables() == tables_before
    assert [outcome(wanted) for wanted in TAKEN.values()] == before
    assert OURS not in ran(PLAIN)


def test_blocks_nest_and_survive_errors() -> None:
    with mha_ext.activate():
        with pytest.raises(KeyError), mha_ext.activate():
            raise KeyError
        assert OURS in ran(PLAIN)
        mha_ext.deactivate()
        assert OURS in ran(PLAIN)
    assert OURS not in ran(PLAIN)
    standing = mha_ext.activate()
    with mha_ext.activate():
        pass
    assert OURS in ran(PLAIN)
    mha_ext.deactivate()
    assert OURS not in ran(PLAIN)
    with pytest.raises(RuntimeError, match=r"can be entered once, and not after deactivate\(\)"):
        standing.__enter__()


def test_blocks_of_threads_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with mha_ext.activate():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=block)
    with mha_ext.activate():
        thread.start()
        assert entered.wait(60)
    assert OURS in ran(PLAIN)
    leave.set()
    thread.join()
    assert OURS not in ran(PLAIN)


def test_switching_while_other_threads_call() -> None:
    want = truth(TAKEN["causal"])
    wrong: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            while not done.is_set():
                for have, exact in zip(TAKEN["causal"].to(torch.float64).results(), want, strict=True):
                    assert_within(have, exact, double_limit(exact, 13 * 8))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with mha_ext.activate():
            TAKEN["causal"]()
        TAKEN["causal"]()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_provider_comes_back() -> None:
    attention = torch.nn.attention
    log: list[str] = []

    class Handle:
        def remove(self) -> None:
            log.append("removed")

    def register() -> Handle:
        log.append("installed")
        return Handle()

    attention.register_flash_attention_impl("other", register_fn=register)
    try:
        attention.activate_flash_attention_impl("other")
        with mha_ext.activate():
            assert attention.current_flash_attention_impl() == "mha_ext"
        assert attention.current_flash_attention_impl() == "other" and log == ["installed", "removed", "installed"]
        with mha_ext.activate():
            attention.activate_flash_attention_impl("other")
            assert OURS not in ran(PLAIN)
        assert attention.current_flash_attention_impl() == "other"
    finally:
        attention.restore_flash_attention_impl()
        attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_pytorchs_own_functions_switch_it_too() -> None:
    torch.nn.attention.activate_flash_attention_impl("mha_ext")
    assert OURS in ran(PLAIN)
    with mha_ext.activate():
        pass
    assert OURS in ran(PLAIN)
    torch.nn.attention.restore_flash_attention_impl()
    assert OURS not in ran(PLAIN)
    torch.nn.attention.activate_flash_attention_impl("mha_ext")
    mha_ext.activate()
    mha_ext.deactivate()
    assert OURS not in ran(PLAIN)


def test_a_child_of_a_process_that_is_switching_can_switch() -> None:
    """The lock may have been held by a thread that the child does not have."""
    program = (
        "import os, signal, threading, mha_ext\nfrom mha_ext import activation\n"
        "held = threading.Event()\n"
        "def hold():\n    with activation._switch.lock:\n        held.set(); threading.Event().wait(60)\n"
        "threading.Thread(target=hold, daemon=True).start(); held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n    signal.alarm(30); mha_ext.activate(); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "7\n", done.stderr


def test_a_torch_without_a_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"activate: torch must have a registry .*got torch 2"):
        mha_ext.activate()
    mha_ext.deactivate()


def test_importing_activates_nothing_and_a_process_may_end_while_active() -> None:
    program = (
        "import torch, mha_ext; attention = torch.nn.attention\n"
        "assert attention.current_flash_attention_impl() is None\n"
        "assert 'mha_ext' in attention.list_flash_attention_impls()\n"
        "mha_ext.activate(); x = torch.ones(1, 2, 3, 4)\n"
        "print(torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "24.0\n", "")
