"""Peak memory of one forward and backward pass, in a process that does nothing else.

``python -m benchmarks.memory '{"case": {...}, "peer": "mha_ext", "threads": 2}'`` prints a number of bytes: the growth
of the largest resident set over a process that already holds the inputs. It includes the output and the gradients.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from benchmarks.cases import Case
from benchmarks.inputs import make_inputs
from benchmarks.peers import Peer, find_peer
from benchmarks.work import timed_work
from mha_ext.demo.memory import measure_in_child, peak_extra_bytes

_WARMUP_LENGTH = 32


def peak_bytes(case: Case, peer: Peer) -> int:
    """Measures a case of the memory suite for one peer, in a child process."""
    request = {"case": case.as_json(), "peer": peer.name, "threads": torch.get_num_threads()}
    return measure_in_child("benchmarks.memory", request)


def _main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    case = Case(**request["case"])
    peer = find_peer(case.level, request["peer"])

    warmup = replace(case, length=_WARMUP_LENGTH, key_length=0)
    warmup_inputs = make_inputs(warmup)
    timed_work(warmup, peer.build(warmup, warmup_inputs), warmup_inputs)()

    inputs = make_inputs(case)
    print(peak_extra_bytes(timed_work(case, peer.build(case, inputs), inputs)))


if __name__ == "__main__":
    _main()
