"""The devices of a session, and which of them runs each node (options ``device_ids`` and ``device_of``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...abi import host
from ...abi.core import check, core, ffi, lib, new_error
from ...clusters.search.search import is_search
from ...clusters.stage_balance import balanced, by_rules, unmatched
from ...clusters.stages import Stage, StageError, placed_nodes, split
from ...model.ir import Graph, Node
from ...plugin_library import EP_NAME
from ..device.devices import DeviceInfo, cuda_devices, emulated_devices
from ..device.open_device import OpenDevice, use_device
from ..options import arena
from ..options.options import OptionError, Options

_SEVERAL_SINCE = 27
"""N of the first ONNX Runtime 1.N that accepts several devices for a session."""

Log = Callable[[str, str], None]
"""Writes a message to the session's log; the arguments are the level and the text."""


def chosen_devices(offered: Sequence[DeviceInfo], options: Options, api_version: int) -> list[DeviceInfo]:
    """Return the devices of a session: those that ONNX Runtime selected, or those of ``device_ids``.

    ``offered``: the devices that ONNX Runtime selected. ``api_version``: the N of ONNX Runtime 1.N.

    Raises:
        OptionError: ONNX Runtime selected no device, several although its version cannot, or others than the options
            name; ``device_ids`` names a device that does not exist.
    """
    if not offered:
        raise OptionError(f"{EP_NAME}: ONNX Runtime selected no device. Pass one to add_provider_for_devices")
    given = [*dict.fromkeys(offered)]
    first = given[0]
    if len(given) > 1 and api_version < _SEVERAL_SINCE:
        raise OptionError(
            f"{EP_NAME}: ONNX Runtime before 1.{_SEVERAL_SINCE} accepts one device for a session, and was given the "
            f"devices {_names(given)}. Pass the first one to add_provider_for_devices, and name all of them in the "
            f"option device_ids={_text([info.ordinal for info in given])}"
        )
    if options.device_id is not None and options.device_id not in [info.ordinal for info in given]:
        raise OptionError(
            f"{EP_NAME} option device_id={options.device_id}: the session was given the device {_names(given)}. Pass "
            f"device {options.device_id} to add_provider_for_devices, or leave out device_id; several devices need one "
            "call of add_provider_for_devices"
        )
    if not options.device_ids:
        return given
    if options.device_ids[0] != first.ordinal:
        raise OptionError(
            f"{EP_NAME} option device_ids={_text(options.device_ids)}: the session was given the device "
            f"{_names([first])}, expected device {options.device_ids[0]}. Set device_id={options.device_ids[0]} too, "
            "or pass this device to add_provider_for_devices"
        )
    for info in given:
        if info.ordinal not in options.device_ids:
            raise OptionError(
                f"{EP_NAME} option device_ids={_text(options.device_ids)}: add_provider_for_devices also got the "
                f"device {_names([info])}. Add the device to device_ids, or do not pass it to "
                "add_provider_for_devices, or leave out the option device_ids"
            )
    return [first, *_named(options.device_ids, emulated=first.emulated)[1:]]


def _named(ordinals: Sequence[int], *, emulated: bool) -> list[DeviceInfo]:
    known = {info.ordinal: info for info in (emulated_devices() if emulated else cuda_devices()[0])}
    for ordinal in ordinals:
        if ordinal not in known:
            raise OptionError(
                f"{EP_NAME} option device_ids={_text(ordinals)}: device {ordinal} does not exist. Choose from "
                f"{_names(known.values())}"
            )
    return [known[ordinal] for ordinal in ordinals]


def _names(infos: Iterable[DeviceInfo]) -> str:
    return ", ".join(f"{info.ordinal} ({info.name})" for info in infos)


def _text(ordinals: Sequence[int]) -> str:
    return ",".join(map(str, ordinals))


