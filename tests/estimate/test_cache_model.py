"""The L2 of the performance model: repeated accesses hit while the data fits."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.estimate.cache_model import served
from ort_cuda_plugin.estimate.work import Access, CopyStep, Region, distinct

MB = 1_000_000


def copies(sizes: list[int], kinds: list[str], pairs: list[tuple[int, int]]) -> tuple[list[Region], list[CopyStep]]:
    """Return adjacent regions of these sizes (bytes) and kinds, and a copy for each pair (source, target) of them."""
    offsets = dict.fromkeys(kinds, 0)
    regions: list[Region] = []
    for size, kind in zip(sizes, kinds, strict=True):
        regions.append(Region(kind, str(len(regions)), size, offsets[kind]))
        offsets[kind] += size
    steps = [CopyStep((), (Access(a, 0, sizes[a]),), (Access(b, 0, sizes[b]),), "copy") for a, b in pairs]
    return regions, steps


def test_what_fits_is_fetched_in_no_run_but_the_first() -> None:
    regions, steps = copies([4 * MB] * 3, ["input", "scratch", "output"], [(0, 1), (1, 2)])
    assert sum(step.dram for step in served(regions, steps, 40 * MB)) == 0


def test_what_does_not_fit_moves_as_if_there_were_no_cache() -> None:
    regions, steps = copies([100 * MB] * 3, ["input", "scratch", "output"], [(0, 1), (1, 2)])
    found = served(regions, steps, 20 * MB)
    assert sum(step.dram for step in found) == pytest.approx(400 * MB, rel=0.02)
    assert [step.touched for step in found] == pytest.approx([200 * MB] * 2)


def test_a_result_that_fits_is_read_from_the_cache_and_the_weights_of_others_are_not() -> None:
    regions, steps = copies([15 * MB, MB, 15 * MB, MB], ["weight", "scratch", "weight", "output"], [(0, 1), (1, 3)])
    found = served(regions, [*steps, CopyStep((), (Access(2, 0, 15 * MB),), (), "copy")], 20 * MB)
    assert [step.fetched for step in found] == pytest.approx([15 * MB, 0, 15 * MB], rel=0.02)


def test_a_dead_result_that_is_overwritten_in_the_cache_is_never_written_back() -> None:
    regions = [Region("scratch", "a", MB, 0), Region("scratch", "b", MB, 0)]
    steps = [CopyStep((), (), (Access(number, 0, MB),), "fill") for number in (0, 1)] * 40
    assert sum(step.dram for step in served(regions, steps, 4 * MB)) == 0


def test_overlapping_accesses_of_a_step_count_once() -> None:
    assert distinct([Access(0, 50, 100), Access(0, 0, 100), Access(1, 0, 10)]) == (Access(0, 0, 150), Access(1, 0, 10))
