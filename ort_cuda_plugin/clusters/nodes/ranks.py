"""Unknown ranks: ranks that the plugin infers where ORT does not, and ranks that a claim assumes.

A plan gets the rank of each input from the Run, but a claim precedes all Runs. For values of unknown rank, a claim
calls the lowering functions in several trials. Each trial assumes a rank for every such value. The plugin claims a node
that no trial declines, so that a Run with any of the assumed ranks has a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ...model.ir import Node, Value
from ...program.lowering.context import NUM_TRIALS

_SAME = range(NUM_TRIALS - 2)
"""Trials that assume their own number as the rank of all values of unknown rank; later trials mix different ranks."""
LIKELY = (2, 3, 4, 1, 0, 5, 6, 7, 8)
"""All trials, most likely ranks of real models first."""


class Ranks:
    """Ranks of values, by name; ``known`` are the ranks that follow from the model."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._trials: list[dict[str, int]] = [{} for _ in range(NUM_TRIALS)]
        self._numbers: dict[str, int] = {}

    def under(self, trial: int | None) -> RanksOfTrial:
        """Return the ranks that a trial assumes; for None only the known ranks."""
        return RanksOfTrial(self, trial)

    def settle(self, values: Iterable[Value | None]) -> None:
        """Merge the trials: the rank of a result becomes known if all trials found the same rank."""
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
    """The ranks of values in trial number ``trial``; with None, only known ranks."""

    def __init__(self, ranks: Ranks, trial: int | None) -> None:
        self.trial = trial
        self._ranks = ranks

    def rank(self, value: Value) -> int | None:
        """Return the known rank of a value, else the rank that the trial assumes, or None without a trial."""
        if value.shape is not None:
            return len(value.shape)
        ranks, trial, name = self._ranks, self.trial, value.name
        known = ranks.known.get(name)
        if known is not None or trial is None:
            return known
        return ranks._trials[trial].setdefault(name, ranks._assumed(name, trial))

    def follows(self, result: Value, source: Value) -> bool:
        """Return whether at least one trial has ranks of both values, and they agree in all such trials."""
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
"""Ranks of the results of ai.onnx.ml operators that do not depend on inputs."""


def learn_declined(node: Node, ranks: RanksOfTrial) -> None:
    """Record result ranks of a declined node, as far as they follow from its operator.

    ORT infers no shapes for ai.onnx.ml, and no ranks of a Loop's states.
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
    """Yield results of an If with one rank in both branches, and states of a Loop whose rank no iteration changes.

    ORT presents bodies before the surrounding graph, so that ranks of their values are known by name.
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