class SessionDevices:
    """The open devices of a session.

    Attributes:
        all: the devices; the first one has the inputs and outputs of the model.
    """

    def __init__(self, offered: Sequence[DeviceInfo], options: Options, log: Log) -> None:
        infos = chosen_devices(offered, options, host.api_version())
        self.ordinals = [info.ordinal for info in infos]
        self._rules = options.device_of
        self._options = options
        if self._rules and len(infos) == 1:
            raise OptionError(f"{EP_NAME} option device_of: the session has one device. Name several in device_ids")
        for rule in self._rules:
            if rule.ordinal not in self.ordinals:
                raise OptionError(
                    f"{EP_NAME} option device_of={rule.pattern}:{rule.ordinal}: device {rule.ordinal} is not a device "
                    f"of the session. Name it in device_ids, which is {_text(self.ordinals)}"
                )
        self.all = [use_device(info) for info in infos]
        self._connect(log)

    @property
    def are_several(self) -> bool:
        """Return whether the session has more than one device."""
        return len(self.all) > 1

    def configure_arenas(self, log: Log) -> None:
        """Set the arenas' options on each device."""
        for device in self.all:
            for memory, values in (
                (lib.OCP_DEVICE_MEMORY, self._options.device_arena),
                (lib.OCP_PINNED_MEMORY, self._options.pinned_arena),
            ):
                if warning := arena.configure(device.info, memory, values):
                    log("WARNING", warning)

    def set_limit(self, nbytes: int) -> None:
        """Limit the memory of each device."""
        for device in self.all:
            arena.set_limit(device.info, lib.OCP_DEVICE_MEMORY, nbytes)

    def _connect(self, log: Log) -> None:
        """Enable peer access between all devices where the hardware has it, and log the route of copies."""
        direct, error = ffi.new("bool *"), new_error()
        for device in self.all:
            for peer in self.all:
                if peer is device:
                    continue
                core().peer_connect(device.pointer, peer.pointer, direct, error)
                check(error, f"device_ids={_text(self.ordinals)}")
                path = "directly" if direct[0] else "through host memory"
                log("INFO", f"copies from device {peer.info.ordinal} to {device.info.ordinal} go {path}")

    def require_fused_nodes(self, others: Mapping[str, bool]) -> None:
        """Refuse settings that a session on several devices does not support.

        ``others`` maps each of these settings to whether it is set.

        Raises: OptionError: the session has several devices, and one of the settings is set.
        """
        for setting, is_set in others.items():
            if self.are_several and is_set:
                raise OptionError(
                    f"{EP_NAME} option device_ids={_text(self.ordinals)}: a session on several devices does not "
                    f"support {setting}. Give the session one device, or leave the setting out"
                )

    def assign(self, graphs: Sequence[Graph], log: Log) -> dict[Node, int]:
        """Return the index of the device of each of the `placed_nodes` in ``graphs``, the clusters of the main graph.

        Raises:
            OptionError: the weights do not fit into the memory of the devices.
        """
        graphs = [graph for graph in graphs if not is_search(graph.nodes[0])]
        nodes = [node for graph in graphs for node in placed_nodes(graph)]
        if self._rules:
            for rule in unmatched(self._rules, (node for graph in graphs for node in graph.all_nodes())):
                log(
                    "WARNING",
                    f"device_of: the pattern {rule.pattern!r} matches no node of the plugin, and no result of one. "
                    "ONNX Runtime may have fused or renamed the node: ort-cuda-plugin explain MODEL lists the nodes",
                )
            return by_rules(nodes, self._rules, self.ordinals)
        try:
            return balanced(nodes, [_available(device) for device in self.all])
        except StageError as error:
            raise OptionError(f"{EP_NAME} option {error}") from None

    def stages(
        self, graph: Graph, inputs: Sequence[str], outputs: Sequence[str], placed: dict[Node, int]
    ) -> list[Stage]:
        """Return the stages of a cluster of the main graph; [] if all its nodes run on the first device.

        ``inputs`` and ``outputs`` are the names of the fused node's values.

        Raises:
            OptionError: a value that is not a tensor would cross between devices.
        """
        devices = {node: placed[node] for node in graph.nodes if node in placed}
        if not any(devices.values()):
            return []
        values = {value.name: value for node in graph.nodes for value in (*node.reads(), *node.outputs) if value}
        try:
            return split(graph, [values[name] for name in inputs], [values[name] for name in outputs], devices)
        except StageError as error:
            raise OptionError(f"{EP_NAME} option device_ids={_text(self.ordinals)}: {error}") from None


def _available(device: OpenDevice) -> int:
    out, error = ffi.new("uint64_t *"), new_error()
    core().device_available(device.pointer, out, error)
    check(error)
    return int(out[0])
