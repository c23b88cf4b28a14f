"""Kernels of applications: Numba or foreign code, which lowering functions launch with symbolic sizes.

A launch is an ordinary record of the plan: a Run launches the kernel without calling Python, CUDA graphs replay it, and
compiled models store it. If the emulated device runs a NumPy counterpart of the kernel, the Run calls Python instead.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ...compiler.foreign import ForeignCode, ForeignKernel
from ...compiler.kernel import KernelSpec
from ...model.ir import Array, DType, Node, Unsupported
from ...program.expressions.symbolic import Dim, Expr, eq, is_read_back
from ...program.lowering.context import Arg, Float32, Float64, Int32, Int64, Lowering, Tensor
from ...program.steps.callbacks import Callback, CallStream, DeviceArray
from ...program.steps.trace import scalar_types
from .half_elements import check_halves
from .kernel_source import KernelSourceError, kernel_source

Function: TypeAlias = Callable[..., Any]
Argument: TypeAlias = "Arg | Dim | float | np.integer[Any] | np.floating[Any]"
Sizes: TypeAlias = "Dim | np.integer[Any] | Sequence[Dim | np.integer[Any]]"


@dataclass(frozen=True)
class Kernel:
    """A kernel and its counterparts.

    Made by `numba_kernel`, `cuda_kernel`, `ptx_kernel`, `cubin_kernel`, `ltoir_kernel`.

    Attributes:
        signature: the type of each parameter, such as "*f32" or "i32"; None if each launch derives the types from its
            arguments.
        foreign: the kernel's code for GPUs, None for a Numba kernel.
        source: the source of the Numba kernel or of the Numba counterpart, "" without either.
        numpy_twin: the NumPy counterpart for the emulated device, a function that writes into its arguments.
    """

    name: str
    signature: tuple[str, ...] | None = None
    foreign: ForeignCode | None = None
    source: str = ""
    numpy_twin: Function | None = field(default=None, repr=False)

    @property
    def needs_gpu(self) -> bool:
        """Return whether the emulated device can run neither the kernel's code nor a counterpart of it."""
        is_cubin = self.foreign is not None and self.foreign.kind == "cubin"
        return is_cubin and not self.source and self.numpy_twin is None

    def for_arguments(self, args: Sequence[Any]) -> tuple[Kernel, Sequence[Any]]:
        """Return the kernel to launch for the arguments ``args`` of an operator's launch, and its arguments."""
        return self, args

    def spec(self, signature: tuple[str, ...], threads: int, owner: str = "") -> KernelSpec:
        """Return the `KernelSpec` for arguments of these types and blocks of ``threads`` threads (0: unknown)."""
        if self.foreign is None:
            return KernelSpec(self.name, signature, self.source, threads, owner=owner)
        return ForeignKernel(self.name, signature, self.source, threads, owner=owner, foreign=self.foreign)


def numba_kernel(function: Function | str, *, name: str = "", signature: Sequence[str] | None = None) -> Kernel:
    """Make a kernel in Numba: from a function, decorated with ``numba.cuda.jit`` or not, or from source text.

    Tensors are plain pointers in the kernel: use one index. Elements of 16-bit floats are uint16; elements of smaller
    floats and of bool are uint8. Built-in functions of kernels, such as ``f16_to_f32``, convert them.

    Raises:
        KernelSourceError: the function cannot be a kernel, or a kernel that is given as text has no name.
    """
    if isinstance(function, str):
        if not name:
            raise KernelSourceError("numba_kernel: a kernel that is given as text needs a name. Pass name=")
        return Kernel(name, None if signature is None else tuple(signature), source=function)
    source, _ = kernel_source(function)
    return Kernel(name or _identifier(function), None if signature is None else tuple(signature), source=source)


def cuda_kernel(
    source: str,
    entry: str,
    signature: Sequence[str],
    *,
    options: Sequence[str] = (),
    numba_twin: Function | None = None,
    numpy_twin: Function | None = None,
) -> Kernel:
    """Make a kernel in CUDA C++, which NVRTC compiles.

    ``entry`` is the name of an ``extern "C"`` function, or of an instance of a template such as ``scale<float>``.
    ``signature`` has "*f32" for a pointer to float, and "i32", "i64", "f32" or "f64" for a number.

    Raises: ValueError: the code, an option or the counterpart for the emulated device is invalid.
    """
    code = ForeignCode("cuda", (("", source.encode()),), entry, tuple(options))
    return _foreign(code, signature, numba_twin, numpy_twin)


