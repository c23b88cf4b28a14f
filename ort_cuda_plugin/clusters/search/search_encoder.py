"""Encoder-decoder searches (T5, Whisper): the decoder has self-attention and cross-attention caches.

The encoder's body may contain the decoder's first pass, and then also returns logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import DType, Graph, InvalidModel, Node, Unsupported, Value
from ...ops import requirements as require
from ...ops.contrib.generation import search
from ...ops.onnx.tensor.indexing import chosen_slices
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import full
from ..nodes.repetition import FunctionNode, Repetition, part
from .search_base import Given, Search, attribute_number, by_name, following, needed
from .search_loop import DecoderInputs, loop_graph

_REALS = (DType.FLOAT32, DType.FLOAT16)


class EncoderDecoder:
    """A search with encoder and decoder, as a loop on the device or as a `Repetition`.

    States are the flag "continue", ``sequences``, the decoder's inputs, and the search's own states. Decoder inputs
    that the encoder computes are equal for all beams of a prompt, and stay constant.
    """

    def __init__(self, kind: Search, has_mask: bool) -> None:
        self._search = kind
        self._has_mask = has_mask
        self._encoder, self._decoder = kind.body("encoder"), kind.body("decoder")
        names = ["input_ids", *["encoder_attention_mask"] * has_mask]
        self._check_names("inputs of the decoder", self._decoder.inputs, names)
        self._check_names("outputs of the decoder", self._decoder.outputs, ["logits"])
        if len(self._decoder.inputs) == len(names):
            raise InvalidModel(f"the decoder must have inputs for K/V caches after {', '.join(names)}, got none")
        self._has_hidden = self._decoder.inputs[len(names)].name == "encoder_hidden_states"
        self._first_cache = len(names) + self._has_hidden
        self._num_self = len(self._decoder.outputs) - 1
        behind = self._first_cache + 2 * self._num_self
        self._caches, self._shared = self._decoder.inputs[self._first_cache : behind], self._decoder.inputs[behind:]
        if len(self._caches) != 2 * self._num_self or len(self._shared) not in (0, 1, 3) or self._num_self < 2:
            raise Unsupported(
                "control-flow",
                f"the decoder has {len(self._caches) + len(self._shared)} inputs from the first K/V cache on, and "
                f"{self._num_self} caches as outputs; supported: two inputs for each of at least two outputs, then "
                "perhaps past_sequence_length, or also beam_width and cache_indirection",
            )
        if any(value.dtype is not DType.INT32 for value in self._shared):
            found = [value.dtype and value.dtype.name for value in self._shared]
            raise InvalidModel(
                f"the decoder's inputs after its K/V caches must have the element type INT32, got {found}"
            )
        if (shape := self._decoder.inputs[0].shape) is None or len(shape) != 2 or shape[1] != 1:
            raise Unsupported(
                "control-flow",
                f"the decoder's input_ids have the shape {shape}; supported: [rows, 1], the last token, since the "
                "K/V cache holds the earlier ones",
            )
        if any(value.dtype not in _REALS or len(value.shape or ()) != 4 for value in self._caches):
            caches = [(value.dtype and value.dtype.name, len(value.shape or ())) for value in self._caches]
            wanted = "element type FLOAT32 or FLOAT16 and rank 4"
            raise InvalidModel(f"the K/V caches that the decoder reads must have {wanted}, got {caches}")
        encoder_names = ["encoder_input_ids", *names[1:]]
        self._decodes_first = len(self._encoder.inputs) > len(encoder_names)
        if self._decodes_first:
            encoder_names.append("decoder_input_ids")
            self._check_names("outputs of the encoder", self._encoder.outputs, ["logits", "encoder_hidden_states"])
        expected = 2 * self._decodes_first + len(self._caches) - (0 if self._decodes_first else self._num_self)
        self._check_names("inputs of the encoder", self._encoder.inputs, encoder_names)
        if len(self._encoder.inputs) != len(encoder_names):
            raise InvalidModel(
                f"the encoder must have only the inputs {encoder_names}, got {len(self._encoder.inputs)} inputs"
            )
        if len(self._encoder.outputs) != expected:
            raise InvalidModel(
                f"the encoder must have {expected} outputs for {len(self._caches)} caches of the decoder, got "
                f"{len(self._encoder.outputs)}"
            )
        if self._shared and not self._decodes_first:
            raise Unsupported(
                "control-flow",
                "past and present caches share buffers, and the encoder has no input decoder_input_ids, so it does not "
                "compute the keys and values of the first tokens; supported: an encoder with this input",
            )
        if not self._decodes_first and self._has_hidden:
            raise InvalidModel(
                "the encoder must have the input decoder_input_ids and the output encoder_hidden_states, since the "
                "decoder has an input encoder_hidden_states"
            )

    @staticmethod
    def _check_names(what: str, values: Sequence[Value], wanted: Sequence[str]) -> None:
        names = [value.name for value in values[: len(wanted)]]
        if names != list(wanted):
            raise InvalidModel(f"the first {what} must have the names {list(wanted)}, got {names}")

    def repetition(self) -> Repetition:
        if self._shared:
            raise Unsupported("control-flow", "past and present caches share buffers; supported: separate tensors")
        kind, name, opsets = self._search, self._search.node.name, self._search.opsets
        states, nodes, made = self._first_calls()
        _, sequences, *_ = states
        own = states[len(states) - len(kind.own_states()) :]
        next_choice, next_made = self._after(sequences, own, is_first=False)
        known = [*states, *kind.inputs]
        step = [*self._decoder.nodes, next_choice]
        numbers = {value: number for number, value in enumerate(states)}
        changed = [*states[:3], *self._caches[: self._num_self], *own]
        outputs = [value for value in kind.node.outputs if value is not None]
        return Repetition(
            kind.node,
            states,
            part(f"{name}: prompt", nodes, kind.inputs, made, opsets),
            part(f"{name}: step", step, known, next_made, opsets, [numbers[value] for value in changed]),
            part(f"{name}: result", [kind.end_node(sequences, own)], known, outputs, opsets),
        )

    def loop(self) -> Graph:
        """Return the search as nodes of one cluster, whose steps are a loop on the device."""
        states, nodes, made = self._first_calls()
        caches = DecoderInputs(self._caches[: self._num_self], key_axis=2, row_axis=0, shared=self._shared)
        return loop_graph(self._search, self._decoder, caches, nodes, made, states)

    @property
    def _fed(self) -> Sequence[Value]:
        """Return the inputs of the decoder that are states, or stay constant."""
        return self._decoder.inputs[: len(self._decoder.inputs) - len(self._shared)]

    def _first_calls(self) -> tuple[tuple[Value, ...], list[Node], list[Value]]:
        """Return the states, and the nodes up to the first choice of tokens with the values of all states after it."""
        kind = self._search
        sequences = Value("sequences", DType.INT32, ("rows", "room"))
        states = (Value("continue", DType.BOOL, ()), sequences, *self._fed, *kind.own_states())
        prompt = Value("prompt", DType.INT32, ("rows", "room"))
        tokens = Value("first tokens", DType.INT32, ("prompts", "tokens"))
        mask = Value("mask of the encoder", DType.INT32, ("prompts", "encoded"))
        start = kind.function(self._start, kind.given, [tokens, mask, prompt])
        encoder_inputs = [kind.given["input_ids"], *[mask] * self._has_mask, *[tokens] * self._decodes_first]
        copy = kind.function(
            lambda ctx, given: [needed(given, str(i)) for i in range(len(given))],
            {str(i): value for i, value in enumerate(encoder_inputs)},
            self._encoder.inputs,
        )
        encoded: list[Node] = [start, copy, *self._encoder.nodes]
        if self._decodes_first:
            first, made = self._after_encoder(prompt, mask)
            return states, [*encoded, first], made
        begin = self._begin(tokens, mask)
        choice, made = self._after(prompt, [], is_first=True)
        kept = self._decoder.inputs[1 : self._first_cache] + self._caches[self._num_self :]
        return states, [*encoded, begin, *self._decoder.nodes, choice], self._all_states(made, kept)

    def _all_states(self, made: list[Value], kept: list[Value]) -> list[Value]:
        """Return all states in order: ``made`` states, which each iteration updates, and constant ``kept`` states."""
        before = self._first_cache - 1
        first_own = 3 + self._num_self
        return [*made[:3], *kept[:before], *made[3:first_own], *kept[before:], *made[first_own:]]

    # ---- the three clusters of the repetition ----

    def _start(self, ctx: Lowering, given: Given) -> list[Tensor]:
        """Compute the decoder's first tokens, the encoder's mask, and the first tokens padded to max_length."""
        kind = self._search
        encoded, tokens, mask = needed(given, "input_ids"), given.get("decoder_input_ids"), given.get("attention_mask")
        prompts = encoded.shape[0]
        if tokens is None or self._has_mask:
            start = attribute_number(kind.node, "decoder_start_token_id", -1)
            if start < 0:
                raise InvalidModel(f"{kind.node.op_type}: decoder_start_token_id is missing")
            tokens = full(ctx, (prompts, 1), start, DType.INT32)
        room = kind.room(ctx, given, tokens.shape[1])
        if not self._has_mask:
            mask = full(ctx, (prompts, 1), 1, DType.INT32)
        elif encoded.rank != 2:
            raise InvalidModel(f"{kind.node.op_type}: input_ids must have rank 2, got {encoded.rank}")
        elif mask is None:
            mask = search.mask_of_leading_padding(ctx, encoded, kind.pad)
        else:
            require.shape(ctx, encoded.shape, attention_mask=mask)
        rows = self._of_beams(ctx, given, tokens)
        return [tokens, mask, search.padded(ctx, rows, room, kind.pad)]

    def _of_beams(self, ctx: Lowering, given: Given, x: Tensor) -> Tensor:
        beams = self._search.beams(ctx, given)
        return x if beams == 1 else search.repeated_rows(ctx, x, beams)

    def _after_encoder(self, prompt: Value, mask: Value) -> tuple[FunctionNode, list[Value]]:
        """Return the node that chooses the first token from the encoder's logits, and the values of all states."""
        kind = self._search
        hidden, caches = self._encoder.outputs[1], self._encoder.outputs[2:]
        of_encoder = [*[mask] * self._has_mask, *[hidden] * self._has_hidden, *caches]
        inputs = {
            **kind.given,
            "logits": self._encoder.outputs[0],
            "sequences": prompt,
            "first cache": caches[0],
            **{str(i): value for i, value in enumerate(of_encoder)},
        }

        def states(ctx: Lowering, given: Given) -> list[Tensor]:
            logits = self._of_beams(ctx, given, needed(given, "logits"))
            length = needed(given, "first cache").shape[2]
            made = kind.choose(ctx, {**given, "logits": logits}, length, is_first=True)
            kept = [self._of_beams(ctx, given, needed(given, str(i))) for i in range(len(of_encoder))]
            return [made.goes_on, made.sequences, made.tokens, *kept, *made.own]

        results = self._results(of_encoder)
        return kind.function(states, inputs, results), results

    def _begin(self, tokens: Value, mask: Value) -> FunctionNode:
        """Return the node that computes the decoder's first inputs from the encoder's results."""
        of_encoder = [*[mask] * self._has_mask, *self._encoder.outputs]
        inputs = {**self._search.given, "tokens": tokens, **{str(i): value for i, value in enumerate(of_encoder)}}

        def begin(ctx: Lowering, given: Given) -> list[Tensor]:
            ids = self._of_beams(ctx, given, needed(given, "tokens"))
            encoded = [self._of_beams(ctx, given, needed(given, str(i))) for i in range(len(of_encoder))]
            caches = encoded[self._has_mask :]
            empty = [ctx.empty((x.shape[0], x.shape[1], 0, x.shape[3]), x.dtype) for x in caches[: self._num_self]]
            return [ids, *encoded[: self._has_mask], *empty, *caches]

        return self._search.function(begin, inputs, self._decoder.inputs)

    def _after(self, sequences: Value, own: Sequence[Value], *, is_first: bool) -> tuple[FunctionNode, list[Value]]:
        """Return the node that chooses tokens after a call of the decoder, and the values of the states that change."""
        kind, presents = self._search, self._decoder.outputs[1:]
        inputs = {
            **kind.given,
            "logits": self._decoder.outputs[0],
            "sequences": sequences,
            "past": self._caches[0],
            **by_name(own),
            **{str(i): value for i, value in enumerate(presents)},
        }
        if not is_first:
            inputs.pop("prefix_vocab_mask", None)

        def states(ctx: Lowering, given: Given) -> list[Tensor]:
            length: Dim = needed(given, "past").shape[2] + 1
            made = kind.choose(ctx, given, length, is_first=is_first)
            kept = [needed(given, str(i)) for i in range(len(presents))]
            if made.rows is not None:
                kept = [chosen_slices(ctx, x, 0, made.rows) for x in kept]
            return [made.goes_on, made.sequences, made.tokens, *kept, *made.own]

        results = self._results(presents)
        return kind.function(states, inputs, results), results

    def _results(self, values: Sequence[Value]) -> list[Value]:
        """Return new values for the states after a choice: flag, sequences, tokens, ``values``, the search's own."""
        unknown = (Value(value.name, value.dtype, (None,) * len(value.shape or ())) for value in values)
        return [
            Value("next continue", DType.BOOL, ()),
            Value("next sequences", DType.INT32, ("rows", "room")),
            Value("next input_ids", DType.INT32, ("rows", 1)),
            *following(unknown),
            *following(self._search.own_states()),
        ]
