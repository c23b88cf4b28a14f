"""A worker process of the runner: reads keys, one JSON string a line, and answers each with an outcome."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from ort_cuda_plugin.conformance.cases import load_cases
from ort_cuda_plugin.conformance.verdict import judge


def main() -> None:
    # Tests and libraries may print: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    optimised = sys.argv[1] == "optimised"
    cases = load_cases()
    for line in sys.stdin:
        outcome = judge(cases[json.loads(line)], optimised=optimised)
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
