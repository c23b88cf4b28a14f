"""Test models with recurrent states, and IO binding of their inputs and outputs to memory that may overlap."""

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
    """A model in ONNX's text format. ``inputs`` and ``outputs`` are declarations such as ``float[2,3] x``.

    The next value of state ``s`` is the output ``next_s``.
    """

    inputs: str
    outputs: str
    nodes: str
    integers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Contents of inputs, by name; the other inputs get random floats."""
    rows: int | None = None
    """Number of valid positions of next values along axis 2 (None: all); a K/V cache is arbitrary after them."""

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
    """A tensor at an offset in device memory, with the CUDA array interface."""

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
    """A block of device memory for tensors, which may overlap."""

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
    """Return an offset for each array such that the arrays do not overlap, and the total number of bytes."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // 256) * 256 + 256
    return offsets, end


def bound(
    session: ort.InferenceSession, memory: Memory, offsets: Mapping[str, int], feeds: Arrays, results: Arrays
) -> ort.IOBinding:
    """Bind all inputs and outputs to ``memory`` at ``offsets``. ``results`` have the outputs' types and shapes."""
    binding = session.io_binding()
    for name, array in feeds.items():
        ort_cuda_plugin.bind_input(binding, name, memory.part(offsets[name], array))
    for name, array in results.items():
        ort_cuda_plugin.bind_output(binding, name, memory.part(offsets[name], array))
    return binding


def run_bound(
    session: ort.InferenceSession, memory: Memory, offsets: Mapping[str, int], feeds: Arrays, results: Arrays
) -> Arrays:
    """Write ``feeds`` to the memory, do a Run with the binding of `bound`, and return the outputs."""
    for name, array in feeds.items():
        memory.write(offsets[name], array)
    session.run_with_iobinding(bound(session, memory, offsets, feeds, results))
    return {name: memory.read(offsets[name], array) for name, array in results.items()}
