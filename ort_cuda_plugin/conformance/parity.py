"""Compares the plugin's kernel registry with that of another execution provider."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeAlias

from ort_cuda_plugin.ops.kernel_definitions import UNLIMITED

WRITE_COMMAND: Final = "ort-cuda-plugin parity --write docs/parity.md"
_HEADER: Final = """\
# Parity

This page compares two *kernel registries*, the lists of kernels that execution providers register with ONNX Runtime:
that of the plugin, and that of {other}. It lists the kernels that only one
of the two has. `{command}` wrote it with onnxruntime {version}; a test fails if the page is
out of date.

The page does not compare which inputs a kernel needs in host memory, because ONNX Runtime's Python API does not report
them. The plugin's kernels need these inputs in host memory. The numbers are positions of inputs, counted from 0. If
the versions of an operator differ, it occurs twice. The last entries are results in host memory:

{host}

The first table counts, for each domain, the operators in the registry of CUDAExecutionProvider, those that the plugin
has too, and those that it has with all versions and element types of CUDAExecutionProvider.
"""
_LACKING: Final = """\
CUDAExecutionProvider has kernels for these operators, versions or types, and the plugin does not. The column *lacking*
says which versions or types of these operators the plugin lacks; *all* means that it lacks the operators."""
_ADDED: Final = "The plugin has kernels for these operators, and CUDAExecutionProvider does not:"
_SEQUENCES: Final = (
    "the EP API has type constraints for tensors only, and a kernel cannot make or read a sequence in device memory"
)
_STRINGS: Final = "strings are in host memory"
_BODIES: Final = "the C API passes the graphs in attributes to a plugin's kernel only for If, Loop and Scan"
_REASONS: Final[Mapping[tuple[str, str], str]] = {
    ("", name): reason
    for reason, names in {
        _SEQUENCES: "ConcatFromSequence Identity MemcpyFromHost MemcpyToHost SequenceAt SequenceConstruct "
        "SequenceEmpty SequenceErase SequenceInsert SequenceLength",
        _STRINGS: "RandomNormalLike RandomUniformLike Size",
        f"{_STRINGS}; the EP API has type constraints for tensors only": "If Loop",
        "ONNX Runtime's CreateScanKernel makes kernels of Scan from version 9 on": "Scan",
    }.items()
    for name in names.split()
} | {
    ("com.microsoft", name): reason
    for reason, names in {
        f"{_BODIES}; the operator runs as a fused node instead": "BeamSearch GreedySearch Sampling WhisperBeamSearch",
        _STRINGS: "UnfoldTensor",
    }.items()
    for name in names.split()
}
"""For each operator, the reason why the plugin's registry lacks a version or type."""
_UNKNOWN: Final = "type constraint "
"""Beginning of a report line about a constraint that no schema has."""

NamesOf: TypeAlias = "Callable[[Kernel], frozenset[str] | None]"
"""Type of a function that returns the constraint names of a kernel's operator; None if the operator has no schema."""


@dataclass(frozen=True)
class Kernel:
    """A kernel definition.

    ``types`` maps each type constraint to the types that it allows; a constraint that is not in it allows all types.
    """

    domain: str
    name: str
    since: int
    until: int
    types: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Gap:
    """Versions of an operator for which the plugin lacks kernels that the other provider has.

    ``types`` says what is missing, in texts such as "T: float16" or "version 7"; empty if the operator is missing.
    """

    domain: str
    name: str
    versions: tuple[tuple[int, int], ...]
    types: tuple[str, ...]

    @property
    def reason(self) -> str:
        if self.types and all(text.startswith(_UNKNOWN) for text in self.types):
            return "its schema has no such constraint, so ONNX Runtime never chooses the kernel"
        return _REASONS.get((self.domain, self.name), "not implemented")


def read_digest(text: str) -> list[Kernel]:
    """Parse a JSON object with ``kernels``: as in a `digest`, or a list of definitions.

    A definition in the list has ``domain``, ``op``, ``versions`` and ``types``.

    Raises:
        ValueError: ``text`` is neither of the two.
    """
    try:
        kernels = json.loads(text)["kernels"]
        if isinstance(kernels, list):
            return [_kernel(row["domain"], row["op"], row["versions"], row["types"]) for row in kernels]
        return [
            _kernel(domain, name, (since, until), {key: types.split() for key, types in constraints.items()})
            for domain, operators in kernels.items()
            for name, rows in operators.items()
            for since, until, constraints in rows
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            'file of kernels: expected a JSON object {"kernels": [{"domain", "op", "versions", "types"}, ...]} '
            f"({type(error).__name__}: {error})"
        ) from None


