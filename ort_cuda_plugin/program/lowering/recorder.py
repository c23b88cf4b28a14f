"""The recorder: creates tensors, and appends the steps that compute them to the trace of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ...compiler.kernel import KernelSpec
from ...model.ir import Array, Constant, DType, InvalidModel, Node, Parameter, Recipe
from ...model.recipes import derived_constant
from ..device import DeviceProperties, LoweringOptions
from ..expressions.scalar import Scalar, cast
from ..expressions.symbolic import Dim, divides, hint, is_read_back, product
from ..steps.libraries import LibraryProblem
from ..steps.steps import Map, Output, dense
from ..steps.tensor import Buffer, BufferKind, Tensor, dims_of
from ..steps.trace import (
    Arg,
    Copy,
    Grid,
    InPlace,
    Int64,
    Launch,
    LibraryCall,
    Memset,
    Remake,
    Step,
    Use,
    scalar_types,
)
from .conditions import Conditions

_INT64_MAX = 2**63 - 1


class Recorder(Conditions):
    """The part of the lowering context that kernels/ and passes/ use: tensors, steps, and conditions of the plan.

    A claim needs shapes only, so the recorder then checks launches and drops them. With ``checks_author``, Runs check
    what a custom operator declares about sizes and values. ``host_work`` is the number of terms that shape arithmetic
    has computed.
    """

    def __init__(
        self,
        device: DeviceProperties,
        options: LoweringOptions | None,
        *,
        is_claim: bool,
        speculative: bool,
        settles: bool,
    ) -> None:
        super().__init__(device, options, speculative=speculative, settles=settles and not is_claim)
        self.checks_author = False
        self.host_work = 0
        self.stand_ins: set[Buffer] = set()
        """Buffers that no step writes: those of `stand_in`, and outputs that hold them. A plan with them never runs."""
        self.is_recording = not is_claim
        """Whether launches are recorded; a claim only checks them."""
        self._widened: dict[Buffer, tuple[Tensor, Tensor]] = {}
        self._materialized: dict[tuple[DType, tuple[Dim, ...]], Buffer] = {}

    @property
    def is_guess(self) -> bool:
        """Return whether sizes may be guesses, so that an error about a size need not occur in a Run."""
        return self._speculative or not self.is_recording

    # ---- tensors ----

    def empty(self, shape: Sequence[Dim], dtype: DType) -> Tensor:
        """Return a new contiguous intermediate. Raises InvalidModel, like `view`, if its byte count exceeds 64 bits."""
        shape = dims_of(shape, dtype)
        return Tensor(dtype, shape, Buffer(BufferKind.SCRATCH, self._countable_bytes(shape, dtype)))

    def stand_in(self, shape: Sequence[Dim], dtype: DType) -> Tensor:
        """Return an `empty` tensor that no step writes, in place of a result that is known only in a Run."""
        x = self.empty(shape, dtype)
        self.stand_ins.add(x.buffer)
        return x

    def _countable_bytes(self, shape: Sequence[Dim], dtype: DType) -> Dim:
        """Return the size of a tensor in bytes. Raises InvalidModel if it exceeds 64 bits."""
        nbytes = product(shape) * dtype.itemsize
        self.trace.originate(self.node, (*shape, nbytes))
        known = isinstance(nbytes, int) or not (self._speculative or is_read_back(nbytes))
        if self.node is not None and known and hint(nbytes) > _INT64_MAX:
            sizes = " x ".join(str(hint(dim)) for dim in shape)
            raise InvalidModel(f"a tensor of shape {sizes} has more bytes than a 64-bit integer holds")
        return nbytes

    def view(self, x: Tensor, shape: Sequence[Dim], strides: Sequence[Dim] | None = None, offset: Dim = 0) -> Tensor:
        """Return a view of x's buffer, without a copy.

        ``strides`` defaults to contiguous ones; ``offset`` counts elements from the start of the buffer. A view of a
        constant is a constant, and a view of a host tensor is a host tensor.
        """
        shape = dims_of(shape, x.dtype)
        self._countable_bytes(shape, x.dtype)
        return Tensor(x.dtype, shape, x.buffer, strides=strides, offset=offset)

    def contiguous(self, x: Tensor, alignment: int = 1) -> Tensor:
        """Return x if it is contiguous with an offset that is a multiple of ``alignment`` elements, else a copy."""
        if x.is_contiguous and divides(alignment, x.offset):
            return x
        if x.is_constant:
            # The host copies a constant once, when a plan needs it. A recorded copy would be part of every Run.
            return self.derived("view", (x,), (), x.static_shape)
        return copy_of(self, x)

    def constant(self, array: Array, dtype: DType | None = None) -> Tensor:
        """Return a constant tensor, a weight of the plan if a launch reads it; ``dtype`` as in `Constant.of`."""
        return self.initializer(Constant.of(np.ascontiguousarray(array).reshape(array.shape), dtype))

    def initializer(self, contents: Constant) -> Tensor:
        """Return a constant tensor; its contents are read when a plan needs them."""
        return Tensor(contents.dtype, contents.shape, Buffer(BufferKind.WEIGHT, contents.nbytes, data=contents))

    def derived(
        self,
        function: str,
        operands: Sequence[Tensor],
        parameters: tuple[Parameter, ...],
        shape: tuple[int, ...],
        dtype: DType | None = None,
    ) -> Tensor:
        """Return a constant that a function of `recipes.FUNCTIONS` computes from constants, such as a transposition.

        ``dtype`` defaults to the first operand's. The function runs once for all plans, when a plan needs the contents.
        """
        recipe = Recipe(function, tuple(x.constant_view() for x in operands), parameters)
        return self.initializer(derived_constant(recipe, dtype or operands[0].dtype, shape))

    def host_tensor(self, dims: Sequence[Dim], shape: Sequence[int], dtype: DType) -> Tensor:
        """Return an integer or bool tensor whose elements, in row-major order, are ``dims``."""
        values = tuple(dims)
        if len(values) != product(shape):
            raise ValueError(
                f"host_tensor: got {len(values)} values, expected {product(shape)}, the size of shape {tuple(shape)}"
            )
        self.trace.originate(self.node, values)
        if all(isinstance(value, int) for value in values):
            bits = np.array([value % 2**64 for value in values], dtype=np.uint64)
            return self.constant(bits.astype(dtype.numpy).reshape(tuple(shape)), dtype)
        return Tensor(dtype, shape, Buffer(BufferKind.HOST, len(values) * dtype.itemsize, host=values))

    # ---- float32 copies of 16-bit tensors ----

    def note_widening(self, source: Tensor, wide: Tensor) -> None:
        """Record that ``wide``, a dense float32 tensor, has the elements of the 16-bit tensor ``source``."""
        self._widened[wide.buffer] = source, wide

    def rounded_beside(self, x: Tensor, dtype: DType) -> Tensor | None:
        """Return a copy of the float32 tensor x in the 16-bit type ``dtype``, stored by the step that stores x.

        The step that was recorded last gets the rounded elements as one more result, so that one kernel stores both.
        Dead code elimination drops a result that no step reads. Returns None if the last step does not store the whole
        buffer of x.
        """
        step = self.trace.steps[-1] if self.trace.steps else None
        if not isinstance(step, Map):
            return None
        known = next((output for output in step.all_outputs if output[1].buffer is x.buffer), None)
        if known is None or not dense(known[1]):
            return None
        value, y = known
        whole = self.empty(y.shape, dtype)

        def with_rounded(outputs: Sequence[Output]) -> Sequence[Output]:
            is_field = any(output is known for output in outputs)
            return [*outputs, (cast(value, dtype), whole)] if is_field else outputs

        self.trace.steps[-1] = step.map_outputs(with_rounded)
        return Tensor(dtype, x.shape, whole.buffer, strides=x.strides, offset=x.offset)

    def before_widening(self, x: Tensor) -> Tensor | None:
        """Return the 16-bit elements from which the float32 tensor x was widened, as a view of the 16-bit tensor.

        Returns None if x is not a view of a tensor of `note_widening`, or no strides over the 16-bit tensor express it.
        """
        if x.buffer not in self._widened:
            return None
        source, wide = self._widened[x.buffer]
        if source.strides == wide.strides:
            return Tensor(source.dtype, x.shape, source.buffer, strides=x.strides, offset=source.offset + x.offset)
        axes = zip(wide.shape, wide.strides, source.strides, strict=True)
        known = {(dim, stride): own for dim, stride, own in axes if dim != 1}
        pairs = zip(x.shape, x.strides, strict=True)
        strides = [0 if stride == 0 or dim == 1 else known.get((dim, stride)) for dim, stride in pairs]
        placed = [stride for stride in strides if stride is not None]
        if x.offset != wide.offset or len(placed) < len(strides):
            return None
        return Tensor(source.dtype, x.shape, source.buffer, strides=placed, offset=source.offset)

    # ---- steps ----

    @contextmanager
    def recording(self, nodes: tuple[Node, ...] | None = None) -> Iterator[list[Step]]:
        """Collect the steps that the ``with`` block records for ``nodes`` in a list, which the caller appends or drops.

        Host tensors that these steps read are copied to the device by steps in the list, so other steps do not depend
        on them.
        """
        outer = self.trace.steps, self._materialized, self.nodes
        steps: list[Step] = []
        self.trace.steps, self._materialized = steps, {}
        self.nodes = self.nodes if nodes is None else nodes
        try:
            yield steps
        finally:
            self.trace.steps, self._materialized, self.nodes = outer

    def record(self, step: Map) -> None:
        """Append a step to the trace."""
        self.trace.steps.append(step)

    def launch(
        self,
        kernel: KernelSpec,
        grid: Grid,
        block: tuple[int, int, int],
        args: Sequence[Arg],
        *,
        shared_bytes: Dim = 0,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        uses: Mapping[Tensor, Use] | None = None,
        remake: Remake | None = None,
        turns: Dim = 1,
        in_place: Sequence[InPlace] = (),
    ) -> None:
        """Record a launch of ``kernel``.

        Tensor arguments are reads unless they are in ``writes``; a tensor in both ``reads`` and ``writes`` is both.
        `Launch` describes the other parameters. If a dimension of the grid is 0, the Run skips the launch. Raises
        TypeError if the arguments do not match the kernel's signature.
        """
        signature = kernel.signature
        if len(args) != len(signature):
            raise TypeError(f"kernel {kernel.name}: got {len(args)} arguments, expected {len(signature)}")
        for number, (arg, expected) in enumerate(zip(args, signature, strict=True)):
            given = f"*{arg.dtype.short}" if isinstance(arg, Tensor) else scalar_types[type(arg)]
            if given != expected:
                raise TypeError(f"kernel {kernel.name}: argument {number}: got {given}, expected {expected}")
        if not self.is_recording:
            return
        placed = tuple(self.materialize(arg) if isinstance(arg, Tensor) else arg for arg in args)
        step = Launch(
            self.nodes,
            *reads_and_writes(placed, reads, writes),
            kernel,
            grid,
            block,
            placed,
            shared_bytes,
            uses or {},
            remake,
            turns=turns,
            in_place=tuple(in_place),
        )
        self.trace.steps.append(step)

    def library(
        self,
        problem: LibraryProblem,
        args: Sequence[Arg],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        note: str = "",
    ) -> None:
        """Record a call of a vendor library; reads and writes as in `launch`. ``note`` describes the call for users."""
        if not self.is_recording:
            return
        placed = tuple(self.materialize(arg) if isinstance(arg, Tensor) else arg for arg in args)
        used = reads_and_writes(placed, reads, writes)
        self.trace.steps.append(LibraryCall(self.nodes, *used, problem, placed, note))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Record a copy of all elements of ``src``. Both tensors must be contiguous and have the same type and size."""
        if dst.dtype is not src.dtype or dst.size != src.size or not (dst.is_contiguous and src.is_contiguous):
            raise TypeError(
                f"copy: got {src!r} with strides {list(src.strides)} and {dst!r} with strides {list(dst.strides)}, "
                "expected contiguous tensors of one type and size. Use copy_into for strided tensors, elementwise_into "
                "to cast"
            )
        if not self.is_recording:
            return
        src = self.materialize(src)
        self.trace.steps.append(Copy(self.nodes, *reads_and_writes((dst, src), (), (dst,)), dst, src))

    def memset(self, dst: Tensor, byte: int) -> None:
        """Record a fill of all bytes of a contiguous tensor with the value ``byte``."""
        if not dst.is_contiguous:
            raise TypeError(f"memset: got {dst!r}, expected a contiguous tensor. Use elementwise_into")
        if self.is_recording:
            self.trace.steps.append(Memset(self.nodes, *reads_and_writes((dst,), (), (dst,)), dst, byte))

    def materialize(self, x: Tensor) -> Tensor:
        """Return x on the device. A small launch writes the elements of a host tensor, once per `recording` list."""
        buffer = x.buffer
        if buffer.host is None:
            return x
        key = x.dtype, buffer.host
        on_device = self._materialized.get(key)
        if on_device is None:
            target = self.empty((len(buffer.host),), x.dtype)
            on_device = self._materialized[key] = target.buffer
            _store_values(self, target, buffer.host)
        return Tensor(x.dtype, x.shape, on_device, strides=x.strides, offset=x.offset)


