"""Persistent RNN kernels, in which many blocks compute each time step, against ONNX Runtime's CPU provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from kernel_harness import Array, make_model, run_op
from ort_cuda_plugin.cli.models.kernel_report import report
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.rnn.rnn_persistent import PartCell
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GATES = {"GRU": 3, "LSTM": 4}


def parameters(kind: str, steps: int, batch: int, size: int, dtype: Any, directions: int = 1) -> list[Array | None]:
    """Return the operator's inputs X, W, R, B, sequence_lens and initial_h."""
    rng, rows = np.random.default_rng(size), GATES[kind] * size
    own = (rows, 3), (rows, size), (2 * rows,), (batch, size)
    shapes = (steps, batch, 3), *((directions, *shape) for shape in own)
    x, w, r, b, h = (rng.uniform(-0.5, 0.5, shape).astype(dtype) for shape in shapes)
    return [x, w, r, b, np.arange(steps, steps + 3 * batch, 3, dtype=np.int32) % steps + 1, h]


@pytest.mark.parametrize(
    ("kind", "direction", "batch", "size", "linear", "dtype"),
    [
        ("LSTM", "bidirectional", 7, 45, 0, np.float32),
        ("LSTM", "forward", 1, 40, 0, np.float64),
        ("GRU", "reverse", 35, 33, 1, np.float32),
        ("GRU", "bidirectional", 2, 40, 0, np.float16),
    ],
)
def test_steps_of_many_blocks_equal_the_cpu(
    monkeypatch: pytest.MonkeyPatch, kind: str, direction: str, batch: int, size: int, linear: int, dtype: Any
) -> None:
    """Hidden sizes fill warps and blocks, or do not; a block has one sequence, or several that may not fill it."""
    directions = 1 + (direction == "bidirectional")
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=False, multiprocessors=8))
    launched: list[None] = []
    launch = PartCell.launch
    monkeypatch.setattr(PartCell, "launch", lambda self: launched.append(launch(self)))
    inputs = parameters(kind, 5, batch, size, dtype, directions)
    attributes: dict[str, Any] = {"hidden_size": size, "direction": direction}
    if kind == "GRU":
        attributes["linear_before_reset"] = linear
    wide = [x.astype(np.float32) if x is not None and x.dtype.kind == "f" else x for x in inputs]
    model = make_model(kind, wide, attributes, 21, outputs=2)
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {value.name: x for value, x in zip(session.get_inputs(), wide, strict=True)})
    actual = run_op(kind, inputs, attributes, 21, outputs=2, dynamic=batch > 1, constant=(1, 2))
    assert launched
    tolerance = 2e-3 if dtype is np.float16 else 2e-6
    for y, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(y, reference, tolerance, tolerance)


def kernel(kind: str, size: int, device: DeviceProperties) -> KernelSpec:
    model = make_model(kind, parameters(kind, 3, 9, size, np.float32), {"hidden_size": size}, 21, outputs=2)
    (found,) = (
        spec for spec in CompiledCluster(read_model(model), device).prepare().kernels if "ticket" in spec.source
    )
    return found


def test_the_largest_kernel_keeps_its_weights_in_registers() -> None:
    """Weights of a larger hidden size exceed the registers, so it uses another kernel with one block per sequence."""
    device = DeviceProperties(emulated=False)
    (usage,) = report([kernel("LSTM", 1024, device)], [Target.cuda(9, 0)])
    assert usage.stack == usage.spill_stores == usage.spill_loads == 0
    with pytest.raises(ValueError, match="not enough values"):
        kernel("LSTM", 1025, device)
