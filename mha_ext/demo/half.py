"""The model trained once more, under autocast to bfloat16, from the same start and on the same batches."""

from __future__ import annotations

import torch
from torch import Tensor

import mha_ext
from mha_ext.demo.model import ModelConfig, build_model
from mha_ext.demo.text import draw_batch
from mha_ext.demo.training import Learner

_DTYPE = torch.bfloat16


def make_half_learner(config: ModelConfig, steps: int, seed: int) -> Learner:
    """Returns the untrained model with our layer; its parameters and their optimizer stay in float32."""
    return Learner("mha_ext bf16", build_model(config, mha_ext.MultiheadAttention, seed), steps, _DTYPE)


@torch.no_grad()
def loss_bound(learner: Learner, codes: Tensor, seed: int) -> float:
    """Returns how far the mean losses of two trainings may be apart when one of them rounds to bfloat16, in nats.

    A logit z is rounded by at most u |z|, u = 2^-8. The gradient of a character's cross-entropy by its logits is
    (softmax - one-hot), whose magnitudes sum to at most 2, so that one rounding of the logits moves the loss of a
    character by at most 2 u max|z|. The bound is the mean of that over a batch. Rounding errors of both signs cancel in
    a mean, and training follows the same batches, so that what is found should be far less.
    """
    config = learner.model.config
    batch, _ = draw_batch(codes, config.batch, config.context, torch.Generator().manual_seed(seed))
    largest = learner.model(batch).abs().amax(-1).mean()
    return float(torch.finfo(_DTYPE).eps * largest)  # eps is 2 u
