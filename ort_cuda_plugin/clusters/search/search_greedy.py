"""GreedySearch and Sampling of com.microsoft."""

from __future__ import annotations

from ...model.ir import DType, Node, Unsupported, Value
from ...ops.contrib.generation import search
from ...ops.contrib.generation.search import Count
from ...ops.contrib.generation.search_sampling import Filter, drawn_tokens, filtered_scores, first_state
from ...ops.onnx.math.reduction import argmax
from ...program.lowering.context import Lowering, Tensor
from .search_base import Choice, Given, Search, attribute_number, attribute_real, needed, rule_inputs


class GreedySearch(Search):
    """Greedy search: chooses the most likely token."""

    input_names = "input_ids max_length min_length repetition_penalty vocab_mask prefix_vocab_mask attention_mask"

    def own_states(self) -> list[Value]:
        return [Value("ended", DType.BOOL, ("rows",))]

    def choose(self, ctx: Lowering, given: Given, length: Count, *, is_first: bool) -> Choice:
        sequences = needed(given, "sequences")
        scores = search.last_scores(ctx, needed(given, "logits"))
        scores = search.ruled_scores(ctx, scores, sequences, length, self.rules, rule_inputs(given))
        tokens, more = self.tokens(ctx, given, scores)
        found = search.append_tokens(ctx, tokens, sequences, length, given.get("ended"), self.end, self.pad)
        return Choice(found.goes_on, found.sequences, found.tokens, [found.ended, *more])

    def tokens(self, ctx: Lowering, given: Given, scores: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the next token of each row, and the search's own states other than ``ended``."""
        return argmax(ctx, scores, axis=1, keepdims=0), []

    def finish(self, ctx: Lowering, given: Given) -> list[Tensor]:
        return [needed(given, "sequences")]


class Sampling(GreedySearch):
    """Sampling: draws from the most likely tokens."""

    input_names = f"{GreedySearch.input_names} presence_mask seed"

    def __init__(self, node: Node, opsets: dict[str, int]) -> None:
        super().__init__(node, opsets)
        if any(value is not None for value in node.outputs[1:]):
            raise Unsupported(
                "attribute", "Sampling with the output filtered_logits is not implemented, nor is it in ONNX Runtime"
            )
        self._filter = Filter(
            attribute_real(node, "top_p", 0.0),
            attribute_real(node, "filter_value", -1e20),
            attribute_number(node, "min_tokens_to_keep", 0),
            attribute_number(node, "custom", 0) != 0,
        )

    def own_states(self) -> list[Value]:
        return [*super().own_states(), Value("generator", DType.INT64, ())]

    def tokens(self, ctx: Lowering, given: Given, scores: Tensor) -> tuple[Tensor, list[Tensor]]:
        state = given.get("generator")
        if state is None:
            state = first_state(ctx, given.get("seed"))
        tokens, after = drawn_tokens(ctx, filtered_scores(ctx, scores, self._filter), state)
        return tokens, [after]
