"""Records which plans were built, for which inputs, and why no earlier plan accepted them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...abi.result_table import Table
from ...context.guards import Guards
from ...plan.format import Plan

_MOST_REMEMBERED = 16
"""Number of a cluster's latest plans whose guards are kept."""
_MOST_SHOWN = 3
_MOST_ELEMENTS = 16
ALL_SIZES_KNOWN = "the model fixes all sizes"
FIRST = "there was no earlier plan"


@dataclass(frozen=True)
class PlanVariant:
    """A plan that was built in this process.

    Attributes:
        cluster: the name of the fused node.
        number: the number of plans that the cluster had before.
        shapes: the input shapes for which the plan was built, by input; empty if the model fixes all sizes.
        contents: the first elements of the inputs that determine shapes, by input.
        seconds: the time to build the plan and compile its kernels.
        reason: the failed guards of the latest earlier plans, at most three, the latest plan first.

    Examples:
        >>> outputs = ort_cuda_plugin.session("model.onnx").run(None, {"x": array})
        >>> ort_cuda_plugin.plan_variants()[-1].reason
        'there was no earlier plan'
    """

    cluster: str
    number: int
    shapes: Mapping[str, tuple[int, ...]]
    contents: Mapping[str, tuple[int, ...]]
    seconds: float
    reason: str

    def __str__(self) -> str:
        inputs = [f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.shapes.items()]
        inputs += [f"{name} = {_shown(values)}" for name, values in self.contents.items()]
        text = f"plan {self.number} of {self.cluster} was built in {self.seconds:.3f} s"
        return f"{text}{' for ' if inputs else ''}{', '.join(inputs)}: {self.reason}"


BUILT: deque[PlanVariant] = deque(maxlen=1000)
"""The latest plans of this process."""


class PlanHistory:
    """The plans of one cluster. ``names`` are the names of its inputs."""

    def __init__(self, cluster: str, names: Sequence[str]) -> None:
        self.count = 0
        self._cluster = cluster
        self._names = names
        self._guards: deque[tuple[int, Guards]] = deque(maxlen=_MOST_REMEMBERED)

    def reason(self, shapes: Sequence[Sequence[int]], contents: Mapping[int, Sequence[int]]) -> str:
        """Explain why a plan is built for these inputs."""
        if not self.count:
            return FIRST
        latest = list(self._guards)[: -_MOST_SHOWN - 1 : -1]
        reasons = [
            f"plan {number}: {guards.refusal(shapes, contents) or 'it accepts these inputs'}"
            for number, guards in latest
        ]
        rest = self.count - len(reasons)
        return "; ".join(reasons) + (f"; and {rest} more" if rest else "")

    def add(
        self,
        plan: Plan,
        shapes: Sequence[Sequence[int]] | None,
        contents: Mapping[int, Sequence[int]],
        seconds: float,
        reason: str,
    ) -> PlanVariant:
        """Record a plan. ``shapes`` is None if the model fixes all sizes."""
        given = {} if shapes is None else dict(zip(self._names, map(tuple, shapes), strict=True))
        values = {self._names[index]: tuple(each[: _MOST_ELEMENTS + 1]) for index, each in contents.items()}
        variant = PlanVariant(self._cluster, self.count, given, values, seconds, reason)
        with contextlib.suppress(ValueError):  # `Guards` refuses an input with very many elements
            self._guards.append((self.count, Guards(replace(plan, records=()), self._names)))
        self.count += 1
        BUILT.append(variant)
        return variant


def plan_variants() -> Table[PlanVariant]:
    """Return the latest 1000 plans that sessions of this process have built, in order.

    ``counters()["plan_variants_built"]`` counts all of them. A plan is built when the inputs of a Run satisfy the
    guards of none of the cluster's plans, or with the session if the model fixes all sizes.

    Examples:
        >>> session = ort_cuda_plugin.session("model.onnx")
        >>> outputs = session.run(None, {"x": array})
        >>> ort_cuda_plugin.plan_variants()[-1].shapes
        {'x': (2, 8)}
    """
    return Table(PlanVariant, BUILT)


def built_after(earlier: Sequence[PlanVariant]) -> list[PlanVariant]:
    """Return the recorded plans that were built since `plan_variants` returned ``earlier``."""
    known = set(map(id, earlier))
    return [variant for variant in BUILT if id(variant) not in known]


def _shown(values: Sequence[int]) -> str:
    more = ", ..." if len(values) > _MOST_ELEMENTS else ""
    return f"[{', '.join(map(str, values[:_MOST_ELEMENTS]))}{more}]"
