"""Profiling: runs a model with ONNX Runtime's profiler, and computes the profile of a typical Run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import GivenOptions, Model, Placement, chosen_device, described_by, placed_session
from .collect import Plans, Profile, collect

if TYPE_CHECKING:
    from ..ep.device.devices import DeviceInfo

_WARM_RUNS = 4
"""Number of warm-up Runs, in which kernels are compiled and CUDA graphs are made."""
NO_WORK = "a Run with these sizes launches no kernels, or profiling failed and ONNX Runtime's log says why"


@dataclass(frozen=True)
class Recording:
    """The profile of a Run, and what it was computed from.

    Attributes:
        device: the device that was profiled.
        events: ONNX Runtime's profiling events.
        plans: the plans of the clusters.
        trace: the file of ONNX Runtime's profiler, JSON.
        placement: where each node of the model runs.
    """

    profile: Profile
    device: DeviceInfo
    events: list[dict[str, Any]]
    plans: Plans
    trace: str
    placement: Placement


def profile(
    model: Model,
    feeds: Mapping[str, Any] | None = None,
    *,
    runs: int = 5,
    emulate: bool | None = None,
    provider_options: GivenOptions | None = None,
) -> Profile:
    """Run a model and return where the time of a Run goes: by step, node and kernel, on the device and on the host.

    Args:
        model: path, or the bytes of a model.
        feeds: the inputs of a Run, by name; None: seeded random values, with 1 for each symbolic dimension.
        runs: number of Runs, after four for warm-up, over which device times are medians.
        emulate: as for `session`.
        provider_options: as for `session`.

    Raises:
        RuntimeError: the profile has no work on the device. Others: those of `session`.
        ValueError: ``runs`` is not positive, or ``feeds`` is None and an input is not a tensor of numbers.

    Examples:
        >>> profile = ort_cuda_plugin.profile("model.onnx", {"x": array}, emulate=True)
        >>> profile.to_dict("nodes")["op_type"]
        ['MatMul', 'Relu']
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: expected at least 1")
    source = model if isinstance(model, bytes) else Path(model)
    given = feeds if feeds is not None else _random_feeds(source)
    name = "model" if isinstance(source, bytes) else source.stem
    found = record(source, None, given, runs, name, emulate, provider_options).profile
    if not found.steps:
        raise RuntimeError(f"{name}: the profile has no work on the device: {NO_WORK}")
    return found


def record(
    model: Model,
    outputs: Sequence[str] | None,
    feeds: Mapping[str, Any],
    runs: int,
    name: str,
    emulate: bool | None,
    provider_options: GivenOptions | None = None,
) -> Recording:
    """Run the model and return its profile under the name ``name``. ``outputs``: the outputs to compute; None: all."""
    import onnxruntime as ort

    given = dict(provider_options or {})
    device = described_by(chosen_device(emulate, {key: str(value) for key, value in given.items()}))
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        plan_folder = Path(folder) / "plans"
        plan_folder.mkdir()
        settings = {**given, "program_folder": str(plan_folder)}
        created, placement = placed_session(model, emulate=emulate, sess_options=options, provider_options=settings)
        for _ in range(_WARM_RUNS + runs):
            created.run(outputs, feeds)
        trace = Path(created.end_profiling()).read_text(encoding="utf-8")
        plans = Plans.read(plan_folder)
    events = json.loads(trace)
    found = replace(collect(events, runs, plans, name, device.name), is_emulated=device.emulated)
    return Recording(found, device, events, plans, trace, placement)


def _random_feeds(model: bytes | Path) -> Mapping[str, Any]:
    import onnx

    from ..models import random_inputs

    loaded = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
    return random_inputs(loaded)
