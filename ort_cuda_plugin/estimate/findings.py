"""Finds performance defects in the kernels of a Run.

The machine code for each architecture shows spills, and GEMMs that do not use the tensor cores for their type. The
accesses of blocks on the emulated device show narrow accesses and bank conflicts: lanes that move contiguous data
should move 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from ..compiler.kernel import KernelSpec
from ..compiler.targets import Target
from ..model.ir import DType
from ..program.expressions.symbolic import Dim, hint
from ..program.lowering.context import LoweringOptions
from ..program.lowering.shapes import broadcast_strides
from ..program.steps.steps import Attend, Contract, Map, Sums
from ..program.steps.tensor import Tensor
from ..program.steps.trace import Launch
from ..program.steps.trace import Step as PlannedStep
from .count import LINE, SECTOR, Counted, Site, count_all
from .gather import work_of_model
from .sass import Code, code_of
from .work import KernelStep, Work

ARCHITECTURES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
COUNTED = "sm_90"
"""The architecture whose access widths are counted; accesses on other architectures must not be narrower."""

VECTOR = 16
"""Bytes of the widest access of a thread."""
MUCH = 1 << 18
"""Minimum bytes that a launch moves for a finding about access widths."""
SHARE = 1 / 8
"""A finding about narrow accesses concerns at least this fraction of the bytes of a launch. A finding about bank
conflicts concerns at least the square of this fraction of the shared-memory requests of a launch.
"""
WAYS = 2.01
"""Maximum wavefronts of a shared-memory request as a multiple of its minimum: two-way conflicts are allowed."""
WINDOW = 3
"""Maximum loads of each input byte for a finding; with more, windows overlap, and vectors need too many registers."""
FEW = 16
"""Minimum of rows, columns and k for a finding about GEMMs: below it, a tensor core's tile is mostly padding."""


@dataclass(frozen=True)
class Finding:
    """A performance defect of a kernel, described by ``what``. ``where`` is an architecture, or "" for all."""

    kernel: str
    where: str
    what: str


MULTIPLIES = "multiply_add_matrix_"
"""Text in the source of every kernel that uses tensor cores."""


class Inspector:
    """Examines the kernels of models on `COUNTED` and on further architectures.

    The machine code of a kernel is cached for all models that use the kernel.
    """

    def __init__(self, architectures: Sequence[str]) -> None:
        self.code: dict[str, dict[KernelSpec, Code]] = {arch: {} for arch in (COUNTED, *architectures)}

    def look(
        self,
        model: onnx.ModelProto,
        libraries: frozenset[str],
        names: frozenset[str] | None = None,
        options: LoweringOptions | None = None,
    ) -> list[Finding]:
        """Return all findings for a model from `gather.optimized`, planned for a GPU with these libraries.

        If ``names`` is given, return only findings about kernels with these names. Raises the errors of
        `gather.work_of_model`, KernelCompileError, and CudaError if a kernel fails.
        """
        options = options or LoweringOptions()
        products = Watched(options.use_tf32)
        work = work_of_model(model, {}, options=options, libraries=libraries, watch=products)
        if names is not None:
            steps = (step for step in work.steps if isinstance(step, KernelStep) and step.kernel.name in names)
            work = replace(work, steps=tuple(steps))
        specs = list(dict.fromkeys(step.kernel for step in work.steps if isinstance(step, KernelStep)))
        found = []
        for arch, known in self.code.items():
            new = [spec for spec in specs if spec not in known]
            known |= zip(new, code_of(new, Target.cuda(*ARCHITECTURES[arch])), strict=True)
            code = {spec: known[spec] for spec in specs}
            found += of_code(code, arch)
            found += of_products(work, products, code, arch)
            found += of_widths(code, self.code[COUNTED], arch)
        return list(dict.fromkeys([*found, *of_counts(work, products, count_all(work, self.code[COUNTED]))]))


class Watched:
    """A `Watch` that classifies the steps before emission, by the labels of their ONNX nodes.

    ``all`` are contractions, including attention; ``tensor`` are GEMMs and attention of 16-bit floats, and with
    ``tf32`` GEMMs of float32, that are large enough for tensor cores. ``apart`` are steps that cannot use vector
    accesses: elementwise steps with an input that is contiguous along another axis than the result, and sliding windows
    over rows whose bytes are not a multiple of `VECTOR`.
    """

    def __init__(self, tf32: bool = True) -> None:
        self.tf32 = tf32
        self.all: set[tuple[str, ...]] = set()
        self.tensor: set[tuple[str, ...]] = set()
        self.apart: set[tuple[str, ...]] = set()
        self._last: Sequence[PlannedStep] = ()

    def __call__(self, name: str, steps: Sequence[PlannedStep]) -> None:
        if name == "emission":
            for step in self._last:
                if isinstance(step, (Map, Launch)):
                    self._note(step, tuple(node.label for node in step.nodes))
        self._last = steps

    def _note(self, step: Map | Launch, labels: tuple[str, ...]) -> None:
        if isinstance(step, Launch) and MULTIPLIES in step.kernel.source:
            self.all.add(labels)
        elif isinstance(step, Sums):
            self.all.add(labels)
            if self._fills_tensor_cores(step):
                self.tensor.add(labels)
        elif _has_broken_windows(step) if isinstance(step, Launch) else type(step) is Map and _is_turned(step):
            self.apart.add(labels)

    def _fills_tensor_cores(self, step: Sums) -> bool:
        if not isinstance(step, (Contract, Attend)):
            return False
        a, b = step.operands[:2]
        has_type = all(x.dtype.is_float and x.dtype.itemsize == 2 for x in step.operands)
        if self.tf32 and isinstance(step, Contract):
            has_type |= all(x.dtype is DType.FLOAT32 for x in step.operands)
        return has_type and all(hint(size) >= FEW for size in (*a.shape[-2:], *b.shape[-2:]))


