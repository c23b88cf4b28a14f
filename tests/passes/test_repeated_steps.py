"""Copied launches: a step with the structure of an earlier one gets the launches that its own emission would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.passes.emission import emission
from ort_cuda_plugin.passes.emission.repeated_steps import Emissions
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.tensor import Buffer, Tensor
from ort_cuda_plugin.program.steps.trace import Copy, Launch, Step


def blocks(scales: Sequence[float], columns: int = 16) -> onnx.ModelProto:
    """Return a model with a block ``Softmax(x @ w) * scale`` for each of ``scales``; each block has different weights
    ``w``.
    """
    nodes, weights, x = [], [], "x"
    for number, scale in enumerate(scales):
        values = np.random.default_rng(number).standard_normal((columns, columns)).astype(np.float32)
        scalar = numpy_helper.from_array(np.array(scale, np.float32), f"s{number}")
        weights += [numpy_helper.from_array(values, f"w{number}"), scalar]
        end = "y" if number == len(scales) - 1 else f"o{number}"
        nodes += [
            helper.make_node("MatMul", [x, f"w{number}"], [f"m{number}"]),
            helper.make_node("Softmax", [f"m{number}"], [f"p{number}"]),
            helper.make_node("Mul", [f"p{number}", f"s{number}"], [end]),
        ]
        x = end
    x_info, y_info = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", columns]) for name in "xy")
    graph = helper.make_graph(nodes, "blocks", [x_info], [y_info], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


DEVICES = {"emulated": DeviceProperties(), "sm_90": DeviceProperties.gpu((9, 0))}


def emitted(cluster: CompiledCluster) -> list[str]:
    """Return the launches of the cluster's plan as text, with buffers numbered in the order of their use."""
    found: list[Step] = []
    cluster.watch = lambda name, steps: found.extend(steps if name == "emission" else ())
    cluster.prepare()
    numbers: dict[Buffer, int] = {}

    def shown(buffer: Buffer) -> str:
        return f"{buffer.kind.name}{numbers.setdefault(buffer, len(numbers))}:{buffer.nbytes!r}"

    def lines() -> Iterator[str]:
        for step in found:
            parts: list[object] = [type(step).__name__, [node.name for node in step.nodes]]
            parts += [list(map(shown, step.reads)), list(map(shown, step.writes))]
            tensors = [step.destination, step.source] if isinstance(step, Copy) else []
            if isinstance(step, Launch):
                parts += [step.kernel.digest, step.grid, step.block, step.shared_bytes, step.turns, step.note]
                parts += [(shown(pair.read), shown(pair.written), pair.kept) for pair in step.in_place]
                parts += [(shown(x.buffer), use) for x, use in step.uses.items()]
                parts += [arg for arg in step.args if not isinstance(arg, Tensor)]
                tensors += [arg for arg in step.args if isinstance(arg, Tensor)]
            parts += [(x.dtype, x.shape, x.strides, x.offset, shown(x.buffer)) for x in tensors]
            yield repr(parts)

    return list(lines())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 0.25, 0.5), (0.0, -0.0, 0.0)])
def test_copied_launches_are_those_of_the_step_itself(device: str, scales: tuple[float, ...]) -> None:
    graph = read_model(blocks(scales))
    copied = emitted(CompiledCluster(graph, DEVICES[device]))
    with mock.patch.object(Emissions, "find", return_value=None):
        assert emitted(CompiledCluster(graph, DEVICES[device])) == copied


def test_steps_of_equal_structure_are_emitted_once() -> None:
    made = []

    def counted(*arguments: object) -> None:
        made.append(arguments)
        launch(*arguments)  # type: ignore[arg-type]

    launch = emission.launch_step
    for count in (3, 9):
        made.clear()
        graph = read_model(blocks([0.5] * count))
        with mock.patch.object(emission, "launch_step", counted):
            launches = emitted(CompiledCluster(graph, DEVICES["emulated"]))
        # Three step structures of two steps each: the first block reads the input, the last one writes the output, the
        # others do neither.
        assert len(made) <= 6
        assert len(launches) >= 2 * count


def test_constants_whose_values_decide_are_noted_in_each_block() -> None:
    graph = read_model(blocks([0.5] * 4))
    CompiledCluster(graph, DEVICES["emulated"]).prepare()
    scales = [value for value in graph.used_values if value.name.startswith("s")]
    assert len(scales) == 4
    assert all(value.initializer is not None and value.initializer.decides for value in scales)
