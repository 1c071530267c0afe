"""What ONNX export tests share: a layer with fixed options, exporting, running, inputs and masks of any size."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from layer_cases import EMBED, HEADS, last_hidden, sequence
from other_libraries import need, onnx_session
from torch import Tensor, nn

B, T, S = (torch.export.Dim(name) for name in "bts")
SIZES = {
    "query": {0: B, 1: T},
    **{name: {0: B, 1: S} for name in ("key", "value", "key_padding_mask")},
}


class Layer(nn.Module):
    """A layer with fixed options, so that what is exported has tensors alone for inputs."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        return self.module(query, key, value, key_padding_mask, attn_mask=attn_mask, **self.options)


def export(model: nn.Module, example: dict[str, Tensor], sizes: dict[str, Any], opset: int | None = None) -> Any:
    """The ONNX program of a module, for PyTorch's default operator set or another."""
    need("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            model.eval(),
            (),
            None,
            kwargs=example,
            dynamo=True,
            dynamic_shapes=sizes,
            verbose=False,
            opset_version=opset,
        )


def operators(program: Any) -> list[str]:
    return [node.op_type for node in program.model.graph]


def run(program: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What ONNX Runtime makes of an exported program, which has to consist of standard operators."""
    assert {node.domain for node in program.model.graph} == {""} and not program.model.functions
    session = onnx_session(program.model_proto.SerializeToString())
    feeds = {node.name: inputs[node.name].numpy() for node in session.get_inputs()}
    return [torch.from_numpy(x) for x in session.run(None, feeds)]


def inputs_of(batch: int, queries: int, keys: int, kdim: int = EMBED, vdim: int = EMBED) -> dict[str, Tensor]:
    return {
        "query": sequence(batch, queries),
        "key": sequence(batch, keys, kdim, seed=2),
        "value": sequence(batch, keys, vdim, seed=3),
    }


def no_masks(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    return {}


def padding(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    """The last example sees no key at all."""
    hidden = last_hidden(batch, keys)
    hidden[-1] = True
    return {"key_padding_mask": hidden}


def bool_mask(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    return {"attn_mask": sequence(1, queries, keys, seed=4)[0] > 0}


def float_mask(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    return {"attn_mask": sequence(batch * HEADS, queries, keys, seed=4)}


MASK_SIZES = {bool_mask: {0: T, 1: S}, float_mask: {0: HEADS * B, 1: T, 2: S}}
