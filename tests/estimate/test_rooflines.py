"""Rooflines of a model and of its steps."""

from __future__ import annotations

import pytest

from ort_cuda_plugin import gpus
from ort_cuda_plugin.estimate.cache_model import Served
from ort_cuda_plugin.estimate.model import Estimate, estimate
from ort_cuda_plugin.estimate.roofline import step_rooflines
from ort_cuda_plugin.estimate.work import Access, CopyStep, KernelStep, LibraryStep, Region, Step, Work
from ort_cuda_plugin.gpus.constants import Constants
from ort_cuda_plugin.model.ir import DType

H100, CONSTANTS = gpus.gpu("h100"), Constants()
HALF = DType.FLOAT16.onnx


def copies(nbytes: int, count: int) -> Work:
    """Return ``count`` copies that pass an input of ``nbytes`` through intermediate tensors to an output."""
    regions = [Region("input", "x", nbytes)]
    regions += [Region("scratch", str(i), nbytes, i % 2 * nbytes) for i in range(count - 1)]
    regions.append(Region("output", "y", nbytes))
    steps = [CopyStep(("copy",), (Access(i, 0, nbytes),), (Access(i + 1, 0, nbytes),), "copy") for i in range(count)]
    return Work(tuple(regions), tuple(steps))


def found(work: Work) -> Estimate:
    return estimate(work, H100, CONSTANTS, count=False)


def test_what_the_l2_keeps_costs_no_memory() -> None:
    small, large = found(copies(4_000_000, 3)), found(copies(1_000_000_000, 3))
    assert small.steps[1].roofline == pytest.approx(CONSTANTS.launch_seconds + H100.l2_seconds(4e6, 4e6))
    at_memory = 2e9 / (H100.dram * CONSTANTS.dram)
    assert large.steps[1].roofline == pytest.approx(CONSTANTS.launch_seconds + at_memory, rel=0.06)
    for each in (small, large):
        assert each.roofline < each.steps_roofline <= each.seconds * (1 + 1e-9)


def test_intermediates_and_launches_are_in_the_steps_alone() -> None:
    one, many = found(copies(1_000_000, 1)), found(copies(1_000_000, 20))
    assert many.roofline == one.roofline == 2e6 / H100.dram
    assert many.steps_roofline > 15 * one.steps_roofline > 15 * CONSTANTS.launch_seconds


def test_a_tiny_step_waits_for_one_access() -> None:
    assert found(copies(64, 2)).steps[1].roofline == CONSTANTS.launch_seconds + CONSTANTS.l2_latency


def product_work(step: type[Step]) -> Work:
    """Return a float16 GEMM of size 4096, computed by a library or by the plugin's kernel."""
    n = 4096
    names = ("weight", "input", "output")
    regions = tuple(Region(kind, kind, n * n * 2) for kind in names)
    accesses = tuple(Access(i, 0, n * n * 2) for i in range(3))
    shared = (("product",), accesses[:2], accesses[2:])
    if step is LibraryStep:
        only: Step = LibraryStep(*shared, "matmul", HALF, frozenset(), 0, (n, n, n, n, n, n, 1, 0, 0, 0))
    else:
        from kernel_launch import kernel

        only = KernelStep(*shared, kernel("product", (), "def kernel():\n    pass\n"), (1, 1, 1), (1, 1, 1), 0, ())
    return Work(regions, (only,), (("float16", 2.0 * n**3, ("product",)),))


def test_our_products_are_measured_against_tensor_cores() -> None:
    library, ours = (found(product_work(kind)).steps[0].roofline for kind in (LibraryStep, KernelStep))
    assert library == ours == pytest.approx(CONSTANTS.launch_seconds + 2.0 * 4096**3 / (989.4e12 * 0.8))


def test_a_product_is_that_of_the_nodes_kernels_with_the_most_operations() -> None:
    """A split-K GEMM, for example, has a second kernel, which adds the partial sums."""
    work = product_work(KernelStep)
    twice = Work(work.regions, work.steps * 2, work.products)
    served = [Served(0, 0, 0, 0)] * 2
    for counted, number in (({0: 2e11, 1: 1e6}, 0), ({0: 1e6, 1: 2e11}, 1), ({}, 1)):
        first, last = step_rooflines(twice, H100, CONSTANTS, served, counted)
        assert (first > last) == (number == 0)