def packaged_digest() -> tuple[str, list[Kernel]]:
    """Return name and version of the built-in CUDA execution provider, and its kernels, from the packaged digest."""
    text = files("ort_cuda_plugin.conformance").joinpath("cuda_kernels.json").read_text(encoding="utf-8")
    return str(json.loads(text)["about"]), read_digest(text)


def digest(about: str, kernels: Iterable[Kernel]) -> str:
    """Return the kernels as text for `read_digest`. Definitions that differ in one constraint are merged."""
    operators: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[tuple[str, str, int, int], list[Mapping[str, frozenset[str]]]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.domain, kernel.name, kernel.since, kernel.until].append(kernel.types)
    for (domain, name, since, until), types in sorted(groups.items()):
        for constraints in _merged(types):
            shown = {key: " ".join(sorted(constraints[key])) for key in sorted(constraints)}
            operators[domain][name].append([since, until, shown])
    lines = [
        f"  {json.dumps(domain)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(rows)}" for name, rows in names.items())
        + "\n  }"
        for domain, names in operators.items()
    ]
    return f'{{\n "about": {json.dumps(about)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def registered(ep_name: str) -> list[Kernel]:
    """Return the kernels in an execution provider's registry.

    Raises:
        RuntimeError: there is no such provider.
    """
    from onnxruntime.capi import _pybind_state as state

    return [
        _kernel(found.domain, found.op_name, found.version_range, found.type_constraints)
        for found in state.get_registered_ep_kernel_defs(ep_name)
    ]


def names_of_host() -> NamesOf:
    """Return a function that maps a kernel to the names of type constraints, inputs and outputs in its ONNX schema.

    The function returns None for a kernel whose operator has no schema.
    """
    from onnxruntime.capi import _pybind_state as state

    schemas: dict[tuple[str, str], dict[int, frozenset[str]]] = defaultdict(dict)
    for schema in state.get_all_operator_schema():
        constraints = {constraint.type_param_str for constraint in schema.type_constraints}
        ports = {port.name for port in (*schema.inputs, *schema.outputs)}
        domain = "" if schema.domain == "ai.onnx" else schema.domain
        schemas[domain, schema.name][schema.since_version] = frozenset(constraints | ports)

    def names(kernel: Kernel) -> frozenset[str] | None:
        versions = schemas.get((kernel.domain, kernel.name))
        if versions is None:
            return None
        first = max((since for since in versions if since <= kernel.since), default=kernel.since)
        served = [names for since, names in versions.items() if first <= since <= kernel.until]
        return frozenset[str]().union(*served) if served else None

    return names


def unknown_constraints(kernels: Iterable[Kernel], names_of: NamesOf) -> list[tuple[Kernel, str]]:
    """Return the kernels whose definition names a type constraint that their schema lacks, with that name."""
    found = []
    for kernel in kernels:
        names = names_of(kernel)
        if names is not None:
            found += [(kernel, constraint) for constraint in sorted(kernel.types) if constraint not in names]
    return found


def gaps(theirs: Iterable[Kernel], ours: Iterable[Kernel], names_of: NamesOf = lambda kernel: None) -> list[Gap]:
    """Return the gaps: kernels of ``theirs`` that ``ours`` lack, one for each operator and set of types.

    A constraint that the schema lacks is reported as well: the name may be a mistake in ``theirs``.
    """
    theirs = list(theirs)
    known: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in ours:
        known[kernel.domain, kernel.name].append(kernel)
    lacking: dict[tuple[str, str], dict[tuple[int, int], set[str]]] = defaultdict(dict)
    for kernel in theirs:
        found = lacking[kernel.domain, kernel.name]
        own = known[kernel.domain, kernel.name]
        if not own:
            found[kernel.since, kernel.until] = set()
        elif missing := set(_lacking(kernel, own)):
            found.setdefault((kernel.since, kernel.until), set()).update(missing)
    result = [
        Gap(kernel.domain, kernel.name, ((kernel.since, kernel.until),), (f"{_UNKNOWN}{constraint}",))
        for kernel, constraint in unknown_constraints(theirs, names_of)
    ]
    for (domain, name), versions in lacking.items():
        by_types: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for span, types in versions.items():
            by_types[tuple(sorted(types))].append(span)
        result += [Gap(domain, name, tuple(sorted(spans)), types) for types, spans in by_types.items()]
    return sorted(result, key=lambda gap: (gap.domain, gap.name, gap.versions))


def additions(theirs: Iterable[Kernel], ours: Iterable[Kernel]) -> dict[str, list[str]]:
    """Return the operators in ``ours`` that ``theirs`` lack, by domain."""
    known = {(kernel.domain, kernel.name) for kernel in theirs}
    found: dict[str, list[str]] = defaultdict(list)
    for domain, name in sorted({(kernel.domain, kernel.name) for kernel in ours} - known):
        found[domain].append(name)
    return found


