"""Peak memory of one training step, measured by a process that trains nothing else.

``python -m mha_ext.demo.step_memory '{"attention": "mha_ext", "config": {...}, "seed": 0, "threads": 2}'`` prints a
number of bytes: the growth of the largest resident set over a process that already holds the model, its optimizer's
state and the libraries' own start-up memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from mha_ext.demo.memory import measure_in_child, peak_extra_bytes
from mha_ext.demo.model import ModelConfig
from mha_ext.demo.training import make_learner

_WARMUP_LENGTH = 2


def step_peak_bytes(attention: str, config: ModelConfig, seed: int) -> int:
    """Measures one step, in a child process, for the named attention layer."""
    request = {
        "attention": attention,
        "config": asdict(config),
        "seed": seed,
        "threads": torch.get_num_threads(),
    }
    return measure_in_child("mha_ext.demo.step_memory", request)


def _main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    config = ModelConfig(**request["config"])
    learner = make_learner(request["attention"], config, steps=2, seed=request["seed"])
    codes = torch.randint(config.alphabet_size, (config.batch, config.context))
    learner.step(codes[:1, :_WARMUP_LENGTH], codes[:1, :_WARMUP_LENGTH])
    print(peak_extra_bytes(lambda: learner.step(codes, codes)))


if __name__ == "__main__":
    _main()
