"""The cost model of GEMMs on each described GPU: no prediction is faster than the hardware."""

from __future__ import annotations

import itertools

import pytest

from ort_cuda_plugin import gpus
from ort_cuda_plugin.gpus import Gpu, closest, typical_multiprocessors
from ort_cuda_plugin.kernels.gemm.tile_shapes import SIZES as BYTES
from ort_cuda_plugin.program.device import DeviceProperties
from ort_cuda_plugin.schedule import cost_model

SIZES = [*itertools.product((8, 197, 784), (64, 768), (256, 3072))]


def of(gpu: Gpu) -> DeviceProperties:
    return DeviceProperties.gpu(gpu.compute_capability, gpu.multiprocessors)


@pytest.mark.parametrize("kind", ["f16", "tf32", "i8"])
@pytest.mark.parametrize("name", gpus.names())
def test_no_gemm_is_predicted_to_beat_the_hardware(name: str, kind: str) -> None:
    gpu = gpus.gpu(name)
    flops = gpu.flops_per_clock(cost_model.FLOPS_OF[kind])
    for m, n, k in SIZES:
        config, cycles = cost_model.fastest(of(gpu), cost_model.Problem(kind, m, n, 1, k, 0, False, False, 0, False))
        blocks = -(-m // config.tile.m) * -(-n // config.tile.n)
        busy = min(blocks, gpu.multiprocessors)
        assert cycles * busy * flops >= 2.0 * m * n * k
        operand_bytes = (m + n) * k * BYTES[kind]
        assert cycles * gpu.l2_read / gpu.clock >= operand_bytes


def test_a_slower_tensor_core_is_predicted_to_take_longer() -> None:
    problem = cost_model.Problem("f16", 3136, 3072, 1, 3072, 0, False, False, 0, False)
    cycles = {name: cost_model.fastest(of(gpus.gpu(name)), problem)[1] for name in ("h100", "rtx4090")}
    assert cycles["rtx4090"] > 4 * cycles["h100"]


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "split_k"),
    [
        pytest.param(16, 256, 3072, 4, id="few blocks"),
        pytest.param(400, 256, 3072, 6, id="no power of two"),
        pytest.param(784, 256, 4096, 8, id="the most"),
        pytest.param(197, 1024, 1152, 2, id="the least"),
        pytest.param(128, 768, 768, 1, id="short sums"),
    ],
)
def test_a_gemm_is_split_as_is_predicted_to_take_least(rows: int, columns: int, depth: int, split_k: int) -> None:
    device = of(gpus.gpu("h100"))
    assert cost_model.choose_split_k(device, "f16", rows, columns, depth, along_k=True) == split_k


def test_a_gpu_without_a_description_has_the_rates_of_the_most_similar_one() -> None:
    assert closest((9, 0), 132).name == gpus.gpu("h100").name
    assert closest((8, 9), 60).key == ""
    assert closest((8, 9), 60).flops_per_clock("float16") == pytest.approx(gpus.gpu("l4").flops_per_clock("float16"))
    assert closest((8, 9), 60).flops["float16"] == pytest.approx(gpus.gpu("l4").flops["float16"] * 60 / 58)
    assert closest((8, 6), 82).compute_capability == (8, 6)
    for unknown in ((7, 5), (10, 3), (13, 0)):
        found = closest(unknown, typical_multiprocessors(unknown))
        assert found.compute_capability == unknown
        assert found.multiprocessors == typical_multiprocessors(unknown)
