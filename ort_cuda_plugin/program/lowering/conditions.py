"""Conditions of a plan: guards decide whether a Run may use the plan, requirements let a Run fail with a message."""

from __future__ import annotations

from collections.abc import Iterable

from ...model.ir import InvalidModel, Node, Unsupported
from ..device import DeviceProperties, LoweringOptions
from ..expressions.operations import ExprOp
from ..expressions.symbolic import Dim, Expr, hint, is_read_back, le, logical_not, single_atom, truth
from ..steps.quarantine import ScheduleKind
from ..steps.schedule import Choice, Engine
from ..steps.trace import Requirement, Trace

_INT32_MAX = 2**31 - 1


class Conditions:
    """Conditions on sizes that the lowering of ``nodes`` records in ``trace``.

    ``device`` and ``options`` are those of the plan. With ``speculative``, the hints of host values are arbitrary.
    Without ``settles``, as in a claim, `settled` adds no guards.
    """

    def __init__(
        self, device: DeviceProperties, options: LoweringOptions | None, *, speculative: bool, settles: bool
    ) -> None:
        self.device = device
        self.options = options or LoweringOptions()
        self.nodes: tuple[Node, ...] = ()
        self.trace = Trace()
        self._speculative = speculative
        self._settles = settles

    @property
    def node(self) -> Node | None:
        """Return the node that is being lowered, or whose kernel is being generated; None if there is none."""
        return self.nodes[-1] if self.nodes else None

    @node.setter
    def node(self, node: Node | None) -> None:
        self.nodes = () if node is None else (node,)

    def require(self, condition: Dim, message: str) -> None:
        """Require that each Run meets the condition, and otherwise fails with ``message``.

        Raises InvalidModel at once if the condition is false (0) for all sizes.
        """
        known = truth(condition)
        if known is False:
            raise InvalidModel(message)
        if known is None:
            assert isinstance(condition, Expr)
            self.trace.originate(self.node, (condition,))
            self.trace.requirements.append(Requirement(self.node, condition, message))

    def guard(self, condition: Dim) -> bool:
        """Return whether the condition holds for the sizes of the plan, and guard the plan on this result.

        Raises Unsupported for an unproven condition on read-back values, which are unknown when guards are tested.
        """
        known = truth(condition)
        if known is not None:
            return known
        assert isinstance(condition, Expr)
        if is_read_back(condition):
            raise Unsupported(
                "shape",
                "a shape that the node needs depends on values that the device computes; supported: shapes that depend "
                "on the inputs' shapes, or on integer inputs that the host reads",
            )
        answer = condition.hint != 0
        recorded = condition if answer else logical_not(condition)
        self.trace.originate(self.node, (recorded,))
        if isinstance(recorded, Expr):
            self.trace.guards[recorded] = None
        return answer

    def try_guard(self, condition: Dim) -> bool:
        """Return the result of `guard`; False, without a guard, for a condition on values that a Run reads back."""
        return not is_read_back(condition) and self.guard(condition)

    def holds(self, condition: Dim) -> bool:
        """Return whether the condition holds for the sizes that the plan is built for. Records no guard.

        Returns False for an unproven condition on values that a Run reads back, for which `guard` raises Unsupported.
        """
        known = truth(condition)
        return hint(condition) != 0 and not is_read_back(condition) if known is None else known

    def may_settle(self, condition: Dim) -> bool:
        """Return the result of `holds`; in a claim, return whether the condition holds for all sizes."""
        return self.holds(condition) if self._settles else bool(truth(condition))

    def take(self, choice: Choice, kinds: Iterable[ScheduleKind]) -> None:
        """Guard the plan on the conditions under which a schedule of these kinds was chosen, and note the kinds."""
        for condition in choice.guards:
            self.guard(condition)
        if choice.schedule.engine is not Engine.LIBRARY:  # kernel selection notes calls that the library accepts
            self.trace.schedules.update(dict.fromkeys(kinds))

    def settled(self, condition: Dim) -> bool | None:
        """Return the result of `guard`; in a claim, or for a condition on read-back values, the result of `known`."""
        if not self._settles or is_read_back(condition):
            return self.known(condition)
        return self.guard(condition)

    def settled_size(self, dim: Dim) -> Dim:
        """Return ``dim``; for a minimum or maximum, the argument that it equals at the plan's sizes, with a guard.

        Return ``dim`` also if `settled` cannot compare the arguments.
        """
        atom = single_atom(dim)
        if atom is None or atom.op not in (ExprOp.MIN, ExprOp.MAX):
            return dim
        a, b = atom.args
        ordered = self.settled(le(a, b))
        return dim if ordered is None else self.settled_size(a if ordered is (atom.op is ExprOp.MIN) else b)

    def known(self, condition: Dim) -> bool | None:
        """Return True or False if the condition provably has this value for all sizes, else None."""
        return truth(condition)

    def index_dtype(self, *sizes: Dim) -> str:
        """Return the type for index arithmetic: "i32" if all sizes are below 2**31, which becomes a guard, or "i64".

        Also returns "i64" for a size that a Run reads back, unless its bounds prove that it is small.
        """
        if self.options.wide_indices:
            return "i64"
        fits = [le(size, _INT32_MAX) for size in sizes]
        if any(self.known(fit) is None and is_read_back(fit) for fit in fits):
            return "i64"
        narrow = all(self.guard(fit) for fit in fits)
        return "i32" if narrow else "i64"
