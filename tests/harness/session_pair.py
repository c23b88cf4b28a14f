"""Creates sessions that must run every node on the plugin, and pairs of a plugin session and a CPU session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.ep.provider import last_provider

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(0)


def info(name: str, kind: int, shape: list[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def ep_session(
    model: bytes, level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
) -> ort.InferenceSession:
    """Create a session on the emulated device. Raises AssertionError unless the plugin runs all nodes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    parts = session.get_provider_graph_assignment_info()
    ours = ort_cuda_plugin.get_ep_name()
    elsewhere = [f"{node.op_type} {node.name}" for part in parts if part.ep_name != ours for node in part.get_nodes()]
    assert parts
    assert not elsewhere, f"nodes on another provider: {', '.join(elsewhere)}"
    return session


def assert_planned_tightly() -> None:
    """Assert that each slab of the last Run is at most 1.15 times the peak of live intermediate tensors."""
    provider = last_provider()
    assert provider is not None
    for fused in provider.fused_nodes:
        planned, alive = fused.plan_memory()
        assert alive <= planned <= 1.15 * alive


class Pair:
    """Two sessions of one model: on the plugin (declined nodes run on the CPU provider), and on the CPU provider."""

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        opset: int = 17,
        **initializers: np.ndarray,
    ) -> None:
        constants = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
        graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        ort_cuda_plugin.register(emulate=True)
        data = model.SerializeToString()
        self.ours = ort.InferenceSession(
            data, options, providers=["CudaPluginExecutionProvider", "CPUExecutionProvider"]
        )
        self.cpu = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    @property
    def clusters(self) -> list[list[str]]:
        """Return the operators of each of the plugin's clusters."""
        return [
            sorted(node.op_type for node in subgraph.get_nodes())
            for subgraph in self.ours.get_provider_graph_assignment_info()
            if subgraph.ep_name == "CudaPluginExecutionProvider"
        ]

    def check(self, **feed: np.ndarray) -> list[np.ndarray]:
        """Run both sessions, and return the plugin's outputs. Raises AssertionError if the outputs differ."""
        results: list[np.ndarray] = self.ours.run(None, feed)
        for actual, expected in zip(results, self.cpu.run(None, feed), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, strict=True)
        return results
