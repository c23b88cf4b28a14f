"""Fills ONNX Runtime's kernel registries from the operator table."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Final

from ...abi import host
from ...abi.core import core, ffi, lib
from ...custom.registry import Snapshot
from ...model.ir import DType
from ...model.ort.ort_calls import OrtCallError, OrtCalls
from ...model.ort.ort_schema import read_schemas
from ...ops.kernel_definitions import UNLIMITED, KernelDefinition, Mismatch, kernel_definitions
from ...ops.registry import is_built_in
from . import kept_definitions

CONTEXT_KERNEL = KernelDefinition("EPContext", "com.microsoft", 1, UNLIMITED, types={})
"""Kernel of nodes that hold a context, with any types. ONNX Runtime uses it if it cannot fuse the node."""


_snapshots: Final[weakref.WeakValueDictionary[int, Snapshot]] = weakref.WeakValueDictionary()


def number_of(operators: Snapshot) -> int:
    """Return the number by which C refers to a session's custom operators that need kernels; 0 if there are none."""
    if not operators.operators:
        return 0
    return _snapshots.setdefault(operators.generation, operators).generation


def add_kernels(registry: Any, ep_name: str, operators: int) -> None:
    """Add a kernel for each version of each operator to ``registry`` (``OrtKernelRegistry *``).

    ``operators``: the result of `number_of` for the custom operators that get kernels as well.

    Contradictions between the operator table and the schemas of this ORT are logged at level INFO: they come from
    another version of ORT, and a user cannot act on them. The tests compare the table with the version for which it is
    written.

    Raises: OrtCallError: ORT rejects a definition.
    """
    ort = OrtCalls(host.api(), host.ep_api())
    arrays: dict[tuple[DType, ...], Any] = {}
    custom = custom_definitions(_snapshots[operators], ort) if operators else []
    for definition in [*_definitions(ep_name), CONTEXT_KERNEL, *custom]:
        _add(ort, registry, ep_name, definition, arrays)


def _definitions(ep_name: str) -> list[KernelDefinition]:
    kept = kept_definitions.kept()
    if kept is None:
        definitions, found = definitions_of_host()
        kept = definitions, list(map(str, found))
        kept_definitions.keep(*kept)
    for mismatch in kept[1]:
        host.log("INFO", f"{ep_name}: this ONNX Runtime never chooses the kernel of {mismatch}")
    return kept[0]


def custom_definitions(operators: Snapshot, ort: OrtCalls) -> list[KernelDefinition]:
    """Return kernels of custom operators, for any types; the claim checks the types.

    In a domain of ONNX Runtime, a custom operator gets kernels only for versions that no built-in operator serves.
    """
    definitions = []
    for (domain, name), rows in operators.by_name.items():
        if rows[0].is_own_schema:
            on_host = set.intersection(*(set(row.host_inputs) for row in rows))
            since = min(row.version for row in rows)
            definitions.append(KernelDefinition(name, domain, since, UNLIMITED, {}, tuple(sorted(on_host))))
            continue
        until = UNLIMITED
        for schema in read_schemas(ort, name, domain):
            if operators.serving(domain, name, schema.since) and not is_built_in(domain, name, schema.since):
                definitions.append(KernelDefinition(name, domain, schema.since, until, {}))
            until = schema.since - 1
    return definitions


def definitions_of_host() -> tuple[list[KernelDefinition], list[Mismatch]]:
    """Return the kernels for the schemas of the loaded ORT, and the contradictions between schemas and operator
    table.
    """
    ort = OrtCalls(host.api(), host.ep_api())
    return kernel_definitions(lambda name, domain: read_schemas(ort, name, domain))


def _add(
    ort: OrtCalls, registry: Any, ep_name: str, definition: KernelDefinition, arrays: dict[tuple[DType, ...], Any]
) -> None:
    """Add a definition to the registry. ``arrays`` are ``const OrtDataType *[]`` that definitions share."""
    builder = ort.out("CreateKernelDefBuilder", "OrtKernelDefBuilder *")
    try:
        ort.call("KernelDefBuilder_SetOperatorType", builder, definition.name.encode())
        ort.call("KernelDefBuilder_SetDomain", builder, definition.domain.encode())
        ort.call("KernelDefBuilder_SetSinceVersion", builder, definition.since, definition.until)
        ort.call("KernelDefBuilder_SetExecutionProvider", builder, ep_name.encode())
        for constraint, dtypes in definition.types.items():
            if dtypes not in arrays:
                types = [found for dtype in dtypes if (found := _data_type(ort, dtype)) is not None]
                arrays[dtypes] = ffi.new("const OrtDataType *[]", types)
            types = arrays[dtypes]
            ort.call("KernelDefBuilder_AddTypeConstraint", builder, constraint.encode(), types, len(types))
        for index in definition.host_inputs:
            ort.call("KernelDefBuilder_SetInputMemType", builder, index, lib.OrtMemTypeCPUInput)
        for index in definition.host_outputs:
            ort.call("KernelDefBuilder_SetOutputMemType", builder, index, lib.OrtMemTypeCPUOutput)
        zero = ffi.new("int[]", [0])
        if definition.is_view:
            ort.call("KernelDefBuilder_AddInputOutputAliases", builder, zero, zero, 1)
        if definition.is_in_place:
            ort.call("KernelDefBuilder_AddInputOutputMutableAliases", builder, zero, zero, 1)
        kernel = ort.out("KernelDefBuilder_Build", "OrtKernelDef *", builder)
    finally:
        ort.functions.ReleaseKernelDefBuilder(builder)
    try:
        table = core()
        create = table.create_shape_kernel if definition.host_outputs else table.create_node_kernel
        ort.call("KernelRegistry_AddKernel", registry, kernel, create, ffi.NULL)
    finally:
        ort.functions.ReleaseKernelDef(kernel)


@cache
def _data_types() -> dict[DType, Any]:
    return {}


def _data_type(ort: OrtCalls, dtype: DType) -> Any | None:
    """Return the ``const OrtDataType *``; None if this ORT has no tensors of the type."""
    known = _data_types()
    if dtype not in known:
        try:
            known[dtype] = ort.out("GetTensorDataType", "const OrtDataType *", dtype.ort)
        except OrtCallError:
            known[dtype] = None
    return known[dtype]
