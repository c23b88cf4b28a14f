"""Runs one backend test on the plugin and on the CPU provider, and judges the plugin's results."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any

import onnx

from ort_cuda_plugin import get_ep_name
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.conformance.cases import Case
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.scope import is_random, out_of_scope
from ort_cuda_plugin.conformance.values import difference, from_ort_value, is_plain, to_ort_value


class Verdict(enum.StrEnum):
    ON_EP = "passed on the EP"
    NO_NODE = "passed with no node left to run"
    PARTLY = "partly on the CPU provider"
    WRONG = "wrong"
    FAILED = "failed"
    HOST_CANNOT = "the CPU provider fails too"


LEFT_BY_ORT = "ONNX Runtime left it to the CPU provider"
BAD = (Verdict.WRONG, Verdict.FAILED)
IN_SCOPE = "in scope"
"""Heading in the report of tests that the plugin should run entirely, but does not."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on one test.

    ``reason`` names nodes, differences or errors; ``cpu_passes``: the CPU provider passes the test. ``group`` is the
    heading under which the report lists the test: the kind of reason why it does not pass on the EP.
    """

    key: str
    verdict: Verdict
    reason: str
    cpu_passes: bool
    group: str = IN_SCOPE


@dataclass
class Attempt:
    """The result of a test on one provider.

    ``problem`` is "" if the test passed; ``wrong``: the problem is a wrong result, not an error. ``placed`` has
    (provider, operator type, reason) of each node. ``declined`` has the plugin's reasons if the session could not be
    created. ``results`` are the outputs of the data set that was judged last.
    """

    problem: str = ""
    wrong: bool = False
    placed: list[tuple[str, str, str]] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


def judge(case: Case, mode: Mode) -> Outcome:
    """Judge a test. Errors of a model or a provider are verdicts, not exceptions."""
    model = case.model()
    cpu = _attempt(case, model, mode, on_plugin=False)
    mode.apply(case.key)
    plugin = _attempt(case, model, mode, on_plugin=True)
    if found := findings():
        return Outcome(case.key, Verdict.FAILED, "; ".join(found), not cpu.problem)
    if cpu.problem and (plugin.problem or is_random(model)):  # random values can match by chance
        return _host_cannot(case, model, cpu, plugin)
    if plugin.problem:
        return Outcome(case.key, Verdict.WRONG if plugin.wrong else Verdict.FAILED, plugin.problem, True)
    elsewhere = {op_type: reason for provider, op_type, reason in plugin.placed if provider != get_ep_name()}
    if elsewhere:
        # ORT did not offer the nodes marked LEFT_BY_ORT, because the plugin declined others: report only the latter.
        declined = {f"{op_type}: {reason}": None for op_type, reason in elsewhere.items() if reason != LEFT_BY_ORT}
        reasons = declined or {f"{op_type}: {LEFT_BY_ORT}": None for op_type in elsewhere}
        scope = out_of_scope(model, {op_type for _, op_type, _ in plugin.placed})
        group = f"out of scope: {scope}" if scope else IN_SCOPE
        return Outcome(case.key, Verdict.PARTLY, "; ".join(reasons), not cpu.problem, group)
    return Outcome(case.key, Verdict.ON_EP if plugin.placed else Verdict.NO_NODE, "", not cpu.problem)


HOST_GROUPS = (
    (r"No Op registered for \S+ with domain_version of (\d+)", r"ONNX Runtime does not know opset \1 of ai.onnx"),
    (r"Unrecognized attribute: (\w+) for operator (\w+)", r"ONNX Runtime does not know the attribute \1 of \2"),
    (r"([\w.]+):\w+\(-1\) is not a registered function/op", r"ONNX Runtime does not know the domain \1"),
    (r"construct locale with name:([\w.-]+)", r"the machine has no locale \1"),
)
"""Patterns of the CPU provider's error for reasons outside of the plugin, and the report's headings for them."""


def _host_cannot(case: Case, model: onnx.ModelProto, cpu: Attempt, plugin: Attempt) -> Outcome:
    def outcome(group: str, reason: str = "") -> Outcome:
        return Outcome(case.key, Verdict.HOST_CANNOT, reason, False, group)

    for pattern, meaning in HOST_GROUPS:
        if match := re.search(pattern, cpu.problem):
            return outcome(match.expand(meaning))
    if scope := out_of_scope(model, {op_type for _, op_type, _ in plugin.placed}):
        return outcome(f"out of scope: {scope}", cpu.problem)
    if (plugin.wrong or not plugin.problem) and is_random(model):
        return outcome("random values, which the test takes from another generator")
    if cpu.wrong and plugin.wrong:
        pairs = zip(plugin.results, cpu.results, strict=True)
        if not any(difference(ours, theirs, case.rtol, case.atol) for ours, theirs in pairs):
            return outcome("CPU provider and plugin return equal values, which differ from the test's", plugin.problem)
    reason = "; ".join(dict.fromkeys(plugin.declined))
    return outcome(IN_SCOPE, reason or f"{plugin.problem} (CPU provider: {cpu.problem})")


def _attempt(case: Case, model: onnx.ModelProto, mode: Mode, *, on_plugin: bool) -> Attempt:
    attempt = Attempt()
    try:
        session = _session(model.SerializeToString(), mode, attempt, on_plugin)
        for inputs, expected in case.data_sets(model):
            attempt.results = run_session(session, inputs)
            names = [output.name for output in model.graph.output]
            for name, a, e in zip(names, attempt.results, expected, strict=True):
                if text := difference(a, e, case.rtol, case.atol):
                    attempt.problem, attempt.wrong = f"output {name!r}: {text}", True
                    return attempt
    except Exception as error:
        attempt.problem = _one_line(error)
    return attempt


def _session(model: bytes, mode: Mode, attempt: Attempt, on_plugin: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if mode.optimized else levels.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not on_plugin:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    from ort_cuda_plugin.api import create_session
    from ort_cuda_plugin.ep.provider import last_verdicts

    try:
        # The plugin also claims nodes that are cheaper on the host, so that their kernels are tested.
        provider_options = {"claim_unprofitable_nodes": "1", "single_nodes": str(int(mode.single_nodes))}
        session, _ = create_session(model, mode.emulate, provider_options, options)
    except Exception:
        declined = [verdict for verdict in last_verdicts() if not verdict.supported]
        attempt.declined = [f"{verdict.op_type}: ({verdict.kind}) {verdict.reason}" for verdict in declined]
        raise
    verdicts = [verdict for verdict in last_verdicts() if not verdict.supported]
    reasons = {(verdict.op_type, verdict.name): f"({verdict.kind}) {verdict.reason}" for verdict in verdicts}
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            reason = reasons.get((node.op_type, node.name), LEFT_BY_ORT)
            attempt.placed.append((part.ep_name, node.op_type, reason))
    return session


def run_session(session: Any, inputs: list[Any]) -> list[Any]:
    """Run a session on ``inputs``, in the order of its inputs; return its outputs as arrays, lists or None."""
    names = [value.name for value in session.get_inputs()]
    feeds = dict(zip(names, inputs, strict=False))
    outputs = [value.name for value in session.get_outputs()]
    # `run` takes sequences and optional values; `run_with_ort_values` takes all element types.
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
