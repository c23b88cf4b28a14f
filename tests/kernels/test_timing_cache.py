"""The cache of measured times: what it stores, and that damaged or foreign files in its folder do no harm."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ort_cuda_plugin.compiler.caches.timing_cache import (
    TimedProblem,
    TimingCache,
    device_identity,
    max_candidates,
    size_bucket,
    timing_cache,
)

DEVICE = device_identity("GPU", (9, 0), 132, {"driver": "13.0"})
PROBLEM = TimedProblem.of("product", DEVICE, ["f16", "f16"], [1000, 64])


def test_buckets_are_quarters_of_powers_of_two() -> None:
    assert [size_bucket(size) for size in (*range(10), 11, 16, 17, 33, 1000, 2**40 + 1)] == [
        *(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 40, 1024),
        5 << 38,
    ]
    assert all(size <= size_bucket(size) < size * 1.25 + 1 for size in range(1, 5000))
    with pytest.raises(ValueError, match="expected a size of at least 0, got -1"):
        size_bucket(-1)


def test_the_fastest_candidate_wins_in_the_next_process(tmp_path: Path) -> None:
    first = TimingCache(tmp_path)
    assert first.best(PROBLEM, ["tiles", "library"]) is None
    first.record(PROBLEM, {"tiles": 2e-3, "library": 1e-3, "impossible": math.inf})
    second = TimingCache(tmp_path)
    assert second.best(PROBLEM, ["tiles", "library"]) == "library"
    assert second.best(PROBLEM, ["tiles", "impossible"]) == "tiles"
    assert second.best(PROBLEM, ["impossible"]) is None
    assert second.best(PROBLEM, []) is None
    assert second.times(PROBLEM)["impossible"] == math.inf
    # A candidate without a measurement may be the fastest.
    assert second.best(PROBLEM, ["tiles", "library", "new"]) is None
    assert second.missing(PROBLEM, ["tiles", "library", "new"]) == ["new"]
    second.record(PROBLEM, {"new": 1e-3})
    assert TimingCache(tmp_path).best(PROBLEM, ["new", "library"]) == "new"


def test_sizes_of_one_bucket_share_times_and_all_else_keeps_problems_apart(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path)
    cache.record(PROBLEM, {"tiles": 1.0})
    same = TimedProblem.of("product", DEVICE, ["f16", "f16"], [1001, 60])
    assert cache.times(same) == {"tiles": 1.0}
    others = [
        TimedProblem.of("convolution", DEVICE, ["f16", "f16"], [1000, 64]),
        TimedProblem.of("product", DEVICE, ["f16", "f32"], [1000, 64]),
        TimedProblem.of("product", DEVICE, ["f16", "f16"], [1000, 65]),
        TimedProblem.of("product", DEVICE, ["f16", "f16"], [1000, 64, 1]),
        *(
            TimedProblem.of("product", device, ["f16", "f16"], [1000, 64])
            for device in (
                device_identity("GPU", (9, 0), 132, {"driver": "13.1"}),
                device_identity("GPU", (9, 0), 114, {"driver": "13.0"}),
                device_identity("GPU", (8, 0), 132, {"driver": "13.0"}),
                device_identity("Other", (9, 0), 132, {"driver": "13.0"}),
            )
        ),
    ]
    assert len({problem.key for problem in [PROBLEM, *others]}) == 9
    assert not any(cache.times(problem) for problem in others)


def test_what_is_no_time_is_an_error_of_the_caller(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path)
    for times in ({"tiles": 0.0}, {"tiles": -1.0}, {"tiles": math.nan}, {"": 1.0}, {"x" * 513: 1.0}):
        with pytest.raises(ValueError, match="of product: expected a time"):
            cache.record(PROBLEM, times)
    assert not list(tmp_path.iterdir())


def test_names_of_candidates_that_are_gone_make_room(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path)
    cache.record(PROBLEM, {f"old {i}": 1.0 for i in range(max_candidates)})
    cache.record(PROBLEM, {"old 5": 2.0, "new": 3.0})
    times = TimingCache(tmp_path).times(PROBLEM)
    assert len(times) == max_candidates
    assert (times["old 5"], times["new"]) == (2.0, 3.0)
    assert "old 0" not in times


def test_the_least_recently_used_problems_go_when_the_bound_is_passed(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path, max_bytes=1000)
    problems = [TimedProblem.of(f"product {i}", DEVICE, [], []) for i in range(10)]
    for age, problem in enumerate(problems):
        cache.record(problem, {"tiles": 1.0})
        os.utime(cache.path(problem.key), (1e9 - age * 1e5, 1e9 - age * 1e5))
    cache.trim()
    left = TimingCache(tmp_path)
    kept = [bool(left.times(problem)) for problem in problems]
    assert kept == sorted(kept, reverse=True)
    assert 0 < kept.count(True) < len(kept)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def entry(body: bytes) -> bytes:
    return TimingCache.magic + hashlib.sha256(body).digest() + body


PARTS = [PROBLEM.timing_id, PROBLEM.device, list(PROBLEM.types), list(PROBLEM.sizes)]
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
documents = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), documents.map(lambda found: json.dumps([*PARTS, found]).encode())))
@example(b"[" * 200_000)
@example(json.dumps([*PARTS, {"tiles": 10**400}]).encode())
@example(json.dumps([*PARTS, {"tiles": 1.0, "library": math.nan}]).encode())
@example(json.dumps([*PARTS, {str(i): 1.0 for i in range(max_candidates + 1)}]).encode())
@example(json.dumps([*PARTS[:3], [1000, 64], {"tiles": 1.0}]).encode())
@example(b'["\\ud800", {"\\ud800": 1}]')
def test_hostile_contents_are_times_or_a_miss_and_are_replaced(tmp_path: Path, body: bytes) -> None:
    for data in (entry(body), body):
        TimingCache(tmp_path).path(PROBLEM.key).write_bytes(data)
        cache = TimingCache(tmp_path)
        assert all(seconds > 0 and name for name, seconds in cache.times(PROBLEM).items())
        cache.record(PROBLEM, {"tiles": 1.5})
        assert TimingCache(tmp_path).times(PROBLEM)["tiles"] == 1.5


def test_damaged_and_foreign_files_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TimingCache(tmp_path)
    cache.record(PROBLEM, {"tiles": 1.0})
    path = cache.path(PROBLEM.key)
    good = path.read_bytes()
    with caplog.at_level(logging.INFO):
        path.write_bytes(good[:-1])
        assert TimingCache(tmp_path).times(PROBLEM) == {}
        path.write_bytes(good)
        path.chmod(0o666)
        assert TimingCache(tmp_path).times(PROBLEM) == {}
    damaged, foreign = [record.getMessage() for record in caplog.records]
    assert damaged == f"timing cache entry {path} is damaged; the process measures the candidate kernels again"
    assert foreign.startswith(f"timing cache entry {path} is not used: other users can write to the file")


def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "timings"
    TimingCache(folder).record(PROBLEM, {"tiles": 1.0})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.chmod(0o500)
    if os.geteuid() == 0:  # root may write whatever the mode says
        access = os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode, **place: not mode & os.W_OK and access(path, mode, **place)
        )
    try:
        cache = TimingCache(folder)
        assert cache.usable
        assert cache.times(PROBLEM) == {"tiles": 1.0}
        cache.record(PROBLEM, {"library": 0.5})
        assert cache.best(PROBLEM, ["tiles", "library"]) == "library"  # kept in memory
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    finally:
        folder.chmod(0o700)


def test_a_folder_that_others_write_to_is_reported_and_memory_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        cache = TimingCache(tmp_path)
    assert caplog.text.count("is not used: other users can write to") == 1
    assert "Each process measures candidate kernels again" in caplog.text
    cache.record(PROBLEM, {"tiles": 1.0})
    assert cache.times(PROBLEM) == {"tiles": 1.0}
    assert not list(tmp_path.iterdir())


def test_two_processes_at_once_lose_no_problem(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from ort_cuda_plugin.compiler.caches.timing_cache import TimedProblem, TimingCache
cache = TimingCache(Path(sys.argv[1]))
for i in range(20):
    cache.record(TimedProblem.of(f"{i % 10}", sys.argv[2], [], []), {f"candidate {i}": 1.0 + i})
    times = TimingCache(Path(sys.argv[1])).times(TimedProblem.of("shared", "", [], []))
    assert times in ({}, {"a": 1.0}, {"b": 2.0}, {"a": 1.0, "b": 2.0}), times
    cache.record(TimedProblem.of("shared", "", [], []), {sys.argv[2]: {"a": 1.0, "b": 2.0}[sys.argv[2]]})
"""
    processes = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name]) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    cache = TimingCache(tmp_path)
    for name in ("a", "b"):
        for i in range(10):
            times = cache.times(TimedProblem.of(f"{i}", name, [], []))
            assert times == {f"candidate {j}": 1.0 + j for j in range(i, 20, 10)}
    assert not list(tmp_path.glob("*.part"))


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CACHE_DIR", str(tmp_path / "one"))
    cache = timing_cache()
    assert cache is timing_cache()
    assert cache.folder == tmp_path / "one" / "timings"
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CACHE_DIR", str(tmp_path / "two"))
    assert timing_cache().folder == tmp_path / "two" / "timings"


def test_a_file_of_the_form_before_is_absent_and_replaced(tmp_path: Path) -> None:
    """Version 1 named candidates by descriptions such as the one below, which no candidate has any longer."""
    cache = TimingCache(tmp_path)
    cache.record(PROBLEM, {"tiles of 16x16x32, by 8 teams": 1.0})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(TimingCache.magic, b"OCPT\x01\n", 1))
    later = TimingCache(tmp_path)
    assert later.times(PROBLEM) == {}
    later.record(PROBLEM, {'{"engine":"library"}': 2.0})
    assert TimingCache(tmp_path).times(PROBLEM) == {'{"engine":"library"}': 2.0}
