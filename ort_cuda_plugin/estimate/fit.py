"""Fits the constants of the performance model to measurements of a GPU.

Measurements are one JSON file, which ``bench/gpu_measurements.py`` writes on a machine with a GPU::

    {"format": 1, "device": "h100", "gpu": "NVIDIA H100 80GB HBM3", "measurements": [
        {"name": "copy of 64 MiB", "seconds": 4.4e-05, "work": {...}}, ...]}

``work`` is the JSON of `work.to_json` for a Run. ``seconds`` is the time of this Run: the median over batches of
back-to-back Runs of the mean in a batch. Every third measurement is held out, to test the model.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from .. import gpus
from ..gpus.constants import Constants
from .model import Prepared, prepare, timed
from .work import Work, from_json, to_json

FORMAT = 1
HELD_OUT = 3
"""Period of held-out measurements: every third one."""
ROUNDS = 6
FACTORS = (0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4, 2.0)
_shares = {"dram", "l2", "tensor_kernel", "tensor_library", "float32_library", "issue"}
MAX_SHARE = 1.2
"""Maximum fraction of a peak rate. Above 1, since a GPU may clock higher than its data sheet says."""


@dataclass(frozen=True)
class Measurement:
    """A time measured on a GPU, and the work that took this time."""

    name: str
    seconds: float
    work: Work


@dataclass(frozen=True)
class Fit:
    """Constants, and the model's accuracy with them on the held-out measurements.

    ``error`` is the median of the relative errors of the estimates, ``rank_correlation`` Spearman's coefficient between
    estimates and times.
    """

    constants: Constants
    error: float
    rank_correlation: float
    estimates: tuple[tuple[str, float, float], ...]
    """Name, measured time and estimate of each held-out measurement."""


def measurements_json(device: str, gpu: str, measurements: Sequence[Measurement]) -> str:
    """Return the text of a file of measurements. ``device``: one of `gpus.names`; ``gpu``: the driver's name for it."""
    rows = [{"name": m.name, "seconds": m.seconds, "work": json.loads(to_json(m.work))} for m in measurements]
    return json.dumps({"format": FORMAT, "device": device, "gpu": gpu, "measurements": rows})


def read_measurements(text: str) -> tuple[str, list[Measurement]]:
    """Return the GPU's name (of `gpus.names`) and the measurements.

    Raises ValueError, LookupError or TypeError for a text of another format.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("device") not in gpus.names():
        raise ValueError(
            f"file of measurements: expected a JSON object with format {FORMAT} and as device one of "
            f"{', '.join(gpus.names())}"
        )
    rows = [
        Measurement(row["name"], row["seconds"], from_json(json.dumps(row["work"]))) for row in data["measurements"]
    ]
    if not rows or not all(row.seconds > 0 for row in rows):
        raise ValueError("measurements: expected at least one, each with seconds above 0")
    return data["device"], rows


def fit(device: str, measurements: Sequence[Measurement], start: Constants | None = None) -> Fit:
    """Return the constants with the least error on the measurements, searched from ``start``, and tested.

    Constants without an effect on the measurements keep their values. With fewer than `HELD_OUT` measurements, the
    measurements of the search also test its result. Raises the errors of `prepare`.
    """
    prepared = [(m, prepare(m.work, gpus.gpu(device))) for m in measurements]
    held = [pair for number, pair in enumerate(prepared) if number % HELD_OUT == HELD_OUT - 1]
    used = [pair for number, pair in enumerate(prepared) if number % HELD_OUT != HELD_OUT - 1]
    constants = _descend(start or Constants(), lambda constants: _loss(used, constants))
    tested = held or used
    estimates = tuple((m.name, m.seconds, timed(p, constants).seconds) for m, p in tested)
    errors = [abs(guess / seconds - 1) for _, seconds, guess in estimates]
    correlation = _rank_correlation([row[1] for row in estimates], [row[2] for row in estimates])
    return Fit(constants, statistics.median(errors), correlation, estimates)


def _loss(pairs: Sequence[tuple[Measurement, Prepared]], constants: Constants) -> float:
    """Return the loss: the sum of the squared logarithms of estimate / measured time."""
    return sum(math.log(timed(prepared, constants).seconds / m.seconds) ** 2 for m, prepared in pairs)


def _descend(constants: Constants, loss: Callable[[Constants], float]) -> Constants:
    """Return constants with a smaller ``loss``: optimize one constant after the other, with shrinking factors."""
    best = loss(constants)
    for number in range(ROUNDS):
        before = best
        for field in fields(Constants):
            if field.name == "l2_share":  # the loss is a step function of this constant, which descent cannot optimize
                continue
            value = getattr(constants, field.name)
            for factor in FACTORS:
                tried = value * factor ** (0.7**number)
                if field.name in _shares:
                    tried = min(tried, MAX_SHARE)
                changed = replace(constants, **{field.name: tried})
                found = loss(changed)
                if found < best * (1 - 1e-6):
                    best, kept = found, changed
                    constants = kept
        if before - best < 1e-9:
            break
    return constants


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) < 2:
        return 1.0
    ranks = [{value: rank for rank, value in enumerate(sorted(values))} for values in (a, b)]
    x, y = [ranks[0][value] for value in a], [ranks[1][value] for value in b]
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return statistics.correlation(x, y)
