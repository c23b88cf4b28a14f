"""Searches with a decoder-only model (GPT-2): inputs are tokens, positions, a mask, and the layers' caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...model.ir import DType, Graph, InvalidModel, Node, Unsupported, Value
from ...ops import requirements as require
from ...ops.contrib.generation import search
from ...ops.onnx.tensor.indexing import chosen_slices
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ..nodes.repetition import FunctionNode, Repetition, part
from .search_base import Given, Search, by_name, following, needed
from .search_loop import DecoderInputs, loop_graph

_NUM_FIRST: Final = 3
"""Number of inputs of a decoder before its caches: tokens, positions and mask."""


@dataclass(frozen=True)
class Cache:
    """A K/V cache of one decoder layer: [2 (keys, values), rows, heads, length, width]."""

    heads: int
    width: int
    dtype: DType


class GptDecoder:
    """A search with a decoder-only model, as a loop on the device or as a `Repetition`.

    States are the flag "continue", ``sequences``, the decoder's inputs, and the search's own states.
    """

    def __init__(self, kind: Search) -> None:
        self._search = kind
        self._decoder = kind.body("decoder")
        self._caches = self._caches_of("decoder", self._decoder)
        self._first_decoder = self._decoder
        if "init_decoder" in kind.node.subgraphs:
            self._first_decoder = kind.body("init_decoder")
            if self._caches_of("init_decoder", self._first_decoder) != self._caches:
                caches = "K/V caches of equal number, type, heads and head size as inputs"
                raise InvalidModel(f"{kind.node.op_type}: decoder and init_decoder must have {caches}")

    def repetition(self) -> Repetition:
        kind, name, opsets = self._search, self._search.node.name, self._search.opsets
        states, nodes, made = self._first_calls()
        _, sequences, *_ = states
        own = states[len(states) - len(kind.own_states()) :]
        next_choice, next_made = self._after(self._decoder, sequences, None, own)
        outputs = [value for value in kind.node.outputs if value is not None]
        known = [*states, *kind.inputs]
        return Repetition(
            kind.node,
            states,
            part(f"{name}: prompt", nodes, kind.inputs, made, opsets),
            part(f"{name}: step", [*self._decoder.nodes, next_choice], known, next_made, opsets),
            part(f"{name}: result", [kind.end_node(sequences, own)], known, outputs, opsets),
        )

    def loop(self) -> Graph:
        """Return the search as nodes of one cluster, whose steps are a loop on the device."""
        states, nodes, made = self._first_calls()
        _, positions, mask, *caches = self._decoder.inputs
        inputs = DecoderInputs(caches, key_axis=3, row_axis=1, counted=[positions], masks=[mask])
        return loop_graph(self._search, self._decoder, inputs, nodes, made, states)

    def _first_calls(self) -> tuple[tuple[Value, ...], list[Node], list[Value]]:
        """Return the states, and the nodes up to the first choice of tokens with the values of all states after it."""
        kind = self._search
        sequences = Value("sequences", DType.INT32, ("rows", "room"))
        states = (Value("continue", DType.BOOL, ()), sequences, *self._decoder.inputs, *kind.own_states())
        prompt = Value("prompt", DType.INT32, ("rows", "room"))
        lengths = Value("lengths", DType.INT32, ("rows", 1))
        start = kind.function(self._start, kind.given, [prompt, lengths, *self._first_decoder.inputs])
        choice, made = self._after(self._first_decoder, prompt, lengths, [])
        return states, [start, *self._first_decoder.nodes, choice], made

    def _start(self, ctx: Lowering, given: Given) -> list[Tensor]:
        """Compute ``sequences`` (the prompts, padded to max_length), the prompts' lengths, and the decoder's inputs."""
        ids, mask = needed(given, "input_ids"), given.get("attention_mask")
        if ids.rank != 2:
            raise InvalidModel(f"{self._search.node.op_type}: input_ids must have rank 2, got {ids.rank}")
        room = self._search.room(ctx, given, ids.shape[1])
        require.shape(ctx, ids.shape, attention_mask=mask)
        beams = self._search.beams(ctx, given)
        if beams != 1:
            ids = search.repeated_rows(ctx, ids, beams)
            mask = None if mask is None else search.repeated_rows(ctx, mask, beams)
        counted, positions, lengths = search.prompt_inputs(ctx, ids, self._search.pad)
        caches = [ctx.empty((2, ids.shape[0], cache.heads, 0, cache.width), cache.dtype) for cache in self._caches]
        prompt = search.padded(ctx, ids, room, self._search.pad)
        return [prompt, lengths, ids, positions, counted if mask is None else mask, *caches]

    def _after(
        self, body: Graph, sequences: Value, lengths: Value | None, own: Sequence[Value]
    ) -> tuple[FunctionNode, list[Value]]:
        """Return the node that chooses tokens after a call of the decoder, and the values of all states.

        ``lengths`` are the prompts' lengths after the first call, else None.
        """
        _, positions, mask = body.inputs[:_NUM_FIRST]
        caches = body.outputs[1:]
        inputs = {
            **self._search.given,
            "logits": body.outputs[0],
            "sequences": sequences,
            "mask": mask,
            "positions": lengths or positions,
            **by_name(own),
            **{f"cache {number}": cache for number, cache in enumerate(caches)},
        }
        if lengths is None:
            inputs.pop("prefix_vocab_mask", None)

        def states(ctx: Lowering, given: Given) -> list[Tensor]:
            logits, mask, positions = (needed(given, name) for name in ("logits", "mask", "positions"))
            if logits.rank != 3:
                raise InvalidModel(f"the decoder's logits must have rank 3, got {logits.rank}")
            made = self._search.choose(ctx, given, mask.shape[1], is_first=lengths is not None)
            later = positions if lengths is not None else elementwise(ctx, lambda x: x + 1, positions)
            kept: list[Tensor] = []
            for number in range(len(caches)):
                cache = needed(given, f"cache {number}")
                kept.append(cache if made.rows is None else chosen_slices(ctx, cache, 1, made.rows))
            longer = search.padded(ctx, mask, mask.shape[1] + 1, 1)
            return [made.goes_on, made.sequences, made.tokens, later, longer, *kept, *made.own]

        results = [
            Value("next continue", DType.BOOL, ()),
            Value("next sequences", DType.INT32, ("rows", "room")),
            Value("next input_ids", DType.INT32, ("rows", 1)),
            Value("next position_ids", DType.INT32, ("rows", 1)),
            Value("next attention_mask", DType.INT32, ("rows", "longer")),
            *(Value(f"next {cache.name}", cache.dtype, (None,) * 5) for cache in caches),
            *following(self._search.own_states()),
        ]
        return self._search.function(states, inputs, results), results

    def _caches_of(self, name: str, body: Graph) -> list[Cache]:
        """Return the caches of a decoder. Raises Unsupported or InvalidModel for unexpected inputs and outputs."""
        inputs, outputs = body.inputs, body.outputs
        first = [value.name for value in inputs[: _NUM_FIRST + 1]]
        wanted = ["input_ids", "position_ids", "attention_mask", "past_0"]
        if first != wanted or [value.name for value in outputs[:2]] != ["logits", "present_0"]:
            raise InvalidModel(
                f"{self._search.node.op_type}: the first inputs of the {name} must be {wanted}, and its first outputs "
                f"logits and present_0; got {first} and {[value.name for value in outputs[:2]]}"
            )
        if len(inputs) != len(outputs) + _NUM_FIRST - 1:
            raise Unsupported(
                "control-flow",
                f"the {name} has {len(inputs) - _NUM_FIRST} past and {len(outputs) - 1} present K/V caches; supported: "
                "equal numbers, and no inputs after the past caches",
            )
        if any(value.dtype is not DType.INT32 for value in inputs[:_NUM_FIRST]):
            names = ", ".join(wanted[:_NUM_FIRST])
            found = [value.dtype and value.dtype.name for value in inputs[:_NUM_FIRST]]
            raise InvalidModel(
                f"{self._search.node.op_type}: the inputs {names} of the {name} must have the element type INT32, got "
                f"{found}"
            )
        caches: list[Cache] = []
        for value in inputs[_NUM_FIRST:]:
            shape = value.shape or ()
            if len(shape) != 5 or shape[0] != 2 or not isinstance(shape[2], int) or not isinstance(shape[4], int):
                raise InvalidModel(
                    f"{value.name!r} must have the shape [2, batch, heads, length, head size] with a constant number "
                    f"of heads and head size, got {list(shape)}"
                )
            if value.dtype not in (DType.FLOAT32, DType.FLOAT16):
                dtype = "none" if value.dtype is None else value.dtype.name
                raise InvalidModel(f"{value.name!r} must have the element type FLOAT32 or FLOAT16, got {dtype}")
            caches.append(Cache(shape[2], shape[4], value.dtype))
        return caches
