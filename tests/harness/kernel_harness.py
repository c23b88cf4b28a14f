"""Runs ONNX models through lowering, plans and the C executor on the emulated device, without ONNX Runtime.

`run_model` runs any ModelProto; `run_op` builds and runs a model of one node.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from interpreted import interpret
from ort_cuda_plugin.abi.core import check, core, ffi, new_error
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.devices import emulated_devices
from ort_cuda_plugin.ep.device.open_device import OpenDevice, use_device
from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
from ort_cuda_plugin.model.ir import DType, Graph, Value
from ort_cuda_plugin.model.onnx_graph import read_model, storage
from ort_cuda_plugin.model.packed import unpack_array
from ort_cuda_plugin.program.lowering.context import LoweringOptions

Array = np.ndarray[Any, np.dtype[Any]]
Input: TypeAlias = Array | np.generic
"""A tensor: an array, or a NumPy scalar for rank 0."""


@functools.cache
def device() -> OpenDevice:
    return use_device(emulated_devices()[0])


def packed(array: Array, dtype: DType) -> Array:
    """Return an array's elements as ONNX Runtime stores them: types of fewer than 8 bits are packed into bytes."""
    if not dtype.is_packed:
        return array
    per_byte = 8 // dtype.bits
    codes = np.zeros(-(-array.size // per_byte) * per_byte, np.uint8)
    codes[: array.size] = array.reshape(-1).view(np.uint8) & ((1 << dtype.bits) - 1)
    places = codes.reshape(-1, per_byte) << np.arange(0, 8, dtype.bits, dtype=np.uint8)
    result: Array = np.bitwise_or.reduce(places, axis=1).astype(np.uint8)
    return result


@ffi.callback("ocp_output_fn")  # type: ignore[untyped-decorator]
def _allocate(context: Any, index: int, dims: Any, rank: int, data: Any, error: Any) -> int:
    outputs: dict[int, tuple[int, tuple[int, ...]]] = ffi.from_handle(context)
    shape = tuple(dims[i] for i in range(rank))
    address = ffi.new("CUdeviceptr *")
    # 8 bytes are enough for each element; the output's element type is not known here.
    if core().device_alloc(device().pointer, max(8 * int(np.prod(shape)), 8), ffi.NULL, address, error):
        return int(error.code)
    outputs[index] = (address[0], shape)
    data[0] = ffi.cast("void *", address[0])
    return 0


def run_graph(graph: Graph, inputs: Sequence[Input], options: LoweringOptions | None = None) -> list[Array]:
    """Compile the graph as one cluster, run it once, and return its outputs (bfloat16 as uint16).

    Raises NodeError, Unsupported or InvalidModel if a node is declined, PluginError if the Run fails.
    """
    stored = [storage(np.asarray(x)) for x in inputs]
    arrays = [np.ascontiguousarray(array).reshape(array.shape) for array, _ in stored]
    dtypes = [dtype for _, dtype in stored]
    contents = [packed(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    cluster = CompiledCluster(graph, device().properties(), options)
    fused = FusedNode("harness", cluster, device())
    error = new_error()
    stream = ffi.new("ocp_stream **")
    core().stream_create(device().pointer, stream, error)
    check(error)
    outputs: dict[int, tuple[int, tuple[int, ...]]] = {}
    try:
        fused.prepare()
        sizes = [dim for value in graph.inputs for dim in ((None,) if value.shape is None else value.shape)]
        if cluster.host_inputs or not all(isinstance(dim, int) for dim in sizes):
            host_values = [[int(x) for x in arrays[i].reshape(-1)] for i in cluster.host_inputs]
            fused.build([x.shape for x in arrays], host_values)
        records = ffi.new("ocp_input[]", len(arrays))
        alive = []
        for record, array, content, dtype in zip(records, arrays, contents, dtypes, strict=True):
            dims = ffi.new("int64_t[]", list(array.shape))
            data = ffi.from_buffer(content) if content.nbytes else ffi.NULL
            alive += [dims, data]
            record.data, record.dims, record.rank, record.dtype = ffi.cast("void *", data), dims, array.ndim, dtype.ort
        handle = ffi.new_handle(outputs)
        core().cluster_run(fused.pointer, stream[0], records, len(arrays), _allocate, handle, error)
        check(error)
        core().stream_synchronize(stream[0], error)
        check(error)
        return [_download(value, *outputs[index]) for index, value in enumerate(graph.outputs)]
    finally:
        core().stream_synchronize(stream[0], new_error())
        for address, _ in outputs.values():
            core().device_free(device().pointer, address, ffi.NULL)
        fused.close()
        core().stream_release(stream[0])


def _download(value: Value, address: int, shape: tuple[int, ...]) -> Array:
    assert value.dtype is not None
    dtype = value.dtype
    nbytes = (int(np.prod(shape)) * dtype.bits + 7) // 8
    if not nbytes:
        return np.empty(shape, dtype.numpy)
    pointer = core().emu_host_pointer(address, nbytes)
    assert pointer != ffi.NULL
    stored = np.frombuffer(ffi.buffer(pointer, nbytes), np.uint8).copy()
    if dtype.is_packed:
        unused = -int(np.prod(shape)) * dtype.bits % 8
        assert stored[-1] >> (8 - unused) == 0, "bits after the last element"
        return unpack_array(stored, dtype, shape)
    return stored.view(dtype.numpy).reshape(shape)


def run_model(
    model: onnx.ModelProto, inputs: Sequence[Input], dynamic: bool = False, options: LoweringOptions | None = None
) -> list[Array]:
    """Call `run_graph` for a model. With ``dynamic`` all sizes of inputs are symbolic when the plan is compiled."""
    outputs = run_graph(read_model(model, dynamic), inputs, options)
    interpret(model, inputs, dynamic, options)
    return outputs


def make_model(
    op_type: str,
    inputs: Sequence[Input | None],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 21,
    *,
    domain: str = "",
    version: int = 1,
    outputs: int = 1,
    constant: Sequence[int] = (),
) -> onnx.ModelProto:
    """Return a model of one node. ``version`` is the opset version of ``domain``, if that is not ONNX's domain.

    An input that is None is omitted; inputs with an index in ``constant`` are initializers.
    """
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    present = [(i, name, np.asarray(x)) for i, (name, x) in enumerate(zip(names, inputs, strict=True)) if x is not None]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], domain=domain, **(attributes or {}))
    graph = helper.make_graph(
        [node],
        "harness",
        [
            helper.make_tensor_value_info(name, storage(x)[1].onnx, x.shape)
            for i, name, x in present
            if i not in constant
        ],
        [_output_info(f"y{i}", present[0][2] if domain else None) for i in range(outputs)],
        [numpy_helper.from_array(x, name) for i, name, x in present if i in constant],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, version)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets)


def _output_info(name: str, like: Array | None) -> onnx.ValueInfoProto:
    """Declare an output. ONNX infers its type, except in other domains, where it gets the type of ``like``."""
    if like is None:
        return helper.make_empty_tensor_value_info(name)
    return helper.make_tensor_value_info(name, storage(like)[1].onnx, None)


def run_op(
    op_type: str,
    inputs: Sequence[Input | None],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 21,
    *,
    domain: str = "",
    version: int = 1,
    outputs: int = 1,
    constant: Sequence[int] = (),
    dynamic: bool = False,
    options: LoweringOptions | None = None,
) -> list[Array]:
    """Run one operator, and return its outputs; see `make_model` and `run_model`."""
    model = make_model(
        op_type, inputs, attributes, opset, domain=domain, version=version, outputs=outputs, constant=constant
    )
    given = [x for i, x in enumerate(inputs) if x is not None and i not in constant]
    return run_model(model, given, dynamic, options)
