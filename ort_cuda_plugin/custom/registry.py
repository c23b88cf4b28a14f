"""Registry of custom operators of applications and installed packages; selects those that serve a node.

Operators are registered by the decorator `ort_cuda_plugin.op`, by `register`, or by the entry points
``ort_cuda_plugin.ops`` of installed packages. An entry point names a module, whose import registers operators, or a
function without arguments.

A session takes a `Snapshot` when it is created: later changes affect later sessions only.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from .. import uninterrupted
from ..compiler.nvidia_packages import CUDA_RUNTIME, load_library
from ..model.ir import Graph, Node, Unsupported
from ..ops import registry as built_in
from .operator import HOST_DOMAINS, CustomOperator
from .report import report

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ort_cuda_plugin.ops"

Implementation: TypeAlias = "CustomOperator | built_in.Operator"
_Table: TypeAlias = Mapping[tuple[str, str], tuple[CustomOperator, ...]]


@dataclass(frozen=True)
class Snapshot:
    """Immutable state of the registry. ``generation`` counts the changes of the registry before this state."""

    generation: int = 0
    _table: _Table = field(default_factory=dict, repr=False)

    @staticmethod
    def of(operator: CustomOperator) -> Snapshot:
        """Return a snapshot of a registry with one operator."""
        return Snapshot(0, {(operator.domain, operator.name): (operator,)})

    @property
    def operators(self) -> list[CustomOperator]:
        """Return all custom operators, ordered by domain, name, version and priority."""
        return [operator for key in sorted(self._table) for operator in self._table[key]]

    @property
    def by_name(self) -> _Table:
        """Return the custom operators by domain and name, each with its oldest version first."""
        return self._table

    def serving(self, domain: str, name: str, version: int) -> list[CustomOperator]:
        """Return the custom operators for a node of this version, highest priority first.

        Each priority contributes one operator: the newest whose version is at most the node's.
        """
        best: dict[int, CustomOperator] = {}
        for operator in self._table.get((domain, name), ()):
            if operator.version <= version:
                best[operator.priority] = operator  # the table is sorted by version: the newest stays
        return [best[priority] for priority in sorted(best, reverse=True)]

    def implementations(self, node: Node, opset: int) -> Sequence[Implementation]:
        """Return the built-in and custom operators that may run a node, in the order in which they are tried.

        ``opset`` is the version of the node's domain that the model imports. Raises Unsupported if no operator serves
        the node.
        """
        own = (node.domain, node.op_type) in self._table
        if not own:
            try:
                return (built_in.lookup(node.domain, node.op_type, node.since_version),)
            except Unsupported as error:
                if node.domain in HOST_DOMAINS:
                    raise
                what = (
                    "no custom operator of that name is registered. Import the module that registers it before you "
                    "create the session; for a command of ort-cuda-plugin pass --operators FILE.py"
                )
                raise Unsupported(error.kind, f"{error.reason}: {what}") from None
        # ONNX Runtime has one schema for all versions of an application's operator.
        schema_is_ours = any(operator.is_own_schema for operator in self._table[node.domain, node.op_type])
        version = max(opset, node.since_version) if schema_is_ours else node.since_version
        custom = self.serving(node.domain, node.op_type, version)
        first = [operator for operator in custom if operator.priority > 0]
        last = [operator for operator in custom if operator.priority <= 0]
        try:
            ours: list[Implementation] = [built_in.lookup(node.domain, node.op_type, node.since_version)]
        except Unsupported:
            if not custom:
                raise
            ours = []
        return [*first, *ours, *last]


def snapshot_of(graph: Graph) -> Snapshot:
    """Return the custom operators of the graph's session; if it has no session, those registered now."""
    return graph.operators if isinstance(graph.operators, Snapshot) else current()


_lock = threading.RLock()
_current = Snapshot()
_discovered = False
_loading = threading.local()


def current() -> Snapshot:
    """Return a snapshot of the operators that are registered now."""
    return _current


def register(operator: CustomOperator) -> CustomOperator:
    """Register an operator for sessions that are created from now on, and return the record that was added.

    An operator with the same definition is replaced; existing sessions keep it.

    Raises:
        ValueError: another operator of this name, version and priority is registered already.
    """
    global _current
    package = getattr(_loading, "package", "")
    if package:
        operator = replace(operator, origin=package)
    with _lock:
        key = operator.domain, operator.name
        rows = [row for row in _current._table.get(key, ()) if not replaces(operator, row)]
        for row in rows:
            if (row.version, row.priority) == (operator.version, operator.priority):
                who = f" by {row.origin}" if row.origin else ""
                raise ValueError(
                    f"{operator.label} with priority {operator.priority} is registered already{who}. Unregister it "
                    "first, or register this one with another priority"
                )
        ordered = sorted([*rows, operator], key=lambda row: (row.version, row.priority))
        _current = Snapshot(_current.generation + 1, {**_current._table, key: tuple(ordered)})
    return operator


def replaces(new: CustomOperator, old: CustomOperator) -> bool:
    """Return whether both come from one definition, because a notebook cell ran again or a module was reloaded."""

    def place(row: CustomOperator) -> tuple[object, ...]:
        return row.origin, row.definition, row.version, row.priority

    return old is not new and bool(new.definition) and place(old) == place(new)


def unregister(operator: CustomOperator) -> None:
    """Unregister an operator; existing sessions keep it.

    Raises:
        LookupError: the operator is not registered.
    """
    global _current
    with _lock:
        key = operator.domain, operator.name
        rows = _current._table.get(key, ())
        if operator not in rows:
            raise LookupError(f"{operator.label} with priority {operator.priority} is not registered")
        table = {**_current._table, key: tuple(row for row in rows if row is not operator)}
        if not table[key]:
            del table[key]
        _current = Snapshot(_current.generation + 1, table)


def discover(*, again: bool = False) -> None:
    """Load the operators of installed packages. A second call in a process does nothing unless ``again``.

    If a package fails, the log names it, with the traceback, and the other packages are loaded.
    """
    global _discovered
    from importlib import metadata

    with _lock:
        if _discovered and not again:
            return
        _discovered = True
    entries = metadata.entry_points(group=ENTRY_POINTS)
    if entries:
        uninterrupted.call(lambda: _load_all(entries))


def _load_all(entries: Iterable[EntryPoint]) -> None:
    for entry in entries:
        _load(entry)


def _load(entry: EntryPoint) -> None:
    """Load an entry point without holding a lock.

    Importing the package may wait for another thread's import. That import may register an operator, which needs the
    registry's lock.
    """
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else f"entry {entry.name}"
    _loading.package = package
    load_library(CUDA_RUNTIME)  # for packages that import numba.cuda
    try:
        loaded = entry.load()
        if callable(loaded) and not hasattr(loaded, "operator"):
            loaded()
    except BaseException:  # catches SystemExit too; KeyboardInterrupt cannot occur on this helper thread
        what = f"the entry point {entry.name} = {entry.value} of {ENTRY_POINTS}"
        report(f"{package}: {what} failed, so operators are missing\n{traceback.format_exc()}")
    finally:
        _loading.package = ""
