"""Loads callbacks of compiled models: a registered creator makes the plugin object whose `enqueue` each Run calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...model.ir import DType
from ...program.steps.callbacks import Callback, CallFunction
from .calls import EnqueueFunction, PluginFailure, Tensors
from .descriptors import TensorFormat
from .fields import PluginFieldCollection, fields_from_json
from .interfaces import Phase
from .node import create
from .operator import find_creator


def stored_callback(row: Mapping[str, Any]) -> Callback:
    """Return the callback that `each_run` recorded. Its creator is looked up when the fused node is made.

    Raises the exceptions of `context.storage.errors.MALFORMED`.
    """
    if row["kind"] != "plugin":
        raise ValueError(f"stored callback: got the kind {row['kind']!r}, expected 'plugin'")
    name, version, namespace, node = (_text(row[key]) for key in ("name", "version", "namespace", "node"))
    label = f"plugin {name}-{version}"
    fields = fields_from_json(row["fields"])
    tactic = _number(row["tactic"])
    tensors = tuple((DType[dtype], _number(rank)) for dtype, rank in row["tensors"])
    layout = Tensors(
        tuple(map(bool, row["given"])),
        tuple(_described(*of_tensor) for of_tensor in row["inputs"]),
        tuple(_described(*of_tensor) for of_tensor in row["outputs"]),
        tuple(tuple(map(_number, axes)) for axes in row["wild"]),
        bool(row["has_workspace"]),
    )
    described = len(layout.inputs) + len(layout.outputs)
    if sum(layout.given) != len(layout.inputs) or len(layout.wild) != len(layout.outputs):
        raise ValueError(
            f"stored callback of {label}: got descriptions of {len(layout.inputs)} inputs and {len(layout.outputs)} "
            f"outputs, expected {sum(layout.given)} and {len(layout.wild)}"
        )
    if len(tensors) != described + layout.has_workspace:
        raise ValueError(
            f"stored callback of {label}: got {len(tensors)} tensors, expected {described + layout.has_workspace}"
        )

    def function() -> CallFunction:
        return _function(name, version, namespace, node, label, fields, tactic, layout)

    key = json.dumps(row, sort_keys=True)
    return Callback(key, f"enqueue of {label}", tensors, function=function, stored=row)


def _described(dtype: str, format: str, channels: int = 0) -> tuple[str, str, int]:
    return DType[dtype].name, TensorFormat[format].name, _number(channels)


def _function(
    name: str,
    version: str,
    namespace: str,
    node: str,
    label: str,
    fields: PluginFieldCollection,
    tactic: int,
    layout: Tensors,
) -> CallFunction:
    creator = find_creator(name, version, namespace)
    if creator is None:
        raise PluginFailure(
            f"{label} of namespace {namespace!r}: each Run of this compiled model calls it, and no creator of it is "
            "registered. Import the module that registers the creator before you create the session"
        )
    plugin = create(creator, label, node, fields, Phase.RUNTIME)
    return EnqueueFunction(label, plugin, tactic, layout)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"stored callback: got {value!r}, expected text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"stored callback: got {value!r}, expected an integer of at least 0")
    return value
