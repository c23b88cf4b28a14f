"""Oracle: runs a model on the CPU provider and on the plugin, and classifies the plugin's result."""

from __future__ import annotations

import contextlib
import enum
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, numpy_helper

from mutation.subject import Feeds, Subject
from ort_cuda_plugin.abi.core import core
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.conformance.scope import is_random
from ort_cuda_plugin.conformance.values import difference, is_plain
from ort_cuda_plugin.conformance.verdict import run_session

SLOW_S = 10.0
"""Maximum CPU seconds that the plugin may need beyond those of the CPU provider."""

TOLERANCES = {"float64": (1e-6, 1e-9), "float32": (2e-4, 2e-5), "float16": (1e-2, 1e-3), "bfloat16": (4e-2, 1e-2)}
"""Tolerances by element type: relative, and absolute for results whose largest number is at most 1."""


class Kind(enum.StrEnum):
    AGREES = "agrees"
    BOTH_REFUSE = "both refuse"
    CPU_REFUSES = "only the CPU provider refuses"
    CPU_SLOW = "the CPU provider is too slow, crashes, or needs too much memory"
    NO_MEMORY = "the plugin needs more memory than there is"
    DOCUMENTED = "differs or refuses as docs/differences.md says"
    HOST_UNDEFINED = "differs where ONNX Runtime leaves a result undefined"
    NOT_FINITE = "differs where a number is infinite, NaN or overflows"
    REFUSES = "only the plugin refuses"
    DIFFERS = "differs"
    INTERNAL = "an internal error"
    SLOW = "slow"
    CRASH = "crash"
    HANG = "hang"


FINDINGS = (Kind.REFUSES, Kind.DIFFERS, Kind.INTERNAL, Kind.SLOW, Kind.CRASH, Kind.HANG)


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


INTERNAL = re.compile(
    r"internal error|\.py:\d+\)|Traceback|\b(Recursion|Key|Index|Assertion|Overflow|Type|Attribute|Lookup|Name|Unicode"
    r"(En|De)code|System|Buffer|Value|ZeroDivision|Runtime|NotImplemented|UnboundLocal)Error\b"
)
"""Pattern of error messages that only a bug of the plugin can cause."""


