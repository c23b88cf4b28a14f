"""Ranks that ORT does not infer: those that the plugin infers itself, and those that it assumes to judge a node.

A plan needs the rank of each input, and gets it from the Run. A claim comes before all Runs. If a rank is not known,
operators' functions run once for each of several trials: a trial assumes a rank for every such value. The plugin claims
a node that no trial declines, so that a Run with any of these ranks finds a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ...model.ir import Node, Value
from ...program.lowering.context import NUM_TRIALS

_SAME = range(NUM_TRIALS - 2)
"""Trials in which all values of unknown rank have the same rank. In later trials the ranks differ."""
LIKELY = (2, 3, 4, 1, 0, 5, 6, 7, 8)
"""All trials, those first that real models are likely to need."""


class Ranks:
    """Ranks by the names of values. ``known`` are the ranks that follow from the model."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._trials: list[dict[str, int]] = [{} for _ in range(NUM_TRIALS)]
        self._numbers: dict[str, int] = {}

    def under(self, trial: int | None) -> RanksOfTrial:
        """Return the ranks that hold in a trial; with None, those that are known."""
        return RanksOfTrial(self, trial)

    def settle(self, values: Iterable[Value | None]) -> None:
        """Merge the trials: a rank that all of them found for a result is known."""
        for value in values:
            if value is not None and value.shape is None:
                found = {trial[value.name] for trial in self._trials if value.name in trial}
                if len(found) == 1:
                    self.known[value.name] = found.pop()

    def _assumed(self, name: str, trial: int) -> int:
        number = self._numbers.setdefault(name, len(self._numbers))
        if trial in _SAME:
            return trial
        return (1 + 2 * number) % 5 if trial == len(_SAME) else (4 + 3 * number) % 5


class RanksOfTrial:
    """The ranks of a trial. ``trial`` is its number; None: nothing is assumed."""

    def __init__(self, ranks: Ranks, trial: int | None) -> None:
        self.trial = trial
        self._ranks = ranks

    def rank(self, value: Value) -> int | None:
        """Return the rank of a value. None if it is not known; a trial then assumes one."""
        if value.shape is not None:
            return len(value.shape)
        ranks, trial, name = self._ranks, self.trial, value.name
        known = ranks.known.get(name)
        if known is not None or trial is None:
            return known
        return ranks._trials[trial].setdefault(name, ranks._assumed(name, trial))

    def follows(self, result: Value, source: Value) -> bool:
        """Whether the ranks of a result and a source agree in every trial that has both, and one has."""
        both = [trial for trial in self._ranks._trials if result.name in trial and source.name in trial]
        return bool(both) and all(trial[result.name] == trial[source.name] for trial in both)

    def learn(self, value: Value, rank: int) -> None:
        """Record the rank of a result that ORT does not infer."""
        if value.shape is not None:
            return
        if self.trial is None:
            self._ranks.known[value.name] = rank
        else:
            self._ranks._trials[self.trial][value.name] = rank


_SAME_AS_FIRST: Final = frozenset(
    [("", "Cast"), ("", "CastLike"), ("", "Identity")]
    + [
        ("ai.onnx.ml", name)
        for name in ("Binarizer", "CategoryMapper", "Imputer", "LabelEncoder", "Normalizer", "Scaler")
    ]
)
_FIXED: Final = {
    "DictVectorizer": (2,),
    "FeatureVectorizer": (2,),
    "LinearClassifier": (1, 2),
    "LinearRegressor": (2,),
    "SVMClassifier": (1, 2),
    "SVMRegressor": (2,),
    "TreeEnsemble": (2,),
    "TreeEnsembleClassifier": (1, 2),
    "TreeEnsembleRegressor": (2,),
}
"""Ranks of the results of operators of ai.onnx.ml."""


def learn_declined(node: Node, ranks: RanksOfTrial) -> None:
    """Record the ranks of results of a node that others run, as far as they follow from its operator.

    ORT infers no shapes for ai.onnx.ml, and no ranks of states that a Loop carries.
    """
    for result, rank in _results_of_bodies(node, ranks):
        ranks.learn(result, rank)
    found: tuple[int, ...] = ()
    first = ranks.rank(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if node.domain == "ai.onnx.ml" and node.op_type in _FIXED:
        found = _FIXED[node.op_type]
    elif first is None:
        pass
    elif (node.domain, node.op_type) in _SAME_AS_FIRST:
        found = (first,)
    elif (node.domain, node.op_type) == ("ai.onnx.ml", "OneHotEncoder"):
        found = (first + 1,)
    elif (node.domain, node.op_type) == ("ai.onnx.ml", "ArrayFeatureExtractor"):
        found = (max(first, 2),)
    for value, rank in zip(node.outputs, found, strict=False):
        if value is not None:
            ranks.learn(value, rank)


def _results_of_bodies(node: Node, ranks: RanksOfTrial) -> Iterator[tuple[Value, int]]:
    """Record results of an If that have one rank in both branches, and states of a Loop whose rank no iteration
    changes.

    ORT shows bodies first, so their values are known here by name.
    """
    if node.domain or not node.subgraphs:
        return
    bodies = [*node.subgraphs.values()]
    if node.op_type == "If":
        for number, result in enumerate(node.outputs):
            found = {ranks.rank(body.outputs[number]) for body in bodies if number < len(body.outputs)}
            (rank,) = found if len(found) == 1 else (None,)
            if result is not None and rank is not None:
                yield result, rank
    if node.op_type == "Loop":
        body = bodies[0]
        for result, first, carried, new in zip(
            node.outputs, node.inputs[2:], body.inputs[2:], body.outputs[1:], strict=False
        ):
            rank = ranks.rank(first) if first is not None else None
            if result is not None and rank is not None and (ranks.follows(new, carried) or ranks.rank(new) == rank):
                yield result, rank
