"""GreedySearch and Sampling of com.microsoft: the decoder and what chooses tokens, as a repetition.

ONNX Runtime's own kernels read on the host what the decoder gives, so a decoder on the device has to come with the
search around it. The C API has no kernel of these operators for plugins as it has one of Loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..model.ir import DType, Graph, InvalidModel, Node, Unsupported, Value
from ..ops import search
from ..program.containers import Operand
from ..program.elementwise import elementwise
from ..program.lowering import Lowering, Tensor
from ..program.symbolic import lt
from .repetition import FunctionNode, Repetition, part

_INPUTS: Final = {
    "GreedySearch": "input_ids max_length min_length repetition_penalty vocab_mask prefix_vocab_mask attention_mask",
}
"""The inputs of the operators, by name."""
_NUM_FIRST: Final = 3
"""Inputs of a decoder before its caches."""


def is_search(node: Node | None) -> bool:
    """Whether the plugin may run the node, with its bodies, as a repetition."""
    if node is None or isinstance(node, FunctionNode):
        return False
    return node.domain == "com.microsoft" and node.op_type in _INPUTS


def as_repetition(node: Node, opsets: Mapping[str, int]) -> Repetition:
    """What is repeated for a node of which `is_search` holds.

    Raises:
        Unsupported, InvalidModel: it cannot be run.
    """
    return _Greedy(node, dict(opsets)).repetition()


def _number(node: Node, name: str, default: int | None = None) -> int:
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise InvalidModel(f"{node.op_type} needs a number {name}, it is {value!r}")
    return value


def _real(node: Node, name: str, default: float) -> float:
    value = node.attributes.get(name, default)
    if not isinstance(value, int | float):
        raise InvalidModel(f"{name} of {node.op_type} must be a number, it is {value!r}")
    return float(value)


def _body(node: Node, name: str) -> Graph:
    body = node.subgraphs.get(name)
    if body is None:
        raise InvalidModel(f"{node.op_type} needs its body {name!r}")
    return body


def _caches_of_gpt(node: Node, name: str, body: Graph) -> list[tuple[int, int, DType]]:
    """The caches that a decoder like GPT-2 takes: heads, width of a head, type. Raises as `as_repetition`."""
    inputs, outputs = body.inputs, body.outputs
    first = [value.name for value in inputs[: _NUM_FIRST + 1]]
    wanted = ["input_ids", "position_ids", "attention_mask", "past_0"]
    if first != wanted or [value.name for value in outputs[:2]] != ["logits", "present_0"]:
        raise InvalidModel(f"the {name} of {node.op_type} has inputs {first}, not {wanted}")
    if len(inputs) != len(outputs) + _NUM_FIRST - 1:
        raise Unsupported("control-flow", f"a {name} whose past and present share a buffer")
    if any(value.dtype is not DType.INT32 for value in inputs[:_NUM_FIRST]):
        raise InvalidModel(f"the first inputs of the {name} of {node.op_type} must be int32")
    caches: list[tuple[int, int, DType]] = []
    for value in inputs[_NUM_FIRST:]:
        shape = value.shape or ()
        if len(shape) != 5 or shape[0] != 2 or not isinstance(shape[2], int) or not isinstance(shape[4], int):
            raise InvalidModel(f"{value!r} must have 5 dimensions: 2, batch, heads, length, width of a head")
        if value.dtype not in (DType.FLOAT32, DType.FLOAT16):
            raise InvalidModel(f"{value!r} must be float32 or float16")
        caches.append((shape[2], shape[4], value.dtype))
    return caches


class _Greedy:
    """Names stand for the states: ``goes_on``, ``sequences``, ``ended``, and the decoder's inputs."""

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        if _number(node, "model_type", 0) != 0:
            raise Unsupported("attribute", f"{node.op_type} with a model_type other than that of GPT-2")
        self._node, self._opsets = node, opsets
        self._end, self._pad = _number(node, "eos_token_id"), _number(node, "pad_token_id")
        names = _INPUTS[node.op_type].split()
        self._given = {name: x for name, x in zip(names, node.inputs, strict=False) if x is not None}
        for name in ("input_ids", "max_length"):
            if name not in self._given:
                raise InvalidModel(f"{node.op_type} lacks its input {name}")
        self._decoder = _body(node, "decoder")
        self._caches = _caches_of_gpt(node, "decoder", self._decoder)
        self._first_decoder = self._decoder
        if "init_decoder" in node.subgraphs:
            self._first_decoder = _body(node, "init_decoder")
            if _caches_of_gpt(node, "init_decoder", self._first_decoder) != self._caches:
                raise InvalidModel(f"the bodies of {node.op_type} have different caches")
        self._rules = search.Rules(
            self._end,
            _number(node, "no_repeat_ngram_size", 0),
            _real(node, "temperature", 1.0),
            _real(node, "presence_penalty", 0.0),
        )

    def repetition(self) -> Repetition:
        """The node as a repetition."""
        goes_on = Value("goes on", DType.BOOL, ())
        sequences = Value("tokens so far", DType.INT32, ("batch", "room"))
        ended = Value("rows that ended", DType.BOOL, ("batch",))
        states = (goes_on, sequences, ended, *self._decoder.inputs)
        prompt = Value("prompt with room", DType.INT32, ("batch", "room"))
        lengths = Value("length of the prompt", DType.INT32, ("batch", 1))
        start = self._function(
            self._start, [self._given.get(name) for name in ("input_ids", "max_length", "attention_mask")],
            [prompt, lengths, *self._first_decoder.inputs],
        )  # fmt: skip
        inputs = [*dict.fromkeys(value for value in self._node.reads() if value.initializer is None)]
        first = [start, *self._first_decoder.nodes]
        choice, made = self._choose(self._first_decoder, prompt, None, lengths)
        step_choice, next_made = self._choose(self._decoder, sequences, ended, None)
        output = self._node.outputs[0]
        if output is None:
            raise InvalidModel(f"{self._node.op_type} gives no sequences")
        finish = self._function(lambda ctx, x: [x], [sequences], [output])
        return Repetition(
            self._node,
            states,
            part(f"{self._node.name}: prompt", [*first, choice], inputs, [*enumerate(made)], self._opsets),
            part(
                f"{self._node.name}: step",
                [*self._decoder.nodes, step_choice],
                [*states, *inputs],
                [*enumerate(next_made)],
                self._opsets,
            ),
            part(f"{self._node.name}: result", [finish], states, [(0, output)], self._opsets),
        )

    def _function(
        self,
        function: Callable[..., Sequence[Operand]],
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
    ) -> FunctionNode:
        node = self._node
        return FunctionNode(
            node.name, node.op_type, node.domain, node.since_version, tuple(inputs), tuple(outputs), function=function
        )

    def _start(self, ctx: Lowering, ids: Tensor, max_length: Tensor, mask: Tensor | None) -> list[Tensor]:
        """The tokens so far, with room for all, and the first inputs of the decoder."""
        if ids.rank != 2:
            raise InvalidModel(f"input_ids of {self._node.op_type} have rank {ids.rank}, not 2")
        room = ctx.host_number(max_length, "max_length")
        ctx.require(lt(ids.shape[1], room), "max_length is not greater than the length of input_ids")
        counted, positions, lengths = search.prompt_inputs(ctx, ids, self._pad)
        if mask is not None:
            ctx.require_shape(mask, ids.shape, "attention_mask")
        caches = [ctx.empty((2, ids.shape[0], heads, 0, width), dtype) for heads, width, dtype in self._caches]
        prompt = search.room_for_tokens(ctx, ids, room, self._pad)
        return [prompt, lengths, ids, positions, counted if mask is None else mask, *caches]

    def _choose(
        self, body: Graph, sequences: Value, ended: Value | None, lengths: Value | None
    ) -> tuple[FunctionNode, list[Value]]:
        """The node that follows a decoder, and the states after it; ``lengths`` of the prompt come with it."""
        optional = ["min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"]
        if lengths is None:
            optional.pop()
        given = [self._given.get(name) for name in optional]
        inputs = [body.outputs[0], sequences, lengths or body.inputs[1], body.inputs[2], ended, *given]
        rank2 = ("batch", "one")
        outputs = [
            Value("goes on after this", DType.BOOL, ()),
            Value("tokens after this", DType.INT32, ("batch", "room")),
            Value("rows that ended by now", DType.BOOL, ("batch",)),
            Value("next input_ids", DType.INT32, rank2),
            Value("next position_ids", DType.INT32, rank2),
            Value("next attention_mask", DType.INT32, ("batch", "longer")),
        ]

        def choose(
            ctx: Lowering,
            logits: Tensor,
            sequences: Tensor,
            places: Tensor,
            mask: Tensor,
            ended: Tensor | None,
            least: Tensor | None,
            penalty: Tensor | None,
            vocabulary_mask: Tensor | None,
            prefix_mask: Tensor | None = None,
        ) -> list[Tensor]:
            if logits.rank != 3:
                raise InvalidModel(f"the logits of a decoder have rank {logits.rank}, not 3")
            length = mask.shape[1]
            rule_inputs = search.RuleInputs(least, penalty, vocabulary_mask, prefix_mask)
            scores = search.last_scores(ctx, logits)
            scores = search.ruled_scores(ctx, scores, sequences, length, self._rules, rule_inputs)
            tokens = search.best_tokens(ctx, scores)
            found = search.append_tokens(ctx, tokens, sequences, length, ended, self._end, self._pad)
            return [
                found.goes_on,
                found.sequences,
                found.ended,
                found.tokens,
                places if lengths is not None else elementwise(ctx, lambda x: x + 1, places),
                search.longer_mask(ctx, mask),
            ]

        return self._function(choose, inputs, outputs), [*outputs, *body.outputs[1:]]
