"""Train a small attention model with a penalty on the gradient of its score, on sequences of 8192 tokens.

    python examples/gradient_penalty.py [--length 8192] [--steps 5]

A critic gives each sequence a score; the penalty keeps the norm of the score's gradient with respect to the input near
1 (Gulrajani et al. 2017), so that every step differentiates a gradient. With attention made of matrix products, second
derivatives at T = 8192 hold dozens of matrices of T x T numbers, 256 MiB each for one head in float32; here they
are computed block by block, and the peak printed at the end grows with T alone.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import mha_ext


class Critic(nn.Module):
    """One layer of causal self-attention and a score for the sequence."""

    def __init__(self, width: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.attention = mha_ext.MultiheadAttention(width, num_heads, batch_first=True)
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(B,)`` of sequences ``(B, T, width)``."""
        out, _ = self.attention(x, x, x, is_causal=True, need_weights=False)
        score: Tensor = self.score(torch.tanh(x + out)).mean((1, 2))
        return score


def penalised_loss(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    """Wasserstein loss, and ten times the squared distance from 1 of the gradient's norm between the two."""
    between = torch.lerp(real, fake, torch.rand(real.shape[0], 1, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norm = slope.square().mean(2).sum(1).sqrt() * real.shape[1] ** 0.5
    return critic(fake).mean() - critic(real).mean() + 10 * (norm - 1).square().mean()


def memory(field: str) -> float:
    """MiB that the kernel counts for this process: ``VmRSS`` now, ``VmHWM`` at most since the start."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def main() -> None:
    """Print the loss of each step and the peak of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of SGD (default %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    critic = Critic()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    real, fake = torch.randn(1, arguments.length, 16).cumsum(1) / 50, torch.randn(1, arguments.length, 16)
    before = memory("VmRSS")
    for step in range(arguments.steps):
        torch.manual_seed(1)  # the same point between the two, so that steps can be compared
        loss = penalised_loss(critic, real, fake)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        print(f"step {step}: loss {loss.item():.5f}", flush=True)
    print(f"memory {memory('VmHWM') - before:.0f} MiB at most beside model and data")


if __name__ == "__main__":
    main()
