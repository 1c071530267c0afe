"""Sharded parameters, in a process of their own with a group of one: what wraps the output projection is called."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import mha_ext

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

def pair():
    torch.manual_seed(0)
    module = mha_ext.MultiheadAttention(16, 4, batch_first=True)
    twin = mha_ext.MultiheadAttention(16, 4, batch_first=True)
    twin.load_state_dict(module.state_dict())
    return module, twin, torch.randn(2, 5, 16)

def same(module, twin, x):
    for need_weights in (True, False):
        out, want = (m(x, x, x, need_weights=need_weights, is_causal=True)[0] for m in (module, twin))
        torch.testing.assert_close(out, want)
        out.sum().backward()
        want.sum().backward()
    for a, b in zip(module.parameters(), twin.parameters()):
        grad = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
        torch.testing.assert_close(grad, b.grad)
"""


def run_alone(code: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = PRELUDE + textwrap.dedent(code) + "\ndist.destroy_process_group()\n"
    arguments = [sys.executable, "-c", program, str(tmp_path / "group")]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_fully_sharded_output_projection_and_module(tmp_path: Path) -> None:
    run_alone(
        """
        from torch.distributed.fsdp import fully_shard
        module, twin, x = pair()
        fully_shard(module.out_proj, mesh=mesh)
        fully_shard(module, mesh=mesh)
        same(module, twin, x)
        """,
        tmp_path,
    )


@pytest.mark.long
def test_tensor_parallel_output_projection(tmp_path: Path) -> None:
    run_alone(
        """
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        module, twin, x = pair()
        parallelize_module(module, mesh, {"out_proj": RowwiseParallel(input_layouts=Replicate())})
        same(module, twin, x)
        """,
        tmp_path,
    )


@pytest.mark.long
def test_data_parallel(tmp_path: Path) -> None:
    run_alone(
        """
        module, twin, x = pair()
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        out = wrapped(x, x, x, need_weights=False)[0]
        want = twin(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(out, want)
        out.sum().backward()
        want.sum().backward()
        for a, b in zip(module.parameters(), twin.parameters()):
            torch.testing.assert_close(a.grad, b.grad)
        """,
        tmp_path,
    )
