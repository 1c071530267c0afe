"""OpenVINO: attention as a graph of product, softmax and product, which it compiles into kernels of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import processors
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import ForeignPeer, Runner, added_mask, future, merged_mask


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
        """Adds all masks as one constant; inputs and the output are tensors that both sides share."""
        import openvino
        from openvino import opset15 as ops

        parameters = [ops.parameter(list(x.shape), openvino.Type.f32) for x in inputs.arguments]
        query, key, value = parameters
        scores = ops.multiply(ops.matmul(query, key, False, True), ops.constant(np.float32(case.head_dim**-0.5)))
        mask, causal = merged_mask(case, inputs, inputs.mask)
        bias = added_mask(~future(case) if causal else mask, inputs.arguments[0].dtype)
        if bias is not None:
            scores = ops.add(scores, ops.constant(bias.numpy()))
        result = ops.matmul(ops.softmax(scores, -1), value, False, False)
        compiled = openvino.Core().compile_model(openvino.Model([result], parameters, "attention"), "CPU", _options())

        request = compiled.create_infer_request()
        output = torch.empty_like(inputs.arguments[0])
        shared: list[Any] = [openvino.Tensor(x.numpy(), shared_memory=True) for x in (*inputs.arguments, output)]
        for number, tensor in enumerate(shared[:-1]):
            request.set_input_tensor(number, tensor)
        request.set_output_tensor(0, shared[-1])

        def forward() -> list[Any]:
            request.infer()
            return shared  # the request itself does not keep its tensors' memory

        def read(_: Any) -> tuple[Tensor, None]:
            return output.clone(), None

        return Runner(forward, {}, read)


def _options() -> dict[str, Any]:
    """float32 throughout (the default may be bfloat16), one request at a time, threads bound."""
    allotment = processors.current()
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": allotment.threads,
        "ENABLE_CPU_PINNING": bool(allotment.processors),
    }
