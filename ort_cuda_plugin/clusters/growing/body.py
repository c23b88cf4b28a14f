"""Lowering of a decoder's nodes in a loop on the device: growing tensors become buffers of fixed capacity.

Loops on the device need states of fixed shapes, but a decoder's caches grow by one key in each step. `GrowingBody`
lowers each node for tensors of the caches' capacity. The rule of its operator ensures that elements behind the valid
ones have no effect, and says which dimensions of the results grow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType, InvalidModel, Node, UnknownRank, Unsupported, Value
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Number, Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import elementwise
from ...program.lowering.host import HostArray, host_array
from ...program.lowering.views import reshape
from ...program.steps.containers import Operand
from ...program.steps.tensor import Tensor
from .values import WHAT_PAST, BeamOfKey, Growing, Sizes, after_past, has_past

Special: TypeAlias = "Growing | Sizes | BeamOfKey"


class NodeByNode(Protocol):
    """The part of `NodeLowering` that a `GrowingBody` uses."""

    ctx: Lowering

    def lower(self, node: Node) -> None: ...

    def operand(self, value: Value) -> Operand: ...

    def set(self, value: Value, operand: Operand) -> None: ...


class GrowingBody:
    """Lowers the nodes of a decoder, some of which read growing tensors.

    ``past`` (int32 [1]) has the number of cached keys; ``capacity`` is the size of dimensions that grow. ``rules`` has
    the rule of each operator that may read a growing tensor or sizes with PAST; ``reads_buffers`` are the operators
    that may read a cache which past and present share.
    """

    def __init__(
        self,
        lowering: NodeByNode,
        past: Tensor,
        capacity: Dim,
        rules: Mapping[tuple[str, str], Rule],
        reads_buffers: Collection[tuple[str, str]] = (),
    ) -> None:
        self.lowering, self.ctx = lowering, lowering.ctx
        self.past, self.capacity = past, capacity
        self._rules, self._reads_buffers = rules, reads_buffers
        self._special: dict[Value, Special] = {}
        self._flags: dict[tuple[bool, int, Dim], Tensor] = {}

    # ---- values ----

    def special(self, value: Value | None) -> Special | None:
        """Return the growing tensor or the sizes of ``value``, None for another value."""
        return None if value is None else self._special.get(value)

    def growing(self, value: Value | None) -> Growing | None:
        found = self.special(value)
        return found if isinstance(found, Growing) else None

    def set(self, value: Value | None, x: Tensor | Special) -> None:
        """Set ``value``. A `Growing` without axes becomes an ordinary tensor, `Sizes` without PAST a host tensor."""
        if value is None:
            return
        self._special.pop(value, None)
        if isinstance(x, Tensor):
            self.lowering.set(value, x)
            return
        if isinstance(x, Growing):
            if not all(-1 <= extra <= 1 for extra in x.axes.values()):
                extras = sorted(x.axes.values())
                raise Unsupported(
                    "control-flow",
                    f"growing axes of its result {value.name!r} are longer than the number of cached keys by {extras}; "
                    "supported: by -1 to 1",
                )
            self.lowering.set(value, x.x)
            if not x.axes:
                return
        elif isinstance(x, Sizes) and not any(map(has_past, x.array.reshape(-1))):
            array = x.array
            self.lowering.set(value, self.ctx.host_tensor(array.reshape(-1).tolist(), array.shape, x.dtype))
            return
        self._special[value] = x

    def tensor(self, value: Value) -> Tensor:
        """Return ``value`` as a tensor: the whole buffer of a growing tensor, or sizes that the device computes."""
        special = self._special.get(value)
        if isinstance(special, Sizes):
            return self.on_device(special)
        if isinstance(special, BeamOfKey):
            raise Unsupported(
                "control-flow",
                f"it reads {value.name!r}, the decoder's cache_indirection; supported: MultiHeadAttention and "
                "DecoderMaskedMultiHeadAttention with past_key and past_value",
            )
        operand = self.lowering.operand(value)
        if not isinstance(operand, Tensor):
            raise Unsupported("control-flow", f"{value.name!r} is a sequence or an optional value; supported: tensors")
        return operand

    def sizes(self, value: Value) -> HostArray | None:
        """Return the elements of ``value`` as symbolic integers; None if shapes do not determine them."""
        special = self._special.get(value)
        if isinstance(special, Sizes):
            return special.array
        return None if special is not None else host_array(self.tensor(value))

    # ---- nodes ----

    def lower(self, node: Node) -> None:
        """Lower a node. Raises Unsupported, with the node's name, if the decoder cannot run in a loop on the device."""
        try:
            self._lower(node)
        except UnknownRank as error:
            raise UnknownRank(_within(node, error.reason)) from error
        except Unsupported as error:
            raise Unsupported(error.kind, _within(node, error.reason)) from error
        except InvalidModel as error:
            raise InvalidModel(_within(node, error.reason)) from error

    def _lower(self, node: Node) -> None:
        if all(self.special(value) is None for value in node.reads()):
            self.lowering.lower(node)
            return
        rule = self._rules.get((node.domain, node.op_type))
        if rule is None:
            name = next(value.name for value in node.reads() if self.special(value) is not None)
            raise Unsupported(
                "control-flow",
                f"it reads {name!r}, which depends on the number of cached keys; supported: the operators that "
                "docs/loops.md names",
            )
        shared = [x for x in node.inputs if x is not None and (growing := self.growing(x)) and growing.is_shared]
        if shared and (node.domain, node.op_type) not in self._reads_buffers:
            names = ", ".join(sorted(op_type for _, op_type in self._reads_buffers))
            raise Unsupported(
                "control-flow",
                f"it reads {shared[0].name!r}, a cache that past and present share; supported: {names}",
            )
        self.ctx.node = node
        rule(self, node)

    def results(self, node: Node, inputs: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Lower ``node`` by its operator for whole buffers, and return its results.

        ``inputs`` replaces inputs by their index.
        """
        given: list[Value | None] = list(node.inputs)
        replaced = dict(inputs or {})
        for index, value in enumerate(given):
            if index not in replaced and value is not None and isinstance(self.special(value), Sizes | BeamOfKey):
                replaced[index] = self.tensor(value)
        for index, x in replaced.items():
            given += [None] * (index + 1 - len(given))
            stand_in = given[index] = Value(f"input {index} of {node.own_name}", x.dtype, None)
            self.lowering.set(stand_in, x)
        self.lowering.lower(replace(node, inputs=tuple(given)) if replaced else node)
        found = []
        for value in node.outputs:
            if value is not None:
                self._special.pop(value, None)
                found.append(self.tensor(value))
        return found

    # ---- what the device computes ----

    def on_device(self, sizes: Sizes) -> Tensor:
        """Return sizes with PAST as a tensor that the device computes."""
        elements = sizes.array.reshape(-1).tolist()
        shape = sizes.array.shape

        def number(maps: IndexMap, dim: Dim) -> Scalar:
            if not has_past(dim):
                return maps.dim(dim)
            rest = after_past(dim)
            if rest is None:
                raise Unsupported(
                    "control-flow", f"it reads the size {dim!r} ({WHAT_PAST}); supported: past plus a fixed number"
                )
            return self.number(maps) + maps.dim(rest)

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            position = s.constant(0, DType.INT64)
            for at, dim in zip(c, shape, strict=True):
                position = position * dim + at
            result = number(maps, elements[0])
            for index, dim in enumerate(elements[1:], 1):
                result = s.where(s.equal(position, index), number(maps, dim), result)
            return s.cast(result, sizes.dtype)

        return gather_map(self.ctx, shape, sizes.dtype, element)

    def number(self, maps: IndexMap) -> Scalar:
        """Return PAST as int64 in a kernel."""
        return s.cast(maps.number(self.past), DType.INT64)

    def flags(self, extra: int, rank: int, axis: int, *, only_last: bool = False) -> Tensor:
        """Return whether each element along ``axis`` is valid, as bools that broadcast to a growing tensor of ``rank``.

        The first PAST + ``extra`` elements are valid.

        With ``only_last``, only the flag of the last valid element is true.
        """
        key = only_last, extra, self.capacity
        if key not in self._flags:

            def flag(maps: IndexMap, c: list[Scalar]) -> Scalar:
                count = self.number(maps) + extra
                return s.equal(c[0], count - 1) if only_last else c[0] < count

            self._flags[key] = gather_map(self.ctx, (self.capacity,), DType.BOOL, flag)
        return reshape(self.ctx, self._flags[key], (self.capacity, *(1,) * (rank - 1 - axis)))

    def filled(self, x: Growing, axis: int, fill: Number) -> Tensor:
        """Return the tensor with ``fill`` behind the valid elements along ``axis``."""
        flags = self.flags(x.axes[axis], x.x.rank, axis)
        return elementwise(self.ctx, lambda value, is_valid: s.where(is_valid, value, fill), x.x, flags)


Rule: TypeAlias = Callable[[GrowingBody, Node], None]
"""Lowers a node with at least one growing input, and sets its results."""


def _within(node: Node, reason: str) -> str:
    return f"in its decoder, node {node.label}: {reason}"


def needed_input(node: Node, index: int) -> Value:
    """Return an input of a node. Raises InvalidModel if it is missing."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise InvalidModel(f"input {index} is missing")
    return value


def known_integers(body: GrowingBody, node: Node, name: str, index: int) -> Sequence[int] | None:
    """Return integers of the attribute ``name`` or else of input ``index``, None if the node has neither."""
    given = node.attributes.get(name)
    if given is not None:
        if isinstance(given, int):
            return [given]
        if isinstance(given, tuple) and all(isinstance(x, int) for x in given):
            return [int(x) for x in given]
        raise InvalidModel(f"{name}: got {given!r}, expected integers")
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    array = body.sizes(value)
    found = None if array is None else array.reshape(-1).tolist()
    if found is None or not all(isinstance(x, int) for x in found):
        raise Unsupported(
            "control-flow",
            f"{name} (input {index}, {value.name!r}) depends on sizes or on contents of tensors; supported: constants",
        )
    return found
