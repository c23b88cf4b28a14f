"""Runs a case on the device that is tested and on the reference, and compares the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import onnx

from .. import counters
from ..conformance.verdict import run_session
from ..program.steps.quarantine import operator_name
from ..program.steps.schedule import Engine, describe
from .device import Device, Skipped
from .forced import Candidate, Forcing, Noting
from .sections.case import Array, Case, Result, Verdict, difference, short_type

FILL = 0x7B
"""Byte of new device memory while a model is checked: an element that no kernel writes is 61280 as float16, 1.3e36 as
float32, 123 as int8, and invalid as a Boolean. Else the memory could hold the right result of an earlier Run."""
SLOW_RATIO = 10.0
"""Time of a Run with a library call, relative to a Run of the same model with the plugin's fastest kernel, from which
on the call is too slow. The small models of the cases take both about as long."""
ROUNDS = 10
"""Rounds of Runs, in turn with the call and with the kernel, whose least times are compared."""

Run = Callable[[], object]
Begins = Callable[[Result], None]
"""Type of a function that is called before each Run, with the result to report if this Run ends the process."""


def judge(case: Case, device: Device, begins: Begins = lambda result: None) -> Iterator[Result]:
    """Yield the results of a case: with the schedules of the rules, then with each other schedule of the device."""
    model = case.model()
    feeds = [*case.feeds(model).values()]
    made = Result(case.name, Verdict.PASS, short_type(case.type), case=case.name)
    expected: list[Array] = []
    candidates: list[Candidate] = []
    own: list[tuple[float, Run]] = []

    def run(result: Result, tuner: Forcing | None = None) -> Iterator[Result]:
        begun, refused = time.process_time(), counters()["library_refusals"]
        is_library = result.engine == Engine.LIBRARY.value
        operators = () if result.engine else result.operators or _operators(model)
        begins(replace(result, verdict=Verdict.FAIL, operators=operators))
        try:
            with device.opened.filling_new_memory(FILL):
                session = device.session(model, tuner)
                if tuner is not None and not tuner.was_used:
                    return  # no step has this candidate now: a pass has replaced the step
                if tuner is not None:
                    result = replace(result, epilogue=tuner.epilogue)
                if not expected:
                    expected.extend(device.expected(case))
                found = run_session(session, feeds)
            again: Run = partial(run_session, session, feeds)
            slow = why_slow(again, own[0][1]) if is_library and own else ""
            if tuner is not None and not is_library and any(map(_is_library, candidates)):
                own[:] = [min([(_seconds(again), again), *own], key=itemgetter(0))]
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
    candidates += sorted(_candidates(device, model), key=_is_library)  # library calls last: `why_slow` needs a kernel
    for candidate in candidates:
        family, operand, schedule = candidate
        tile = "" if schedule.tile is None else schedule.tile.name
        forced = replace(made, name=f"{case.name}: {describe(schedule)}", schedule=describe(schedule), family=family)
        yield from run(replace(forced, operand=operand, engine=schedule.engine.value, tile=tile), Forcing(candidate))


def _is_library(candidate: Candidate) -> bool:
    return candidate[2].engine is Engine.LIBRARY


def _seconds(run: Run) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def why_slow(call: Run, kernel: Run) -> str:
    """Return why Runs with a library call are too slow beside those with a kernel of the plugin; "" if they are not.

    Only the ratio counts, since other processes may slow down both. The Runs take turns, and the least time of each
    counts, so that a burst of other work does not hit only one of them.
    """
    of_call, of_kernel = float("inf"), float("inf")
    for _ in range(ROUNDS):
        of_call, of_kernel = min(of_call, _seconds(call)), min(of_kernel, _seconds(kernel))
    if of_call <= SLOW_RATIO * of_kernel:
        return ""
    return (
        f"a Run takes {1e3 * of_call:.2f} ms, {of_call / of_kernel:.0f} times as long as with the plugin's kernel "
        f"({1e3 * of_kernel:.2f} ms); expected at most {SLOW_RATIO:.0f} times"
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
    """Return the names of the model's operators in the form that the quarantine uses, without Constant."""
    names = (operator_name(node.domain, node.op_type) for node in model.graph.node)
    return tuple(name for name in dict.fromkeys(names) if name != "Constant")


def _candidates(device: Device, model: onnx.ModelProto) -> Mapping[Candidate, None]:
    noting = Noting()
    try:
        device.session(model, noting)
    except Exception:  # the run with the rules' schedules has reported the error
        return {}
    return noting.found
