"""Runs clusters in the C executor without ONNX Runtime: plans are written in Python, kernels in C."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kernel_objects import KERNEL_FLAGS
from ort_cuda_plugin.abi.core import check, core, ffi, lib, new_error
from ort_cuda_plugin.ep import boundary
from ort_cuda_plugin.ep.nodes.fused_node import FUSED_NODES
from ort_cuda_plugin.plan.format import Param, ParamKind, Plan, PlanExpr, Record, RecordKind, encode
from ort_cuda_plugin.program.expressions.operations import ExprOp

FLOAT, INT32, INT64, BOOL = 1, 6, 7, 9
NUMPY_TYPES = {FLOAT: np.float32, INT32: np.int32, INT64: np.int64, BOOL: np.bool_}
ONNX_TYPES = {np.dtype(v): k for k, v in NUMPY_TYPES.items()} | {np.dtype(np.uint64): 13, np.dtype(np.int8): 3}
P, I8, I16, I32, I64, F32, F64 = (getattr(ParamKind, k) for k in ("POINTER", "I8", "I16", "I32", "I64", "F32", "F64"))
KERNELS = {
    "affine": (P, P, I64, F32, F32),
    "add": (P, P, P, I32),
    "keep_positive": (P, P, P, I64),
    "parameters": (P, I8, I16, I32, I64, F32, F64),
    "idle": (P, I64),
}
"""The kernels of executor_kernels.c, with the kinds of their parameters."""
AFFINE, ADD, KEEP_POSITIVE, PARAMETERS, IDLE = range(5)
"""Indices of the kernels in a `TestCluster`."""

ROOT = Path(__file__).resolve().parents[2]


class OnHost:
    """An input that a Run gets in host memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)


class Wild:
    """A float input of shape [1] with an invalid device address."""

    address = 0xDEAD000


@cache
def device() -> Any:
    """Return the emulated device (``ocp_device *``)."""
    error = new_error()
    opened = core().device_open(1, 0, error)
    check(error)
    return opened


