"""Formats that pack channels into vectors, formats that the host lacks, and destruction of plugins, in stock
sessions.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

import ort_cuda_plugin
from custom_operators import kept_registry
from ort_cuda_plugin.custom.plugin import (
    DType,
    Plugin,
    PluginBuild,
    PluginCore,
    PluginCreator,
    PluginRuntime,
    Port,
    TensorFormat,
    register_creator,
)

NUMPY = {DType.FLOAT32: "float", DType.FLOAT16: "float16", DType.INT8: "int8"}
SAID: dict[str, Any] = {}


class Packed(Plugin, PluginCore, PluginBuild, PluginRuntime):
    """Copies its input to its output; accepts only the format in ``SAID["format"]``."""

    def __init__(self) -> None:
        SAID["made"] = SAID.get("made", 0) + 1

    def get_plugin_name(self) -> str:
        return "Packed"

    def get_plugin_namespace(self) -> str:
        return "formats"

    def clone(self) -> Plugin:
        return type(self)()

    def destroy(self) -> None:
        SAID["destroyed"] = SAID.get("destroyed", 0) + 1

    def get_output_data_types(self, input_types: Any) -> Any:
        return [input_types[0]]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, expr_builder: Any) -> Any:
        return [inputs[0]]

    def supports_format_combination(self, pos: int, in_out: Any, nb_inputs: int) -> bool:
        return in_out[pos].desc.format is SAID["format"]

    def enqueue(
        self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any
    ) -> None:
        SAID["given"] = input_desc[0].format, tuple(input_desc[0].dims), tuple(inputs[0].shape)
        stream.copy(outputs[0], inputs[0])


class PackedInEachRun(Packed):
    """A `Packed` whose `enqueue` is called in each Run."""

    enqueue_is_recorded = False

    def enqueue(
        self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any
    ) -> None:
        SAID["given"] = input_desc[0].format, tuple(input_desc[0].dims), tuple(inputs[0].shape)
        stream.write(outputs[0], stream.read(inputs[0]))


class Creator(PluginCreator):
    inputs = (Port("x", set(NUMPY)),)
    outputs = (Port("y", set(NUMPY)),)

    def get_plugin_name(self) -> str:
        return "Packed"

    def get_plugin_namespace(self) -> str:
        return "formats"

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Plugin:
        made: Plugin = SAID["class"]()
        return made


@pytest.fixture(autouse=True)
def creator() -> Iterator[None]:
    ort_cuda_plugin.register(emulate=True)
    with kept_registry():
        gc.collect()  # frees plugins that other tests left
        SAID.clear()
        SAID["class"] = Packed
        register_creator(Creator())
        yield


def model(dtype: DType, *dims: int | str) -> bytes:
    tensor = f"{NUMPY[dtype]}[{', '.join(map(str, dims))}]"
    text = f'<ir_version: 10, opset_import: ["" : 21, "formats" : 1]> g ({tensor} x) => ({tensor} y) {{ y = '
    return bytes(onnx.parser.parse_model(text + "formats.Packed (x) }").SerializeToString())


@pytest.mark.parametrize("kind", [Packed, PackedInEachRun])
@pytest.mark.parametrize(
    ("format", "dtype", "channels"),
    [
        (TensorFormat.CHW2, DType.FLOAT16, 4),
        (TensorFormat.CHW2, DType.FLOAT16, 3),
        (TensorFormat.CHW4, DType.INT8, 9),
        (TensorFormat.CHW4, DType.FLOAT16, 8),
        (TensorFormat.CHW16, DType.FLOAT16, 5),
        (TensorFormat.CHW32, DType.FLOAT32, 33),
        (TensorFormat.CHW32, DType.INT8, 64),
    ],
)
def test_channels_are_packed_into_vectors_and_unpacked(
    kind: type[Packed], format: TensorFormat, dtype: DType, channels: int
) -> None:
    SAID.update({"class": kind, "format": format})
    session = ort_cuda_plugin.session(model(dtype, "n", channels, "h", 3), emulate=True)
    vector = int(format.name[3:])
    for n, h in ((2, 5), (1, 2)):
        x = np.random.default_rng(0).integers(-9, 9, (n, channels, h, 3)).astype(dtype.numpy)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
        given, dims, shape = SAID["given"]
        assert given is format
        if kind is PackedInEachRun:
            assert dims == (n, channels, h, 3)
            assert shape == (n, -(-channels // vector), h, 3, vector)


def test_a_volume_is_packed() -> None:
    SAID["format"] = TensorFormat.CDHW32
    x = np.random.default_rng(0).integers(-9, 9, (1, 40, 2, 3, 4)).astype(np.int8)
    session = ort_cuda_plugin.session(model(DType.INT8, *x.shape), emulate=True)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)


@pytest.mark.parametrize("dtype", list(NUMPY))
@pytest.mark.parametrize("dims", [(1, 4, 2, 2), ("n", "c", "h", 2)])
def test_a_node_whose_formats_all_fail_says_so_for_each_type(dtype: DType, dims: tuple[int | str, ...]) -> None:
    """Without this error, ONNX Runtime would assume the first type of the node's schema and complain about that."""
    SAID["format"] = None
    with pytest.raises(Exception, match=f"supports_format_combination accepts no {dtype.name} in .* for tensor 0"):
        ort_cuda_plugin.session(model(dtype, *dims), emulate=True)


@pytest.mark.parametrize("kind", [Packed, PackedInEachRun])
def test_each_plugin_is_destroyed_once_with_its_session(kind: type[Packed]) -> None:
    SAID.update({"class": kind, "format": TensorFormat.LINEAR})
    session = ort_cuda_plugin.session(model(DType.FLOAT32, 2, 3), emulate=True)
    x = np.ones((2, 3), np.float32)
    session.run(None, {"x": x})
    assert SAID.get("destroyed", 0) < SAID["made"]
    del session
    gc.collect()
    assert SAID["destroyed"] == SAID["made"]


def test_a_destroy_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Packed):
        def destroy(self) -> None:
            raise RuntimeError("no such handle")

    Failing()
    gc.collect()
    assert "destroy of a plugin of class" in caplog.text
    assert "no such handle" in caplog.text
