"""A node as three clusters: one makes states of the node's inputs, a step is repeated on them, one makes the outputs.

``csrc_shim/run/repeat.h`` runs it: states stay on the device. Only the flag comes back that decides on
another step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..model.ir import Graph, Node, Value
from ..program.containers import Operand

Function = Callable[..., Sequence[Operand]]
"""Takes the lowering context and the node's inputs, as an operator's function does."""


@dataclass(eq=False)
class FunctionNode(Node):
    """A part of a node, which no operator table has: ``function`` lowers it."""

    function: Function = field(default=lambda ctx, *inputs: inputs)


@dataclass(frozen=True)
class Part:
    """What one of the clusters does. Its inputs are states and inputs of the node; ``results`` numbers its states."""

    graph: Graph
    results: tuple[int, ...]


@dataclass(frozen=True)
class Repetition:
    """``node`` as what is repeated.

    The first of ``states`` is the flag; as values they are what the step and the last cluster read. ``first`` makes
    all of them. What ``step`` does not make stays what it is.
    """

    node: Node
    states: tuple[Value, ...]
    first: Part
    step: Part
    last: Part

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.first, self.step, self.last

    def sources(self, part: Part, inputs: Sequence[Value]) -> list[int]:
        """Where each input of a part comes from: the number of a state, or behind these that of an input."""
        known = {value: number for number, value in enumerate((*self.states, *inputs))}
        return [known[value] for value in part.graph.inputs]


def part(
    name: str,
    nodes: Sequence[Node],
    available: Iterable[Value],
    made: Sequence[Value],
    opsets: dict[str, int],
    results: Iterable[int] | None = None,
) -> Part:
    """A part of ``nodes``, with those inputs of the ``available`` that they read.

    ``made`` are the states with the numbers ``results``; default: the first ones.
    """
    read = {value for node in nodes for value in node.reads()}.union(made)
    inputs = [value for value in available if value in read and value.initializer is None]
    numbers = range(len(made)) if results is None else results
    return Part(Graph(name, list(nodes), inputs, list(made), opsets), tuple(numbers))
