"""Writes the coverage table, docs/operators.md: whether each operator runs as kernels, library calls or copies.

The kinds of work are those that lowering records for the nodes of ONNX's backend tests, for a GPU with NVIDIA's
libraries.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping

import onnx

from ort_cuda_plugin.clusters.nodes.node_lowering import InputSymbols, NodeLowering, symbolic_input
from ort_cuda_plugin.conformance.cases import load_cases
from ort_cuda_plugin.ep.device.libraries import LIBRARIES
from ort_cuda_plugin.model.ir import DType, Graph, InvalidModel, Unsupported
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.ops import registry
from ort_cuda_plugin.ops.registry import Operator
from ort_cuda_plugin.passes.emission.emission import emit
from ort_cuda_plugin.passes.table import KERNEL_SELECTION, run_passes
from ort_cuda_plugin.program.expressions.symbolic import Dim
from ort_cuda_plugin.program.lowering.context import Buffer, DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.libraries import ATTENTION, CONV, MATMUL
from ort_cuda_plugin.program.steps.trace import (
    Copy,
    DeviceLoop,
    HostCall,
    Launch,
    LibraryCall,
    Memset,
    ReadBack,
    Recordable,
)

WRITE_COMMAND = "ort-cuda-plugin operators --write docs/operators.md"
GPU = DeviceProperties(emulated=False, libraries=frozenset(library.name for library in LIBRARIES))
LIBRARY_NAMES = {MATMUL: "cuBLASLt", CONV: "cuDNN", ATTENTION: "cuDNN"}
NO_LAUNCH = "no launch"
NO_TEST = "no test of ONNX has it"

_HEADER = """# Operators

This page lists the operators that the plugin supports, with their opset versions and element types. The table has a row
for each operator, or range of versions of an operator, that `ort_cuda_plugin/ops/` declares. `{command}`
wrote it with onnx {onnx}; a test fails if the table is out of date.

The column *versions* has a range of opset versions of the operator's domain. The column *types* has the element types
of each type constraint of the operator's ONNX schema, such as `T`; *as ONNX says* means that the declaration names no
types, so that those of the schema apply. The column *left to the CPU* has element types and versions that ONNX defines
and the plugin does not support: it leaves such nodes to other providers, mostly to the CPU provider. The column *notes*
says what the operator returns if its name does not say enough, and how the plugin treats cases that ONNX leaves open.

The column *runs as* says what the nodes of ONNX's backend tests become on a GPU with cuBLASLt and cuDNN:

- cuBLASLt, cuDNN: a call of this library. A GPU without the library, and the emulated device, run a kernel of the
  plugin instead.
- kernel: a kernel of the plugin.
- copy: a copy or fill by the CUDA driver.
- read-back: the host reads a value in the middle of a Run.
- {no_launch}: the node needs no work on the device (a view, or shape arithmetic).
- {no_test}: the plugin supports the operator, but no backend test contains it.

The column *types* uses short names (f32 is float32, b1 is bool) and names for sets of types: {types}.
"""


def render() -> str:
    """Return the table in Markdown."""
    runs = recorded()
    lines = [
        _HEADER.format(
            command=WRITE_COMMAND, onnx=onnx.__version__, no_launch=NO_LAUNCH, no_test=NO_TEST, types=_legend()
        ),
        "| operator | versions | types | runs as | left to the CPU | notes |",
        "|---|---|---|---|---|---|",
    ]
    for operator in registry.operators():
        name = f"{operator.domain}.{operator.name}" if operator.domain else operator.name
        cells = (
            name,
            _versions(operator),
            "; ".join(f"{constraint}: {_types(types)}" for constraint, types in operator.types.items())
            or "as ONNX says",
            ", ".join(sorted(runs.get((operator.domain, operator.name, operator.since), {NO_TEST}))),
            _left(operator),
            (operator.function.__doc__ or "").strip().split("\n")[0],
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# ---- launches recorded by lowering ----


@functools.cache
def recorded() -> Mapping[tuple[str, str, int], set[str]]:
    """Return the kinds of launches of each operator's nodes, by (domain, name, since).

    The nodes are those of all backend tests that can be lowered.
    """
    found: dict[tuple[str, str, int], set[str]] = defaultdict(set)
    for case in load_cases().values():
        try:
            graph = read_model(case.model())
        except (ValueError, KeyError, TypeError, onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
            continue  # strings, sequences, operators that this version of ONNX does not define
        for operator, kinds in _lowered(graph):
            found[operator.domain, operator.name, operator.since] |= kinds
    return found


def _lowered(graph: Graph) -> Iterator[tuple[Operator, set[str]]]:
    """Yield each node's operator and its kinds of launches, up to the first node that lowering declines."""
    symbols = InputSymbols()

    def read_host_input(buffer: Buffer, count: int) -> tuple[Dim, ...]:
        return symbols.host_values(buffer, [1] * count)

    lowering = NodeLowering(graph, GPU, LoweringOptions(), read_host_input, record=True, guesses=symbols, states={})
    try:
        for index, value in enumerate(graph.inputs):
            lowering.add_input(value, symbolic_input(symbols, value, index))
        for node in graph.nodes:
            steps = lowering.ctx.trace.steps
            before = len(steps)
            lowering.lower(node)
            operator = registry.lookup(node.domain, node.op_type, node.since_version)
            selected = run_passes(lowering.ctx, steps[before:], KERNEL_SELECTION)
            yield operator, {_kind(step) for step in emit(lowering.ctx, selected)} or {NO_LAUNCH}
    except (Unsupported, InvalidModel, ZeroDivisionError, OverflowError, KeyError):
        return


