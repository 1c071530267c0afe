"""ONNX Runtime: its standard operator ``Attention`` and those of its own domain, alone and as a whole layer.

Weights and masks are constants of the model, as an exported model has them, so that it may pack them beforehand.
Inputs and outputs are bound to memory once; a run copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import processors
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import ForeignPeer, Runner, added_mask, future, merged_mask

_OPSET = 23  # the first with Attention
_CONTRIB = "com.microsoft"
_QUIET = 3  # errors only


def _session(model: bytes) -> Any:
    """A session whose threads are bound to the process's processors; otherwise as it is by default.

    Its threads spin for some milliseconds after a run, which the next run is faster for. They have come to rest before
    another process is measured (`processors.rest`).
    """
    import onnxruntime

    allotment = processors.current()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = allotment.threads, 1
    options.log_severity_level = _QUIET
    if allotment.processors and allotment.threads > 1:
        places = ";".join(str(allotment.place(number) + 1) for number in range(1, allotment.threads))
        options.add_session_config_entry("session.intra_op_thread_affinities", places)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if allotment.processors:
        processors.confine([allotment.place(0)])  # the calling thread computes too
    return session


def _model(nodes: Sequence[Any], feeds: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> bytes:
    """A model of some nodes with the outputs ``out`` and, if a node makes them, ``weights``."""
    from onnx import helper, numpy_helper

    def typed(name: str, tensor: Tensor | None) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype("float32"))
        return helper.make_tensor_value_info(name, kind, None if tensor is None else tuple(tensor.shape))

    made = {name for node in nodes for name in node.output}
    graph = helper.make_graph(
        list(nodes),
        "attention",
        [typed(name, tensor) for name, tensor in feeds.items()],
        [typed(name, None) for name in ("out", "weights") if name in made],
        [numpy_helper.from_array(np.ascontiguousarray(t.numpy()), name) for name, t in constants.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _runner(
    nodes: Sequence[Any],
    feeds: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    read: Callable[[Tensor], Tensor] = lambda out: out,
) -> Runner:
    """Binds a model's inputs and outputs; ``read`` gives the output the shape that all peers return."""
    import onnxruntime

    session = _session(_model(nodes, feeds, constants))
    binding = session.io_binding()
    for name, tensor in feeds.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in session.get_outputs()]
    session.run_with_iobinding(_outputs_anywhere(binding, names))
    for name, value in zip(names, binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(name, value)

    def forward() -> None:
        session.run_with_iobinding(binding)

    def result(_: Any) -> tuple[Tensor, Tensor | None]:
        found = dict(zip(names, (torch.from_numpy(value.numpy()) for value in binding.get_outputs()), strict=True))
        return read(found["out"]), found.get("weights")

    return Runner(forward, {}, result)


def _outputs_anywhere(binding: Any, names: Sequence[str]) -> Any:
    for name in names:
        binding.bind_output(name)
    return binding


def _node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, list(inputs), list(outputs), **attributes)


def _joined(heads: Tensor) -> Tensor:
    """(B, H, T, D) to (B, T, H D)."""
    return heads.transpose(1, 2).flatten(2)


def _merged_mask(case: Case, inputs: Inputs) -> tuple[Tensor | None, bool]:
    """All masks as one, with a row for every query, which the operators want."""
    mask, causal = merged_mask(case, inputs, inputs.mask)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], case.length, case.keys)
    return mask, causal


class _OnnxPeer(ForeignPeer):
    worker = "ONNX Runtime"
    modules = ("onnx", "onnxruntime")


