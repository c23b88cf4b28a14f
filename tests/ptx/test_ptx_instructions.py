"""PTX on the emulated device: each instruction computes what the ISA says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ort_cuda_plugin import emulator
from ptx_cases import FLOAT, INTEGER, Case, equal, masked, module, samples

THREADS = 256


@pytest.mark.parametrize(("cases", "floats"), [(INTEGER, False), (FLOAT, True)], ids=["integers", "floats"])
def test_instructions_compute_what_the_isa_says(cases: Sequence[Case], floats: bool, subtests: pytest.Subtests) -> None:
    x, y, z = samples(np.random.default_rng(5), THREADS, floats)
    out = np.zeros((THREADS, len(cases)), np.uint64)
    emulator.load(module(cases)).launch("cases", 1, THREADS, (x, y, z, out))
    for number, case in enumerate(cases):
        with subtests.test(instruction=case.text), np.errstate(all="ignore"):
            for thread in range(THREADS):
                a, b, c = (masked(int(each[thread]), case.bits) for each in (x, y, z))
                try:
                    expected = case.reference(a, b, c)
                except (OverflowError, ValueError, ZeroDivisionError):
                    continue  # Python raises for some infinities and zeros for which the ISA defines a result
                got = masked(int(out[thread, number]), case.result or case.bits)
                same = equal(case, got, expected) if floats else got == expected
                assert same, f"thread {thread}: {a:#x}, {b:#x}, {c:#x} -> {got:#x}, expected {expected:#x}"
