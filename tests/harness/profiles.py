"""Creates sessions with ONNX Runtime's profiling, and reads their profile files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

import ort_cuda_plugin

KERNEL_TIME = "_kernel_time"


@dataclass(frozen=True)
class Event:
    """One event of a profile; ``begin`` and ``end`` are microseconds since the profile began."""

    category: str
    name: str
    thread: int
    begin: int
    end: int
    args: Mapping[str, Any]

    @property
    def duration(self) -> int:
        return self.end - self.begin

    def holds(self, other: Event) -> bool:
        """Return whether the other event is within this one, with a tolerance of a microsecond at both ends.

        ORT rounds begins and durations down, so the end of its event may be a microsecond early. The clocks of ORT and
        of the device are aligned to a microsecond.
        """
        return self.begin - 1 <= other.begin and other.end <= self.end + 1


class Profile:
    """The events of a profile file. The file is deleted."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        events = json.loads(file.read_text())
        file.unlink()
        self.events = [
            Event(e["cat"], e["name"], e["tid"], e["ts"], e["ts"] + e["dur"], e.get("args", {})) for e in events
        ]
        self.device = [e for e in self.events if e.category == "Kernel" and "ort_event_id" in e.args]
        """Events of the plugin's devices."""
        self.kernels = [e for e in self.device if e.args["kind"] in ("kernel", "library")]

    def nodes(self, provider: str | None = None) -> list[Event]:
        """Return ORT's kernel-time events of the nodes that the provider ran."""
        provider = provider or ort_cuda_plugin.get_ep_name()
        return [
            e
            for e in self.events
            if e.category == "Node" and e.name.endswith(KERNEL_TIME) and e.args.get("provider") == provider
        ]

    def sessions(self, name: str) -> list[Event]:
        return [e for e in self.events if e.category == "Session" and e.name == name]

    def within(self, parent: Event) -> list[Event]:
        """Return the device events within an event of ORT's, by time and thread."""
        return [e for e in self.device if e.thread == parent.thread and parent.holds(e)]


def profiled_session(
    model: bytes, folder: Path, provider_options: Mapping[str, str] | None = None
) -> ort.InferenceSession:
    """Create a session on the emulated device that writes its profile to ``folder``, which is created."""
    folder.mkdir(exist_ok=True)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.log_severity_level = 3
    return ort_cuda_plugin.session(model, emulate=True, sess_options=options, provider_options=provider_options)