def ptx_kernel(
    ptx: str | bytes | Mapping[str, bytes],
    entry: str,
    signature: Sequence[str],
    *,
    numba_twin: Function | None = None,
    numpy_twin: Function | None = None,
) -> Kernel:
    """Make a kernel from PTX: one text for all architectures, or a text for each.

    Raises ValueError as `cuda_kernel`.
    """
    images = {"": ptx.encode()} if isinstance(ptx, str) else ptx
    return _foreign(ForeignCode("ptx", _images(images), entry), signature, numba_twin, numpy_twin)


def cubin_kernel(
    cubins: Mapping[str, bytes],
    entry: str,
    signature: Sequence[str],
    *,
    numba_twin: Function | None = None,
    numpy_twin: Function | None = None,
) -> Kernel:
    """Make a kernel from cubins, one for each architecture, such as Triton and CuTe produce.

    Raises ValueError as `cuda_kernel`. If a compiler has added parameters, as Triton does for scratch memory, declare
    them in ``signature`` as "i64" and launch with 0.
    """
    return _foreign(ForeignCode("cubin", _images(cubins), entry), signature, numba_twin, numpy_twin)


def ltoir_kernel(
    ltoir: bytes | Mapping[str, bytes],
    entry: str,
    signature: Sequence[str],
    *,
    numba_twin: Function | None = None,
    numpy_twin: Function | None = None,
) -> Kernel:
    """Make a kernel from LTO-IR, which nvJitLink links. Raises ValueError as `cuda_kernel`."""
    return _foreign(ForeignCode("ltoir", _images(ltoir), entry), signature, numba_twin, numpy_twin)


def launch(
    ctx: Lowering,
    kernel: Kernel,
    grid: Sizes,
    block: Sizes,
    args: Sequence[Argument],
    *,
    writes: Sequence[Tensor],
    reads: Sequence[Tensor] = (),
    shared_bytes: Dim = 0,
) -> None:
    """Record a launch. Grid, block, numbers and ``shared_bytes`` may be expressions of sizes.

    ``args`` are contiguous tensors and numbers. The kernel writes the tensors in ``writes``. It reads all other
    tensors, and those of ``writes`` that ``reads`` also lists. The block size is a constant of a plan: if it depends on
    input sizes, each of its values gets a plan. An empty grid launches nothing.

    Raises:
        TypeError: the arguments are not those of the signature.
        Unsupported: the kernel is a cubin without a counterpart, and the device is the emulated one.
    """
    check_kernel(kernel)
    blocks = [size_of(kernel, "grid", size) for size in sizes_of(grid)]
    shared_bytes = size_of(kernel, "shared memory", shared_bytes)
    threads = checked_block(kernel, [_number(ctx, kernel, size) for size in sizes_of(block)])
    if kernel.source and (kernel.foreign is None or not ctx.device.runs_cubins):
        check_halves(kernel.name, kernel.source, [getattr(arg, "dtype", None) for arg in args])
    kernel, args = kernel.for_arguments(args)
    placed = arguments(kernel, args)
    for number, arg in enumerate(placed):
        if isinstance(arg, Tensor) and not arg.is_contiguous:
            raise TypeError(f"kernel {kernel.name}: argument {number} is not contiguous. Pass ctx.contiguous(tensor)")
    if not ctx.device.runs_cubins and not kernel.source:
        if function := kernel.numpy_twin:
            _call_numpy(ctx, kernel, function, blocks, placed, reads, writes)
            return
        if kernel.needs_gpu:
            of_node = "" if ctx.node is None else f" of {_name(ctx.node)}"
            raise Unsupported(
                "op",
                f"kernel {kernel.name}{of_node} is a cubin, and has no counterpart in Numba or NumPy that the "
                "emulated device can run. Give the kernel a counterpart, or run on a GPU",
            )
    x, y, z = blocks
    bx, by, bz = threads
    spec = kernel.spec(tuple(map(type_of, placed)), bx * by * bz, "" if ctx.node is None else _name(ctx.node))
    ctx.launch(spec, (x, y, z), (bx, by, bz), placed, shared_bytes=shared_bytes, reads=reads, writes=writes)


