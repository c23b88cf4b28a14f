"""The tools that every change passes: ruff, mypy --strict, clang-format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_is_clean(arguments: tuple[str, ...]) -> None:
    run(sys.executable, "-m", "ruff", *arguments, ".")


def test_mypy_strict_is_clean() -> None:
    run(sys.executable, "-m", "mypy", "--strict")


def test_c_sources_are_clang_formatted() -> None:
    sources = [
        str(path) for folder in ("csrc_shim", "tests", "bench") for path in sorted((ROOT / folder).rglob("*.[ch]"))
    ]
    clang_format = str(Path(sys.executable).parent / "clang-format")
    run(clang_format, "--dry-run", "-Werror", *(source for source in sources if Path(source).name != "ort_abi.h"))
