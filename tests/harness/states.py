"""Models with states, whose next values an application binds to the memory of the ones before, in whatever way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort

import ort_cuda_plugin

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class StateModel:
    """Nodes in ONNX's textual form, from inputs to outputs, both as ``float[2,3] x``.

    The next value of state ``s`` is the output ``next_s``.
    """

    inputs: str
    outputs: str
    nodes: str
    integers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """What the inputs have that are not of random floats."""
    rows: int | None = None
    """How many rows, along axis 2, the next values have: what a cache has behind them may be anything."""

    def build(self) -> bytes:
        text = (
            f'<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]> '
            f"g ({self.inputs}) => ({self.outputs}) {{ {self.nodes} }}"
        )
        return bytes(onnx.parser.parse_model(text).SerializeToString())

    def feeds(self, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        made: Arrays = {}
        for value in onnx.load_from_string(self.build()).graph.input:
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            given = self.integers.get(value.name)
            made[value.name] = (
                rng.standard_normal(shape).astype(kind) if given is None else np.array(given, kind).reshape(shape)
            )
        return made


@dataclass(frozen=True)
class Part:
    """A tensor in device memory, by the CUDA array interface."""

    memory: ort.OrtValue
    offset: int
    array: np.ndarray

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.memory.data_ptr() + self.offset, False),
            "version": 3,
        }


class Memory:
    """Device memory with tensors in it, which may overlap."""

    def __init__(self, nbytes: int) -> None:
        device = next(d for d in ort_cuda_plugin.register(emulate=True) if d.ep_metadata["emulated"] == "1")
        vendor = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id
        self.value = ort.OrtValue.ortvalue_from_numpy(np.zeros(nbytes, np.uint8), "gpu", 0, vendor)

    def write(self, offset: int, array: np.ndarray) -> None:
        contents = self.value.numpy()
        contents[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(contents)], [self.value])

    def read(self, offset: int, like: np.ndarray) -> np.ndarray:
        contents = np.ascontiguousarray(self.value.numpy()[offset : offset + like.nbytes])
        return contents.view(like.dtype).reshape(like.shape)

    def part(self, offset: int, array: np.ndarray) -> Part:
        return Part(self.value, offset, array)


def spread(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Return offsets at which the arrays do not overlap, and the bytes after them."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // 256) * 256 + 256
    return offsets, end


def bound(
    session: ort.InferenceSession, memory: Memory, offsets: Mapping[str, int], feeds: Arrays, results: Arrays
) -> ort.IOBinding:
    """Every input and output in ``memory``; ``results`` are arrays of the outputs' types and shapes."""
    binding = session.io_binding()
    for name, array in feeds.items():
        ort_cuda_plugin.bind_input(binding, name, memory.part(offsets[name], array))
    for name, array in results.items():
        ort_cuda_plugin.bind_output(binding, name, memory.part(offsets[name], array))
    return binding


def run_bound(
    session: ort.InferenceSession, memory: Memory, offsets: Mapping[str, int], feeds: Arrays, results: Arrays
) -> Arrays:
    """One Run as `bound`, from ``feeds``."""
    for name, array in feeds.items():
        memory.write(offsets[name], array)
    session.run_with_iobinding(bound(session, memory, offsets, feeds, results))
    return {name: memory.read(offsets[name], array) for name, array in results.items()}
