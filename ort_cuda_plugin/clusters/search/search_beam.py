"""BeamSearch and WhisperBeamSearch of com.microsoft."""

from __future__ import annotations

from dataclasses import replace

from ...model.ir import DType, InvalidModel, Node, Unsupported, Value
from ...ops.contrib.generation import search, search_beam
from ...ops.contrib.generation.search import Count
from ...ops.contrib.generation.search_beam import Beams
from ...ops.contrib.generation.whisper_timestamps import TimestampTokens, timestamp_scores
from ...program.expressions.symbolic import Dim, le, logical_and
from ...program.lowering.context import Lowering, Tensor
from .search_base import Choice, Given, Search, attribute_number, needed, rule_inputs

MOST_BEAMS = 128
"""Maximum number of beams, as in ONNX Runtime."""


class BeamSearch(Search):
    """Beam search: continues the most likely sequences of each prompt."""

    input_names = (
        "input_ids max_length min_length num_beams num_return_sequences length_penalty repetition_penalty vocab_mask "
        "prefix_vocab_mask attention_mask decoder_input_ids logits_processor"
    )

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        super().__init__(node, opsets)
        for name in ("num_beams", "num_return_sequences"):
            if name not in self.given:
                raise InvalidModel(f"{node.op_type}: input {name} is missing")
        if any(value is not None for value in node.outputs[2:]):
            raise Unsupported(
                "attribute", f"{node.op_type} has an output after output 1; supported: sequences and sequences_scores"
            )
        self._timestamps = self._timestamp_tokens()
        self._early = attribute_number(node, "early_stopping", 0) == 1

    def _timestamp_tokens(self) -> TimestampTokens | None:
        """Return the tokens of Whisper's timestamp rules; None if the search does not apply these rules.

        Raises Unsupported for BeamSearch if logits_processor may request the rules.
        """
        processor = self.given.get("logits_processor")
        if processor is not None and (processor.constant is None or processor.constant.any()):
            raise Unsupported(
                "attribute",
                f"{self.node.op_type}: logits_processor is given; supported: no logits_processor, or constant 0",
            )
        return None

    def beams(self, ctx: Lowering, given: Given) -> Dim:
        beams = ctx.host_number(needed(given, "num_beams"), "num_beams")
        ctx.require(logical_and(le(1, beams), le(beams, MOST_BEAMS)), f"num_beams must be in [1, {MOST_BEAMS}]")
        return beams

    def own_states(self) -> list[Value]:
        of_beams = ("prompts", "beams")
        return [
            Value("beam scores", DType.FLOAT32, of_beams),
            Value("done", DType.BOOL, ("prompts",)),
            Value("hypothesis scores", DType.FLOAT32, of_beams),
            Value("hypothesis lengths", DType.INT32, of_beams),
            Value("hypotheses", DType.INT32, (*of_beams, "room")),
        ]

    def choose(self, ctx: Lowering, given: Given, length: Count, *, is_first: bool) -> Choice:
        sequences = needed(given, "sequences")
        if is_first:
            prompts = needed(given, "input_ids").shape[0]
            now = search_beam.no_beams(ctx, prompts, self.beams(ctx, given), sequences.shape[1], self.pad)
        else:
            now = self._now(given)
        scores = search_beam.log_probabilities(ctx, search.last_scores(ctx, needed(given, "logits")))
        rules = rule_inputs(given)
        if rules.prefix_mask is not None:
            beams = now.scores.shape[1]
            rules = replace(rules, prefix_mask=search.repeated_rows(ctx, rules.prefix_mask, beams))
        scores = search.ruled_scores(ctx, scores, sequences, length, self.rules, rules)
        if self._timestamps is not None:
            processor = needed(given, "logits_processor")
            is_on = None if processor.constant is not None else processor
            scores = timestamp_scores(ctx, scores, sequences, length, self._timestamps, is_on)
        step = search_beam.best_beams(ctx, scores, sequences, length, now, self._beam_rules(given))
        return Choice(step.goes_on, step.sequences, step.tokens, step.beams.states, step.rows)

    def finish(self, ctx: Lowering, given: Given) -> list[Tensor]:
        now = self._now(given)
        count = ctx.host_number(needed(given, "num_return_sequences"), "num_return_sequences")
        possible = logical_and(le(1, count), le(count, now.scores.shape[1]))
        ctx.require(possible, "num_return_sequences must be in [1, num_beams]")
        wanted = self.node.outputs[1] if len(self.node.outputs) > 1 else None
        score_type = wanted.dtype if wanted is not None and wanted.dtype is not None else DType.FLOAT32
        rules = self._beam_rules(given)
        return [*search_beam.results(ctx, now, needed(given, "sequences"), count, rules, score_type)]

    def _beam_rules(self, given: Given) -> search_beam.Rules:
        return search_beam.Rules(self.end, self.pad, self._early, given.get("length_penalty"))

    def _now(self, given: Given) -> Beams:
        return Beams(*(needed(given, value.name) for value in self.own_states()))


class WhisperBeamSearch(BeamSearch):
    """BeamSearch for Whisper."""

    input_names = f"{BeamSearch.input_names} cross_qk_layer_head extra_decoding_ids temperature"

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        super().__init__(node, opsets)
        for name in ("cross_qk_layer_head", "extra_decoding_ids", "temperature"):
            if name in self.given:
                raise Unsupported("attribute", f"{node.op_type} with {name} is not implemented")

    def _timestamp_tokens(self) -> TimestampTokens | None:
        processor = self.given.get("logits_processor")
        if processor is None or (processor.constant is not None and not (processor.constant == 1).any()):
            return None
        names = (
            "beginning_timestamp_token_id no_timestamps_token_id start_of_lm_token_id decoder_start_token_id "
            "translate_token_id transcribe_token_id"
        )
        first, *others = (attribute_number(self.node, name, -1) for name in names.split())
        if first < 1:
            raise InvalidModel(
                f"{self.node.op_type}: beginning_timestamp_token_id must be at least 1 with a logits_processor, got "
                f"{first}"
            )
        return TimestampTokens(first, self.end, tuple(others[:2]), tuple(others[2:]))
