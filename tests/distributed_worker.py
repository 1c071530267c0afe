"""One process of a group of two: ``distributed_worker.py FILE RANK NAME ...`` calls those checks one after another."""

from __future__ import annotations

import sys
from datetime import timedelta

import distributed_checks
import tensor_parallel_checks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    store, rank, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=2, timeout=timedelta(seconds=120)
    )
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        torch.manual_seed(0)
        check = getattr(distributed_checks, name, None) or getattr(tensor_parallel_checks, name)
        check(mesh)
        print(name, flush=True)
    dist.destroy_process_group()
