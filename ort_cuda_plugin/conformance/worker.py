"""A worker process of the runner: reads pickled pairs of a mode and a test, and answers each with an outcome."""

from __future__ import annotations

import os
import pickle
import sys

from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.conformance.verdict import judge


def main() -> None:
    # Compile in this process: the workers already use all cores, and each compiler process would import Numba anew.
    kernel_library.max_workers = 0
    # Tests and libraries may print, so the outcomes go through a separate file descriptor.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            mode, case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(judge(case, mode), answers)
        answers.flush()


if __name__ == "__main__":
    main()