def _kind(step: Recordable) -> str:
    match step:
        case LibraryCall():
            return LIBRARY_NAMES[step.problem.kind]
        case Launch():
            return "kernel"
        case Copy() | Memset():
            return "copy"
        case ReadBack():
            return "read-back"
        case HostCall():
            return "Python"
        case DeviceLoop():
            return "loop"


# ---- cells ----

NAMED_TYPES: Mapping[str, frozenset[DType]] = {
    "all": registry.ALL_TENSORS,
    "arithmetic": registry.ARITHMETIC,
    "floats": registry.FLOATS,
    "ints": registry.INTS,
    "signed ints": registry.SIGNED_INTS,
    "unsigned ints": registry.UNSIGNED_INTS,
}
"""Sets of element types by the names that abbreviate them in the table, the largest set first."""


def _legend() -> str:
    return "; ".join(f"*{name}*: {' '.join(_sorted(types))}" for name, types in NAMED_TYPES.items())


def _sorted(types: frozenset[DType]) -> list[str]:
    return [dtype.short for dtype in sorted(types, key=lambda dtype: dtype.value)]


def _types(types: frozenset[DType]) -> str:
    names = []
    for name, named in NAMED_TYPES.items():
        if named <= types:
            names.append(f"*{name}*")
            types -= named
    return " ".join(names + _sorted(types)) or "none"


def _versions(operator: Operator) -> str:
    served = _served(operator)
    return str(served.start) if len(served) == 1 else f"{served.start}-{served.stop - 1}"


def _served(operator: Operator) -> range:
    """Return the versions of the domain for which the declaration ``operator`` applies."""
    following = [
        other.since
        for other in registry.operators()
        if (other.domain, other.name) == (operator.domain, operator.name) and other.since > operator.since
    ]
    last = operator.until or min(following, default=registry.NEWEST_OPSETS[operator.domain] + 1) - 1
    return range(operator.since, last + 1)


def _left(operator: Operator) -> str:
    """Return the element types and earlier versions that ONNX defines and the declaration leaves out, as text."""
    schemas = [
        schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if (schema.domain, schema.name) == (operator.domain, operator.name) and not schema.deprecated
    ]
    missing: set[str] = set()
    for schema in schemas:
        if schema.since_version not in _served(operator):
            continue
        for constraint in schema.type_constraints:
            served = operator.types.get(constraint.type_param_str)
            if served is not None:
                missing |= set(constraint.allowed_type_strs) - {_onnx_type(dtype) for dtype in served}
    parts = sorted(missing)
    first = min(other.since for other in registry.operators() if other.name == operator.name)
    if operator.since == first and (early := sorted(s.since_version for s in schemas if s.since_version < first)):
        parts.append("version " + ", ".join(map(str, early)))
    return ", ".join(parts)


def _onnx_type(dtype: DType) -> str:
    name = onnx.TensorProto.DataType.Name(dtype.value).lower()
    return f"tensor({name})"
