"""The lowering context: operators' functions receive it, and record steps and launches on tensors in it.

One pass over an operator's function serves three purposes: it infers shapes, decides whether the plugin runs the node
(by raising `Unsupported`), and records what a plan does. Nothing here compiles, allocates or touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ...compiler.kernel import KernelSpec
from ...model.ir import Array, Constant, DType, Graph, InvalidModel, Node, UnknownRank, Unsupported
from ...model.recipes import Parameter, Recipe
from ..device import DeviceProperties, LoweringOptions
from ..expressions.operations import ExprOp
from ..expressions.scalar import cast
from ..expressions.symbolic import (
    READ_BACK,
    Dim,
    Expr,
    bounds,
    divides,
    eq,
    floordiv,
    hint,
    is_read_back,
    le,
    logical_not,
    product,
    single_atom,
    symbol,
    truth,
)
from ..steps.callbacks import Callback
from ..steps.libraries import LibraryProblem
from ..steps.steps import Map
from ..steps.tensor import MAX_HOST_ELEMENTS, Buffer, BufferKind, DeferredContents, Tensor, contiguous_strides, dims_of
from ..steps.trace import (
    Arg,
    Copy,
    Float32,
    Float64,
    Grid,
    HostCall,
    InPlace,
    Int32,
    Int64,
    Launch,
    LibraryCall,
    Memset,
    ReadBack,
    Remake,
    Requirement,
    Step,
    Trace,
    Use,
    scalar_types,
)
from .elementwise import copy_of, elementwise
from .host import MAX_HOST_WORK
from .tuning import Tuner

__all__ = [
    "MAX_HOST_ELEMENTS",
    "Arg",
    "Buffer",
    "BufferKind",
    "DType",
    "DeviceProperties",
    "Float32",
    "Float64",
    "Graph",
    "Int32",
    "Int64",
    "InvalidModel",
    "Lowering",
    "LoweringOptions",
    "Node",
    "Tensor",
    "Unsupported",
    "contiguous_strides",
]

NUM_TRIALS = 9
"""Number of trials, each with another assumption about an unknown number: see `Lowering.chosen`."""
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_READ_BACK_HINT = 1


class Lowering:
    """The context that an operator's function gets as its first argument.

    ``node`` is the node being lowered, ``opset`` the version of its domain that the model imports, ``device`` and
    ``options`` what the plan is for. Claims need shapes only: they pass ``try_step``, which makes a step's kernel,
    because that can fail; launches are then checked but not kept. With ``speculative`` the hints of host values are
    arbitrary; ``guessed`` tells whether `host_constants` has returned one since it was last set to False. ``trial``
    numbers the assumption about an unknown number that a rank depends on, see `chosen`. ``states`` has the states of
    the cluster's nodes, which all its plans share. Without ``settles``, `settled` answers as for a claim. ``notes`` has
    remarks for users about nodes. ``checks_author``: the operator's statements about sizes and computed values are
    checked.
    """

    def __init__(
        self,
        device: DeviceProperties,
        options: LoweringOptions | None = None,
        *,
        try_step: Callable[[Lowering, Map], None] | None = None,
        speculative: bool = False,
        read_host_input: Callable[[Buffer, int], tuple[Dim, ...]] | None = None,
        states: dict[Node, Constant] | None = None,
        settles: bool = True,
        trial: int | None = None,
    ) -> None:
        self.device = device
        self.options = options or LoweringOptions()
        self.nodes: tuple[Node, ...] = ()
        self.opset = 0
        self.trace = Trace()
        self.tuner: Tuner | None = None
        """Chooses among tactics of applications' operators, where anything is measured."""
        self.guessed = False
        self.trial = trial
        self.notes: dict[Node, str] = {}
        self.checks_author = False
        self._try_step = try_step
        self._speculative = speculative
        self._settles = settles and try_step is None
        self._read_host_input = read_host_input
        self._states = {} if states is None else states
        self.stand_ins: set[Buffer] = set()
        """What `stand_in` gave, and outputs with such parts; nothing writes these, and no plan with one is run."""
        self._materialized: dict[tuple[DType, tuple[Dim, ...]], Buffer] = {}
        self._read_backs: dict[Buffer, tuple[Expr, ...]] = {}
        self._num_read_back = 0
        self._host_work = 0

    @property
    def node(self) -> Node | None:
        """Return the node that is being lowered, or whose kernel is being made."""
        return self.nodes[-1] if self.nodes else None

    @node.setter
    def node(self, node: Node | None) -> None:
        self.nodes = () if node is None else (node,)

    @property
    def is_guess(self) -> bool:
        """Whether the present sizes are guesses: an error about them may not occur in a Run."""
        return self._speculative or not self._is_recording

    @property
    def _is_recording(self) -> bool:
        return self._try_step is None

    # ---- tensors ----

    def empty(self, shape: Sequence[Dim], dtype: DType) -> Tensor:
        """Return a new contiguous intermediate with undefined contents.

        Raises InvalidModel, like `view`, if its size in bytes exceeds 64 bits.
        """
        shape = dims_of(shape, dtype)
        return Tensor(dtype, shape, Buffer(BufferKind.SCRATCH, self._countable_bytes(shape, dtype)))

    def stand_in(self, shape: Sequence[Dim], dtype: DType) -> Tensor:
        """Like `empty`, for a result that is not computed because the Run decides which of several it is."""
        x = self.empty(shape, dtype)
        self.stand_ins.add(x.buffer)
        return x

    def _countable_bytes(self, shape: Sequence[Dim], dtype: DType) -> Dim:
        """Return the bytes of a tensor. Raises InvalidModel if they exceed 64 bits."""
        nbytes = product(shape) * dtype.itemsize
        self.trace.originate(self.node, (*shape, nbytes))
        known = isinstance(nbytes, int) or not (self._speculative or is_read_back(nbytes))
        if self.node is not None and known and hint(nbytes) > _INT64_MAX:
            sizes = " x ".join(str(hint(dim)) for dim in shape)
            raise InvalidModel(f"a tensor of {sizes} elements has more bytes than a 64-bit integer holds")
        return nbytes

    def view(self, x: Tensor, shape: Sequence[Dim], strides: Sequence[Dim] | None = None, offset: Dim = 0) -> Tensor:
        """Return a view of x's buffer, without a copy.

        ``strides`` None means contiguous; ``offset`` counts from the buffer's start. Views of constants are constants,
        views of host values are host values.
        """
        shape = dims_of(shape, x.dtype)
        self._countable_bytes(shape, x.dtype)
        return Tensor(x.dtype, shape, x.buffer, strides=strides, offset=offset)

    def contiguous(self, x: Tensor, alignment: int = 1) -> Tensor:
        """Return x itself if it is contiguous at an offset that is a multiple of ``alignment`` elements, else a
        copy.
        """
        if x.is_contiguous and divides(alignment, x.offset):
            return x
        if x.is_constant:
            # Rearranged once on the host instead of in every Run; read when a plan needs it.
            return self.derived("view", (x,), (), x.static_shape)
        return copy_of(self, x)

    def constant(self, array: Array, dtype: DType | None = None) -> Tensor:
        """Return a tensor of known contents; it becomes a weight when a launch reads it. ``dtype``: see
        `Constant.of`.
        """
        return self.initializer(Constant.of(np.ascontiguousarray(array).reshape(array.shape), dtype))

    def initializer(self, contents: Constant) -> Tensor:
        """Return a tensor of known contents that are not read yet."""
        return Tensor(contents.dtype, contents.shape, Buffer(BufferKind.WEIGHT, contents.nbytes, data=contents))

    def derived(
        self,
        function: str,
        operands: Sequence[Tensor],
        parameters: tuple[Parameter, ...],
        shape: tuple[int, ...],
        dtype: DType | None = None,
    ) -> Tensor:
        """Return a constant that a function of `recipes.FUNCTIONS` computes from constants, such as weights in another
        layout.

        Its type is by default the first operand's. The function runs only when a plan needs the contents, once for all
        plans.
        """
        recipe = Recipe(function, tuple(x.constant_view() for x in operands), parameters)
        return self.initializer(recipe.constant(dtype or operands[0].dtype, shape))

    def host_tensor(self, dims: Sequence[Dim], shape: Sequence[int], dtype: DType) -> Tensor:
        """Return an integer or bool tensor whose elements, in row-major order, are ``dims``."""
        values = tuple(dims)
        if len(values) != product(shape):
            raise ValueError(f"{len(values)} values for shape {tuple(shape)}")
        self.trace.originate(self.node, values)
        if all(isinstance(value, int) for value in values):
            bits = np.array([value % 2**64 for value in values], dtype=np.uint64)
            return self.constant(bits.astype(dtype.numpy).reshape(tuple(shape)), dtype)
        return Tensor(dtype, shape, Buffer(BufferKind.HOST, len(values) * dtype.itemsize, host=values))

    def state(self, initial: Callable[[], Array]) -> Tensor:
        """Memory of the node being lowered that keeps its contents from Run to Run; a launch may write it.

        All plans of the node and all concurrent Runs of a session share it. Nothing orders their launches, so they must
        update it atomically. ``initial`` gives the contents before the first Run.
        """
        if self.node is None:
            raise TypeError("only a node has a state")
        contents = self._states.get(self.node)
        if contents is None:
            array = initial()
            contents = Constant(
                DType.from_numpy(array.dtype), array.shape, lambda: array, is_initializer=False, is_state=True
            )
            self._states[self.node] = contents
        return Tensor(contents.dtype, contents.shape, Buffer(BufferKind.STATE, contents.nbytes, state=contents))

    def may_compute_on_host(self) -> bool:
        """Whether shape arithmetic stays on the host: below `MAX_HOST_WORK`."""
        return self._host_work < MAX_HOST_WORK

    def spend_host_work(self, work: int) -> None:
        """Count the terms of the results of shape arithmetic."""
        self._host_work += work

    def defer_host(self, x: Tensor, sources: Sequence[Tensor], compute: Callable[..., tuple[Dim, ...]]) -> Tensor:
        """Return x, whose contents `host_values` can now get by ``compute`` from the contents of ``sources``.

        For shape arithmetic on inputs of the cluster, which is done on the device unless the contents are requested.
        Contents are elements in row-major order. x must be a new tensor of `empty`: others have known contents, and a
        view of a source would be computed from itself.
        """
        if any(source.buffer is x.buffer for source in sources):
            return x
        if x.buffer.kind is BufferKind.SCRATCH and x.buffer.deferred_host is None:
            x.buffer.deferred_host = DeferredContents(self.node, tuple(sources), compute)
        return x

    def _deferred_contents(self, buffer: Buffer) -> tuple[Dim, ...]:
        """Return deferred contents. Sources come first, with an explicit stack, since the model decides how long a
        chain of them is. Each buffer waits for its sources once, so this terminates.
        """
        pending = [buffer]
        waited: set[Buffer] = set()
        while True:
            deferred = pending[-1].deferred_host
            assert deferred is not None
            if deferred.contents is None:
                sources = [x.buffer for x in deferred.sources if x.host is None]
                missing = [x for x in sources if x.deferred_host is not None and x.deferred_host.contents is None]
                if missing:
                    if pending[-1] in waited:
                        label = deferred.node.label if deferred.node else "(inputs)"
                        raise RuntimeError(f"shape arithmetic of node {label}: it is computed from itself")
                    waited.add(pending[-1])
                    pending += missing
                    continue
                read = [self.host_values(x, "an input of shape arithmetic") for x in deferred.sources]
                deferred.contents = deferred.compute(*read)
                self.trace.originate(deferred.node, deferred.contents)
            pending.pop()
            if not pending:
                return deferred.contents

    def host_values(self, x: Tensor, what: str) -> tuple[Dim, ...]:
        """Return the integer contents of x in row-major order; ``what`` names them in messages ("shape of Reshape").

        An input of the cluster becomes a host input, read back once per Run. Contents that the device computes are read
        back in the middle of the Run (`read_back`).
        """
        known = x.host
        if known is not None:
            return known
        if not (x.dtype.is_integer or x.dtype is DType.BOOL):
            raise Unsupported("dtype", f"{what} has element type {x.dtype.name}, which is not an integer type")
        buffer = x.buffer
        if buffer.kind is not BufferKind.INPUT and buffer.deferred_host is None:
            return self.read_back(x, what)
        x = self._of_known_shape(x, what)
        self._readable(x.size, what)
        positions = x.positions()
        assert positions is not None
        elements = floordiv(buffer.nbytes, x.dtype.itemsize)
        if self._speculative and not isinstance(elements, int):
            elements = max(positions, default=-1) + 1  # an input of unknown size must have these elements
        elements = self._readable(elements, what)
        if buffer.deferred_host is not None:
            contents = self._deferred_contents(buffer)
        else:
            if self._read_host_input is None:
                raise Unsupported("shape", f"{what} is an input that is not read back")
            contents = self._read_host_input(buffer, elements)
        return tuple(contents[position] for position in positions)

    def _readable(self, count: Dim, what: str) -> int:
        """Return the number of elements that the host reads, and guard the plan to it."""
        count = self._fixed(count, what)
        if count > MAX_HOST_ELEMENTS:
            raise Unsupported("shape", f"{what} has {count} elements; at most {MAX_HOST_ELEMENTS} are read back")
        return count

    def _of_known_shape(self, x: Tensor, what: str) -> Tensor:
        """Return x with numbers for its dimensions, and guard the plan to them."""
        shape, strides = ([self._fixed(dim, what) for dim in dims] for dims in (x.shape, x.strides))
        return Tensor(x.dtype, shape, x.buffer, strides=strides, offset=self._fixed(x.offset, what))

    def _fixed(self, dim: Dim, what: str) -> int:
        if isinstance(dim, int):
            return dim
        if self._speculative or is_read_back(dim):
            reason = f"{what} has a number of elements that is not known before the Run"
            # A claimed node gets its plan when the shapes of a Run are known.
            waits = self._is_recording and self._speculative and self.trial is None and not is_read_back(dim)
            raise UnknownRank(reason) if waits else Unsupported("shape", reason)
        self.guard(eq(dim, hint(dim)))
        return hint(dim)

    def host_number(self, x: Tensor, what: str) -> Dim:
        """Like `host_values` for a tensor of one element. Raises InvalidModel for another number of elements."""
        values = self.host_values(x, what)
        if len(values) != 1:
            raise InvalidModel(f"{what} has {len(values)} elements, not one")
        return values[0]

    def host_constants(self, x: Tensor, what: str, guess: Sequence[int]) -> tuple[int, ...]:
        """As `host_values`, for what must be a number when the plan is made, such as axes.

        The plan then holds only for these contents. ``guess`` is any valid contents, for when nothing is known yet.
        """
        values = self.host_values(x, what)
        if any(is_read_back(value) for value in values):
            raise Unsupported("shape", f"{what} is computed on the device")
        if self._speculative and not all(isinstance(value, int) for value in values):
            if len(guess) != len(values):
                raise InvalidModel(f"{what} has {len(values)} elements")
            self.guessed = True
            return tuple(guess)
        for value in values:
            self.guard(eq(value, hint(value)))
        return tuple(hint(value) for value in values)

    def chosen(self, dim: Dim, what: str, choices: Sequence[int]) -> int:
        """Return ``dim`` as a number, because a rank depends on it when the plan is made; ``what`` names it.

        The plan is guarded to this number. If the number is not known yet, each trial assumes one of ``choices``.
        Raises UnknownRank without a trial, Unsupported if there are more choices than trials.
        """
        if isinstance(dim, int):
            return dim
        if is_read_back(dim):
            raise Unsupported("shape", f"{what} is computed on the device")
        if not self._speculative:
            self.guard(eq(dim, hint(dim)))
            return hint(dim)
        if len(choices) > NUM_TRIALS:
            raise Unsupported("shape", f"{what} is only known in a Run, and may be one of {len(choices)} numbers")
        if self.trial is None:
            raise UnknownRank(f"{what} is not known")
        return choices[self.trial % len(choices)]

    def read_back(
        self, x: Tensor, what: str, lower: int | None = None, upper: Dim | None = None, *, likely: int = _READ_BACK_HINT
    ) -> tuple[Expr, ...]:
        """Return the integer contents of x, which work of the same Run computes; ``what`` names them in messages.

        The host waits for that work, reads the elements and goes on: a segment of the plan ends. So call it once for
        all values that an operator needs, and only for few elements. ``lower`` and ``upper`` bound each element; bounds
        of the plugin's own operators are trusted, those of others are checked. ``likely`` is the expected value of an
        unbounded element. Guards cannot depend on values that were read back: see `guard`.
        """
        if not (x.dtype.is_integer or x.dtype is DType.BOOL):
            raise Unsupported("dtype", f"{what} has element type {x.dtype.name}, which is not an integer type")
        x = self._of_known_shape(x, what)
        count = self._readable(x.size, what)
        known = self._read_backs.get(x.buffer) if x.is_contiguous and x.offset == 0 else None
        if known is not None and len(known) == count:
            return known
        if x.dtype.is_packed:
            x = elementwise(self, lambda value: cast(value, DType.INT32), x)
        source = self.materialize(self.contiguous(x))
        most = bounds(upper)[1] if upper is not None else None
        guess = max(hint(upper) if upper is not None else likely, lower or 0)
        first = READ_BACK + self._num_read_back
        self._num_read_back += count
        symbols = tuple(symbol(first + i, f"{what}[{i}]", guess, lower, most) for i in range(count))
        if source.buffer is x.buffer:
            self._read_backs[x.buffer] = symbols
        if self._is_recording and count:
            self.trace.steps.append(ReadBack(self.nodes, source, first, count, (source.buffer,)))
        if self.checks_author:
            for i in range(count):
                self._check_read_back(symbol(first + i, f"{what}[{i}]", guess, None, None), what, lower, upper)
        return symbols

    def _check_read_back(self, found: Expr, what: str, lower: int | None, upper: Dim | None) -> None:
        """Require the bounds of a value that was read back. ``found`` is its symbol without bounds."""
        if lower is not None:
            self.require(le(lower, found), f"{what} is less than {lower}, the least that the operator says")
        if upper is not None:
            self.require(le(found, upper), f"{what} is more than {upper}, the most that the operator says")

    # ---- conditions ----

    def require(self, condition: Dim, message: str) -> None:
        """Fail the Run with the node's name and ``message`` if the condition is 0. Raises InvalidModel if it is 0 for
        all sizes.
        """
        known = truth(condition)
        if known is False:
            raise InvalidModel(message)
        if known is None:
            assert isinstance(condition, Expr)
            self.trace.originate(self.node, (condition,))
            self.trace.requirements.append(Requirement(self.node, condition, message))

    def require_shape(self, x: Tensor, shape: Sequence[Dim], what: str) -> None:
        """Like `require` for the shape of x, which ``what`` names ("bias of Gemm"). Raises InvalidModel for another
        rank.
        """
        if x.rank != len(shape):
            raise InvalidModel(f"the {what} has rank {x.rank}, not {len(shape)}")
        for axis, (dim, wanted) in enumerate(zip(x.shape, shape, strict=True)):
            self.require(eq(dim, wanted), f"the {what} has another size in dimension {axis} than it must have")

    def guard(self, condition: Dim) -> bool:
        """Return the condition's truth at the shapes that the plan is built for, and guard the plan to it.

        Raises Unsupported if the condition depends on values that a Run computes: the plan is chosen before that.
        """
        known = truth(condition)
        if known is not None:
            return known
        assert isinstance(condition, Expr)
        if is_read_back(condition):
            raise Unsupported("shape", "its result depends on values that are computed on the device")
        answer = condition.hint != 0
        recorded = condition if answer else logical_not(condition)
        self.trace.originate(self.node, (recorded,))
        if isinstance(recorded, Expr):
            self.trace.guards[recorded] = None
        return answer

    def settled(self, condition: Dim) -> bool | None:
        """Like `guard`, but None for a claim, which is for all shapes, and for conditions on values that a Run
        computes.
        """
        if not self._settles or is_read_back(condition):
            return self.known(condition)
        return self.guard(condition)

    def settled_size(self, dim: Dim) -> Dim:
        """Return ``dim``; if it is a minimum or maximum, the argument that it equals at the plan's shapes (guarded)."""
        atom = single_atom(dim)
        if atom is None or atom.op not in (ExprOp.MIN, ExprOp.MAX):
            return dim
        a, b = atom.args
        ordered = self.settled(le(a, b))
        return dim if ordered is None else self.settled_size(a if ordered is (atom.op is ExprOp.MIN) else b)

    def known(self, condition: Dim) -> bool | None:
        """Return the condition's truth if it is the same for all shapes, else None."""
        return truth(condition)

    def index_dtype(self, *sizes: Dim) -> str:
        """Return "i32" if all sizes are below 2**31 (guarded), else "i64": the type for index arithmetic."""
        if self.options.wide_indices:
            return "i64"
        fits = [le(size, _INT32_MAX) for size in sizes]
        if any(self.known(fit) is None and is_read_back(fit) for fit in fits):
            return "i64"
        narrow = all(self.guard(fit) for fit in fits)
        return "i32" if narrow else "i64"

    # ---- what the plan does ----

    @contextmanager
    def recording(self, nodes: tuple[Node, ...] | None = None) -> Iterator[list[Step]]:
        """Collect the steps that are recorded in the block, for ``nodes``, in a list; the caller decides where they
        run.

        Host values that they read are materialised in the list, for these steps only: other steps may run before them,
        and the caller may drop them.
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
        """Append a step to the trace; a claim makes its kernel instead."""
        if self._try_step is None:
            self.trace.steps.append(step)
        else:
            self._try_step(self, step)

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
        """Record a launch.

        Tensor arguments are reads unless they are among ``writes`` (in both: read and written). ``uses`` describes
        arguments that the kernel does not read exactly once as a whole; for the others see `Launch`. A grid with a
        dimension of 0 launches nothing. Raises TypeError if arguments do not match the signature.
        """
        signature = kernel.signature
        if len(args) != len(signature):
            raise TypeError(f"kernel {kernel.name} takes {len(signature)} arguments, got {len(args)}")
        for number, (arg, expected) in enumerate(zip(args, signature, strict=True)):
            given = f"*{arg.dtype.short}" if isinstance(arg, Tensor) else scalar_types[type(arg)]
            if given != expected:
                raise TypeError(f"kernel {kernel.name}: argument {number} is {given}, the signature says {expected}")
        if not self._is_recording:
            return
        placed = tuple(self.materialize(arg) if isinstance(arg, Tensor) else arg for arg in args)
        read, written = self._uses(placed, reads, writes)
        step = Launch(
            self.nodes,
            kernel,
            grid,
            block,
            placed,
            shared_bytes,
            read,
            written,
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
        """Record a call of a vendor library; reads and writes as for `launch`. ``note`` describes it for users."""
        if not self._is_recording:
            return
        placed = tuple(self.materialize(arg) if isinstance(arg, Tensor) else arg for arg in args)
        read, written = self._uses(placed, reads, writes)
        self.trace.steps.append(LibraryCall(self.nodes, problem, placed, read, written, note))

    def call_back(
        self, callback: Callback, tensors: Sequence[Tensor], numbers: Sequence[Dim] = (), *, writes: Sequence[Tensor]
    ) -> None:
        """Record a Python call in each Run; ``tensors`` are contiguous, those among ``writes`` may be written.

        A plan with such a call never becomes a CUDA graph.
        """
        if [(x.dtype, x.rank) for x in tensors] != list(callback.tensors) or len(numbers) != callback.num_numbers:
            raise TypeError(f"callback {callback.name} takes other tensors or numbers")
        if not all(x.is_contiguous for x in tensors):
            raise TypeError(f"callback {callback.name} got a tensor that is not contiguous")
        if self.node is not None:
            self.notes[self.node] = f"{callback.name} is called in Python in each Run, which is no CUDA graph"
        if not self._is_recording:
            return
        placed = tuple(map(self.materialize, tensors))
        read, written = self._uses(placed, [x for x in placed if x.buffer not in {w.buffer for w in writes}], writes)
        self.trace.steps.append(HostCall(self.nodes, callback, placed, tuple(numbers), read, written))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Copy all elements; both tensors are contiguous, with one element type and the same number of elements."""
        if dst.dtype is not src.dtype or dst.size != src.size or not (dst.is_contiguous and src.is_contiguous):
            raise TypeError(f"cannot copy {src!r} to {dst!r} as bytes")
        if not self._is_recording:
            return
        src = self.materialize(src)
        read, written = self._uses((dst, src), (), (dst,))
        self.trace.steps.append(Copy(self.nodes, dst, src, read, written))

    def memset(self, dst: Tensor, byte: int) -> None:
        """Set every byte of a contiguous tensor."""
        if not dst.is_contiguous:
            raise TypeError(f"cannot set the bytes of {dst!r}, which is not contiguous")
        if self._is_recording:
            _, written = self._uses((dst,), (), (dst,))
            self.trace.steps.append(Memset(self.nodes, dst, byte, (), written))

    def materialize(self, x: Tensor) -> Tensor:
        """Return x with its elements on the device: a small launch writes those of a HOST buffer, once in a
        `recording`.
        """
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

    @staticmethod
    def _uses(
        args: Sequence[Arg], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
        for tensor in writes:
            if tensor.buffer.kind not in (BufferKind.SCRATCH, BufferKind.OUTPUT, BufferKind.STATE):
                raise TypeError(f"{tensor!r} is neither an intermediate or output nor a state, it cannot be written")
        written = dict.fromkeys(tensor.buffer for tensor in writes)
        read = dict.fromkeys(tensor.buffer for tensor in reads)
        for arg in args:
            if isinstance(arg, Tensor) and arg.buffer not in written:
                read[arg.buffer] = None
        return tuple(read), tuple(written)


_STORE_WIDTH = 32
_store_source = """
def kernel(out, {names}):
{body}
"""


def _store_values(ctx: Lowering, target: Tensor, values: Sequence[Dim]) -> None:
    """Write register values to the device, by one thread; the values are the kernel's parameters."""
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
