"""Repetition: a node as three clusters, which compute states from inputs, update them repeatedly, and return results.

``csrc_shim/run/repeat.h`` runs the clusters. States stay on the device; only the flag "continue" is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...model.ir import Graph, Node, Value
from ...program.steps.containers import Operand

Function = Callable[..., Sequence[Operand]]
"""``function(ctx, *inputs)`` lowers a node, like an operator's function."""


@dataclass(eq=False)
class FunctionNode(Node):
    """A node that is not in the operator table; ``function`` lowers it.

    If the node has ``subgraphs``, the first argument of ``function`` is the `NodeLowering`, which lowers their nodes.
    """

    function: Function = field(default=lambda ctx, *inputs: inputs)


@dataclass(frozen=True)
class Part:
    """One of a repetition's three clusters. It reads states and inputs of the node.

    Its outputs are the states with the indices ``results``; those of the last cluster are the node's outputs.
    """

    graph: Graph
    results: tuple[int, ...]


@dataclass(frozen=True)
class Repetition:
    """Three clusters and their states; the first state is the flag "continue".

    ``first`` computes all states. ``step`` updates states for as long as the flag is true; a state that it does not
    compute stays constant. ``last`` computes the node's outputs from the states.
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
        """Return, for each input of the cluster ``part``, its index in the list of states followed by ``inputs``."""
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
    """Return the cluster with ``nodes``. Its inputs are the values of ``available`` that are read or are outputs.

    ``made`` are the cluster's outputs: the states with the indices ``results``, by default the first states.
    """
    read = {value for node in nodes for value in node.reads()}.union(made)
    inputs = [value for value in available if value in read and value.initializer is None]
    numbers = range(len(made)) if results is None else results
    return Part(Graph(name, list(nodes), inputs, list(made), opsets), tuple(numbers))
