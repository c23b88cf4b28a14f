"""Base classes of applications' plugins, modeled on TensorRT's IPluginV3 and its capabilities.

A method without a sensible default is abstract: a class must define it. Methods report errors by exceptions. Methods
that return a status in TensorRT may also return a number other than 0, and methods that make a plugin may return None.
If a node omits an input and has later ones, the omitted input is None in all lists of inputs.
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

logger = logging.getLogger("ort_cuda_plugin").getChild("custom")

Dims: TypeAlias = tuple[Any, ...]
"""A shape; a size is an int, a `Size` or, in output shapes, a `SizeTensor`."""


class Phase(enum.Enum):
    """The purpose for which a plugin is created: BUILD for a node of a model, RUNTIME for a compiled model."""

    BUILD = 0
    RUNTIME = 1


class CapabilityType(enum.Enum):
    """Capabilities of a plugin. A plugin that is created for `Phase.RUNTIME` may lack BUILD."""

    CORE = 0
    BUILD = 1
    RUNTIME = 2


@dataclass(frozen=True)
class PluginResourceContext:
    """Resources that plugins share by key, and the kind of device. `PluginRuntime.attach_to_context` receives it."""

    is_emulated: bool = False
    resources: Resources = field(default=RESOURCES)


class Plugin(ABC):
    """A plugin of one node. Clones of it serve separate plans and concurrent Runs.

    A plugin may return another object for each of its capabilities.
    """

    def get_capability_interface(self, type: CapabilityType) -> Any:
        """Return the capability of that type; by default the plugin itself, None if its class lacks the capability."""
        wanted = {
            CapabilityType.CORE: PluginCore,
            CapabilityType.BUILD: PluginBuild,
            CapabilityType.RUNTIME: PluginRuntime,
        }[type]
        return self if isinstance(self, wanted) else None

    def destroy(self) -> None:
        """Release what the plugin acquired. Called once, after its last use."""
        return

    def __del__(self) -> None:
        try:
            self.destroy()
        except Exception:
            logger.exception("destroy of a plugin of class %s failed", type(self).__qualname__)

    @abstractmethod
    def clone(self) -> Plugin | None:
        """Return a new plugin with the same parameters. Cloning must be cheap, and must not allocate device memory."""


class PluginCore(ABC):
    """Core capability: the identity of the plugin, as its creator declares it."""

    @abstractmethod
    def get_plugin_name(self) -> str: ...

    def get_plugin_version(self) -> str:
        return "1"

    def get_plugin_namespace(self) -> str:
        return ""


class PluginBuild(ABC):
    """Build capability: describes types, shapes, formats and memory while a plan is built."""

    def get_metadata_string(self) -> str:
        """Return text for `explain`, such as the values of attributes."""
        return ""

    def get_nb_outputs(self) -> int:
        return 1

    @abstractmethod
    def get_output_shapes(
        self, inputs: Sequence[Dims], shape_inputs: Sequence[Dims], expr_builder: ExprBuilder
    ) -> Sequence[Dims]:
        """Return the shape of each output.

        ``inputs`` are shapes, and ``shape_inputs`` the contents of the inputs that the host reads.
        """

    @abstractmethod
    def get_output_data_types(self, input_types: Sequence[DType]) -> Sequence[DType]: ...

    def supports_format_combination(self, pos: int, in_out: Sequence[DynamicPluginTensorDesc], nb_inputs: int) -> bool:
        """Return whether tensor ``pos`` may have its format, given the formats of the tensors before it.

        The inputs come first, then the outputs.
        """
        return in_out[pos].desc.format.name == "LINEAR"

    def get_aliased_input(self, output_index: int) -> int:
        """Return the index of the input whose memory output ``output_index`` shares; -1: it shares none."""
        return -1

    def get_workspace_size(
        self, inputs: Sequence[DynamicPluginTensorDesc], outputs: Sequence[DynamicPluginTensorDesc]
    ) -> Any:
        """Return the bytes of scratch memory that `enqueue` needs: an int, or a `Size` made of ``desc.dims``."""
        return 0

    def get_nb_tactics(self) -> int:
        return len(self.get_valid_tactics())

    def get_valid_tactics(self) -> Sequence[int]:
        """Return the numbers of tactics, from 1. An empty list stands for one tactic with the number 0."""
        return ()

    def get_format_combination_limit(self) -> int:
        """Return the maximum number of format combinations that are measured for each tactic."""
        return 100

    def get_timing_cache_id(self) -> str | None:
        """Return the plugin's key in the timing cache; None: no tactic is timed, and the first one is used."""
        return None

    def configure_plugin(
        self, inputs: Sequence[DynamicPluginTensorDesc], outputs: Sequence[DynamicPluginTensorDesc]
    ) -> Any:
        """Receive the tensors' formats, types and ranges of sizes. Raise an exception for unsupported dimensions."""
        return 0


class PluginRuntime(ABC):
    """Runtime capability: enqueues the plugin's work."""

    enqueue_is_recorded = True
    """Whether `enqueue` is called once for each plan, and the plan then repeats its launches in each Run.

    Otherwise each Run calls `enqueue`.
    """

    def set_tactic(self, tactic: int) -> Any:
        """Set the tactic of the next `enqueue`; 0 if the plugin lists no tactics."""
        return 0

    def on_shape_change(self, inputs: Sequence[PluginTensorDesc], outputs: Sequence[PluginTensorDesc]) -> Any:
        """Receive the sizes of the next `enqueue`; -1 stands for a size that `enqueue` computes."""
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
        """Enqueue launches and copies on the stream."""

    def attach_to_context(self, context: PluginResourceContext) -> Plugin | None:
        """Return a clone of the whole plugin that may use the context's resources while it lives."""
        assert isinstance(self, Plugin)
        return self.clone()

    def get_fields_to_serialize(self) -> PluginFieldCollection:
        """Return the fields that `PluginCreator.create_plugin` needs in `Phase.RUNTIME`."""
        return PluginFieldCollection()


class PluginCreator(ABC):
    """Creates plugins from fields. One creator serves all nodes of its name, version and namespace."""

    inputs: Sequence[Port] = ()
    """The inputs of a node, with their element types."""
    outputs: Sequence[Port] = ()

    @abstractmethod
    def get_plugin_name(self) -> str:
        """Return the operator's name in models."""

    def get_plugin_version(self) -> str:
        return "1"

    def get_plugin_namespace(self) -> str:
        """Return the operator's domain in models; "" stands for `operator.DEFAULT_DOMAIN`."""
        return ""

    def get_field_names(self) -> PluginFieldCollection:
        """Return the fields that `create_plugin` takes, without data."""
        return PluginFieldCollection()

    @abstractmethod
    def create_plugin(self, name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin | None:
        """Create a plugin for the node ``name``. Raise an exception for bad attributes; a field may be missing."""
