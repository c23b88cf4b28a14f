"""The memory pool and stream order, below ONNX Runtime: the C tests of ``tests/c/memory_test.c``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from c_programs import SOURCES, build_program, run_program

TESTS = re.findall(r"^    TEST\((\w+)\),$", (SOURCES / "memory_test.c").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def memory_test() -> Path:
    return build_program("memory_test", ["memory_test.c", "fake_driver.c"])


def test_the_c_tests_are_listed() -> None:
    assert len(TESTS) > 10


@pytest.mark.parametrize("name", TESTS)
def test_pool(memory_test: Path, name: str) -> None:
    done = run_program(memory_test, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name}\n"


def test_a_cached_allocation_and_its_free_take_less_than_300_nanoseconds(memory_test: Path) -> None:
    done = run_program(memory_test, "time")
    assert done.returncode == 0, done.stderr
    alone, with_four_threads = map(float, done.stdout.split())
    assert 0 < alone < 300
    assert 0 < with_four_threads < 300
