"""What the demonstration verifies about the layer, apart from training with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.demo.model import ModelConfig

_GRADCHECK_SIZES = {"batch": 2, "length": 5, "width": 8, "heads": 2}
_PARITY_TOLERANCE = 2e-5  # of the largest magnitude; both sides work in float32


@dataclass(frozen=True)
class Difference:
    """How far two float32 layers are apart, and each from the float64 result; relative to the largest magnitude."""

    name: str
    apart: float
    ours: float
    theirs: float

    @property
    def passed(self) -> bool:
        """Whether the two agree to rounding."""
        return self.apart <= _PARITY_TOLERANCE


def gradients_match_finite_differences(seed: int) -> bool:
    """Checks the layer's gradients, of its input and of every parameter, against central differences in float64."""
    torch.manual_seed(seed)
    sizes = _GRADCHECK_SIZES
    layer = mha_ext.MultiheadAttention(sizes["width"], sizes["heads"], batch_first=True, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(sizes["batch"], sizes["length"], sizes["width"], dtype=torch.float64, requires_grad=True)

    def outputs(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        output: Tensor = torch.func.functional_call(layer, state, (x, x, x), {"is_causal": True})[0]
        return output

    parameters = [parameter.detach().requires_grad_() for parameter in layer.parameters()]
    return torch.autograd.gradcheck(outputs, (x, *parameters), raise_exception=False)


def _results(layer: nn.MultiheadAttention, x: Tensor, grad_output: Tensor, future: Tensor) -> dict[str, Tensor]:
    """Output, averaged weights and all gradients of one causal self-attention call, in float64."""
    dtype = layer.out_proj.weight.dtype
    leaf = x.to(dtype, copy=True).requires_grad_()
    output, weights = layer(leaf, leaf, leaf, attn_mask=future, is_causal=True)
    output.backward(grad_output.to(dtype))
    results = {"output": output, "attention weights": weights, "gradient of the input": leaf.grad}
    results |= {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {name: result.detach().double() for name, result in results.items()}


def _distance(left: Tensor, right: Tensor, scale: Tensor) -> float:
    return float((left - right).abs().max() / scale.abs().max())


def parity(config: ModelConfig, seed: int) -> list[Difference]:
    """Compares our layer with PyTorch's, in float32 at the model's sizes, with float64 as the judge of both."""

    def layer(attention_class: type[nn.MultiheadAttention], dtype: torch.dtype) -> nn.MultiheadAttention:
        torch.manual_seed(seed)
        return attention_class(config.width, config.heads, batch_first=True).to(dtype)

    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch, config.context, config.width)
    x = torch.randn(shape, generator=generator)
    grad_output = torch.randn(shape, generator=generator)
    future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)

    ours = _results(layer(mha_ext.MultiheadAttention, torch.float32), x, grad_output, future)
    theirs = _results(layer(nn.MultiheadAttention, torch.float32), x, grad_output, future)
    truth = _results(layer(nn.MultiheadAttention, torch.float64), x, grad_output, future)
    return [
        Difference(
            name,
            apart=_distance(ours[name], theirs[name], exact),
            ours=_distance(ours[name], exact, exact),
            theirs=_distance(theirs[name], exact, exact),
        )
        for name, exact in truth.items()
    ]


def counted_parameters(layer: nn.Module) -> Mapping[str, int]:
    """Number of parameters that a layer really holds, weights and biases apart."""
    counts = {"weights": 0, "biases": 0}
    for parameter in layer.parameters():
        counts["weights" if parameter.dim() > 1 else "biases"] += parameter.numel()
    return counts
