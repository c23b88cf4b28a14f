"""What an author of a plugin derives from, after IPluginV3 and its capabilities.

A method that has no sensible default raises NotImplementedError. Errors are exceptions; a method that TensorRT wants a
status of may also return a number other than 0, and one that makes a plugin may return None. An input that a node
leaves out, and after which others come, is None in all lists of inputs.
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...model.ir import DType
from ..operator import Port
from ..resources import RESOURCES, Resources
from .descriptors import DynamicPluginTensorDesc, ExprBuilder, PluginTensorDesc
from .fields import PluginFieldCollection

logger = logging.getLogger(__name__)

Dims: TypeAlias = tuple[Any, ...]
"""Sizes: ints, `Size` and, in output shapes, `SizeTensor`."""


class Phase(enum.Enum):
    """What a plugin is created for: a node of a model, or a compiled model that is loaded."""

    BUILD = 0
    RUNTIME = 1


class CapabilityType(enum.Enum):
    """Parts of a plugin; BUILD may be missing from one that is created for `Phase.RUNTIME`."""

    CORE = 0
    BUILD = 1
    RUNTIME = 2


@dataclass(frozen=True)
class PluginResourceContext:
    """What a plugin gets when it is attached: resources that plugins share by key, and what the device is."""

    is_emulated: bool = False
    resources: Resources = field(default=RESOURCES)


class Plugin(ABC):
    """A plugin: one object for each node, session and stream. Made complete; its capabilities may be other objects."""

    def get_capability_interface(self, type: CapabilityType) -> Any:
        """The part of that type; the plugin itself where it derives from all of them."""
        wanted = {
            CapabilityType.CORE: PluginCore,
            CapabilityType.BUILD: PluginBuild,
            CapabilityType.RUNTIME: PluginRuntime,
        }[type]
        return self if isinstance(self, wanted) else None

    def destroy(self) -> None:
        """Called once, when nobody uses the plugin any more: what it acquired can be released here."""
        return

    def __del__(self) -> None:
        try:
            self.destroy()
        except Exception:
            logger.exception("destroy of a plugin of class %s failed", type(self).__qualname__)

    @abstractmethod
    def clone(self) -> Plugin | None:
        """A new plugin with the same parameters, for each use of the node: cheap, without memory on the device."""


class PluginCore(ABC):
    """Who the plugin is: as its creator says."""

    @abstractmethod
    def get_plugin_name(self) -> str: ...

    def get_plugin_version(self) -> str:
        return "1"

    def get_plugin_namespace(self) -> str:
        return ""


class PluginBuild(ABC):
    """What the plugin is asked while plans are made."""

    def get_metadata_string(self) -> str:
        """What `explain` says of the node, such as the values of its attributes."""
        return ""

    def get_nb_outputs(self) -> int:
        return 1

    @abstractmethod
    def get_output_shapes(
        self, inputs: Sequence[Dims], shape_inputs: Sequence[Dims], expr_builder: ExprBuilder
    ) -> Sequence[Dims]:
        """The shape of each output.

        ``inputs`` are shapes, and ``shape_inputs`` the contents of the inputs that the host reads.
        """

    @abstractmethod
    def get_output_data_types(self, input_types: Sequence[DType]) -> Sequence[DType]: ...

    def supports_format_combination(self, pos: int, in_out: Sequence[DynamicPluginTensorDesc], nb_inputs: int) -> bool:
        """Whether tensor ``pos``, counted over inputs and then outputs, may be so, given those before it."""
        return in_out[pos].desc.format.name == "LINEAR"

    def get_aliased_input(self, output_index: int) -> int:
        """The input whose memory an output is, or -1."""
        return -1

    def get_workspace_size(
        self, inputs: Sequence[DynamicPluginTensorDesc], outputs: Sequence[DynamicPluginTensorDesc]
    ) -> Any:
        """Bytes of scratch memory: an int, or a `Size` of ``desc.dims`` of the inputs."""
        return 0

    def get_nb_tactics(self) -> int:
        return len(self.get_valid_tactics())

    def get_valid_tactics(self) -> Sequence[int]:
        """Numbers from 1 of the ways to compute the same; none: there is one way, tactic 0."""
        return ()

    def get_format_combination_limit(self) -> int:
        """How many combinations of formats are measured for each tactic."""
        return 100

    def get_timing_cache_id(self) -> str | None:
        """Names the problem in the cache of times; None: nothing is measured, and the first tactic is taken."""
        return None

    def configure_plugin(
        self, inputs: Sequence[DynamicPluginTensorDesc], outputs: Sequence[DynamicPluginTensorDesc]
    ) -> Any:
        """Told of formats, types and ranges of sizes: checks of dimensions have their place here."""
        return 0


class PluginRuntime(ABC):
    """What the plugin does with memory."""

    enqueue_is_recorded = True
    """Whether `enqueue` is called when a plan is made, which keeps its launches. Else each Run calls it."""

    def set_tactic(self, tactic: int) -> Any:
        """Which way the next `enqueue` is to take; 0 where there is one."""
        return 0

    def on_shape_change(self, inputs: Sequence[PluginTensorDesc], outputs: Sequence[PluginTensorDesc]) -> Any:
        """Told of the sizes of the next `enqueue`; -1 stands for one that `enqueue` computes."""
        return 0

    @abstractmethod
    def enqueue(
        self,
        input_desc: Sequence[PluginTensorDesc],
        output_desc: Sequence[PluginTensorDesc],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        workspace: Any,
        stream: Any,
    ) -> Any:
        """Computes, by launches and copies on the stream."""

    def attach_to_context(self, context: PluginResourceContext) -> Plugin | None:
        """A clone of the whole plugin that may use the context's resources until it goes."""
        assert isinstance(self, Plugin)
        return self.clone()

    def get_fields_to_serialize(self) -> PluginFieldCollection:
        """What `PluginCreator.create_plugin` needs in `Phase.RUNTIME`."""
        return PluginFieldCollection()


class PluginCreator(ABC):
    """Makes plugins of fields. One creator serves all nodes of its name, version and namespace."""

    inputs: Sequence[Port] = ()
    """The inputs that a node has, with their element types."""
    outputs: Sequence[Port] = ()

    @abstractmethod
    def get_plugin_name(self) -> str:
        """The operator's name in models."""

    def get_plugin_version(self) -> str:
        return "1"

    def get_plugin_namespace(self) -> str:
        """The operator's domain in models; "" stands for `operator.DEFAULT_DOMAIN`."""
        return ""

    def get_field_names(self) -> PluginFieldCollection:
        """The fields that `create_plugin` takes, without data."""
        return PluginFieldCollection()

    @abstractmethod
    def create_plugin(self, name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin | None:
        """A plugin for the node ``name``. Checks of attributes have their place here; a field may be missing."""
