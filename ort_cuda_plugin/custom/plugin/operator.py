"""Registers the creators of applications' plugins, each as a custom operator."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final, TypeVar

from .. import registry
from ..operator import Attribute, CustomOperator
from .fields import attribute_of
from .interfaces import PluginCreator
from .node import PluginNodes

DEFAULT_DOMAIN: Final = "trt.plugins"
"""Domain of plugins without a namespace: the domain that ONNX Runtime's TensorRT provider uses."""

_CreatorKey = tuple[str, str, str]


@dataclass(frozen=True)
class _Registered:
    creator: PluginCreator
    operator: CustomOperator


_lock = threading.Lock()
_creators: dict[_CreatorKey, _Registered] = {}


def key_of(creator: PluginCreator) -> _CreatorKey:
    """Return the creator's name, version and namespace."""
    return creator.get_plugin_name(), creator.get_plugin_version(), creator.get_plugin_namespace()


Creator = TypeVar("Creator", bound="PluginCreator | type[PluginCreator]")


def register_creator(given: Creator, *, priority: int = 0) -> Creator:
    """Register the operator of a creator for sessions that are created from now on. Also a decorator of the class.

    ``given`` is a creator, or its class, which is called without arguments. ``priority`` as in `CustomOperator`. If a
    notebook cell defines the class again, the new class replaces the old one.

    Raises:
        ValueError: the name, version and namespace are taken, or the creator's declaration cannot be an operator.
    """
    creator = given() if isinstance(given, type) else given
    name, version, namespace = key = key_of(creator)
    if not version.isdigit() or version == "0":
        raise ValueError(f"plugin {name}: version: got {version!r}, expected the digits of a number of at least 1")
    if not creator.inputs and not creator.outputs:
        raise ValueError(
            f"plugin {name}: its creator declares no inputs and no outputs. Set its attributes `inputs` and `outputs` "
            "to ports"
        )
    attributes: tuple[Attribute, ...] = tuple(map(attribute_of, creator.get_field_names()))
    domain = namespace or DEFAULT_DOMAIN
    if domain == "ai.onnx":
        domain = ""
    operator = CustomOperator(
        name,
        domain,
        int(version),
        tuple(creator.inputs),
        tuple(creator.outputs),
        attributes,
        PluginNodes(creator).lower,
        priority,
        type(creator).__module__,
        type(creator).__qualname__ if isinstance(given, type) else "",
    )
    with _lock:
        known = _creators.get(key)
        if known is not None and _is_current(known) and not registry.replaces(operator, known.operator):
            raise ValueError(
                f"plugin {name}, version {version}, namespace {namespace!r}: another creator is registered. Unregister"
                " it first, or use another version"
            )
        _creators[key] = _Registered(creator, registry.register(operator))
    return given


def unregister_creator(given: PluginCreator | type[PluginCreator]) -> None:
    """Unregister a creator and its operator. Existing sessions keep both.

    Raises:
        LookupError: the creator is not registered.
    """
    creator = given() if isinstance(given, type) else given
    with _lock:
        found = _creators.pop(key_of(creator), None)
    if found is None:
        name, version, namespace = key_of(creator)
        raise LookupError(f"plugin {name}, version {version}, namespace {namespace!r}: no creator is registered")
    registry.unregister(found.operator)


def find_creator(name: str, version: str, namespace: str) -> PluginCreator | None:
    """Return the registered creator of that name, version and namespace; None if there is none."""
    with _lock:
        found = _creators.get((name, version, namespace))
    return None if found is None or not _is_current(found) else found.creator


def _is_current(known: _Registered) -> bool:
    return known.operator in registry.current().operators
