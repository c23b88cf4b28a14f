"""A process of the selftest: runs sections on request, and reports each check before and after it.

A request is a line of JSON with the fields of `Request`. The answers are lines of JSON: ``{"begin": CHECK}``,
``{"run": RESULT}`` before each Run of the check, ``{"result": RESULT}`` and, at the end of the section, ``{"end": NAME,
"cpu_seconds": NUMBER}``, or ``{"lost": REASON}`` if the device is lost. The result in a "run" is the one that the check
has if this Run ends the process. The first line describes the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..compiler.library import kernel_library
from ..ep.device.quarantined import without_quarantine
from .device import Device, describe
from .sections.case import Verdict
from .table import SECTIONS

Event = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The checks of a section to run: all but ``skip``, or only those of ``only``.

    By default the quarantine is ignored, so that quarantined entries are checked too. With ``with_quarantine`` sessions
    respect it, as later sessions of applications will, and may leave nodes to the CPU provider.
    """

    section: str
    is_quick: bool = False
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    with_quarantine: bool = False


def run_section(
    device: Device, request: Request, tell: Callable[[Event], None] = lambda event: None
) -> Iterator[Event]:
    """Yield the events of a section; the last one is "end" or "lost". ``tell`` gets the "run" event before each Run."""
    begun = time.process_time()
    section = next(section for section in SECTIONS if section.name == request.section)
    device = replace(device, takes_all=not request.with_quarantine)
    for check, run in section.checks(device, request.is_quick):
        if check in request.skip or (request.only and check not in request.only):
            continue
        yield {"begin": check}
        with nullcontext() if request.with_quarantine else without_quarantine():
            found = list(run(lambda result: tell({"run": asdict(result)})))
        yield from ({"result": asdict(result)} for result in found)
        if any(result.verdict is Verdict.FAIL for result in found) and (reason := device.why_lost()):
            yield {"lost": reason}
            return
    yield {"end": section.name, "cpu_seconds": time.process_time() - begun}


def main(emulate: str, ordinal: str) -> None:
    """Answer requests until the input ends."""
    kernel_library.max_workers = 0  # no worker processes for compilation: each would import the compiler
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send what libraries print to stderr, so that it does not mix with the answers
    device = Device(emulate == "1", int(ordinal))

    def answer(event: Event) -> None:
        print(json.dumps(event), file=answers, flush=True)

    answer({"device": describe(device)})
    for line in sys.stdin:
        data = json.loads(line)
        request = Request(**{**data, "skip": tuple(data["skip"]), "only": tuple(data["only"])})
        for event in run_section(device, request, answer):
            answer(event)


if __name__ == "__main__":
    main(*sys.argv[1:])
