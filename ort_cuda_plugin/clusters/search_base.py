"""What searches for tokens have in common: what they choose, and what a form of decoder needs to ask them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..model.ir import Graph, InvalidModel, Node, Value
from ..ops.contrib.generation import search
from ..program.lowering import Lowering, Tensor
from ..program.symbolic import Dim, lt
from .repetition import FunctionNode

MOST_ROOM: Final = 4096
"""The largest max_length, as in ONNX Runtime."""

Given = Mapping[str, Tensor | None]
"""Tensors by names: inputs of the search, ``logits``, ``sequences``, and the states of the search's own."""


@dataclass(frozen=True)
class Choice:
    """What follows from the logits of one call of the decoder.

    ``own`` are the states of the search's own. ``rows`` says of which row each row goes on, where not of itself.
    """

    goes_on: Tensor
    sequences: Tensor
    tokens: Tensor
    own: Sequence[Tensor]
    rows: Tensor | None = None


def attribute_number(node: Node, name: str, default: int | None = None) -> int:
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise InvalidModel(f"{node.op_type} needs a number {name}, it is {value!r}")
    return value


def attribute_real(node: Node, name: str, default: float) -> float:
    value = node.attributes.get(name, default)
    if not isinstance(value, int | float):
        raise InvalidModel(f"{name} of {node.op_type} must be a number, it is {value!r}")
    return float(value)


class Search(ABC):
    """What is chosen, and how.

    Attributes:
        input_names: the operator's inputs.
        given: those that the node has, by name.
    """

    input_names: str

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        self.node, self.opsets = node, opsets
        self.end, self.pad = attribute_number(node, "eos_token_id"), attribute_number(node, "pad_token_id")
        names = self.input_names.split()
        self.given = {name: x for name, x in zip(names, node.inputs, strict=False) if x is not None}
        for name in ("input_ids", "max_length"):
            if name not in self.given:
                raise InvalidModel(f"{node.op_type} lacks its input {name}")
        if not node.outputs or node.outputs[0] is None:
            raise InvalidModel(f"{node.op_type} gives no sequences")
        self.rules = search.Rules(
            self.end,
            attribute_number(node, "no_repeat_ngram_size", 0),
            attribute_real(node, "temperature", 1.0),
            attribute_real(node, "presence_penalty", 0.0),
        )

    # ---- what a kind of search says ----

    def beams(self, ctx: Lowering, given: Given) -> Dim:
        """How many rows there are for each of the prompt."""
        return 1

    @abstractmethod
    def own_states(self) -> list[Value]:
        """The states that only this kind of search has."""

    @abstractmethod
    def choose(self, ctx: Lowering, given: Given, length: Dim, *, is_first: bool) -> Choice:
        """The tokens behind the first ``length`` ones of ``sequences``; own states are not there at first."""

    @abstractmethod
    def finish(self, ctx: Lowering, given: Given) -> list[Tensor]:
        """The outputs of the node."""

    # ---- for forms of decoders ----

    @property
    def inputs(self) -> list[Value]:
        """What the node reads in a Run, implicit inputs as well."""
        return [*dict.fromkeys(value for value in self.node.reads() if value.initializer is None)]

    def body(self, name: str) -> Graph:
        """Raises InvalidModel where the node has none."""
        body = self.node.subgraphs.get(name)
        if body is None:
            raise InvalidModel(f"{self.node.op_type} needs its body {name!r}")
        return body

    def room(self, ctx: Lowering, given: Given, length: Dim) -> Dim:
        """max_length, which must be greater than that of the tokens at first."""
        room = ctx.host_number(needed(given, "max_length"), "max_length")
        ctx.require(lt(length, room), "max_length is not greater than the length of input_ids")
        ctx.require(lt(room, MOST_ROOM + 1), f"max_length is greater than {MOST_ROOM}")
        return room

    def function(
        self,
        function: Callable[[Lowering, Given], Sequence[Tensor]],
        inputs: Mapping[str, Value],
        outputs: Sequence[Value | None],
    ) -> FunctionNode:
        """A part of the node."""
        node, names = self.node, list(inputs)

        def lowered(ctx: Lowering, *tensors: Tensor) -> Sequence[Tensor]:
            return function(ctx, dict(zip(names, tensors, strict=True)))

        return FunctionNode(
            node.name, node.op_type, node.domain, node.since_version, tuple(inputs.values()), tuple(outputs),
            function=lowered,
        )  # fmt: skip

    def end_node(self, sequences: Value, own: Iterable[Value]) -> FunctionNode:
        """What makes the node's outputs of ``sequences`` and the own states."""
        inputs = {**self.given, "sequences": sequences, **by_name(own)}
        return self.function(self.finish, inputs, self.node.outputs)


def rule_inputs(given: Given) -> search.RuleInputs:
    """Those of a search's inputs that change scores."""
    return search.RuleInputs(
        given.get("min_length"),
        given.get("repetition_penalty"),
        given.get("vocab_mask"),
        given.get("prefix_vocab_mask"),
        given.get("presence_mask"),
    )


def needed(given: Given, name: str) -> Tensor:
    """An input that is there."""
    tensor = given[name]
    assert tensor is not None
    return tensor


def by_name(values: Iterable[Value]) -> dict[str, Value]:
    return {value.name: value for value in values}


def following(values: Iterable[Value]) -> list[Value]:
    """The same states after a choice."""
    return [Value(f"next {value.name}", value.dtype, value.shape) for value in values]
