"""OpenVINO: attention as a graph of product, softmax and product, which it compiles, alone and as a whole layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import processors
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import ForeignPeer, Runner, added_mask, future, merged_mask

_HINTS = {"fp32": "f32", "bf16": "bf16"}  # the precision of everything in between; the default may be another


def _tensor(x: Tensor) -> Any:
    """OpenVINO's tensor of the same memory; NumPy has no bfloat16."""
    import openvino

    if x.dtype != torch.bfloat16:
        return openvino.Tensor(x.numpy(), shared_memory=True)
    return openvino.Tensor(x.view(torch.int16).numpy(), openvino.Shape(list(x.shape)), openvino.Type.bf16)


def _parameter(x: Tensor) -> Any:
    import openvino
    from openvino import opset15 as ops

    return ops.parameter(list(x.shape), openvino.Type.bf16 if x.dtype == torch.bfloat16 else openvino.Type.f32)


def _constant(x: Tensor) -> Any:
    """A constant of the graph, which has memory of its own."""
    from openvino import opset15 as ops

    return ops.constant(_tensor(x), shared_memory=False)


def _attention(case: Case, inputs: Inputs, query: Any, key: Any, value: Any) -> Any:
    """The graph (query · keyᵀ · scale + mask), softmax, · value; all masks are one constant that is added."""
    from openvino import opset15 as ops

    dtype = inputs.arguments[0].dtype
    scale = torch.tensor(case.head_dim**-0.5, dtype=dtype)
    scores = ops.multiply(ops.matmul(query, key, False, True), _constant(scale.reshape(1)))
    mask, causal = merged_mask(case, inputs, inputs.mask)
    bias = added_mask(~future(case) if causal else mask, dtype)
    if bias is not None:
        scores = ops.add(scores, _constant(bias))
    return ops.matmul(ops.softmax(scores, -1), value, False, False)


def _runner(case: Case, result: Any, parameters: list[Any], arguments: Sequence[Tensor]) -> Runner:
    """Compiles a graph; inputs and the output are tensors that both sides share."""
    import openvino

    model = openvino.Model([result], parameters, "attention")
    compiled = openvino.Core().compile_model(model, "CPU", _options(case.dtype))
    request = compiled.create_infer_request()
    output = torch.empty(list(compiled.output(0).shape), dtype=arguments[0].dtype)
    shared = [_tensor(x) for x in (*arguments, output)]
    for number, tensor in enumerate(shared[:-1]):
        request.set_input_tensor(number, tensor)
    request.set_output_tensor(0, shared[-1])

    def forward() -> list[Any]:
        request.infer()
        return shared  # the request itself does not keep its tensors' memory

    def read(_: Any) -> tuple[Tensor, None]:
        return output.clone(), None

    return Runner(forward, {}, read)


class OpenVinoAttention(ForeignPeer):
    """The graph (query · keyᵀ · scale + mask), softmax, · value."""

    name = "OpenVINO"
    level = "core"
    worker = "OpenVINO"
    modules = ("openvino",)

    def unsupported(self, case: Case) -> str | None:
        """A graph of plain products has no grouped heads."""
        return "has no grouped heads" if case.kv_heads else super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Hands over query, key and value."""
        parameters = [_parameter(x) for x in inputs.arguments]
        return _runner(case, _attention(case, inputs, *parameters), parameters, inputs.arguments)


class OpenVinoLayer(ForeignPeer):
    """A whole layer in bfloat16, where ONNX Runtime's are not measured: product, attention, product."""

    name = "OpenVINO layer"
    level = "layer"
    worker = "OpenVINO"
    modules = ("openvino",)
    dtypes = ("bf16",)

    def unsupported(self, case: Case) -> str | None:
        """The graph gives no weights."""
        if case.need_weights:
            return "the graph has one output"
        if case.mask == "bias":
            return "masks that need a gradient are measured in the core only"
        return super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Parameters are constants; the packed product is split after one transposition."""
        from openvino import opset15 as ops

        def linear(x: Any, weight: str, bias: str) -> Any:
            constants = [_constant(inputs.parameters[name]) for name in (weight, bias)]
            return ops.add(ops.matmul(x, constants[0], False, True), constants[1])

        x = _parameter(inputs.arguments[0])
        sizes = np.array([case.batch, case.length, 3, case.heads, case.head_dim])
        packed = ops.reshape(linear(x, "in_proj_weight", "in_proj_bias"), sizes, False)
        parts = ops.split(ops.transpose(packed, np.array([2, 0, 3, 1, 4])), np.int64(0), 3)
        query, key, value = (ops.squeeze(part, np.array([0])) for part in parts.outputs())
        context = ops.transpose(_attention(case, inputs, query, key, value), np.array([0, 2, 1, 3]))
        joined = ops.reshape(context, np.array([case.batch, case.length, case.embed_dim]), False)
        return _runner(case, linear(joined, "out_proj.weight", "out_proj.bias"), [x], inputs.arguments)


def _options(dtype: str) -> dict[str, Any]:
    """The case's dtype throughout, one request at a time, threads bound."""
    allotment = processors.current()
    return {
        "INFERENCE_PRECISION_HINT": _HINTS[dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": allotment.threads,
        "ENABLE_CPU_PINNING": bool(allotment.processors),
    }