_DOCUMENTED = re.compile(
    "overflows 64 bits|does not fit 64 bits|more bytes than a 64-bit integer|does not fit the integer type of"
    "|must have the (shape|size)"
    "|must have one element|Pad\\)'?: axes .* name one twice"
    "|each dimension of the result must be at least 0|dft_length must be at least 0"
)
"""Pattern of documented errors for models for which the CPU provider's size arithmetic wraps, or which make it read
out of bounds.
"""
RECURRENT = {"LSTM", "GRU", "RNN"}
LOSSES = {"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}


@dataclass
class _Attempt:
    results: list[Any] | None = None
    error: str = ""
    seconds: float = 0.0


def judge(data: bytes, feeds: Feeds, level: int, stage: Callable[[str], None]) -> Outcome:
    """Judge a model. ``level`` is ONNX Runtime's optimization level; ``stage`` is called as each stage begins."""
    stage("cpu")
    cpu = _attempt(lambda: _cpu_session(data, level), feeds, runs=1)
    if cpu.seconds > SLOW_S or "bad_alloc" in cpu.error or "Failed to allocate memory" in cpu.error:
        return Outcome(Kind.CPU_SLOW, cpu.error[:200], cpu.seconds)
    stage("plugin")
    core().emu_clear_findings()
    reports: list[str] = []
    ours = _attempt(lambda: _our_session(data, level, reports), feeds, runs=2)
    stage("judge")
    return _compare(data, feeds, cpu, ours, reports)


def _compare(data: bytes, feeds: Feeds, cpu: _Attempt, ours: _Attempt, reports: list[str]) -> Outcome:
    def outcome(kind: Kind, detail: str = "") -> Outcome:
        return Outcome(kind, " ".join(detail.split())[:600], ours.seconds)

    if found := findings():
        return outcome(Kind.INTERNAL, "; ".join(found))
    for text in (ours.error, *reports):
        # Such an error is not the plugin's: ONNX Runtime reports it without the plugin too, or its Python binding fails
        # for a name that is not UTF-8.
        same = text == cpu.error or text.startswith("UnicodeDecodeError:")
        # `ort_cuda_plugin.session` rephrases ONNX Runtime's error about the IR version.
        same = same or ("IR version" in text and "IR version" in cpu.error)
        if INTERNAL.search(text) and not same:
            return outcome(Kind.INTERNAL, text)
    if ours.seconds > cpu.seconds + SLOW_S:
        return outcome(Kind.SLOW, f"{ours.seconds:.1f} s, the CPU provider {cpu.seconds:.1f} s")
    if cpu.results is None:
        return outcome(
            Kind.CPU_REFUSES if ours.results is not None else Kind.BOTH_REFUSE, f"{cpu.error} | {ours.error}"
        )
    if ours.results is None:
        model = onnx.load_model_from_string(data)
        documented = _DOCUMENTED.search(ours.error) or _is_documented(model, feeds) or _has_endless_sizes(model, feeds)
        kind = Kind.DOCUMENTED if documented else Kind.REFUSES
        return outcome(Kind.NO_MEMORY if "memory" in ours.error else kind, ours.error)
    model = onnx.load_model_from_string(data)
    random = is_random(model)
    for number, (actual, expected) in enumerate(zip(ours.results, cpu.results, strict=True)):
        text = _difference(actual, expected, random, _rounding_of_sums(feeds))
        if text:
            return outcome(_kind_of_difference(model, feeds, expected, text), f"output {number}: {text}")
    return outcome(Kind.AGREES)


def _kind_of_difference(model: onnx.ModelProto, feeds: Feeds, expected: Any, text: str) -> Kind:
    """Classify a difference of results, because kernels of the CPU provider may lose NaN or approximate."""
    if _is_documented(model, feeds):
        return Kind.DOCUMENTED
    if any(_is_undefined_in_the_host(node) for node in model.graph.node):
        return Kind.HOST_UNDEFINED
    numbers = [expected, *feeds.values(), *_constants(model)]
    special = any(isinstance(x, np.ndarray) and x.dtype.kind == "f" and not _is_ordinary(x) for x in numbers)
    return Kind.NOT_FINITE if special and "elements" in text else Kind.DIFFERS


def _is_undefined_in_the_host(node: onnx.NodeProto) -> bool:
    """Return whether the CPU provider leaves a result of the node uninitialized.

    Its Scan does not write an output of the body that is also an input of the body. Its Cast does nothing if
    ``saturate`` is neither 0 nor 1.
    """
    if node.op_type in ("Cast", "CastLike"):
        return any(attribute.name == "saturate" and attribute.i not in (0, 1) for attribute in node.attribute)
    if node.op_type != "Scan":
        return False
    bodies = [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]
    return any({x.name for x in body.input} & {y.name for y in body.output} for body in bodies)


def _is_documented(model: onnx.ModelProto, feeds: Feeds) -> bool:
    """Return whether docs/differences.md lists a difference for the model, judging by its nodes and inputs."""
    arrays = [x for x in (*feeds.values(), *_constants(model)) if isinstance(x, np.ndarray)]
    for node in model.graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        floats = {attribute.name: attribute.f for attribute in node.attribute}
        if (
            node.op_type in LOSSES
            or (node.op_type in RECURRENT and any(x.size == 0 for x in arrays))
            or (node.op_type == "NonZero" and any(x.ndim == 0 for x in arrays))
            or (node.op_type == "TopK" and attributes.get("sorted") == 0)
            or (node.op_type == "Range" and any(np.ndim(feeds[name]) == 1 for name in node.input if name in feeds))
            or (node.op_type == "LRN" and floats.get("bias", 1.0) == 0.0)
        ):
            return True
    return False


def _has_endless_sizes(model: onnx.ModelProto, feeds: Feeds) -> bool:
    """Return whether sizes may exceed 32 bits or derive from infinity, so that the CPU provider's arithmetic wraps."""
    numbers = [x for x in (*feeds.values(), *_constants(model)) if isinstance(x, np.ndarray) and x.size]
    if any(x.dtype.kind in "iu" and max(abs(int(x.min())), int(x.max())) >= 2**31 for x in numbers):
        return True
    return any(node.op_type == "Range" for node in model.graph.node) and not all(
        _is_ordinary(x) for x in numbers if x.dtype.kind == "f"
    )


def _constants(model: onnx.ModelProto) -> Iterator[Any]:
    for graph in Subject(model, {}).graphs():
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
                    yield np.array([attribute.f, *attribute.floats], np.float32)
    for tensor in Subject(model, {}).initializers():
        with contextlib.suppress(Exception):
            yield numpy_helper.to_array(tensor)


def _is_ordinary(x: np.ndarray[Any, np.dtype[Any]]) -> bool:
    with np.errstate(all="ignore"):
        return bool((np.abs(x.astype(np.float64)) < 1e20).all())


def _rounding_of_sums(feeds: Feeds) -> float:
    """Return the largest difference that another summation order can make in a float32 sum of a whole input."""
    floats = [x for x in feeds.values() if isinstance(x, np.ndarray) and x.dtype == np.float32]
    with np.errstate(all="ignore"):
        sums = [float(np.abs(x.astype(np.float64)).sum()) for x in floats]
    return 2.0**-24 * max((x for x in sums if np.isfinite(x)), default=0.0)


def _difference(actual: Any, expected: Any, random: bool, rounding: float) -> str:
    if isinstance(expected, np.ndarray):
        if random:
            same = isinstance(actual, np.ndarray) and actual.shape == expected.shape and actual.dtype == expected.dtype
            return "" if same else "another shape or type"
        rtol, atol = TOLERANCES.get(expected.dtype.name, (1e-2, 1e-2))
        if expected.dtype.kind == "f" or not is_plain(expected):
            with np.errstate(all="ignore"):
                finite = np.abs(expected.astype(np.float64))
            finite = finite[np.isfinite(finite)]
            atol *= max(1.0, float(finite.max())) if finite.size else 1.0
            atol = max(atol, rounding)
    else:
        rtol, atol = 2e-4, 2e-5
    with np.errstate(all="ignore"):
        return difference(actual, expected, rtol, atol)


def _attempt(create: Callable[[], Any], feeds: Feeds, runs: int) -> _Attempt:
    attempt = _Attempt()
    start = time.process_time()
    try:
        session = create()
        values = [feeds[value.name] for value in session.get_inputs() if value.name in feeds]
        for _ in range(runs):
            # Copies the arrays, because they may be views of memory that is freed with the session.
            attempt.results = [x.copy() if isinstance(x, np.ndarray) else x for x in run_session(session, values)]
    except Exception as error:
        attempt.results = None
        attempt.error = f"{type(error).__name__}: {error}"
        if type(error).__module__.startswith("onnxruntime"):
            attempt.error = str(error)
    attempt.seconds = time.process_time() - start
    return attempt


def _options(level: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel(level)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return options


def _cpu_session(data: bytes, level: int) -> Any:
    import onnxruntime as ort

    return ort.InferenceSession(data, _options(level), providers=["CPUExecutionProvider"])


def _our_session(data: bytes, level: int, reports: list[str]) -> Any:
    from ort_cuda_plugin.api import create_session
    from ort_cuda_plugin.ep.provider import last_verdicts

    before = last_verdicts()
    try:
        session, provider = create_session(data, True, None, _options(level))
        reports.append(provider.failure)
    finally:
        verdicts = last_verdicts()
        if verdicts is not before:
            reports += [verdict.reason for verdict in verdicts if not verdict.supported]
    return session
