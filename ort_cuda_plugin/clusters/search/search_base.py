"""Base of the token searches: the choice of tokens, and the interface to the decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...model.ir import Graph, InvalidModel, Node, Value
from ...ops.contrib.generation import search
from ...ops.contrib.generation.search import Count
from ...program.expressions.symbolic import Dim, lt
from ...program.lowering.context import Lowering, Tensor
from ..nodes.repetition import FunctionNode

MOST_ROOM: Final = 4096
"""Maximum of the input max_length, in tokens, as in ONNX Runtime."""

Given = Mapping[str, Tensor | None]
"""Tensors by name: inputs of the search, ``logits``, ``sequences``, and the search's own states."""


@dataclass(frozen=True)
class Choice:
    """The tokens that a search chooses in one step, and the states after it.

    ``goes_on`` is the flag "continue"; ``own`` are the search's own states. ``rows`` holds, for each new row of
    ``sequences``, the index of the row that it continues; None if each row continues itself.
    """

    goes_on: Tensor
    sequences: Tensor
    tokens: Tensor
    own: Sequence[Tensor]
    rows: Tensor | None = None


def attribute_number(node: Node, name: str, default: int | None = None) -> int:
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise InvalidModel(f"{node.op_type}: {name} must be an integer, got {value!r}")
    return value


def attribute_real(node: Node, name: str, default: float) -> float:
    value = node.attributes.get(name, default)
    if not isinstance(value, int | float):
        raise InvalidModel(f"{node.op_type}: {name} must be a number, got {value!r}")
    return float(value)


class Search(ABC):
    """Base of the token searches.

    ``input_names`` lists the operator's inputs; ``given`` maps them to the node's values.
    """

    input_names: str

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        self.node, self.opsets = node, opsets
        self.end, self.pad = attribute_number(node, "eos_token_id"), attribute_number(node, "pad_token_id")
        names = self.input_names.split()
        self.given = {name: x for name, x in zip(names, node.inputs, strict=False) if x is not None}
        for name in ("input_ids", "max_length"):
            if name not in self.given:
                raise InvalidModel(f"{node.op_type}: input {name} is missing")
        if not node.outputs or node.outputs[0] is None:
            raise InvalidModel(f"{node.op_type}: output sequences is missing")
        self.rules = search.Rules(
            self.end,
            attribute_number(node, "no_repeat_ngram_size", 0),
            attribute_real(node, "temperature", 1.0),
            attribute_real(node, "presence_penalty", 0.0),
        )

    # ---- methods that each kind of search defines ----

    def beams(self, ctx: Lowering, given: Given) -> Dim:
        """Return the number of sequences per prompt."""
        return 1

    @abstractmethod
    def own_states(self) -> list[Value]:
        """Return the states that only this kind of search has, such as the scores of beams."""

    @abstractmethod
    def choose(self, ctx: Lowering, given: Given, length: Count, *, is_first: bool) -> Choice:
        """Choose the tokens after the first ``length`` tokens of ``sequences``.

        ``is_first``: the search's own states are not computed yet.
        """

    @abstractmethod
    def finish(self, ctx: Lowering, given: Given) -> list[Tensor]:
        """Return the outputs of the node."""

    # ---- interface to the decoders ----

    @property
    def inputs(self) -> list[Value]:
        """Return the values that the node reads in a Run, including implicit inputs."""
        return [*dict.fromkeys(value for value in self.node.reads() if value.initializer is None)]

    def body(self, name: str) -> Graph:
        """Return a body of the node. Raises InvalidModel if it is missing."""
        body = self.node.subgraphs.get(name)
        if body is None:
            raise InvalidModel(f"{self.node.op_type}: body {name!r} is missing")
        return body

    def room(self, ctx: Lowering, given: Given, length: Dim) -> Dim:
        """Return max_length: at most `MOST_ROOM`, more than ``length``, the number of the decoder's first tokens."""
        room = ctx.host_number(needed(given, "max_length"), "max_length")
        ctx.require(
            lt(length, room), "max_length must be greater than the number of tokens with which the decoder starts"
        )
        ctx.require(lt(room, MOST_ROOM + 1), f"max_length must be at most {MOST_ROOM}")
        return room

    def function(
        self,
        function: Callable[[Lowering, Given], Sequence[Tensor]],
        inputs: Mapping[str, Value],
        outputs: Sequence[Value | None],
    ) -> FunctionNode:
        """Return a node that ``function`` lowers; the function gets the tensors of ``inputs`` by the same names."""
        node, names = self.node, list(inputs)

        def lowered(ctx: Lowering, *tensors: Tensor) -> Sequence[Tensor]:
            return function(ctx, dict(zip(names, tensors, strict=True)))

        return FunctionNode(
            node.name, node.op_type, node.domain, node.since_version, tuple(inputs.values()), tuple(outputs),
            function=lowered,
        )  # fmt: skip

    def end_node(self, sequences: Value, own: Iterable[Value]) -> FunctionNode:
        """Return the node that computes the outputs from ``sequences`` and the search's own states."""
        inputs = {**self.given, "sequences": sequences, **by_name(own)}
        return self.function(self.finish, inputs, self.node.outputs)


def rule_inputs(given: Given) -> search.RuleInputs:
    """Return those inputs of a search that change the scores of tokens."""
    return search.RuleInputs(
        given.get("min_length"),
        given.get("repetition_penalty"),
        given.get("vocab_mask"),
        given.get("prefix_vocab_mask"),
        given.get("presence_mask"),
    )


def needed(given: Given, name: str) -> Tensor:
    """Return an input that the search requires."""
    tensor = given[name]
    assert tensor is not None
    return tensor


def by_name(values: Iterable[Value]) -> dict[str, Value]:
    return {value.name: value for value in values}


def following(values: Iterable[Value]) -> list[Value]:
    """Return a new value for each state, which holds the state after a choice of tokens."""
    return [Value(f"next {value.name}", value.dtype, value.shape) for value in values]