class OnnxAttention(_OnnxPeer):
    """The standard operator ``Attention`` on heads."""

    name = "ORT Attention"
    level = "core"

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Merges all masks into one beforehand."""
        feeds = dict(zip(("query", "key", "value"), inputs.arguments, strict=True))
        mask, causal = _merged_mask(case, inputs)
        constants = {} if mask is None else {"mask": mask}
        node = _node("Attention", [*feeds, *constants], ["out"], is_causal=int(causal))
        return _runner([node], feeds, constants)


class OnnxContribAttention(_OnnxPeer):
    """``com.microsoft.MultiHeadAttention``, which takes (B, T, E)."""

    name = "ORT MHA (contrib)"
    level = "core"

    def unsupported(self, case: Case) -> str | None:
        """Each query head needs a key/value head of its own."""
        return "has no grouped heads" if case.kv_heads else super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Adds all masks as one float mask, and joins the heads beforehand."""
        feeds = {name: _joined(x) for name, x in zip(("query", "key", "value"), inputs.arguments, strict=True)}
        mask, causal = _merged_mask(case, inputs)
        if causal and case.length != case.keys:  # there the operator lets the last query see the last key
            mask, causal = ~future(case), False
        bias = added_mask(mask, inputs.arguments[0].dtype)
        constants = {} if bias is None else {"bias": bias}
        options = {"num_heads": case.heads, "unidirectional": int(causal), "domain": _CONTRIB}
        names = [*feeds, *(["", "", "bias"] if constants else [])]
        node = _node("MultiHeadAttention", names, ["out"], **options)
        return _runner([node], feeds, constants, lambda out: out.unflatten(2, (case.heads, -1)).transpose(1, 2))


class _OnnxLayer(_OnnxPeer):
    level = "layer"

    def unsupported(self, case: Case) -> str | None:
        """Leaves trained masks to the core."""
        if case.mask == "bias":
            return "masks that need a gradient are measured in the core only"
        if case.need_weights and not case.average_weights:
            return "measured with averaged weights only"
        return super().unsupported(case)

    @staticmethod
    def constants(inputs: Inputs) -> dict[str, Tensor]:
        """The weights as (inputs, outputs), and the biases."""
        parameters = inputs.parameters
        return {
            "w": parameters["in_proj_weight"].mT,
            "b": parameters["in_proj_bias"],
            "wo": parameters["out_proj.weight"].mT,
            "bo": parameters["out_proj.bias"],
        }

    @staticmethod
    def last_projection() -> list[Any]:
        """From ``context`` to ``out``."""
        return [_node("MatMul", ["context", "wo"], ["po"]), _node("Add", ["po", "bo"], ["out"])]


class OnnxLayer(_OnnxLayer):
    """One packed product, the standard operator ``Attention``, one product."""

    name = "ORT layer"

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Splits the packed projection inside the model."""
        mask, causal = _merged_mask(case, inputs)
        constants = self.constants(inputs) | ({} if mask is None else {"mask": mask})
        options: dict[str, Any] = {"q_num_heads": case.heads, "kv_num_heads": case.heads, "is_causal": int(causal)}
        outputs = ["context"]
        nodes = [
            _node("MatMul", ["x", "w"], ["px"]),
            _node("Add", ["px", "b"], ["packed"]),
            _node("Split", ["packed"], ["q", "k", "v"], axis=-1, num_outputs=3),
        ]
        if case.need_weights:
            outputs, options["qk_matmul_output_mode"] = ["context", "", "", "per_head"], 3
        nodes.append(_node("Attention", ["q", "k", "v", *(["mask"] if mask is not None else [])], outputs, **options))
        if case.need_weights:
            constants["axis"] = torch.tensor([1])
            nodes.append(_node("ReduceMean", ["per_head", "axis"], ["weights"], keepdims=0))
        return _runner([*nodes, *self.last_projection()], {"x": inputs.arguments[0]}, constants)


class OnnxContribLayer(_OnnxLayer):
    """``com.microsoft.Attention``, which holds the packed projection, and one product."""

    name = "ORT layer (contrib)"

    def unsupported(self, case: Case) -> str | None:
        """The operator returns no weights."""
        return "returns no weights" if case.need_weights else super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Adds all masks as one float mask."""
        mask, causal = _merged_mask(case, inputs)
        bias = added_mask(mask, inputs.arguments[0].dtype)
        constants = self.constants(inputs) | ({} if bias is None else {"bias": bias})
        names = ["x", "w", "b", *(["", "", "bias"] if bias is not None else [])]
        options = {"num_heads": case.heads, "unidirectional": int(causal), "domain": _CONTRIB}
        nodes = [_node("Attention", names, ["context"], **options), *self.last_projection()]
        return _runner(nodes, {"x": inputs.arguments[0]}, constants)
