"""Checks that each change has to pass: ruff, mypy --strict, clang-format, and the checkers of the files in .github."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent
HOSTED = ROOT / ".github"
SCHEMAS = {
    "workflows/*.yml": "github-workflows",
    "actions/*/action.yml": "github-actions",
    "ISSUE_TEMPLATE/*.yml": "github-issue-forms",
    "dependabot.yml": "dependabot",
}
"""Patterns of files in .github, and check-jsonschema's name of their schema."""


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_is_clean(arguments: tuple[str, ...]) -> None:
    run(sys.executable, "-m", "ruff", *arguments, ".")


@pytest.mark.every_case  # the package's types are checked for each change, however long it takes
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["ort_cuda_plugin", "build_plugin.py", "tests/harness/typed_program.py"], id="package"),
        pytest.param([], id="all", marks=pytest.mark.full),
    ],
)
def test_mypy_strict_is_clean(files: list[str]) -> None:
    run(sys.executable, "-m", "mypy", "--strict", *files)


def test_c_sources_are_clang_formatted() -> None:
    files = [path for folder in ("csrc_shim", "tests", "bench") for path in sorted((ROOT / folder).rglob("*.[ch]"))]
    sources = [str(path) for path in files if path.name != "ort_abi.h"]
    run(str(PROGRAMS / "clang-format"), "--dry-run", "-Werror", *sources)


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed")
@pytest.mark.parametrize("pattern", SCHEMAS)
def test_definitions_of_github_have_the_form_of_their_schema(pattern: str) -> None:
    files = [str(path) for path in sorted(HOSTED.glob(pattern))]
    assert files
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{SCHEMAS[pattern]}", *files)


@pytest.mark.skipif(not (PROGRAMS / "zizmor").exists(), reason="zizmor is not installed")
def test_workflows_pass_the_audit_of_zizmor() -> None:
    """zizmor reports unpinned actions, excess permissions, untrusted text in commands, and caches used by a release."""
    run(str(PROGRAMS / "zizmor"), "--offline", "--no-progress", str(HOSTED))