@cache
def kernel_image() -> bytes:
    """Compile executor_kernels.c to an object file for the emulated device."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.o"
        compiler = shlex.split(os.environ.get("CC", "gcc"))
        flags = ["-O2", *KERNEL_FLAGS]
        includes = f"-I{ROOT / 'csrc_shim'}"
        source = str(ROOT / "tests" / "c" / "executor_kernels.c")
        subprocess.run([*compiler, *flags, includes, "-c", source, "-o", str(target)], check=True)
        return target.read_bytes()


@cache
def functions() -> tuple[Any, ...]:
    """Return the CUfunctions of the test kernels, in the order of KERNELS."""
    image = kernel_image()
    module = ffi.new("CUmodule *")
    succeed(driver().ModuleLoadData(module, ffi.from_buffer(image), len(image)))
    found = []
    for name in KERNELS:
        function = ffi.new("CUfunction *")
        succeed(driver().ModuleGetFunction(function, module[0], name.encode()))
        found.append(function[0])
    return tuple(found)


def driver() -> Any:
    error = new_error()
    core().device_enter(device(), ffi.new("ocp_stay *"), error)  # the context stays current
    check(error)
    return core().driver_emulator()


def succeed(result: int) -> None:
    assert result == 0, f"CUDA error {result}"


def synchronize(stream: Any) -> None:
    error = new_error()
    core().stream_synchronize(stream, error)
    check(error)


class DeviceBlock:
    """A block of device memory, for the bytes of an array."""

    def __init__(self, nbytes: int) -> None:
        address = ffi.new("CUdeviceptr *")
        error = new_error()
        core().device_alloc(device(), nbytes, ffi.NULL, address, error)
        check(error)
        self.address: int = address[0]
        self.nbytes = nbytes

    def upload(self, array: np.ndarray) -> DeviceBlock:
        data = np.ascontiguousarray(array)
        if data.nbytes:
            raw = ffi.from_buffer(data.reshape(-1).view(np.uint8))
            succeed(driver().MemcpyHtoDAsync(self.address, raw, data.nbytes, ffi.NULL))
            succeed(driver().CtxSynchronize())
        return self

    def download(self, shape: Sequence[int], dtype: Any, stream: Any) -> np.ndarray:
        """Wait for the stream, and return the contents."""
        synchronize(stream)
        array = np.empty(tuple(shape), dtype)
        if array.nbytes:
            raw = ffi.from_buffer(array.reshape(-1).view(np.uint8), require_writable=True)
            succeed(driver().MemcpyDtoHAsync(raw, self.address, array.nbytes, ffi.NULL))
            succeed(driver().CtxSynchronize())
        return array

    def __del__(self) -> None:
        core().device_free(device(), self.address, ffi.NULL)


class Stream:
    """Context manager of an ``ocp_stream *``."""

    def __enter__(self) -> Any:
        out = ffi.new("ocp_stream **")
        error = new_error()
        core().stream_create(device(), out, error)
        check(error)
        self.pointer = out[0]
        return self.pointer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core().stream_release(self.pointer)


class Outputs:
    """The callback that allocates the outputs of one Run; keeps their memory."""

    def __init__(self, plan_dtypes: Sequence[int]) -> None:
        self.dtypes = plan_dtypes
        self.blocks: dict[int, tuple[DeviceBlock, tuple[int, ...]]] = {}
        self.bind()

    def bind(self) -> None:
        signature = "int(void *, uint32_t, const int64_t *, uint32_t, void **, ocp_error *)"
        self.callback = ffi.callback(signature, self.allocate)

    def allocate(self, _context: Any, index: int, dims: Any, rank: int, data: Any, _error: Any) -> int:
        shape = tuple(dims[d] for d in range(rank))
        block = DeviceBlock(int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY_TYPES[self.dtypes[index]]).itemsize)
        self.blocks[index] = (block, shape)
        data[0] = ffi.cast("void *", block.address)
        return 0

    def arrays(self, stream: Any) -> list[np.ndarray]:
        """Return the outputs, and drop the callback. Its reference to this object would delay freeing the memory."""
        self.callback = None
        return [
            block.download(shape, NUMPY_TYPES[self.dtypes[index]], stream)
            for index, (block, shape) in sorted(self.blocks.items())
        ]


class TestCluster:
    """An ``ocp_cluster`` with all test kernels. The argument ``build`` is called if no plan's guards hold.

    ``on_host`` are the indices of the ``weights`` in host memory.
    """

    __test__ = False

    def __init__(
        self,
        *plans: Plan,
        weights: Sequence[np.ndarray] = (),
        on_host: Sequence[int] = (),
        host_inputs: Sequence[int] = (),
        outputs: Sequence[int] = (FLOAT,),
        build: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], None] | None = None,
    ) -> None:
        boundary.attach(int(ffi.cast("uintptr_t", core())))
        self.outputs = outputs
        self.builder = build
        self.handle = FUSED_NODES.add(self)  # type: ignore[arg-type]
        self.pointer = core().cluster_create(device(), b"test cluster", self.handle)
        self._names = [ffi.new("char[]", name.encode()) for name in KERNELS]
        kernels = ffi.new("ocp_kernel_ref[]", len(KERNELS))
        self._params = [ffi.new("uint8_t[]", kinds) for kinds in KERNELS.values()]
        for kernel, function, name, params in zip(kernels, functions(), self._names, self._params, strict=True):
            kernel.function, kernel.name = function, name
            kernel.num_params, kernel.params = len(params), params
        error = new_error()
        assert core().cluster_add_kernels(self.pointer, kernels, len(KERNELS), error) == 0
        for index, array in enumerate(weights):
            weight = acquire(array, index in on_host)
            core().cluster_add_weights(self.pointer, ffi.new("ocp_weight *[]", [weight]), 1, error)
        core().cluster_set_host_inputs(self.pointer, list(host_inputs), len(host_inputs), error)
        check(error)
        for plan in plans:
            self.add(plan)

    def build(self, shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> None:
        if self.builder is None:
            raise AssertionError("no plan matched")
        self.builder(shapes, host_values)

    def add(self, plan: Plan) -> None:
        self.add_blob(encode(plan))

    def add_blob(self, blob: bytes) -> None:
        error = new_error()
        core().cluster_add_plan(self.pointer, ffi.from_buffer(blob), len(blob), error)
        check(error)

    def run(self, *inputs: np.ndarray | OnHost | Wild, stream: Any = None) -> list[np.ndarray]:
        """Run once, and wait for the outputs. Raises PluginError."""
        if stream is None:
            with Stream() as own:
                return self.run(*inputs, stream=own)
        outputs = Outputs(self.outputs)
        self.enqueue(inputs, outputs, stream)
        return outputs.arrays(stream)

    def enqueue(self, inputs: Sequence[np.ndarray | OnHost | Wild], outputs: Outputs, stream: Any) -> None:
        rows = ffi.new("ocp_input[]", len(inputs))
        alive: list[Any] = []
        for row, value in zip(rows, inputs, strict=True):
            if isinstance(value, Wild):
                alive.append(ffi.new("int64_t[]", [1]))
                row.dims, row.rank, row.dtype, row.on_device = alive[-1], 1, FLOAT, True
                row.data = ffi.cast("void *", value.address)
                continue
            array = value.array if isinstance(value, OnHost) else np.ascontiguousarray(value)
            dims = ffi.new("int64_t[]", array.shape)
            row.dims, row.rank, row.dtype = dims, array.ndim, ONNX_TYPES[array.dtype]
            row.on_device = not isinstance(value, OnHost)
            if isinstance(value, OnHost):
                row.data = ffi.cast("void *", array.ctypes.data)
                alive += [dims, array]
            else:
                block = DeviceBlock(array.nbytes).upload(array)
                row.data = ffi.cast("void *", block.address)
                alive += [dims, block]
        error = new_error()
        core().cluster_run(self.pointer, stream, rows, len(inputs), outputs.callback, ffi.NULL, error)
        try:
            check(error)
        finally:
            core().stream_synchronize(stream, new_error())  # the inputs are freed on return

    def close(self) -> None:
        core().cluster_release(self.pointer)
        FUSED_NODES.pop(self.handle)

    def __enter__(self) -> TestCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def acquire(array: np.ndarray, on_host: bool = False) -> Any:
    """Return a weight (``ocp_weight *``) with the bytes of the array, in device or host memory."""
    data = np.ascontiguousarray(array)
    raw = ffi.from_buffer(data.reshape(-1).view(np.uint8)) if data.nbytes else ffi.NULL
    out = ffi.new("ocp_weight **")
    error = new_error()
    memory = lib.OCP_WEIGHT_ON_HOST if on_host else lib.OCP_WEIGHT_ON_DEVICE
    core().weight_acquire(device(), memory, raw, data.nbytes, out, error)
    check(error)
    return out[0]


class Registers:
    """Allocates the registers of a plan, and collects the expressions that define them."""

    def __init__(self, first: int) -> None:
        """Start after the first ``first`` registers, which belong to the inputs."""
        self.count = first
        self.segment = 0
        self.exprs: list[PlanExpr] = []

    def op(self, op: ExprOp, a: int = 0, b: int = 0, c: int = 0, imm: int = 0) -> int:
        self.exprs.append(PlanExpr(op, self.count, a, b, c, self.segment, imm))
        self.count += 1
        return self.count - 1

    def const(self, value: int) -> int:
        return self.op(ExprOp.CONST, imm=value)

    def take(self, count: int) -> int:
        """Allocate registers that no expression defines; return the first one."""
        self.count += count
        return self.count - count

    def product(self, *registers: int) -> int:
        total = self.const(1)
        for register in registers:
            total = self.op(ExprOp.MUL, total, register)
        return total

    def grid(self, size: int, block: int) -> tuple[int, int, int]:
        """Return registers of a one-dimensional grid for ``size`` threads in blocks of ``block``."""
        one = self.const(1)
        return self.op(ExprOp.CEILDIV, size, self.const(block)), one, one


def launch(kernel: int, grid: tuple[int, int, int], params: Sequence[Param], **fields: Any) -> Record:
    """Return a launch record with blocks of 32 threads, for node 0."""
    return Record(RecordKind.LAUNCH, 0, tuple(params), index=kernel, grid=grid, block=(32, 1, 1), **fields)


def run_in_threads(cluster: TestCluster, expected: Callable[[np.ndarray], np.ndarray], runs: int) -> None:
    """Run the cluster in four threads with separate streams, for inputs [n, 50] of random n; check the results."""

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        with Stream() as stream:
            for _ in range(runs):
                x = generator.standard_normal((int(generator.integers(1, 4)), 50), dtype=np.float32)
                np.testing.assert_array_equal(cluster.run(x, stream=stream)[0], expected(x))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
