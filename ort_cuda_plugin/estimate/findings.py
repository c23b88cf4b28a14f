"""What is not as it should be in the kernels of a Run on GPUs.

A GPU's code tells of spills, and of products of 16-bit floats without tensor cores, on each architecture. What blocks
access on the emulated device tells of narrow accesses and of bank conflicts: whichever form a kernel was meant to have,
lanes that move neighbours should move 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..compiler.kernel import KernelSpec
from ..program.steps import Attend, Contract
from ..program.symbolic import hint
from ..program.trace import Step as PlannedStep
from .count import LINE, SECTOR, Counted, Site
from .sass import Code
from .work import KernelStep, Work

VECTOR = 16
"""Bytes of the widest access."""
MUCH = 1 << 18
"""Bytes that a launch moves, of which the width of accesses matters."""
SHARE = 1 / 8
"""Of a launch's bytes, or of its requests of shared memory: what less of them do does not matter."""
WAYS = 2.01
"""Wavefronts of an access of shared memory, by those that would do: two-way conflicts are allowed."""
FEW = 16
"""A product with fewer rows, columns or steps than a tensor core's tile has none to fill."""


@dataclass(frozen=True)
class Finding:
    """One thing about a kernel. ``where`` is an architecture, or "" for all."""

    kernel: str
    where: str
    what: str


class HalfProducts:
    """Watches the passes, and notes products of 16-bit floats, attention among them, that have whole tiles.

    ``labels`` has the labels of the ONNX nodes of each.
    """

    def __init__(self) -> None:
        self.labels: set[tuple[str, ...]] = set()
        self._last: Sequence[PlannedStep] = ()

    def __call__(self, name: str, steps: Sequence[PlannedStep]) -> None:
        if name == "emitted":
            for step in self._last:
                if isinstance(step, (Contract, Attend)) and self._is_one(step):
                    self.labels.add(tuple(node.label for node in step.nodes))
        self._last = steps

    @staticmethod
    def _is_one(step: Contract | Attend) -> bool:
        a, b = step.operands[:2]
        is_half = all(x.dtype.is_float and x.dtype.itemsize == 2 for x in step.operands)
        return is_half and all(hint(size) >= FEW for size in (*a.shape[-2:], *b.shape[-2:]))


def of_code(code: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Registers that a kernel spills, on one architecture."""
    found = []
    for spec, one in code.items():
        stack = one.mix.get("LDL", 0) + one.mix.get("STL", 0)
        if one.spilled or stack:
            found.append(Finding(spec.symbol, arch, f"spills {one.spilled} bytes, {stack} accesses to the stack"))
    return found


def of_widths(code: Mapping[KernelSpec, Code], other: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Accesses that are narrower than on another architecture, whose code is ``other``."""
    found = []
    for spec, one in code.items():
        for name in ("LDG", "STG", "LDS", "STS"):
            if one.widest(name) < other[spec].widest(name):
                text = f"{name} of {one.widest(name)} bytes, of {other[spec].widest(name)} elsewhere"
                found.append(Finding(spec.symbol, arch, text))
    return found


def of_products(work: Work, products: HalfProducts, code: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Products of 16-bit floats none of whose kernels uses tensor cores."""
    kernels: dict[tuple[str, ...], list[KernelSpec]] = {}
    for step in work.steps:
        if isinstance(step, KernelStep) and step.nodes in products.labels:
            kernels.setdefault(step.nodes, []).append(step.kernel)
    plain = {specs[0].symbol: nodes for nodes, specs in kernels.items() if not _has_tensor_cores(specs, code)}
    return [Finding(name, arch, f"no tensor cores in {', '.join(nodes)}") for name, nodes in plain.items()]


def _has_tensor_cores(specs: Sequence[KernelSpec], code: Mapping[KernelSpec, Code]) -> bool:
    return any(code[spec].uses_tensor_cores for spec in specs)


def of_counts(work: Work, counts: Mapping[int, Counted]) -> list[Finding]:
    """Narrow accesses of neighbours, and bank conflicts; ``counts`` is by the number of a step."""
    found: dict[Finding, None] = {}
    for number, counted in counts.items():
        step = work.steps[number]
        assert isinstance(step, KernelStep)
        texts = [*narrow_accesses(counted.sites), *bank_conflicts(counted.sites)]
        found |= dict.fromkeys(Finding(step.kernel.symbol, "", text) for text in texts)
    return list(found)


def narrow_accesses(sites: Sequence[Site]) -> list[str]:
    """Accesses of global memory whose lanes move neighbours, by less than 16 bytes each.

    What is beside accesses of 16 bytes, as often as these, is of a smaller type.
    """
    total = sum(_bytes(site) for site in sites if site.kind in ("load", "store"))
    if total < MUCH:
        return []
    wide = max((site.requests for site in sites if site.nbytes >= VECTOR and not _is_shared(site)), default=0.0)
    texts = []
    for site in sites:
        is_dense = site.kind in ("load", "store") and 0.99 * site.least <= site.units <= 1.05 * site.least
        is_full = site.least * SECTOR >= 0.9 * site.nbytes * 32
        if site.nbytes < VECTOR and is_dense and is_full and _bytes(site) > SHARE * total and site.requests > wide:
            texts.append(f"{site.kind}s of {site.nbytes} bytes, {_bytes(site) / total:.0%} of all bytes")
    return texts


def bank_conflicts(sites: Sequence[Site]) -> list[str]:
    """Accesses of shared memory that take more than twice the wavefronts that they need."""
    total = sum(site.requests for site in sites if _is_shared(site))
    return [
        f"{site.kind}s of {site.nbytes} bytes take {site.units:.1f} wavefronts, {site.least:.1f} would do"
        for site in sites
        if _is_shared(site) and site.units > WAYS * site.least and site.requests > SHARE * SHARE * total
    ]


def _is_shared(site: Site) -> bool:
    return site.kind.startswith("shared")


def _bytes(site: Site) -> float:
    return site.requests * site.least * (LINE if _is_shared(site) else SECTOR)
