"""Compiles a cluster for one target without its device, and collects everything that its plans refer to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..clusters.cluster import CompiledCluster, Variant
from ..clusters.nodes.ranks import LIKELY, Ranks
from ..compiler.kernel import KernelSpec
from ..compiler.targets import Target
from ..model.ir import Constant, DType, InvalidModel, Node, NodeError, Unsupported
from ..plan.format import Plan
from ..plan.tables import Weight
from ..program.lowering.context import DeviceProperties
from ..program.steps.callbacks import Callback
from ..program.steps.libraries import LibraryProblem
from ..program.steps.quarantine import ScheduleKind
from .guards import Guards
from .sample_shapes import Shapes, sample_shapes

MAX_RANKS = 5
"""Maximum number of candidate ranks, from `LIKELY`, for which plans are built if an input's rank is unknown."""
MAX_CONDITIONS = 3
"""Maximum number of boolean host inputs for which plans are built with both values."""


@dataclass(frozen=True)
class ContextTarget:
    """A target of a compiled model: the compiler's target, and the device properties for which plans are built."""

    target: Target
    device: DeviceProperties


@dataclass
class Captured:
    """Plans of one cluster for one target. Indices in the plans refer to the lists of this object.

    ``schedules`` are the kinds of the schedules in the plans. ``failures`` are texts, each with the shapes for which no
    plan could be built, and the reason.
    """

    host_inputs: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    kernels: list[KernelSpec] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    problems: list[LibraryProblem] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    states: Mapping[Node, Constant] = field(default_factory=dict)
    schedules: set[ScheduleKind] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def take(self, variant: Variant) -> None:
        """Add a variant. Its indices continue those of the variants that were added before it."""
        assert variant.plan is not None
        self.kernels += variant.kernels
        self.weights += variant.weights
        self.problems += variant.problems
        self.callbacks += variant.callbacks
        self.schedules |= variant.tables.schedules
        self.plans.append(variant.plan)
        variant.tables.kernels.commit()
        variant.tables.weights.commit()
        variant.tables.problems.commit()
        variant.tables.callbacks.commit()


def capture(cluster: CompiledCluster, ranks: Ranks, wanted: Sequence[Shapes] = ()) -> Captured:
    """Build the plans of a cluster: one if its shapes are static, else plans for sample shapes and the ``wanted`` ones.

    ``cluster`` cannot be used afterwards.

    Raises:
        NodeError: a node that the plugin claimed cannot be lowered.
    """
    captured = Captured()
    variant = cluster.prepare()
    captured.host_inputs = cluster.host_inputs
    captured.states = cluster.states
    if variant.plan is not None:
        captured.take(variant)
        return captured
    names = [value.name for value in cluster.inputs]
    guards: list[Guards] = []
    guesses: list[str] = []
    is_guess = any(ranks.under(None).rank(value) is None for value in cluster.inputs)
    for shapes, contents in _samples(cluster, ranks, wanted):
        if any(not known.refusal(shapes, contents) for known in guards):
            continue
        try:
            captured.take(cluster.build(shapes, list(contents.values())))
        except (NodeError, InvalidModel, Unsupported) as error:
            (guesses if is_guess else captured.failures).append(f"{_shown(names, shapes)}: {error}")
            continue
        guards.append(Guards(captured.plans[-1], names))
    if not guards:
        captured.failures += guesses
    return captured


def _samples(
    cluster: CompiledCluster, ranks: Ranks, wanted: Sequence[Shapes]
) -> Iterator[tuple[list[tuple[int, ...]], dict[int, Sequence[int]]]]:
    """Yield shapes of all inputs, and contents of host inputs by their indices.

    For inputs of unknown rank, yield shapes of the first `MAX_RANKS` ranks in `LIKELY`.
    """
    is_known = all(ranks.under(None).rank(value) is not None for value in cluster.inputs)
    for trial in (None,) if is_known else LIKELY[:MAX_RANKS]:
        assumed = {value.name: ranks.under(trial).rank(value) for value in cluster.inputs}
        found = {name: rank for name, rank in assumed.items() if rank is not None}
        for shapes in sample_shapes(cluster.inputs, found, wanted):
            for contents in _contents(cluster, shapes):
                yield shapes, contents


def _contents(cluster: CompiledCluster, shapes: Sequence[Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """Yield contents for host inputs: every element is 1, the first `MAX_CONDITIONS` scalar booleans also 0."""
    ones: dict[int, Sequence[int]] = {index: [1] * math.prod(shapes[index]) for index in cluster.host_inputs}
    conditions = [index for index in ones if cluster.inputs[index].dtype is DType.BOOL and len(ones[index]) == 1]
    for values in itertools.product((1, 0), repeat=min(len(conditions), MAX_CONDITIONS)):
        yield ones | {index: [value] for index, value in zip(conditions, values, strict=False)}


def _shown(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape in zip(names, shapes, strict=True))
