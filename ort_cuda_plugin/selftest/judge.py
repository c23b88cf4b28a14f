"""Runs a case on the device that is tested and on the reference, and compares the results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx

from .. import counters
from ..conformance.verdict import run_session
from ..program.steps.quarantine import operator_name
from ..program.steps.schedule import Engine, describe
from .device import Device, Skipped
from .forced import Candidate, Forcing, Noting
from .sections.case import Array, Case, Result, Verdict, difference, short_type

SLOW_SECONDS = 0.02
"""Seconds of a Run above which a library call counts as too slow: about 1000 times the typical Run of these cases."""


def judge(case: Case, device: Device) -> Iterator[Result]:
    """Yield the results of a case: with the schedules that the rules choose, then with each candidate forced."""
    model = case.model()
    feeds = [*case.feeds(model).values()]
    made = Result(case.name, Verdict.PASS, short_type(case.type), case=case.name)
    expected: list[Array] = []

    def run(result: Result, tuner: Forcing | None = None) -> Iterator[Result]:
        begun, refused = time.process_time(), counters()["library_refusals"]
        try:
            session = device.session(model, tuner)
            if tuner is not None and not tuner.was_used:
                return  # a later pass replaced the step that has this candidate
            if not expected:
                expected.extend(device.expected(case))
            found = run_session(session, feeds)
            slow = _slow(session, feeds) if result.engine == Engine.LIBRARY.value else ""
        except Skipped as skipped:
            yield replace(result, verdict=Verdict.SKIPPED, reason=str(skipped), operators=())
            return
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            yield replace(result, verdict=Verdict.FAIL, reason=reason, seconds=time.process_time() - begun)
            return
        seconds = time.process_time() - begun
        if counters()["library_refusals"] > refused:  # the library refused the call, and a kernel replaced it
            yield _refused(result, device.opened.refusals.latest)
        elif slow:
            yield replace(result, verdict=Verdict.FAIL, reason=slow, seconds=seconds)
            return
        yield from _compared(case, model, result, found, expected, seconds)

    # If nodes may run on the CPU provider (a check under the quarantine), blame all operators of the model: those that
    # the case is about are declined by then, so another node of the model may be wrong.
    yield from run(replace(made, operators=case.operators if device.takes_all else _operators(model)))
    if not case.each_schedule:
        return
    for candidate in _candidates(device, model):
        family, operand, schedule = candidate
        tile = "" if schedule.tile is None else schedule.tile.name
        forced = replace(made, name=f"{case.name}: {describe(schedule)}", schedule=describe(schedule), family=family)
        yield from run(replace(forced, operand=operand, engine=schedule.engine.value, tile=tile), Forcing(candidate))


def _slow(session: Any, feeds: list[Any]) -> str:
    """Return why Runs of a session are too slow, "" if they are not. An earlier Run must have loaded the kernels."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        run_session(session, feeds)
        times.append(time.perf_counter() - begun)
    least = min(times)
    return (
        f"a Run takes {1e3 * least:.1f} ms, expected at most {1e3 * SLOW_SECONDS:.0f} ms"
        if least > SLOW_SECONDS
        else ""
    )


def _refused(result: Result, reason: str) -> Result:
    """Return a failed result for a library call that was refused. Later sessions do not try the call again."""
    name = f"{result.case}: library call"
    return replace(
        result, name=name, verdict=Verdict.FAIL, reason=reason, engine="", tile="", operators=(), is_refusal=True
    )


def _compared(
    case: Case, model: onnx.ModelProto, result: Result, found: list[Any], expected: list[Array], seconds: float
) -> Iterator[Result]:
    """Yield the result of a Run; with ``case.by_output`` one for each output, whose name is the operator's."""
    names = [output.name for output in model.graph.output]
    wrong = {
        name: text
        for name, a, e in zip(names, found, expected, strict=True)
        if (text := difference(a, e, case.is_exact))
    }
    if not case.by_output:
        texts = "; ".join(text if len(names) == 1 else f"{name}: {text}" for name, text in wrong.items())
        yield replace(result, verdict=Verdict.FAIL if wrong else Verdict.PASS, reason=texts, seconds=seconds)
        return
    for name in names:
        own = replace(result, name=f"{case.name} {name}", seconds=seconds / len(names))
        own = own if result.operators else replace(own, operators=(name,))
        yield replace(own, verdict=Verdict.FAIL if name in wrong else Verdict.PASS, reason=wrong.get(name, ""))


def _operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the operators of a model's nodes, as they are quarantined."""
    names = (operator_name(node.domain, node.op_type) for node in model.graph.node)
    return tuple(name for name in dict.fromkeys(names) if name != "Constant")


def _candidates(device: Device, model: onnx.ModelProto) -> Mapping[Candidate, None]:
    noting = Noting()
    try:
        device.session(model, noting)
    except Exception:  # the run with the rules' schedules has reported the error
        return {}
    return noting.found
