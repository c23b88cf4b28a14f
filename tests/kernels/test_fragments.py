"""Fragments of kernels: an undefined name is reported where fragments are joined or launched, not by Numba."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernel_harness import run_op
from ort_cuda_plugin.kernels.codegen.fragment import Fragment, FragmentError, check_parameters, join
from ort_cuda_plugin.kernels.gemm import gemm_simt

TILE = Fragment("tile", "tiles = n >> 4\nrow0 = cuda.blockIdx.x * tiles", "row0")


def test_a_fragment_reads_what_earlier_ones_give_and_parameters() -> None:
    body = join([TILE, Fragment("loop", "for i in range(steps):\n    total = x[row0 + i]\n    y[i] += total")])
    assert body.needs == {"n": "tile", "steps": "loop", "x": "loop", "y": "loop"}
    assert body.splitlines()[-1] == "        y[i] += total"
    check_parameters("sum", body, ("n", "steps", "x", "y"))


def test_a_name_that_nothing_gives_is_missing() -> None:
    body = join([TILE, Fragment("loop", "y[row0] = x[row0] + column0")])
    with pytest.raises(FragmentError, match=r"kernel sum: fragment loop: 'column0' is undefined"):
        check_parameters("sum", body, ("n", "x", "y"))


def test_a_local_name_of_an_earlier_fragment_is_missing() -> None:
    with pytest.raises(FragmentError, match=r"fragment loop: 'tiles' is a local name of fragment tile"):
        join([TILE, Fragment("loop", "y[row0] = tiles")])


@pytest.mark.parametrize(
    ("text", "name"),
    [("total += 1\ntotal = 0", "total"), ("k0 = k0 + column0", "k0"), ("if a < 1:\n    y[a] = 2", "a")],
)
def test_a_name_is_read_before_it_is_assigned(text: str, name: str) -> None:
    assert name in join([Fragment("text", text)]).needs


def test_a_fragment_gives_what_it_declares() -> None:
    with pytest.raises(FragmentError, match=r"fragment tile: 'column0' is declared"):
        join([replace(TILE, gives="row0 column0")])


def test_text_without_fragments_is_checked_as_well() -> None:
    with pytest.raises(FragmentError, match=r"fragment body: 'm' is undefined"):
        check_parameters("copy", "    y[0] = x[m]", ("x", "y"))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (17, 70), (33, 65)])
def test_threads_beyond_the_result_of_a_product_do_not_multiply(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[str] = []
    write = gemm_simt.TiledProduct.body._write.__wrapped__

    def body(kernel: gemm_simt.TiledProduct) -> str:
        bodies.append(write(kernel))
        return bodies[-1]

    monkeypatch.setattr(gemm_simt.TiledProduct.body, "_write", body)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 40), (40, columns)))
    np.testing.assert_allclose(run_op("MatMul", [a, b])[0], a @ b, rtol=1e-4, atol=1e-5)
    condition = "idle = choose(row0 + thread_row < m and column0 + thread_column < n, int32(0), int32(steps + 1))"
    assert all(condition in text and "if step > idle:" in text for text in bodies)
    assert bodies


def test_a_missing_name_is_found_when_the_kernel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_simt, "steps_of", lambda depth: Fragment("steps_of", "count = k_end", "count"))
    monkeypatch.setattr(gemm_simt.TiledProduct.body, "_write", gemm_simt.TiledProduct.body._write.__wrapped__)
    x = np.ones((32, 48), np.float32)
    with pytest.raises(FragmentError, match=r"kernel matmul_32x64x16_f32: fragment pipeline: 'steps' is undefined"):
        run_op("MatMul", [x, x.T.copy()])