def copy_of(ctx: Recorder, x: Tensor) -> Tensor:
    """Return a contiguous copy of x."""
    result, element = ctx.empty(x.shape, x.dtype), Scalar(x.dtype, "leaf")
    source = x if x.size == 1 else ctx.materialize(x)
    ctx.record(Map(ctx.nodes, x.shape, ((element, source),), ((element, result),)))
    return result


def reads_and_writes(
    args: Sequence[Arg], reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    for tensor in writes:
        if tensor.buffer.kind not in (BufferKind.SCRATCH, BufferKind.OUTPUT, BufferKind.STATE):
            raise TypeError(f"{tensor!r} is read-only. Write to an intermediate, an output or a state")
    written = dict.fromkeys(tensor.buffer for tensor in writes)
    read = dict.fromkeys(tensor.buffer for tensor in reads)
    for arg in args:
        if isinstance(arg, Tensor) and arg.buffer not in written:
            read[arg.buffer] = None
    return tuple(read), tuple(written)


_STORE_WIDTH = 32  # maximum values that one launch stores; each is a kernel parameter
_store_source = """
def kernel(out, {names}):
{body}
"""


def _store_values(ctx: Recorder, target: Tensor, values: Sequence[Dim]) -> None:
    """Write ``values`` to ``target`` by launches of one thread each; the values are kernel parameters."""
    for start in range(0, len(values), _STORE_WIDTH):
        chunk = values[start : start + _STORE_WIDTH]
        names = [f"v{i}" for i in range(len(chunk))]
        body = "\n".join(f"    out[{i}] = {name}" for i, name in enumerate(names))
        spec = KernelSpec(
            name=f"store_{target.dtype.short}",
            signature=(f"*{target.dtype.short}", *["i64"] * len(chunk)),
            source=_store_source.format(names=", ".join(names), body=body),
            launch_bounds=1,
        )
        piece = Tensor(target.dtype, (len(chunk),), target.buffer, offset=start)
        ctx.launch(spec, (1, 1, 1), (1, 1, 1), (piece, *map(Int64, chunk)), writes=(piece,))