def _kernel(domain: str, name: str, versions: Sequence[int], types: Mapping[str, Iterable[str]]) -> Kernel:
    since, until = versions
    plain = {key: frozenset(map(_short, values)) for key, values in types.items()}
    return Kernel("" if domain == "ai.onnx" else domain, name, int(since), int(until), plain)


def _short(type_name: str) -> str:
    """Abbreviate tensor(float) to float, and seq(tensor(float)) to seq(float)."""
    return re.sub(r"tensor\((\w+)\)", r"\1", type_name)


def _merged(types: Sequence[Mapping[str, frozenset[str]]]) -> list[Mapping[str, frozenset[str]]]:
    """Merge kernel definitions that differ in the types of one constraint only."""
    merged = list(types)
    for key in sorted({key for constraints in merged for key in constraints}):
        by_rest: dict[Any, set[str]] = defaultdict(set)
        for constraints in merged:
            rest = frozenset((other, allowed) for other, allowed in constraints.items() if other != key)
            by_rest[rest, key in constraints].update(constraints.get(key, ()))
        merged = [dict(rest) | ({key: frozenset(allowed)} if has else {}) for (rest, has), allowed in by_rest.items()]
    return merged


def _lacking(kernel: Kernel, own: Sequence[Kernel]) -> Iterator[str]:
    """Yield the versions and types of ``kernel`` that no kernel in ``own`` serves."""
    # In ORT, a kernel without a last version serves only the schema of its first version.
    last = kernel.since if kernel.until == UNLIMITED else kernel.until
    versions = {kernel.since} | {other.since for other in own if kernel.since <= other.since <= last}
    for version in sorted(versions):
        serving = [other for other in own if other.since <= version <= other.until]
        if not serving:
            yield f"version {version}"
            continue
        for constraint, types in kernel.types.items():
            served = [other.types.get(constraint, types) for other in serving]
            for missing in sorted(types - frozenset().union(*served)):
                yield f"{constraint}: {missing}"


def render(other: str, theirs: Sequence[Kernel], ours: Sequence[Kernel], host_memory: Sequence[str]) -> str:
    """Return the report as Markdown.

    Args:
        other: the name of the other provider.
        theirs: the other provider's kernels.
        ours: the plugin's kernels.
        host_memory: the inputs and outputs of the plugin's kernels that are in host memory, as text.
    """
    import onnxruntime

    names = {(kernel.domain, kernel.name) for kernel in theirs}
    names_of = names_of_host()
    found = gaps(theirs, ours, names_of)
    missing = {(gap.domain, gap.name) for gap in found if not gap.types}
    header = _HEADER.format(
        other=other, command=WRITE_COMMAND, version=onnxruntime.__version__, host=", ".join(host_memory)
    )
    columns = ("domain", "operators of CUDAExecutionProvider", "in the plugin", "with all versions and types")
    lines = [header, f"| {' | '.join(columns)} |", "|---|---|---|---|"]
    for domain in sorted({domain for domain, _ in names}):
        of_domain = {name for name in names if name[0] == domain}
        partial = {(gap.domain, gap.name) for gap in found if gap.domain == domain}
        here, whole = len(of_domain - missing), len(of_domain - partial)
        lines.append(f"| {_domain(domain)} | {len(of_domain)} | {here} | {whole} |")
    lines += ["", "## What CUDAExecutionProvider has and the plugin lacks", "", _LACKING, ""]
    lines += ["| domain | operators | lacking | reason |", "|---|---|---|---|"]
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for gap in found:
        lacking = ", ".join(_types_in_words(gap.types)) or "all"
        names_of_row = rows[gap.domain, lacking, gap.reason]
        if gap.name not in names_of_row:
            names_of_row.append(gap.name)
    for (domain, lacking, reason), operators in rows.items():
        lines.append(f"| {_domain(domain)} | {', '.join(operators)} | {lacking} | {reason} |")
    lines += ["", "## What the plugin adds", "", _ADDED, ""]
    for domain, operators in additions(theirs, ours).items():
        lines.append(f"- {_domain(domain)}: {', '.join(operators)}")
    if unknown := unknown_constraints(ours, names_of):
        lines += ["", "## Type constraints of the plugin that no schema has", ""]
        lines += [f"- {_domain(kernel.domain)}.{kernel.name}-{kernel.since}: {name}" for kernel, name in unknown]
    return "\n".join(lines) + "\n"


def _domain(domain: str) -> str:
    return domain or "ai.onnx"


def _types_in_words(types: Sequence[str]) -> list[str]:
    """Replace the entries for strings and sequences by the words "strings" and "sequences" for all constraints."""
    strings = [text for text in types if text.endswith(": string")]
    sequences = [text for text in types if "seq(" in text]
    rest = [text for text in types if text not in strings and text not in sequences]
    return rest + ["strings"] * bool(strings) + ["sequences"] * bool(sequences)
