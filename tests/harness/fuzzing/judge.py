"""Runs a network on the plugin, and compares each output of each Run with the network's expected results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzzing.network import BFLOAT16, FLOAT, FLOAT16, Array, Case, Value, wide
from mutation.oracle import INTERNAL, Kind, Outcome
from ort_cuda_plugin.abi.core import core
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.conformance.verdict import run_session

ROUNDING = {FLOAT: 2e-5, FLOAT16: 4e-3, BFLOAT16: 3e-2}
"""Maximum rounding error of the last operator by element type, relative to the largest element."""
DRIFTS = 8.0
"""Maximum error of a result, as a multiple of the distance between the value's two tracks (see `network`)."""
REPEATS = 6
"""Number of Runs with the last sizes; the later ones replay a CUDA graph."""


def judge(case: Case, stage: Callable[[str], None] = lambda name: None) -> Outcome:
    core().emu_clear_findings()
    start = time.process_time()
    stage("plugin")
    kind, detail = _verdict(case, on_plugin=True)
    found = findings()
    if kind is not Kind.AGREES and not found:
        stage("cpu")
        host, text = _verdict(case, on_plugin=False)
        if host is Kind.DIFFERS:
            kind, detail = Kind.HOST_UNDEFINED, f"{text} | {detail}"
        elif host is not Kind.AGREES:
            kind, detail = Kind.BOTH_REFUSE, f"{text} | {detail}"
    if found:
        kind, detail = Kind.INTERNAL, "; ".join(found)
    return Outcome(kind, " ".join(detail.split())[:600], time.process_time() - start)


def _verdict(case: Case, on_plugin: bool) -> tuple[Kind, str]:
    """Run the network on the plugin, or on the CPU provider, and return the outcome."""
    try:
        detail = _difference(case, on_plugin)
    except Exception as error:
        kind = Kind.INTERNAL if INTERNAL.search(str(error)) else Kind.REFUSES
        return kind, f"{type(error).__name__}: {error}"
    return (Kind.DIFFERS if detail else Kind.AGREES), detail


def _difference(case: Case, on_plugin: bool) -> str:
    session = _session(case, on_plugin)
    for run in range(case.runs):
        for _ in range(REPEATS if run == case.runs - 1 else 1):
            actual = run_session(session, case.feed(run))
            for name, array in zip(case.outputs, actual, strict=True):
                if text := difference(case.values[name], run, array):
                    return f"Run {run}, {name}: {text}"
    return ""


def difference(value: Value, run: int, actual: Array) -> str:
    """Describe what is wrong with a result; "" if it is right."""
    expected = value.clean[run]
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.dtype != expected.dtype:
        return f"element type {actual.dtype}, expected {expected.dtype}"
    if not value.is_float:
        return "" if np.array_equal(actual, expected) else f"{_few(actual)}, expected {_few(expected)}"
    allowed = DRIFTS * value.drift() + ROUNDING[value.kind] * max(value.largest(), 1e-3)
    distance = np.abs(wide(actual) - wide(expected))
    if bool((distance <= allowed).all()):
        return ""
    worst = np.unravel_index(int(np.argmax(np.nan_to_num(distance, nan=np.inf))), distance.shape)
    return f"{actual[worst]} at {[int(i) for i in worst]}, expected {expected[worst]} within {allowed:.2g}"


def _few(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)} {array.reshape(-1)[:12].tolist()}"


def _session(case: Case, on_plugin: bool) -> Any:
    import onnxruntime as ort

    import ort_cuda_plugin

    ort_cuda_plugin.register(emulate=True)
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if case.optimized else levels.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    ours = [(ort_cuda_plugin.get_ep_name(), dict(case.options))] if on_plugin else []
    return ort.InferenceSession(case.model(), options, providers=[*ours, "CPUExecutionProvider"])
