"""Conditions of a plan: guards, which select a plan, and requirements, which fail a Run."""

from __future__ import annotations

from ...model.ir import InvalidModel, Node, Unsupported
from ..device import DeviceProperties, LoweringOptions
from ..expressions.operations import ExprOp
from ..expressions.symbolic import Dim, Expr, hint, is_read_back, le, logical_not, single_atom, truth
from ..steps.schedule import Choice
from ..steps.trace import Requirement, Trace

_INT32_MAX = 2**31 - 1


class Conditions:
    """Conditions on sizes that lowering of ``nodes`` adds to a plan's ``trace``.

    ``device`` and ``options`` are the plan's. With ``speculative``, hints of host values are arbitrary. Without
    ``settles`` (in a claim), `settled` adds no guards.
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
        """Return the node that is lowered, or whose kernel is generated."""
        return self.nodes[-1] if self.nodes else None

    @node.setter
    def node(self, node: Node | None) -> None:
        self.nodes = () if node is None else (node,)

    def require(self, condition: Dim, message: str) -> None:
        """Fail the Run with ``message`` if the condition is 0; raise InvalidModel if it is 0 for all sizes."""
        known = truth(condition)
        if known is False:
            raise InvalidModel(message)
        if known is None:
            assert isinstance(condition, Expr)
            self.trace.originate(self.node, (condition,))
            self.trace.requirements.append(Requirement(self.node, condition, message))

    def guard(self, condition: Dim) -> bool:
        """Return whether the condition is true at the plan's shapes, and guard the plan on that result.

        Raises Unsupported if the condition depends on values that a Run computes, since plans are selected earlier.
        """
        known = truth(condition)
        if known is not None:
            return known
        assert isinstance(condition, Expr)
        if is_read_back(condition):
            raise Unsupported("shape", "a size is computed on the device; supported: sizes from shapes")
        answer = condition.hint != 0
        recorded = condition if answer else logical_not(condition)
        self.trace.originate(self.node, (recorded,))
        if isinstance(recorded, Expr):
            self.trace.guards[recorded] = None
        return answer

    def holds(self, condition: Dim) -> bool:
        """Return whether the condition is true at the plan's shapes and `guard` would accept it; record no guard."""
        known = truth(condition)
        return hint(condition) != 0 and not is_read_back(condition) if known is None else known

    def may_settle(self, condition: Dim) -> bool:
        """Return what `holds` returns; in a claim, return whether the condition is true for all shapes."""
        return self.holds(condition) if self._settles else bool(truth(condition))

    def take(self, choice: Choice) -> None:
        """Guard the plan on the conditions under which a schedule was chosen."""
        for condition in choice.guards:
            self.guard(condition)

    def settled(self, condition: Dim) -> bool | None:
        """Call `guard` and return its result; in a claim, or for a value that a Run computes, call `known` instead."""
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
        """Return whether the condition is true, if that is the same for all shapes; else None."""
        return truth(condition)

    def index_dtype(self, *sizes: Dim) -> str:
        """Return the type for index arithmetic: "i32" if all sizes are below 2**31 (guarded), else "i64".

        Returns "i64" also if a Run computes a size whose bounds do not decide this.
        """
        if self.options.wide_indices:
            return "i64"
        fits = [le(size, _INT32_MAX) for size in sizes]
        if any(self.known(fit) is None and is_read_back(fit) for fit in fits):
            return "i64"
        narrow = all(self.guard(fit) for fit in fits)
        return "i32" if narrow else "i64"
