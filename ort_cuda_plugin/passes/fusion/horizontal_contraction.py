"""Horizontal fusion of contractions whose results stay separate tensors, for integer GEMMs and for convolutions.

The merged step computes the columns (output channels) of all original steps. Each result keeps its own tensor, so the
steps that read the results do not change.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ...program.steps.steps import Sums, joined_nodes
from ...program.steps.trace import ReadBack, Step
from ...program.termination import Measure
from ..analysis.expression_equality import (
    converted_by,
    joined_constant,
    joined_conversion,
    joined_inputs,
    result_of,
    same_leaves,
)
from ..analysis.uses import Uses
from ..simplification.concat_elimination import are_apart, written_views

AnySums = TypeVar("AnySums", bound=Sums)


class Merging(ABC, Generic[AnySums]):
    """Interface of a merging pass for one type of contraction.

    ``columns`` is the axis of the results, and ``weight_columns`` the axis of the weights, along which steps are
    merged.
    """

    columns: int
    weight_columns: int

    @abstractmethod
    def candidate(self, step: Step) -> AnySums | None:
        """Return the step if it may be merged with others of equal `key`, else None."""

    @abstractmethod
    def key(self, step: AnySums) -> Hashable:
        """Return the properties in which steps must agree to be merged."""

    def have_equal_epilogues(self, first: AnySums, other: AnySums) -> bool:
        """Return whether two steps of equal `key` have equal epilogues and prologues, except for
        constants per column.
        """
        if same_leaves(result_of(first), result_of(other), self.columns, spreads=True) is None:
            return False
        pairs = zip(first.conversions, other.conversions, first.operands, other.operands, strict=True)
        for (one, two, x, y), columns in zip(pairs, (None, self.weight_columns), strict=True):
            if (one is None) != (two is None):
                return False
            if one and two and same_leaves(converted_by(one, x), converted_by(two, y), columns) is None:
                return False
        return True

    @abstractmethod
    def is_faster(self, merged: AnySums, count: int) -> bool:
        """Return whether the merged step takes less time than the ``count`` separate steps."""

    @abstractmethod
    def made(self, merged: AnySums, count: int) -> list[Step] | None:
        """Return the steps that compute ``merged`` in place of ``count`` steps; None if those steps must stay."""

    def joined(self, steps: Sequence[AnySums]) -> AnySums:
        """Return the merged step, which computes the columns of all ``steps``."""
        first, parts = steps[0], self._parts(steps)
        shape = list(first.shape)
        shape[self.columns] = parts[-1].stop
        operands = [step.operands[1] for step in steps]
        weights = joined_constant(operands, self.weight_columns)
        conversions = [conversion for step in steps if (conversion := step.conversions[1]) is not None]
        conversion = joined_conversion(conversions, operands, self.weight_columns, weights) if conversions else None
        one, *others = map(result_of, steps)
        return replace(
            first,
            nodes=joined_nodes(*steps),
            shape=tuple(shape),
            operands=(first.operands[0], weights),
            conversions=(first.conversions[0], conversion),
            inputs=joined_inputs(one, others, self.columns, tuple(shape)),
            outputs=tuple((first.outputs[0][0], y) for step in steps for _, y in step.outputs),
            column_parts=tuple(part for step, part in zip(steps, parts, strict=True) for _ in step.outputs),
        )

    def _parts(self, steps: Sequence[AnySums]) -> list[range]:
        parts: list[range] = []
        for step in steps:
            begin = parts[-1].stop if parts else 0
            parts.append(range(begin, begin + operator.index(step.shape[self.columns])))
        return parts


def has_one_result(step: Sums) -> bool:
    """Return whether the step computes a single value per element, which it may store in several tensors."""
    result, first = step.outputs[0]
    return all(value is result and y.dtype is first.dtype and y.shape == step.shape for value, y in step.outputs)


def merge_contractions(steps: Iterable[Step], merging: Merging[AnySums]) -> list[Step]:
    """Return the program after merging contractions as ``merging`` allows."""
    return _Merger(list(steps), merging).run()


class _Merger(Generic[AnySums]):
    def __init__(self, steps: list[Step], merging: Merging[AnySums]) -> None:
        self.merging = merging
        self.steps: list[Step | None] = [*steps]
        self.uses = Uses(enumerate(steps))
        self.candidates: dict[int, AnySums] = {}
        self.made: dict[int, list[Step]] = {}
        """The merged steps, by the position of the first step that each replaces."""

    def run(self) -> list[Step]:
        groups: dict[Hashable, list[int]] = {}
        for position, step in enumerate(self.steps):
            candidate = None if step is None else self.merging.candidate(step)
            if candidate is not None:
                self.candidates[position] = candidate
                groups.setdefault(self.merging.key(candidate), []).append(position)
        for positions in groups.values():
            left, measure = positions, Measure("horizontal_contraction")
            while len(left) > 1:
                measure.fall(len(left), self.candidates[left[0]].node)
                left = self._merge_first(left)
        result: list[Step] = []
        for position, step in enumerate(self.steps):
            result += self.made.get(position, [] if step is None else [step])
        return result

    def _merge_first(self, positions: Sequence[int]) -> list[int]:
        """Merge the step at the first position with as many others as possible; return the positions that remain
        unmerged.
        """
        start, *others = positions
        taken, merged = [start], self.candidates[start]
        for position in others:
            is_equal = self.merging.have_equal_epilogues(self.candidates[start], self.candidates[position])
            if is_equal and self._may_begin(start, position):
                joined = self.merging.joined([self.candidates[one] for one in (*taken, position)])
                if self.merging.is_faster(joined, len(taken) + 1):
                    merged = joined
                    taken.append(position)
        made = self.merging.made(merged, len(taken)) if len(taken) > 1 else None
        if made is not None:
            self.made[start] = made
            for position in taken:
                self.steps[position] = None
        return [position for position in others if position not in taken]

    def _may_begin(self, start: int, position: int) -> bool:
        """Return whether the step at ``position`` may move forward to the earlier position ``start``.

        Its inputs must already be computed there, and no step in between may read or write its results.
        """
        step = self.candidates[position]

        def between(users: Iterable[int]) -> list[int]:
            return [user for user in users if start <= user < position]

        if any(isinstance(other, ReadBack) for other in self.steps[start:position]):
            return False
        if any(between(self.uses.writers(buffer)) for buffer in step.reads):
            return False
        for _, target in step.outputs:
            if between(self.uses.readers(target.buffer)):
                return False
            for writer in between(self.uses.writers(target.buffer)):
                written = written_views(self.steps[writer], target.buffer)
                if self.steps[writer] is not None and not (written and all(are_apart(y, target) for y in written)):
                    return False
        return True
