"""Compiles a cluster for one target without a device, and keeps all that its plans need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..clusters.cluster import CompiledCluster, Variant
from ..compiler.kernel import KernelSpec
from ..compiler.targets import Target
from ..model.ir import Constant, InvalidModel, Node, NodeError, Unsupported
from ..plan.format import Plan
from ..plan.tables import Weight
from ..program.libraries import LibraryProblem
from ..program.lowering import DeviceProperties
from .guards import Guards
from .sample_shapes import Shapes, sample_shapes


@dataclass(frozen=True)
class ContextTarget:
    """What a context is made for: a target of the compiler, and the device that plans are made for."""

    target: Target
    device: DeviceProperties


@dataclass
class Captured:
    """Plans of one cluster for one target; their numbers count the lists here. ``failures`` says what has no plan."""

    host_inputs: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    kernels: list[KernelSpec] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    problems: list[LibraryProblem] = field(default_factory=list)
    states: Mapping[Node, Constant] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def take(self, variant: Variant) -> None:
        """Adds a variant, whose numbers follow those of what is here."""
        assert variant.plan is not None
        self.kernels += variant.kernels
        self.weights += variant.weights
        self.problems += variant.problems
        self.plans.append(variant.plan)
        variant.tables.kernels.commit()
        variant.tables.weights.commit()
        variant.tables.problems.commit()


def capture(cluster: CompiledCluster, known_ranks: Mapping[str, int], wanted: Sequence[Shapes] = ()) -> Captured:
    """The plan of a cluster whose shapes the model fixes, or those for sample shapes and for the ``wanted`` ones.

    ``cluster`` is used up.

    Raises:
        NodeError: a node cannot be run after all.
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
    for shapes in sample_shapes(cluster.inputs, known_ranks, wanted):
        contents = {index: _contents(shapes[index]) for index in cluster.host_inputs}
        if any(not known.refusal(shapes, contents) for known in guards):
            continue
        try:
            captured.take(cluster.build(shapes, list(contents.values())))
        except (NodeError, InvalidModel, Unsupported) as error:
            captured.failures.append(f"{_shown(names, shapes)}: {error}")
            continue
        guards.append(Guards(captured.plans[-1], names))
    return captured


def _contents(shape: Sequence[int]) -> list[int]:
    """What a host input of this shape is taken to hold: nothing is known of it."""
    count = 1
    for dim in shape:
        count *= dim
    return [1] * count


def _shown(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape in zip(names, shapes, strict=True))
