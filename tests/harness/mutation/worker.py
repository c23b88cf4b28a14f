"""The worker process of the mutation fuzzer. It reads pickled mutants from stdin, and answers in lines of JSON.

Each stage ("build", "cpu", "plugin", "judge") is reported when it begins, and then the outcome. So after a crash the
parent process knows the mutant and the stage.

    python -m mutation.worker BASES     (BASES: file with the pickled dict of bases)
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
"""Bytes of address space that mutants may use beyond those of the started worker. A mutant that needs more gets an
error.
"""

PATIENCE_S = 50
"""Seconds after which the worker writes its threads' stacks to stderr, and continues."""


class Answer(Protocol):
    def __call__(self, **message: Any) -> None: ...


def main() -> None:
    bases = pickle.loads(Path(sys.argv[1]).read_bytes())

    def judged(mutant: Mutant, answer: Answer) -> Outcome:
        answer(stage="build")
        try:
            data, feeds = build(mutant, bases[mutant.base])
        except Exception as error:  # for example, the model exceeds protobuf's size limit
            return Outcome(Kind.BOTH_REFUSE, f"not built: {type(error).__name__}: {error}"[:200])
        return judge(data, feeds, mutant.level, lambda stage: answer(stage=stage))

    serve(judged)


def serve(judged: Callable[[Any, Answer], Outcome]) -> None:
    """Judge each pickled task from stdin until it ends, and write stages and outcomes to stdout."""
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
    session(add_model(), emulate=True)  # so that the emulated device has reserved its address space already
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
