"""Searches with a decoder like GPT-2: it takes tokens with their positions, a mask, and the caches of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..model.ir import DType, Graph, InvalidModel, Node, Unsupported, Value
from ..ops import search
from ..program.elementwise import elementwise
from ..program.lowering import Lowering, Tensor
from ..program.symbolic import Dim, lt
from .repetition import FunctionNode, Repetition, part

_NUM_FIRST: Final = 3
"""Inputs of a decoder before its caches."""
MOST_ROOM: Final = 4096
"""The largest max_length, as in ONNX Runtime."""

Given = Mapping[str, Tensor | None]
"""Tensors by names: inputs of the search, ``logits``, ``sequences``, ``mask``, and the states of the search's own."""


@dataclass(frozen=True)
class Cache:
    """A cache of a decoder: [2, rows, heads, length, width]."""

    heads: int
    width: int
    dtype: DType


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


class GptSearch(ABC):
    """A search as a repetition. States are the flag, ``sequences``, the decoder's inputs, and those of `own_states`.

    Attributes:
        input_names: the operator's inputs.
    """

    input_names: str

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        if attribute_number(node, "model_type", 0) != 0:
            raise Unsupported("attribute", f"{node.op_type} with a model_type other than that of GPT-2")
        self.node, self._opsets = node, opsets
        self.end, self.pad = attribute_number(node, "eos_token_id"), attribute_number(node, "pad_token_id")
        names = self.input_names.split()
        self._given = {name: x for name, x in zip(names, node.inputs, strict=False) if x is not None}
        for name in ("input_ids", "max_length"):
            if name not in self._given:
                raise InvalidModel(f"{node.op_type} lacks its input {name}")
        self._decoder = self._body("decoder")
        self._caches = self._caches_of("decoder", self._decoder)
        self._first_decoder = self._decoder
        if "init_decoder" in node.subgraphs:
            self._first_decoder = self._body("init_decoder")
            if self._caches_of("init_decoder", self._first_decoder) != self._caches:
                raise InvalidModel(f"the bodies of {node.op_type} have different caches")
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

    # ---- the repetition ----

    def repetition(self) -> Repetition:
        """The node as a repetition."""
        name = self.node.name
        inputs = [*dict.fromkeys(value for value in self.node.reads() if value.initializer is None)]
        sequences = Value("sequences", DType.INT32, ("rows", "room"))
        own = self.own_states()
        states = (Value("goes on", DType.BOOL, ()), sequences, *self._decoder.inputs, *own)
        prompt = Value("prompt", DType.INT32, ("rows", "room"))
        lengths = Value("lengths", DType.INT32, ("rows", 1))
        start = self._function(self._start, self._given, [prompt, lengths, *self._first_decoder.inputs])
        choice, made = self._after(self._first_decoder, prompt, lengths, [])
        next_choice, next_made = self._after(self._decoder, sequences, None, own)
        end = self._function(self.finish, {**self._given, "sequences": sequences, **_by_name(own)}, self.node.outputs)
        outputs = [value for value in self.node.outputs if value is not None]
        return Repetition(
            self.node,
            states,
            part(f"{name}: prompt", [start, *self._first_decoder.nodes, choice], inputs, made, self._opsets),
            part(f"{name}: step", [*self._decoder.nodes, next_choice], [*states, *inputs], next_made, self._opsets),
            part(f"{name}: result", [end], [*states, *inputs], outputs, self._opsets),
        )

    def _function(
        self,
        function: Callable[[Lowering, Given], Sequence[Tensor]],
        inputs: Mapping[str, Value],
        outputs: Sequence[Value | None],
    ) -> FunctionNode:
        node, names = self.node, list(inputs)

        def lowered(ctx: Lowering, *tensors: Tensor) -> Sequence[Tensor]:
            return function(ctx, dict(zip(names, tensors, strict=True)))

        return FunctionNode(
            node.name, node.op_type, node.domain, node.since_version, tuple(inputs.values()), tuple(outputs),
            function=lowered,
        )  # fmt: skip

    def _start(self, ctx: Lowering, given: Given) -> list[Tensor]:
        """The tokens so far, with room for all, the lengths of the prompts, and the decoder's first inputs."""
        ids, max_length, mask = given["input_ids"], given["max_length"], given.get("attention_mask")
        assert ids is not None
        assert max_length is not None
        if ids.rank != 2:
            raise InvalidModel(f"input_ids of {self.node.op_type} have rank {ids.rank}, not 2")
        room = ctx.host_number(max_length, "max_length")
        ctx.require(lt(ids.shape[1], room), "max_length is not greater than the length of input_ids")
        ctx.require(lt(room, MOST_ROOM + 1), f"max_length is greater than {MOST_ROOM}")
        if mask is not None:
            ctx.require_shape(mask, ids.shape, "attention_mask")
        beams = self.beams(ctx, given)
        if beams != 1:
            ids = search.repeated_rows(ctx, ids, beams)
            mask = None if mask is None else search.repeated_rows(ctx, mask, beams)
        counted, positions, lengths = search.prompt_inputs(ctx, ids, self.pad)
        caches = [ctx.empty((2, ids.shape[0], cache.heads, 0, cache.width), cache.dtype) for cache in self._caches]
        prompt = search.room_for_tokens(ctx, ids, room, self.pad)
        return [prompt, lengths, ids, positions, counted if mask is None else mask, *caches]

    def _after(
        self, body: Graph, sequences: Value, lengths: Value | None, own: Sequence[Value]
    ) -> tuple[FunctionNode, list[Value]]:
        """The node that follows a decoder, and all states then. ``lengths`` are those of prompts, after their pass."""
        _, positions, mask = body.inputs[:_NUM_FIRST]
        caches = body.outputs[1:]
        inputs = {
            **self._given,
            "logits": body.outputs[0],
            "sequences": sequences,
            "mask": mask,
            "positions": lengths or positions,
            **_by_name(own),
            **{f"cache {number}": cache for number, cache in enumerate(caches)},
        }
        if lengths is None:
            inputs.pop("prefix_vocab_mask", None)

        def states(ctx: Lowering, given: Given) -> list[Tensor]:
            logits, mask, positions = given["logits"], given["mask"], given["positions"]
            assert logits is not None
            assert mask is not None
            assert positions is not None
            if logits.rank != 3:
                raise InvalidModel(f"the logits of a decoder have rank {logits.rank}, not 3")
            made = self.choose(ctx, given, mask.shape[1], is_first=lengths is not None)
            later = positions if lengths is not None else elementwise(ctx, lambda x: x + 1, positions)
            kept: list[Tensor] = []
            for number in range(len(caches)):
                cache = given[f"cache {number}"]
                assert cache is not None
                kept.append(cache if made.rows is None else search.chosen_rows(ctx, cache, 1, made.rows))
            longer = search.longer_mask(ctx, mask)
            return [made.goes_on, made.sequences, made.tokens, later, longer, *kept, *made.own]

        results = [
            Value("goes on after this", DType.BOOL, ()),
            Value("sequences after this", DType.INT32, ("rows", "room")),
            Value("next input_ids", DType.INT32, ("rows", 1)),
            Value("next position_ids", DType.INT32, ("rows", 1)),
            Value("next attention_mask", DType.INT32, ("rows", "longer")),
            *(Value(f"next {cache.name}", cache.dtype, (None,) * 5) for cache in caches),
            *(Value(f"next {value.name}", value.dtype, value.shape) for value in self.own_states()),
        ]
        return self._function(states, inputs, results), results

    def _body(self, name: str) -> Graph:
        body = self.node.subgraphs.get(name)
        if body is None:
            raise InvalidModel(f"{self.node.op_type} needs its body {name!r}")
        return body

    def _caches_of(self, name: str, body: Graph) -> list[Cache]:
        """Raises Unsupported and InvalidModel where it is no such decoder."""
        inputs, outputs = body.inputs, body.outputs
        first = [value.name for value in inputs[: _NUM_FIRST + 1]]
        wanted = ["input_ids", "position_ids", "attention_mask", "past_0"]
        if first != wanted or [value.name for value in outputs[:2]] != ["logits", "present_0"]:
            raise InvalidModel(f"the {name} of {self.node.op_type} has inputs {first}, not {wanted}")
        if len(inputs) != len(outputs) + _NUM_FIRST - 1:
            raise Unsupported("control-flow", f"a {name} whose past and present share a buffer")
        if any(value.dtype is not DType.INT32 for value in inputs[:_NUM_FIRST]):
            raise InvalidModel(f"the first inputs of the {name} of {self.node.op_type} must be int32")
        caches: list[Cache] = []
        for value in inputs[_NUM_FIRST:]:
            shape = value.shape or ()
            if len(shape) != 5 or shape[0] != 2 or not isinstance(shape[2], int) or not isinstance(shape[4], int):
                raise InvalidModel(f"{value!r} must have 5 dimensions: 2, batch, heads, length, width of a head")
            if value.dtype not in (DType.FLOAT32, DType.FLOAT16):
                raise InvalidModel(f"{value!r} must be float32 or float16")
            caches.append(Cache(shape[2], shape[4], value.dtype))
        return caches


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


def _by_name(values: Iterable[Value]) -> dict[str, Value]:
    return {value.name: value for value in values}
