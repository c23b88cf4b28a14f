"""The worker process of the fuzzer, with the protocol of `mutation.worker`.

    python -m fuzzing.worker

It reads pickles, each a `Case` or a profile with a seed.
"""

from __future__ import annotations

from fuzzing.judge import judge
from fuzzing.network import Case
from fuzzing.profiles import Profile, make_case
from mutation.oracle import Outcome
from mutation.worker import Answer, serve


def answer(task: Case | tuple[Profile, int], stage: Answer) -> Outcome:
    stage(stage="cpu")  # `make_case` runs nodes on the CPU provider
    case = task if isinstance(task, Case) else make_case(*task)
    return judge(case, lambda name: stage(stage=name))


if __name__ == "__main__":
    serve(answer)