@dataclass(frozen=True)
class NumpyCounterpart:
    """Runs a function on NumPy copies of the tensors, and copies back the tensors that the function may write.

    ``kinds`` has the kind of each argument: "t" a tensor, "n" a number of the Run, "f" the float in ``floats`` at that
    position. ``written`` are the indices of the tensors that are copied back. ``unread`` are the indices of those that
    the function does not read, so it gets zeros for them. The first three numbers of a Run are the grid.
    """

    function: Function
    kinds: str
    floats: tuple[float | None, ...]
    written: tuple[int, ...]
    unread: tuple[int, ...]

    def __call__(self, tensors: Sequence[DeviceArray], numbers: Sequence[int], stream: CallStream) -> None:
        if 0 in numbers[:3]:
            return
        arrays: list[Array] = [
            np.zeros(x.shape, x.dtype.numpy) if number in self.unread else stream.read(x)
            for number, x in enumerate(tensors)
        ]
        from_tensors, from_numbers = iter(arrays), iter(numbers[3:])
        args = [
            next(from_tensors) if kind == "t" else next(from_numbers) if kind == "n" else value
            for kind, value in zip(self.kinds, self.floats, strict=True)
        ]
        self.function(*args)
        for number in self.written:
            stream.write(tensors[number], arrays[number])


def _call_numpy(
    ctx: Lowering,
    kernel: Kernel,
    function: Function,
    grid: Sequence[Dim],
    args: Sequence[Arg],
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
) -> None:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    numbers = [*grid, *(arg.value for arg in args if isinstance(arg, Int32 | Int64))]
    kinds = "".join("t" if isinstance(x, Tensor) else "n" if isinstance(x, Int32 | Int64) else "f" for x in args)
    floats = tuple(x.value if isinstance(x, Float32 | Float64) else None for x in args)
    buffers = {x.buffer for x in writes}
    written = tuple(number for number, x in enumerate(tensors) if x.buffer in buffers)
    kept = {x.buffer for x in reads}
    unread = tuple(number for number in written if tensors[number].buffer not in kept)
    run = NumpyCounterpart(function, kinds, floats, written, unread)
    types = tuple((x.dtype, x.rank) for x in tensors)
    name = f"the NumPy counterpart of kernel {kernel.name}"
    callback = Callback((kernel.name, run), name, types, len(numbers), function=lambda: run)
    ctx.call_back(callback, tensors, numbers, writes=writes)


def _foreign(
    code: ForeignCode, signature: Sequence[str], numba_twin: Function | None, numpy_twin: Function | None
) -> Kernel:
    source, parameters = kernel_source(numba_twin) if numba_twin is not None else ("", ())
    if numba_twin is not None and len(parameters) != len(signature):
        raise KernelSourceError(
            f"kernel {code.entry}: its counterpart in Numba has {len(parameters)} parameters, expected "
            f"{len(signature)} as the signature declares"
        )
    name = re.sub(r"\W+", "_", code.entry).strip("_") or "kernel"
    kernel = Kernel(name, tuple(signature), code, source, numpy_twin)
    kernel.spec(tuple(signature), 0)  # raises ValueError for an unknown type in the signature
    return kernel


