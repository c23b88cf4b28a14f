"""Custom operators of a test application, and models with them, for tests of their registration in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.custom import registry
from ort_cuda_plugin.custom.operator import CustomOperator, Port
from ort_cuda_plugin.ops.registry import FLOATS
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise

DOMAIN = "my.domain"
X, Y = Port("x", FLOATS, "T"), Port("y", FLOATS, "T")


def doubled(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> list[Tensor]:
    assert inputs[0] is not None
    return [elementwise(ctx, lambda a: a * 2, inputs[0])]


def operator(name: str = "Double", version: int = 1, priority: int = 0, **more: Any) -> CustomOperator:
    """Return a custom operator that doubles its input; ``more`` replaces fields of `CustomOperator`."""
    given: dict[str, Any] = {"inputs": (X,), "outputs": (Y,), "attributes": (), "domain": DOMAIN}
    return CustomOperator(name, version=version, priority=priority, **{"function": doubled, **given, **more})


@contextmanager
def kept_registry() -> Iterator[None]:
    """Restore the registry after the block."""
    before = set(registry.current().operators)
    try:
        yield
    finally:
        for added in registry.current().operators:
            if added not in before:
                registry.unregister(added)


def model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Sequence[int | str] | None],
    outputs: Sequence[str],
    dtype: int = TensorProto.FLOAT,
    opset: int = 1,
) -> bytes:
    """Return a model of the nodes, which may be of `DOMAIN`. All inputs have ``dtype``; outputs declare no type."""
    graph = helper.make_graph(
        nodes,
        "custom",
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, opset)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def stock_session(model: bytes, **options: str) -> ort.InferenceSession:
    """Return an ``InferenceSession`` with the emulated device, not created by `ort_cuda_plugin.session`."""
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 4
    (device,) = (d for d in ort_cuda_plugin.register(emulate=True) if d.ep_metadata.get("emulated") == "1")
    session_options.add_provider_for_devices([device], options)
    return ort.InferenceSession(model, session_options)
