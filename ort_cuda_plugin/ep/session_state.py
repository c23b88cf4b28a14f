"""The state of one session that claims and compilation share: options, device, compiled models, custom operators."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ..abi import host
from ..abi.core import check, core, ffi, new_error
from ..clusters.nodes.control_flow import CompiledBody
from ..clusters.nodes.ranks import Ranks
from ..custom import registry as custom
from ..model.ir import Graph
from ..model.ort.ort_graph import read_graph
from ..plugin_library import EP_NAME
from ..program.lowering.context import DeviceProperties
from ..progress.display import shown_for_session
from .contexts.context_session import ContextSession
from .device import quarantined
from .device.devices import DeviceInfo
from .device.identity import Identity
from .device.open_device import OpenDevice
from .options.option_values import LOG_LEVELS
from .options.options import OptionError, Options, collect, parse
from .session.layering import rules_of_others
from .session.optimized_model import writes_optimized_model
from .session.partitioning import goes_by_statistics, read_budget
from .session.session_devices import SessionDevices
from .session.weight_budget import SessionWeightBudget


class Session:
    """A session's options and devices.

    Attributes:
        devices: the devices; ``device`` is the first one.
        contexts: the compiled models.
        may_be_cut: the reason why nodes must not be fused; "" if they may be.
        weight_budget: the limit of device memory for weights.
        budget: the limit of device memory for claimed nodes; None: no limit.
        single_nodes: whether ONNX Runtime runs each node by a registry kernel.
        operators: the custom operators.
        ranks: inferred ranks of values; kept here because ORT drops the nodes that a fused node replaces.
        progress: closing it ends the display of progress.
        compiled: the compiled clusters, by the names of their fused nodes; those of bodies may be compiled again in the
            plan of the surrounding graph.
    """

    def __init__(self, metadata: list[Any], session_options: Any, logger: Any, identity: Identity) -> None:
        self.identity = identity
        self._logger = logger  # ORT's session logger; it is freed with the session, like this object
        entries = _entries("GetSessionOptionsConfigEntries", host.api(), session_options)
        self.options = Options()
        self._read_options(entries)
        self.contexts = ContextSession(entries, session_options)
        offered = [DeviceInfo.from_metadata(host.key_value_pairs(pairs)) for pairs in metadata]
        self.devices = SessionDevices(offered, self.options, self.log)
        self.device = self.devices.all[0]
        self._quarantines = {device: quarantined.load(device) for device in self.devices.all}
        others = rules_of_others(entries, identity, self.device.info, host.host_version())
        if others and self.contexts.output is not None:
            raise OptionError(
                f"ep.context_enable=1 with layering rules for {others}: ONNX Runtime then fuses no nodes, because the "
                "rules may separate them, so nothing would be compiled. Compile the model without the rules; a session "
                "that loads the compiled model may have rules"
            )
        self.may_be_cut = f"layering rules for {others} may assign its neighbors to another provider" if others else ""
        self.budget = read_budget(entries, self._available_memory)
        self.single_nodes = (
            bool(others)
            or self.options.single_nodes
            or writes_optimized_model(session_options)
            or goes_by_statistics(entries, identity)
        )
        self.devices.require_fused_nodes(
            {
                "enable_cuda_graph=1 (each stage has automatic CUDA graphs)": self.options.enable_cuda_graph,
                "ep.context_enable=1 (a compiled model has code for one device)": self.contexts.output is not None,
                "session.resource_cuda_partitioning_settings (use gpu_mem_limit)": self.budget is not None,
                f"layering rules for {others} (use device_of)": bool(others),
                "weight_budget (each device holds the weights of its stages)": self.options.weight_budget is not None,
                "single_nodes=1": self.options.single_nodes,
                "optimized_model_filepath": writes_optimized_model(session_options),
            }
        )
        budget = self.options.weight_budget
        if budget is not None and self.single_nodes:
            raise OptionError(
                f"{EP_NAME} option weight_budget: ONNX Runtime runs each node of this session by a kernel of its own, "
                "and copies all weights to the device itself. Leave out weight_budget, or the setting that requests "
                "single nodes (single_nodes, optimized_model_filepath, layering rules, statistics)"
            )
        self.weight_budget = SessionWeightBudget(budget, self.device.info.memory_bytes)
        custom.discover()
        self.operators = custom.current()
        self.ranks = Ranks()
        self.compiled: dict[str, CompiledBody] = {}
        self.progress = ExitStack()
        self.progress.enter_context(shown_for_session(self.options.progress))
        weakref.finalize(self, self.progress.close)  # if the provider is never closed, because its creation failed

    def _read_options(self, session: dict[str, str]) -> None:
        environment = _entries("GetEnvConfigEntries", host.ep_api())
        self.options, ignored = parse(collect(session, environment, self.identity))
        if ignored:
            reasons = "; ".join(f"{key} ({why})" for key, why in ignored.items())
            self.log("WARNING", f"options that the plugin ignores: {reasons}")

    def _available_memory(self) -> int:
        out, error = ffi.new("uint64_t *"), new_error()
        core().device_available(self.device.pointer, out, error)
        check(error)
        return int(out[0])

    def log(self, level: str, message: str) -> None:
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.options.log_level):
            host.log(level, message, self._logger)

    def properties(self, device: OpenDevice | None = None) -> DeviceProperties:
        """Return the properties of a device of the session, by default the first one."""
        device = device or self.device
        properties = replace(device.properties(), quarantine=self._quarantines[device])
        return (
            properties
            if self.options.enable_cudnn
            else replace(properties, libraries=properties.libraries - frozenset({"cudnn"}))
        )

    def read_graph(self, ort_graph: Any) -> Graph:
        graph = read_graph(host.api(), ort_graph)
        graph.operators = self.operators
        return graph


def _entries(function: str, table: Any, *arguments: Any) -> dict[str, str]:
    pairs = ffi.new("OrtKeyValuePairs **")
    host.check_status(getattr(table, function)(*arguments, pairs))
    try:
        return host.key_value_pairs(pairs[0])
    finally:
        host.api().ReleaseKeyValuePairs(pairs[0])
