"""The trace of lowering: the recorded steps (launches, library calls, copies, ...), guards and requirements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ...compiler.kernel import KernelSpec
from ...model.ir import Node
from ..expressions.symbolic import Dim, Expr, Monomial
from .callbacks import Callback
from .libraries import LibraryProblem
from .quarantine import ScheduleKind
from .schedule import Schedule
from .steps import Map
from .tensor import Buffer, Tensor


@dataclass(frozen=True)
class Int32:
    value: Dim


@dataclass(frozen=True)
class Int64:
    value: Dim


@dataclass(frozen=True)
class Float32:
    value: float


@dataclass(frozen=True)
class Float64:
    value: float


@dataclass(frozen=True, eq=False)
class LoopCondition:
    """The condition of a `DeviceLoop`, compared by identity.

    As an argument of a kernel: the handle of the loop's conditional node in a CUDA graph, 0 outside of a graph (i64).
    """


Arg: TypeAlias = Tensor | Int32 | Int64 | Float32 | Float64 | LoopCondition
Grid: TypeAlias = tuple[Dim, Dim, Dim]
scalar_types: Final = {Int32: "i32", Int64: "i64", Float32: "f32", Float64: "f64", LoopCondition: "i64"}


@dataclass(eq=False)
class Recorded:
    """Base of steps that a plan can contain; ``reads`` and ``writes`` are the buffers that it uses.

    ``nodes`` are the ONNX nodes it computes; errors name the last one.
    """

    nodes: tuple[Node, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]

    @property
    def node(self) -> Node | None:
        return self.nodes[-1] if self.nodes else None


@dataclass(frozen=True)
class Use:
    """Accesses of a kernel to a tensor, for `traffic`: at most ``elements`` elements, each ``times`` times."""

    times: Dim = 1
    elements: Dim | None = None


@dataclass(frozen=True)
class InPlace:
    """Permission to give the buffers ``read`` and ``written`` of a launch the same memory.

    The launch must read and write each element in the same thread, and read it first. With ``kept``, the launch does
    not change the elements that it reads, for example if it appends rows to a K/V cache.
    """

    read: Buffer
    written: Buffer
    kept: bool = False


def in_place_of(read: Tensor | None, written: Tensor, *, kept: bool = False) -> tuple[InPlace, ...]:
    """Return the permission that ``written`` shares the memory of ``read``, in a tuple.

    Return () if their layouts differ, and if ``read`` is None.

    Their shapes must be equal in every Run, but may be different expressions.
    """
    if read is None or read.dtype.itemsize != written.dtype.itemsize or read.offset != written.offset:
        return ()
    have_equal_layouts = read.strides == written.strides or (read.is_contiguous and written.is_contiguous)
    return (InPlace(read.buffer, written.buffer, kept),) if have_equal_layouts else ()


@dataclass(eq=False)
class Launch(Recorded):
    """A kernel launch.

    ``uses`` describes arguments that the kernel does not access exactly once as a whole. ``note`` tells users why this
    kernel was selected; the launch of a contraction has its ``schedule``. The grid consists of ``turns`` consecutive
    groups of blocks, each of which waits for the results of the previous group (persistent kernels of recurrences).
    Buffers may share memory only with an `InPlace`. ``remake`` records the launch again for other views of its tensors;
    None: the launch cannot use other views.
    """

    kernel: KernelSpec
    grid: Grid
    block: tuple[int, int, int]
    args: tuple[Arg, ...]
    shared_bytes: Dim
    uses: Mapping[Tensor, Use] = field(default_factory=dict)
    remake: Remake | None = None
    note: str = ""
    schedule: Schedule | None = None
    turns: Dim = 1
    in_place: tuple[InPlace, ...] = ()


@dataclass(eq=False)
class LibraryCall(Recorded):
    """A vendor library's call; ``problem`` defines the meaning of ``args``. ``note`` describes the call for users."""

    problem: LibraryProblem
    args: tuple[Arg, ...]
    note: str = ""


@dataclass(eq=False)
class Copy(Recorded):
    """A device-to-device copy of all elements of ``source``; both tensors are contiguous."""

    destination: Tensor
    source: Tensor


@dataclass(eq=False)
class Memset(Recorded):
    """A fill of a contiguous tensor, whose bytes all become ``byte``."""

    destination: Tensor
    byte: int


@dataclass(eq=False)
class ReadBack(Recorded):
    """A read of contiguous integers or bools by the host, which starts a new segment of the plan.

    The values become the symbols with the numbers ``first_symbol`` to ``first_symbol + count - 1``.
    """

    source: Tensor
    first_symbol: int
    count: int


@dataclass(eq=False)
class HostCall(Recorded):
    """A call of a Python function in each Run, which enqueues device work. ``tensors`` are contiguous."""

    callback: Callback
    tensors: tuple[Tensor, ...]
    numbers: tuple[Dim, ...]


@dataclass(eq=False)
class DeviceLoop(Recorded):
    """A loop whose iterations the device counts: steps ``first``, then ``body`` while ``flag`` (int32 [1]) is not 0.

    ``first`` and ``body`` are compiled, and no other step writes what they write. ``body`` sets the flag, and the
    ``condition`` of the loop's node in a CUDA graph. The host knows the number of iterations as ``count``; with None,
    it reads the flag before each iteration unless the loop is part of a CUDA graph. ``reads`` and ``writes`` are the
    buffers that other steps know: values from outside of the loop, and its results.
    """

    condition: LoopCondition
    flag: Tensor
    count: Dim | None
    first: tuple[Recordable, ...]
    body: tuple[Recordable, ...]


Recordable: TypeAlias = Launch | LibraryCall | Copy | Memset | ReadBack | HostCall | DeviceLoop
"""Steps that a plan can contain, in contrast to a `Map` that emission has not yet turned into launches."""
Step: TypeAlias = Recordable | Map
View: TypeAlias = Callable[[Tensor], Tensor]
Remake: TypeAlias = Callable[[View], Sequence[Step]]
"""Function that records a launch again, with its tensors replaced by other views, and returns the steps."""


@dataclass(frozen=True)
class Requirement:
    """A condition that each Run checks; if it is false, the Run fails with the node's name and the message."""

    node: Node | None
    condition: Expr
    message: str


@dataclass(eq=False)
class Trace:
    """The steps, guards and requirements that lowering recorded, in order."""

    steps: list[Step] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    guards: dict[Expr, None] = field(default_factory=dict)
    origins: dict[Expr | Monomial, Node] = field(default_factory=dict)
    """The first node that needs a symbolic value, or a monomial of it, for errors of a Run that cannot evaluate it."""
    folded: list[list[Recordable]] = field(default_factory=list)
    """Launches that constant folding moved before the first Run, in groups that share no intermediate."""
    schedules: dict[ScheduleKind, None] = field(default_factory=dict)
    """The kinds of the schedules that steps were given, for comparison with a quarantine."""

    def release_steps(self) -> None:
        """Drop the steps of a finished plan: their ``remake`` may refer to the context, and so to this trace."""
        self.steps, self.folded = [], []

    def originate(self, node: Node | None, dims: Iterable[Dim]) -> None:
        """Record that ``node`` needs the values ``dims``; if a Run cannot evaluate one, its error names the node."""
        if node is None:
            return
        for dim in dims:
            if isinstance(dim, int) or dim in self.origins:
                continue
            self.origins[dim] = node
            for monomial, _ in dim.terms:
                self.origins.setdefault(monomial, node)
