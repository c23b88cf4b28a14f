"""Memory in stream order and the arena, below ONNX Runtime: the C tests of ``tests/c``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from c_programs import SOURCES, build_program, run_program


def names(source: str) -> list[str]:
    return re.findall(r"^    TEST\((\w+)\),$", (SOURCES / source).read_text(), re.MULTILINE)


MEMORY_TESTS, ARENA_TESTS = names("memory_test.c"), names("arena_test.c")


@pytest.fixture(scope="module")
def memory_test() -> Path:
    return build_program("memory_test", ["memory_test.c", "fake_driver.c"])


@pytest.fixture(scope="module")
def arena_test() -> Path:
    return build_program("arena_test", ["arena_test.c", "fake_driver.c"])


def test_the_c_tests_are_listed() -> None:
    assert len(MEMORY_TESTS) > 10
    assert len(ARENA_TESTS) > 10


@pytest.mark.parametrize("name", MEMORY_TESTS)
def test_pool(memory_test: Path, name: str) -> None:
    done = run_program(memory_test, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name}\n"


@pytest.mark.parametrize("name", ARENA_TESTS)
def test_arena(arena_test: Path, name: str) -> None:
    done = run_program(arena_test, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name}\n"


def test_a_cached_allocation_and_its_free_take_less_than_300_nanoseconds(memory_test: Path) -> None:
    done = run_program(memory_test, "time")
    assert done.returncode == 0, done.stderr
    alone, with_four_threads = map(float, done.stdout.split())
    assert 0 < alone < 300
    assert 0 < with_four_threads < 300
