"""Judges many random networks in worker processes, and minimizes those with wrong results.

    PYTHONPATH=tests/harness python -m fuzzing {sizes,graphs} [--count 500] [--first 0] [--jobs 1] [--lowering sm_90]
                                               [--check] [--adversarial] [--out FOLDER]

Exits with 1 if there is a finding. FOLDER gets a minimized model of each finding, its inputs and outputs, and a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from campaign import Campaign
from fuzzing.minimize import minimize, write
from fuzzing.network import Case
from fuzzing.profiles import Profile, make_case
from ort_cuda_plugin.conformance.mode import Mode

TIMEOUT_S = 300.0
"""Seconds for one network, compilation of its kernels included."""


def campaign(profile: Profile, mode: Mode, jobs: int = 1, variables: Mapping[str, str] | None = None) -> Campaign[Case]:
    """Return the campaign over the networks of a profile. ``variables`` are environment variables of the workers."""
    return Campaign(
        (sys.executable, "-m", "fuzzing.worker"),
        mode.environment(jobs) | {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1G"} | dict(variables or {}),
        task=lambda number: (profile, number),
        case=lambda number: make_case(profile, number),
        minimize=minimize,
        write=lambda folder, number, case, outcome: write(folder, f"{profile}_{number}", case, outcome),
        timeout_s=TIMEOUT_S,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Profile, choices=list(Profile))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first network")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lowering", default="", metavar="GPU", help="kernels of this GPU, as sm_90 or sm_90:132")
    parser.add_argument("--check", action="store_true", help="the emulated device's checking mode")
    parser.add_argument("--adversarial", action="store_true", help="streams that defer and interleave work")
    parser.add_argument("--out", type=Path, default=Path("build") / "fuzzing")
    options = parser.parse_args(arguments)

    mode = Mode(check=options.check, seed=options.first if options.adversarial else None, lowering=options.lowering)
    numbers = range(options.first, options.first + options.count)
    report = campaign(options.profile, mode, options.jobs).run(numbers, jobs=options.jobs, out=options.out, loud=True)
    report.print()
    return 1 if report.findings else 0
