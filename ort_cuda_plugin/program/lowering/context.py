"""The lowering context, in which operators' lowering functions record steps and launches.

A lowering function is called for three purposes: to infer shapes, to decide whether the plugin runs the node (it raises
`Unsupported` if not), and to record the steps of a plan. This module compiles nothing and uses no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...model.ir import Array, Constant, Node, UnknownRank
from ...model.ir import DType as DType
from ...model.ir import InvalidModel as InvalidModel
from ...model.ir import Unsupported as Unsupported
from ..device import DeviceProperties as DeviceProperties
from ..device import LoweringOptions as LoweringOptions
from ..expressions.scalar import cast
from ..expressions.symbolic import (
    READ_BACK,
    Dim,
    Expr,
    bounds,
    eq,
    floordiv,
    hint,
    is_read_back,
    le,
    symbol,
)
from ..steps.callbacks import Callback
from ..steps.schedule import Choice
from ..steps.steps import Map, Sums
from ..steps.tensor import MAX_HOST_ELEMENTS
from ..steps.tensor import Buffer as Buffer
from ..steps.tensor import BufferKind as BufferKind
from ..steps.tensor import Tensor as Tensor
from ..steps.trace import Arg as Arg
from ..steps.trace import Float32 as Float32
from ..steps.trace import Float64 as Float64
from ..steps.trace import HostCall, ReadBack, Step
from ..steps.trace import Int32 as Int32
from ..steps.trace import Int64 as Int64
from .elementwise import elementwise
from .recorder import Recorder, reads_and_writes

NUM_TRIALS = 9
"""Maximum trials of a claim. Each trial assumes another value of an unknown number; see `Lowering.chosen`."""
_READ_BACK_HINT = 1


Make: TypeAlias = "Callable[[Lowering, Sequence[Tensor | None], str], object]"
"""``make(ctx, inputs, tactic)`` records the steps of a custom operator with the named tactic."""


Compile: TypeAlias = "Callable[[Lowering, Sequence[Step]], Sequence[Step]]"
"""``compiled(ctx, steps)`` runs the passes that come after the timed pass in the table of passes (``passes.table``)."""


@dataclass(frozen=True)
class Tactic:
    """The selected tactic (implementation variant) of a custom operator, and the reason for it."""

    name: str
    why: str


class Tuner:
    """Selects schedules of steps, tactics of custom operators, and optional passes, by timing them.

    This base class measures nothing, so the rules of the cost model choose.
    """

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        """Return the fastest of ``choices``, which rules have ordered by preference; None if nothing is measured."""
        return None

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic | None:
        """Return the fastest of the tactics ``names``; None if nothing is measured.

        ``problem`` identifies the computation: it contains everything that affects the time, except types and sizes.
        """
        return None

    def pays(self, ctx: Lowering, name: str, before: Sequence[Step], after: Sequence[Step], compiled: Compile) -> bool:
        """Return whether the plan with the pass ``name`` is at least as fast as the plan without it.

        ``before`` and ``after`` are the whole programs before and after the pass. True if nothing is measured.
        """
        return True


class Lowering(Recorder):
    """The context that an operator's lowering function gets as its first argument.

    The context adds the contents of host tensors and the states of nodes to the `Recorder`. ``opset`` is the version
    of the node's domain that the model imports. A claim passes ``try_step``, which generates a step's kernel to find
    out whether that fails. ``guessed`` becomes True when `host_constants` returns its ``guess``. ``trial`` selects the
    value that `chosen` assumes for an unknown dimension. ``states`` holds the states of the cluster's nodes, which all
    plans share. ``notes`` holds remarks for users, by node.
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
        is_claim = try_step is not None
        super().__init__(device, options, is_claim=is_claim, speculative=speculative, settles=settles)
        self._try_step = try_step
        self.opset = 0
        self.tuner: Tuner | None = None
        """The autotuner; None without autotuning."""
        self.guessed = False
        self.is_in_loop = False
        """Whether the recorded steps belong to the body of a `DeviceLoop`, so that the host can read back nothing."""
        self.trial = trial
        self.notes: dict[Node, str] = {}
        self._read_host_input = read_host_input
        self._states = {} if states is None else states
        self._read_backs: dict[Buffer, tuple[Expr, ...]] = {}
        self._num_read_back = 0

    def record(self, step: Map) -> None:
        """Append a step to the trace; in a claim, only try to generate the step's kernel."""
        if self._try_step is None:
            super().record(step)
        else:
            self._try_step(self, step)

    def state(self, initial: Callable[[], Array]) -> Tensor:
        """Return the current node's state: memory that keeps its contents between Runs, and that launches may write.

        All plans with the node, and all concurrent Runs of a session, share the state. Launches of concurrent Runs are
        not ordered, so they must update the state atomically. ``initial`` returns the contents for the first Run.
        """
        if self.node is None:
            raise TypeError("state() was called outside of an operator's function. Call it in the function")
        contents = self._states.get(self.node)
        if contents is None:
            array = initial()
            contents = Constant(
                DType.from_numpy(array.dtype), array.shape, lambda: array, is_initializer=False, is_state=True
            )
            self._states[self.node] = contents
        return Tensor(contents.dtype, contents.shape, Buffer(BufferKind.STATE, contents.nbytes, state=contents))

    def call_back(
        self, callback: Callback, tensors: Sequence[Tensor], numbers: Sequence[Dim] = (), *, writes: Sequence[Tensor]
    ) -> None:
        """Record a call of Python code in each Run; ``tensors`` must be contiguous, and the call may change ``writes``.

        A plan with such a call is never captured as a CUDA graph. Raises TypeError if ``tensors`` or ``numbers``
        contradict ``callback``.
        """
        if [(x.dtype, x.rank) for x in tensors] != list(callback.tensors) or len(numbers) != callback.num_numbers:
            expected = f"{len(callback.tensors)} tensors {callback.tensors} and {callback.num_numbers} numbers"
            raise TypeError(f"callback {callback.name}: got {tensors} and {len(numbers)} numbers, expected {expected}")
        if not all(x.is_contiguous for x in tensors):
            raise TypeError(f"callback {callback.name}: a tensor argument is not contiguous. Pass ctx.contiguous(x)")
        if self.node is not None:
            self.notes[self.node] = f"each Run calls {callback.name} in Python, and cannot be a CUDA graph"
        if not self.is_recording:
            return
        placed = tuple(map(self.materialize, tensors))
        outputs = {x.buffer for x in writes}
        used = reads_and_writes(placed, [x for x in placed if x.buffer not in outputs], writes)
        self.trace.steps.append(HostCall(self.nodes, *used, callback, placed, tuple(numbers)))

    # ---- tensor contents that are known on the host, or read by it ----

    def _deferred_contents(self, buffer: Buffer) -> tuple[Dim, ...]:
        """Return the deferred contents of ``buffer``; first compute the contents of the buffers that they depend on.

        The explicit stack, instead of recursion, allows dependency chains of any length. The loop terminates, since
        each buffer waits for its dependencies at most once.
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
                        raise RuntimeError(
                            f"node {label}: internal error: its shape depends on itself. Report the model"
                        )
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
        """Return the integer contents of x in row-major order; ``what`` names x in messages ("shape of Reshape").

        If x is an input of the cluster, it becomes a host input, which each Run reads back once before it starts.
        Contents that the device computes are read back in the middle of the Run (`read_back`).
        """
        known = x.host
        if known is not None:
            return known
        if not (x.dtype.is_integer or x.dtype is DType.BOOL):
            raise Unsupported("dtype", f"the type of {what} is {x.dtype.name}; supported: integers and bool")
        buffer = x.buffer
        if buffer.kind is not BufferKind.INPUT and buffer.deferred_host is None:
            return self.read_back(x, what)
        x = self._of_known_shape(x, what)
        self._readable(x.size, what)
        positions = x.positions()
        assert positions is not None
        elements = floordiv(buffer.nbytes, x.dtype.itemsize)
        if self._speculative and not isinstance(elements, int):
            # unknown size: assume that x contains the last element of the buffer
            elements = max(positions, default=-1) + 1
        elements = self._readable(elements, what)
        if buffer.deferred_host is not None:
            contents = self._deferred_contents(buffer)
        else:
            if self._read_host_input is None:
                raise Unsupported(
                    "shape", f"the host must read {what}, an input in device memory; supported: inputs in host memory"
                )
            contents = self._read_host_input(buffer, elements)
        return tuple(contents[position] for position in positions)

    def _readable(self, count: Dim, what: str) -> int:
        """Return ``count``, a number of elements that the host reads, as an int, and guard the plan on it.

        Raises Unsupported for more than `MAX_HOST_ELEMENTS`.
        """
        count = self._fixed(count, what)
        if count > MAX_HOST_ELEMENTS:
            raise Unsupported("shape", f"{what} has {count} elements; supported: up to {MAX_HOST_ELEMENTS}")
        return count

    def _of_known_shape(self, x: Tensor, what: str) -> Tensor:
        """Return x with its shape, strides and offset as ints, and guard the plan on them."""
        shape, strides = ([self._fixed(dim, what) for dim in dims] for dims in (x.shape, x.strides))
        return Tensor(x.dtype, shape, x.buffer, strides=strides, offset=self._fixed(x.offset, what))

    def _fixed(self, dim: Dim, what: str) -> int:
        if isinstance(dim, int):
            return dim
        if self._speculative or is_read_back(dim):
            reason = (
                f"the number of elements of {what} is known only when the model runs; supported: numbers known when the"
                " session is created"
            )
            # If a claimed node has a size that is unknown at session creation, its plan is built in the first Run.
            waits = self.is_recording and self._speculative and self.trial is None and not is_read_back(dim)
            raise UnknownRank(reason) if waits else Unsupported("shape", reason)
        self.guard(eq(dim, hint(dim)))
        return hint(dim)

    def host_number(self, x: Tensor, what: str) -> Dim:
        """Return the only element of x, read with `host_values`. Raises InvalidModel if x does not have one element."""
        values = self.host_values(x, what)
        if len(values) != 1:
            raise InvalidModel(f"{what} must have one element, got {len(values)}")
        return values[0]

    def host_constants(self, x: Tensor, what: str, guess: Sequence[int]) -> tuple[int, ...]:
        """Return the elements of x, such as axes, as ints, read with `host_values`, and guard the plan on them.

        ``guess`` holds arbitrary valid values, which a claim uses while the contents are unknown.
        """
        values = self.host_values(x, what)
        if any(is_read_back(value) for value in values):
            raise Unsupported("shape", f"{what} is computed on the device; supported: values from shapes and inputs")
        if self._speculative and not all(isinstance(value, int) for value in values):
            if len(guess) != len(values):
                raise InvalidModel(f"{what} must have {len(guess)} elements, got {len(values)}")
            self.guessed = True
            return tuple(guess)
        for value in values:
            self.guard(eq(value, hint(value)))
        return tuple(hint(value) for value in values)

    def chosen(self, dim: Dim, what: str, choices: Sequence[int]) -> int:
        """Return ``dim`` as an int, for a dimension that decides the rank of a tensor; ``what`` names it in messages.

        The plan is guarded on the value. While the value is unknown, each trial of a claim assumes one of ``choices``.
        Raises UnknownRank outside of a trial, and Unsupported if there are more choices than trials.
        """
        if isinstance(dim, int):
            return dim
        if is_read_back(dim):
            raise Unsupported("shape", f"{what} is computed on the device; supported: values from shapes and inputs")
        if not self._speculative:
            self.guard(eq(dim, hint(dim)))
            return hint(dim)
        if len(choices) > NUM_TRIALS:
            reason = (
                f"{what} is known only when the model runs, and has {len(choices)} possible values; supported: up to "
                f"{NUM_TRIALS}"
            )
            raise Unsupported("shape", reason)
        if self.trial is None:
            raise UnknownRank(
                f"{what} is known only when the model runs; supported: values known when the session is created"
            )
        return choices[self.trial % len(choices)]

    def read_back(
        self, x: Tensor, what: str, lower: int | None = None, upper: Dim | None = None, *, likely: int = _READ_BACK_HINT
    ) -> tuple[Expr, ...]:
        """Return the integers in x, which the Run itself computes, as new symbols; ``what`` names them in messages.

        A read-back ends a segment of the plan: the host waits for the device and reads the elements. So call this
        function once for all values that an operator needs, and only for few elements. ``lower`` and ``upper`` are
        bounds of each element; Runs check the bounds that custom operators declare. ``likely`` is the expected value of
        an element without upper bound. Guards cannot depend on read-back values, see `guard`.
        """
        if not (x.dtype.is_integer or x.dtype is DType.BOOL):
            raise Unsupported("dtype", f"the type of {what} is {x.dtype.name}; supported: integers and bool")
        if self.is_in_loop:
            reason = f"the host must read {what} in each iteration; supported: values that no iteration computes"
            raise Unsupported("control-flow", reason)
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
        if self.is_recording and count:
            self.trace.steps.append(ReadBack(self.nodes, (source.buffer,), (), source, first, count))
        for i in range(count if self.checks_author else 0):
            found = symbol(first + i, f"{what}[{i}]", guess, None, None)  # without bounds
            declared = "bound that the operator declared"
            if lower is not None:
                self.require(le(lower, found), f"{what} is less than {lower}, the lower {declared}")
            if upper is not None:
                self.require(le(found, upper), f"{what} is more than {upper}, the upper {declared}")
        return symbols
