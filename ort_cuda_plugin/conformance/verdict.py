"""Runs one test on the plugin and on the CPU provider, and judges it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import onnx

from ort_cuda_plugin import get_ep_name
from ort_cuda_plugin.conformance.cases import Case
from ort_cuda_plugin.conformance.values import difference, from_ort_value, is_plain, to_ort_value


class Verdict(enum.StrEnum):
    ON_EP = "passed on the EP"
    NO_NODE = "passed with no node left to run"
    PARTLY = "partly elsewhere"
    WRONG = "wrong"
    FAILED = "failed"
    HOST_CANNOT = "the host cannot"


@dataclass(frozen=True)
class Outcome:
    """A verdict. ``reason`` names nodes, differences or errors; ``cpu_passes``: the CPU provider alone passes."""

    key: str
    verdict: Verdict
    reason: str
    cpu_passes: bool


def judge(case: Case, *, optimised: bool) -> Outcome:
    """Never raises for what a model or a provider does wrong."""
    model = case.model()
    cpu = _problem(case, model, optimised, on_plugin=False)[0]
    problem, wrong, placed = _problem(case, model, optimised, on_plugin=True)
    if problem:
        if cpu:
            return Outcome(case.key, Verdict.HOST_CANNOT, f"CPU provider: {cpu}; plugin: {problem}", False)
        return Outcome(case.key, Verdict.WRONG if wrong else Verdict.FAILED, problem, True)
    elsewhere = [f"{op_type}: {reason}" for provider, op_type, reason in placed if provider != get_ep_name()]
    if elsewhere:
        return Outcome(case.key, Verdict.PARTLY, "; ".join(dict.fromkeys(elsewhere)), not cpu)
    return Outcome(case.key, Verdict.ON_EP if placed else Verdict.NO_NODE, "", not cpu)


def _problem(
    case: Case, model: onnx.ModelProto, optimised: bool, *, on_plugin: bool
) -> tuple[str, bool, list[tuple[str, str, str]]]:
    """What went wrong or "", whether that is a wrong result, and (provider, op type, reason) of each node."""
    placed: list[tuple[str, str, str]] = []
    try:
        session, placed = _session(model.SerializeToString(), optimised, on_plugin)
        for inputs, expected in case.data_sets(model):
            actual = _run(session, inputs)
            for name, a, e in zip([output.name for output in model.graph.output], actual, expected, strict=True):
                if text := difference(a, e, case.rtol, case.atol):
                    return f"output {name!r}: {text}", True, placed
    except Exception as error:
        return _one_line(error), False, placed
    return "", False, placed


def _session(model: bytes, optimised: bool, on_plugin: bool) -> tuple[Any, list[tuple[str, str, str]]]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if not on_plugin:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), []
    from ort_cuda_plugin.api import create_session

    session, provider = create_session(model, True, None, options)
    reasons = {(verdict.op_type, verdict.name): f"({verdict.kind}) {verdict.reason}" for verdict in provider.verdicts}
    placed = []
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            placed.append((part.ep_name, node.op_type, reasons.get((node.op_type, node.name), "left there by ORT")))
    return session, placed


def _run(session: Any, inputs: list[Any]) -> list[Any]:
    names = [value.name for value in session.get_inputs()]
    feeds = dict(zip(names, inputs, strict=False))
    outputs = [value.name for value in session.get_outputs()]
    # Sequences and optional values exist in the first API only, some element types in the second only.
    needs_values = not all(map(is_plain, inputs)) or any(
        kind in value.type
        for value in session.get_outputs()
        for kind in ("bfloat16", "float8", "int4", "int2", "float4")
    )
    if not needs_values:
        return list(session.run(outputs, feeds))
    values = {name: to_ort_value(array) for name, array in feeds.items()}
    return [from_ort_value(value) for value in session.run_with_ort_values(outputs, values)]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