def _has_broken_windows(step: Launch) -> bool:
    """Return whether a launch is a pooling, and `VECTOR` does not divide the bytes of a row of its input or result."""
    tensors = [x for x in step.args if isinstance(x, Tensor)]
    return "_pool" in step.kernel.name and any(hint(x.shape[-1]) * x.dtype.itemsize % VECTOR for x in tensors)


def _is_turned(step: Map) -> bool:
    """Return whether an input is contiguous along another axis than a result."""
    axes = [axis for axis, size in enumerate(step.shape) if size != 1]

    def strides(x: Tensor) -> dict[int, Dim]:
        return {axis: broadcast_strides(x, step.shape)[axis] for axis in axes}

    inner = {axis for _, y in step.outputs for axis, stride in strides(y).items() if stride == 1}
    inputs = [strides(x) for _, x in step.inputs]
    return any(1 in of.values() and any(of[axis] not in (0, 1) for axis in inner) for of in inputs)


def of_code(code: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Return findings about kernels that spill registers on the architecture ``arch``."""
    found = []
    for spec, one in code.items():
        stack = one.mix.get("LDL", 0) + one.mix.get("STL", 0)
        if one.spilled or stack:
            found.append(
                Finding(
                    spec.symbol,
                    arch,
                    f"register spills of {one.spilled} bytes, {stack} instructions that access the stack",
                )
            )
    return found


def of_widths(code: Mapping[KernelSpec, Code], other: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Return findings about accesses that are narrower than on another architecture, whose code is ``other``."""
    found = []
    for spec, one in code.items():
        for name in ("LDG", "STG", "LDS", "STS"):
            if one.widest(name) < other[spec].widest(name):
                text = f"widest {name} has {one.widest(name)} bytes, {other[spec].widest(name)} on another architecture"
                found.append(Finding(spec.symbol, arch, text))
    return found


def of_products(work: Work, products: Watched, code: Mapping[KernelSpec, Code], arch: str) -> list[Finding]:
    """Return findings about contractions that suit tensor cores, but whose kernels do not use tensor cores."""
    kernels: dict[tuple[str, ...], list[KernelSpec]] = {}
    for step in work.steps:
        if isinstance(step, KernelStep) and step.nodes in products.tensor:
            kernels.setdefault(step.nodes, []).append(step.kernel)
    plain = {specs[0].symbol: nodes for nodes, specs in kernels.items() if not _has_tensor_cores(specs, code)}
    return [Finding(name, arch, f"uses no tensor cores for {', '.join(nodes)}") for name, nodes in plain.items()]


def _has_tensor_cores(specs: Sequence[KernelSpec], code: Mapping[KernelSpec, Code]) -> bool:
    return any(code[spec].uses_tensor_cores for spec in specs)


def of_counts(work: Work, products: Watched, counts: Mapping[int, Counted]) -> list[Finding]:
    """Return findings about narrow accesses of contiguous data outside of contractions, and about bank conflicts.

    ``counts`` has the counts of each launch by the number of its step.
    """
    found: dict[Finding, None] = {}
    for number, counted in counts.items():
        step = work.steps[number]
        assert isinstance(step, KernelStep)
        texts = bank_conflicts(counted.sites)
        loaded = sum(_bytes(site) for site in counted.sites if site.kind == "load")
        is_straight = step.nodes not in products.all and step.nodes not in products.apart
        if is_straight and loaded <= WINDOW * sum(access.nbytes for access in step.reads):
            texts += narrow_accesses(counted.sites)
        found |= dict.fromkeys(Finding(step.kernel.symbol, "", text) for text in texts)
    return list(found)


def narrow_accesses(sites: Sequence[Site]) -> list[str]:
    """Describe loads and stores of global memory that move contiguous data with fewer than 16 bytes per lane.

    Accesses that execute no more often than the most frequent 16-byte access are exempt: they move no more elements
    than that access, of a smaller type.
    """
    total = sum(_bytes(site) for site in sites if site.kind in ("load", "store"))
    if total < MUCH:
        return []
    wide = max((site.requests for site in sites if site.nbytes >= VECTOR and not _is_shared(site)), default=0.0)
    narrow: dict[tuple[str, int], float] = {}
    for site in sites:
        is_dense = site.kind in ("load", "store") and 0.99 * site.least <= site.units <= 1.05 * site.least
        is_full = site.least * SECTOR >= 0.9 * site.nbytes * 32
        if site.nbytes < VECTOR and is_dense and is_full and site.requests > wide:
            key = site.kind, site.nbytes
            narrow[key] = narrow.get(key, 0.0) + _bytes(site)
    return [
        f"narrow {kind}s of {nbytes} bytes per thread, {moved / total:.0%} of all bytes moved"
        for (kind, nbytes), moved in narrow.items()
        if moved > SHARE * total
    ]


def bank_conflicts(sites: Sequence[Site]) -> list[str]:
    """Describe shared-memory accesses that take more than twice their minimum of wavefronts."""
    total = sum(site.requests for site in sites if _is_shared(site))
    found: dict[str, float] = {}
    for site in sites:
        if _is_shared(site) and site.units > WAYS * site.least:
            text = (
                f"bank conflicts: {site.kind}s of {site.nbytes} bytes take {site.units:.1f} wavefronts, minimum "
                f"{site.least:.1f}"
            )
            found[text] = found.get(text, 0.0) + site.requests
    return [text for text, requests in found.items() if requests > SHARE * SHARE * total]


def _is_shared(site: Site) -> bool:
    return site.kind.startswith("shared")


def _bytes(site: Site) -> float:
    return site.requests * site.least * (LINE if _is_shared(site) else SECTOR)
