"""Fitting recovers the constants of a simulated GPU from its measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ort_cuda_plugin import gpus
from ort_cuda_plugin.estimate import fit
from ort_cuda_plugin.estimate.fit import Measurement, measurements_json, read_measurements
from ort_cuda_plugin.estimate.model import estimate
from ort_cuda_plugin.estimate.work import Access, CopyStep, LibraryStep, Region, Work
from ort_cuda_plugin.gpus.constants import Constants

HALF = 10


def copy(nbytes: int) -> Work:
    regions = (Region("input", "x", nbytes), Region("output", "y", nbytes))
    return Work(regions, (CopyStep(("copy",), (Access(0, 0, nbytes),), (Access(1, 0, nbytes),), "copy"),))


def product(size: int) -> Work:
    nbytes = 2 * size * size
    regions = tuple(Region(kind, kind, nbytes) for kind in ("input", "weight", "output"))
    reads, writes = (Access(0, 0, nbytes), Access(1, 0, nbytes)), (Access(2, 0, nbytes),)
    sizes = (size, size, size, size, size, size, 1, 0, 0, 0, 0)
    return Work(regions, (LibraryStep(("product",), reads, writes, "matmul", HALF, frozenset(), 0, sizes),))


WORKS = {
    **{f"copy of {1 << power}": copy(1 << power) for power in (10, 14, 18, 26, 27, 28)},
    **{f"product of {size}": product(size) for size in (64, 128, 256, 4096, 6144, 8192)},
}
TRUTH = replace(Constants(), dram=0.8, tensor_library=0.7, launch_seconds=4e-6, library_seconds=3e-6)


def measured(constants: Constants) -> list[Measurement]:
    h100 = gpus.gpu("h100")
    return [Measurement(name, estimate(work, h100, constants).seconds, work) for name, work in WORKS.items()]


def test_constants_of_a_made_up_gpu_are_found_again() -> None:
    found = fit.fit("h100", measured(TRUTH))
    for name in ("dram", "tensor_library", "launch_seconds"):
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUTH, name), rel=0.1), name
    # Times of library calls depend only on the sum of these two constants.
    starts = [each.product_seconds + each.library_seconds for each in (found.constants, TRUTH)]
    assert starts[0] == pytest.approx(starts[1], rel=0.1)
    assert found.error < 0.03
    assert found.rank_correlation > 0.99
    assert len(found.estimates) == len(WORKS) // fit.HELD_OUT
    # With the constants before the fit, each held-out estimate is off by more than 10%.
    held = [m for number, m in enumerate(measured(TRUTH)) if number % fit.HELD_OUT == fit.HELD_OUT - 1]
    off = [abs(estimate(m.work, gpus.gpu("h100")).seconds / m.seconds - 1) for m in held]
    assert min(off) > 0.1


def test_what_decides_nothing_stays() -> None:
    found = fit.fit("h100", [m for m in measured(TRUTH) if m.name.startswith("copy")])
    assert found.constants.tensor_library == Constants().tensor_library
    assert found.constants.barrier_cycles == Constants().barrier_cycles


def test_measurements_survive_their_file() -> None:
    rows = measured(TRUTH)
    assert read_measurements(measurements_json("h100", "NVIDIA H100", rows)) == ("h100", rows)


@pytest.mark.parametrize("change", [{"format": 2}, {"device": "voodoo"}, {"measurements": []}])
def test_other_files_are_refused(change: dict[str, object]) -> None:
    data = json.loads(measurements_json("h100", "NVIDIA H100", measured(TRUTH)[:1]))
    with pytest.raises(ValueError, match="measurement"):
        read_measurements(json.dumps(data | change))
