"""A process that judges mutants. It reads their descriptions, one pickle each, and answers in lines of JSON: the stage
that it is in, then the outcome. So a crash has a mutant and a culprit.

    python -m mutation.worker BASES     where BASES is the pickled dict of bases
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from isolated import add_model
from mutation.mutants import Mutant, build
from mutation.oracle import Kind, Outcome, judge
from ort_cuda_plugin import session

MEMORY = 4 * 2**30
"""Bytes that may be mapped beyond those of a worker that has begun: a mutant that asks for more gets an error and does
not disturb the machine."""

PATIENCE_S = 50
"""Then the worker writes to stderr where its threads are, and goes on."""


class Answer(Protocol):
    def __call__(self, **message: Any) -> None: ...


def main() -> None:
    bases = pickle.loads(Path(sys.argv[1]).read_bytes())

    def judged(mutant: Mutant, answer: Answer) -> Outcome:
        answer(stage="build")
        try:
            data, feeds = build(mutant, bases[mutant.base])
        except Exception as error:  # such as a protobuf above its limit
            return Outcome(Kind.BOTH_REFUSE, f"not built: {type(error).__name__}: {error}"[:200])
        return judge(data, feeds, mutant.level, lambda stage: answer(stage=stage))

    serve(judged)


def serve(judged: Callable[[Any, Answer], Outcome]) -> None:
    """Answers each pickle on stdin until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        faulthandler.dump_traceback_later(PATIENCE_S)
        outcome = judged(task, answer)
        answer(kind=outcome.kind, detail=outcome.detail, seconds=round(outcome.seconds, 3))


def _limit_memory() -> None:
    session(add_model(), emulate=True)  # the emulated device has its address space
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
