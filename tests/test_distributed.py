"""The layer and the operators over two gloo processes give what one process gives: outputs, weights, gradients.

Data parallelism (DDP, FSDP2 of the whole layer and of ``out_proj`` alone), DTensors cut along samples, heads and
queries into every operator, and tensor parallelism of the layer by heads. The checks are functions of
``distributed_checks`` and ``tensor_parallel_checks``, several to a pair of processes: starting one takes longer than
most checks.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import distributed_checks
import pytest
import tensor_parallel_checks
from torch.distributed.device_mesh import DeviceMesh
from two_processes import run_in_two

USUAL = (
    "distributed_data_parallel",
    "fully_sharded",
    "attention_stays_cut",
    "what_cannot_be_cut_is_gathered",
    "heads_in_parallel",
)
OPERATORS = (
    "one_of_the_results_alone",
    "masks_and_variants",
    "weights_of_attention",
    "half_types",
    "second_order",
    "meshes_of_two_axes",
    "function_on_dtensors",
    "errors",
)
LAYERS = (
    "layer_on_dtensors",
    "variants_fully_sharded",
    "rowwise_output_alone",
    "layers_in_parallel",
    "masks_in_parallel",
    "layouts_in_parallel",
    "in_a_model",
    "checkpoints_in_parallel",
    "dropout_in_parallel",
    "refusals",
)


def test_data_parallel_and_shards_of_attention(tmp_path: Path) -> None:
    run_in_two(tmp_path, *USUAL)


@pytest.mark.long
@pytest.mark.parametrize("names", [OPERATORS, LAYERS], ids=["operators", "layers"])
def test_on_two_processes(tmp_path: Path, names: tuple[str, ...]) -> None:
    run_in_two(tmp_path, *names)


@pytest.mark.long
def test_a_process_that_fails_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_check"):
        run_in_two(tmp_path, "no_such_check")


def test_every_check_is_run() -> None:
    modules = (distributed_checks, tensor_parallel_checks)
    written = {
        name
        for module in modules
        for name, check in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(check).parameters) == ["mesh"]
        and inspect.signature(check).parameters["mesh"].annotation == DeviceMesh.__name__
    }
    assert written == {*USUAL, *OPERATORS, *LAYERS}


@pytest.mark.long
@pytest.mark.parametrize("first", ["torch", "torch.distributed.tensor"])
def test_rules_are_registered_where_dtensor_is(first: str) -> None:
    """An import of mha_ext alone imports no DTensor on their account."""
    program = f"""
import sys
import {first}, mha_ext
assert ("mha_ext._sharding" in sys.modules) == ("torch.distributed.tensor" in sys.modules)
import mha_ext.distributed
propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
assert mha_ext._ops.operators.attention.default in propagator.op_strategy_funcs
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