def _images(images: bytes | Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    return (("", images),) if isinstance(images, bytes) else tuple(sorted(images.items()))


def _identifier(function: Function) -> str:
    return re.sub(r"\W", "_", str(getattr(function, "__name__", "kernel")))


def sizes_of(sizes: Sizes) -> tuple[Any, Any, Any]:
    """Return the three sizes of a grid or a block. Raises TypeError for none or more than three."""
    given = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    if not 1 <= len(given) <= 3:
        raise TypeError(f"a grid or a block: got {len(given)} sizes, expected one to three")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def check_kernel(kernel: object) -> None:
    """Check that a kernel can be launched. Raises TypeError."""
    if not isinstance(kernel, Kernel):
        makers = "numba_kernel, array_kernel, cuda_kernel, ptx_kernel, cubin_kernel or ltoir_kernel"
        raise TypeError(f"got {kernel!r}, expected a kernel, which one of these functions makes: {makers}")


def checked_block(kernel: Kernel, sizes: Sequence[Any]) -> tuple[int, int, int]:
    """Return the three sizes of a block as integers. Raises TypeError for a block that no GPU runs."""
    x, y, z = (operator.index(size_of(kernel, "block", size)) for size in sizes)
    if min(x, y, z) < 1 or z > 64 or x * y * z > 1024:
        raise TypeError(
            f"kernel {kernel.name}: got a block of {(x, y, z)} threads, expected sizes of at least 1, a product of at "
            "most 1024, and a z size of at most 64"
        )
    return x, y, z


def size_of(kernel: Kernel, what: str, size: Any) -> Dim:
    """Return ``size`` as a `Dim`; ``what`` names the launch's parameter: "grid", "block" or "shared memory".

    Raises TypeError if ``size`` is neither an expression nor an integer from 0 to 2**31 - 1.
    """
    if isinstance(size, Expr):
        return size
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(
            f"kernel {kernel.name}: {size!r} is not a size for its {what}: use whole numbers, and ceildiv() or "
            "floordiv() in place of /"
        ) from None
    if not 0 <= number < 1 << 31:
        raise TypeError(f"kernel {kernel.name}: its {what} is {number}, expected 0 to {2**31 - 1}")
    return number


def _number(ctx: Lowering, kernel: Kernel, size: Any) -> Any:
    if isinstance(size, Expr):
        if is_read_back(size):
            raise TypeError(
                f"kernel {kernel.name}: a size of its block depends on values that a Run computes. Use a number, or a "
                "size of an input"
            )
        ctx.guard(eq(size, size.hint))
        return size.hint
    return size


def arguments(kernel: Kernel, args: Sequence[Any]) -> list[Any]:
    """Convert arguments to the types of the kernel's parameters; objects with a ``dtype`` are passed as pointers."""
    types = kernel.signature or (None,) * len(args)
    if len(types) != len(args):
        raise TypeError(f"kernel {kernel.name} takes {len(types)} arguments, got {len(args)}")
    return [
        _argument(kernel, number, arg, wanted) for number, (arg, wanted) in enumerate(zip(args, types, strict=True))
    ]


def _argument(kernel: Kernel, number: int, arg: Any, wanted: str | None) -> Any:
    placed: Any
    if isinstance(arg, np.number | np.bool_):
        arg = arg.item()
    if isinstance(getattr(arg, "dtype", None), DType) or isinstance(arg, Int32 | Int64 | Float32 | Float64):
        placed = arg
    elif isinstance(arg, Expr | int):
        if wanted in ("f32", "f64") and not isinstance(arg, int):
            raise TypeError(
                f"kernel {kernel.name}: argument {number}: got a symbolic size, expected {wanted} as the signature "
                "declares. Declare i32 or i64 for a size"
            )
        is_float = wanted in ("f32", "f64")
        placed = _number_of(wanted, float(arg) if isinstance(arg, int) and is_float else arg)
    elif isinstance(arg, float):
        placed = _number_of(wanted, arg)
    else:
        raise TypeError(
            f"kernel {kernel.name}: argument {number}: got {type(arg).__name__}, expected a tensor or a number"
        )
    if wanted is not None and type_of(placed) != wanted:
        raise TypeError(
            f"kernel {kernel.name}: argument {number}: got the type {type_of(placed)}, expected {wanted} as the "
            "signature declares"
        )
    return placed


def _number_of(wanted: str | None, value: Dim | float) -> Arg:
    if isinstance(value, float):
        return Float64(value) if wanted == "f64" else Float32(value)
    return Int32(value) if wanted == "i32" else Int64(value)


def type_of(arg: Any) -> str:
    """Return the type of a parameter, as a signature writes it."""
    return f"*{arg.dtype.short}" if hasattr(arg, "dtype") else scalar_types[type(arg)]


def _name(node: Node) -> str:
    return f"{node.domain or 'ai.onnx'}::{node.op_type}"
