"""A node as three clusters: the first computes states from the node's inputs, the second updates them repeatedly, the
third computes the outputs.

``csrc_shim/run/repeat.h`` runs them. States stay on the device; only the flag that asks for another step is copied
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...model.ir import Graph, Node, Value
from ...program.steps.containers import Operand

Function = Callable[..., Sequence[Operand]]
"""Function of the lowering context and the node's inputs, like an operator's function."""


@dataclass(eq=False)
class FunctionNode(Node):
    """A node outside of the operator table: ``function`` lowers it."""

    function: Function = field(default=lambda ctx, *inputs: inputs)


@dataclass(frozen=True)
class Part:
    """One of the three clusters. Its inputs are states and inputs of the node; ``results`` numbers the states that it
    writes.
    """

    graph: Graph
    results: tuple[int, ...]


@dataclass(frozen=True)
class Repetition:
    """A node in the form of three clusters and their states.

    The first of ``states`` is the flag; the values are inputs of the step and of the last cluster. ``first`` computes
    all states. A state that ``step`` does not compute stays constant.
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
        """Return the source of each input of a part: the number of a state, or behind the states that of an input."""
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
    """Make a part of ``nodes``, with those inputs from ``available`` that they read.

    ``made`` are the states with the numbers ``results``; default: the first ones.
    """
    read = {value for node in nodes for value in node.reads()}.union(made)
    inputs = [value for value in available if value in read and value.initializer is None]
    numbers = range(len(made)) if results is None else results
    return Part(Graph(name, list(nodes), inputs, list(made), opsets), tuple(numbers))
