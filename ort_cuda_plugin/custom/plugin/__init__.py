"""Custom operators as plugin classes, modeled on TensorRT 10's IPluginV3: base classes and their registration."""

from __future__ import annotations

from ...model.ir import DType
from ..operator import Port, PortKind
from .descriptors import DynamicPluginTensorDesc, ExprBuilder, PluginTensorDesc, Size, SizeTensor, TensorFormat
from .fields import PluginField, PluginFieldCollection, PluginFieldType
from .interfaces import (
    CapabilityType,
    Phase,
    Plugin,
    PluginBuild,
    PluginCore,
    PluginCreator,
    PluginResourceContext,
    PluginRuntime,
)
from .operator import register_creator, unregister_creator

__all__ = [
    "CapabilityType",
    "DType",
    "DynamicPluginTensorDesc",
    "ExprBuilder",
    "Phase",
    "Plugin",
    "PluginBuild",
    "PluginCore",
    "PluginCreator",
    "PluginField",
    "PluginFieldCollection",
    "PluginFieldType",
    "PluginResourceContext",
    "PluginRuntime",
    "PluginTensorDesc",
    "Port",
    "PortKind",
    "Size",
    "SizeTensor",
    "TensorFormat",
    "register_creator",
    "unregister_creator",
]
