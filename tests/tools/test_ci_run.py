"""`.ci/run` installs what the README says with the locked versions, and runs pytest without the settings for that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLATION = "install -e .[cpu,libs,test]"
PYTHON = """#!/bin/bash
# python3 -m venv FOLDER
mkdir -p "$3/bin" && echo "PATH=$3/bin:\\$PATH" >"$3/bin/activate" && cp "$TOOLS"/* "$3/bin"
"""
TOOL = """#!/bin/bash
line="$(basename "$0") $*"
echo "$line; pip ${PIP_CONSTRAINT:-any} uv ${UV_CONSTRAINT:-any} from ${UV_DEFAULT_INDEX:-PyPI}" >>"$CALLS"
[ -z "${FAILS:-}" ] || [[ "$line" != "$FAILS"* ]]
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables for `.ci/run`. Their python3 creates virtual environments whose tools only note their calls."""
    programs, tools = tmp_path / "programs", tmp_path / "tools"
    for folder, name, text in (
        (programs, "python3", PYTHON),
        (tools, "pip", TOOL),
        (tools, "uv", TOOL),
        (tools, "pytest", TOOL),
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return kept | {"PATH": path, "TOOLS": str(tools), "CALLS": str(tmp_path / "calls")}


def calls(environment: dict[str, str]) -> list[str]:
    """Run `.ci/run` and return the command lines of the tools that it called."""
    done = subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(environment["CALLS"]).read_text().splitlines()


def test_uv_installs_the_locked_versions_and_pytest_runs_without_constraints(environment: dict[str, str]) -> None:
    assert calls(environment | {"PIP_INDEX_URL": "https://index"}) == [
        "pip install --quiet --constraint .ci/lock.txt uv; pip any uv any from PyPI",
        f"uv pip {INSTALLATION}; pip any uv .ci/lock.txt from https://index",
        "pytest ; pip any uv any from PyPI",
    ]


@pytest.mark.parametrize("failure", ["uv", "pip install --quiet"])
def test_pip_installs_the_locked_versions_without_uv(environment: dict[str, str], failure: str) -> None:
    assert calls(environment | {"FAILS": failure})[-2:] == [
        f"pip {INSTALLATION}; pip .ci/lock.txt uv any from PyPI",
        "pytest ; pip any uv any from PyPI",
    ]
