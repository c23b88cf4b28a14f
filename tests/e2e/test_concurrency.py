"""Sessions that run on several threads at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import ort_cuda_plugin
from device_models import add_and_double, with_cpu_nodes
from session_pair import ep_session

THREADS = 4


def in_threads(work: Callable[[int], None]) -> None:
    """Call ``work(0)`` to ``work(3)`` on concurrent threads. Raises the exception of a call."""
    start = Barrier(THREADS)

    def begin(index: int) -> None:
        start.wait()
        work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(begin, index) for index in range(THREADS)]:
            done.result()


@pytest.mark.usefixtures("collected")
def test_two_sessions_run_on_four_threads() -> None:
    before = ort_cuda_plugin.counters()
    sessions = [ep_session(add_and_double()), ort_cuda_plugin.session(with_cpu_nodes(1, rounds=2), emulate=True)]

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        for _ in range(25):
            if index % 2:
                x = rng.integers(-1000, 1000, rng.integers(1, 40, 2)).astype(np.float32)
                np.testing.assert_array_equal(sessions[1].run(None, {"x": x})[0], np.tile(x, (8, 1)))
            else:
                a, b = (rng.standard_normal(rng.integers(1, 5000)).astype(np.float32) for _ in range(2))
                b = np.resize(b, a.shape)
                np.testing.assert_array_equal(sessions[0].run(None, {"a": a, "b": b})[0], 2 * (a + b))

    in_threads(work)
    sessions.clear()
    gc.collect()
    after = ort_cuda_plugin.counters()
    assert after["device_bytes_in_use"] == before["device_bytes_in_use"]
    assert after["pinned_bytes_in_use"] == before["pinned_bytes_in_use"]


def test_one_session_runs_on_four_threads_without_python() -> None:
    session = ep_session(add_and_double())
    x = np.arange(64, dtype=np.float32)
    session.run(None, {"a": x, "b": x})
    before = ort_cuda_plugin.counters()

    def work(index: int) -> None:
        for n in range(1, 30):
            a = np.full(100 * index + n, n, np.float32)
            np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], 4 * a)

    in_threads(work)
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["runs"] - before["runs"] == THREADS * 29
    assert after["plan_variants_built"] == before["plan_variants_built"]


def test_first_runs_at_once_build_one_variant() -> None:
    session = ep_session(add_and_double())
    before = ort_cuda_plugin.counters()["plan_variants_built"]

    def work(index: int) -> None:
        a = np.full(10 + index, index, np.float32)
        np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], 4 * a)

    in_threads(work)
    assert ort_cuda_plugin.counters()["plan_variants_built"] - before == 1
