"""`bench/real_models.py`: files from archives, separate processes, and regressions against the table."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from isolated import ROOT, add_model

sys.path.insert(0, str(ROOT / "bench"))
import real_models
from real_models import Listed, Result, Size

SIZE = Size(launches=3, error=1e-6, moved=1e-7, is_right=True, ms=2.0, cpu_ms=1.0)
RESULT = Result(nodes=9, of=9, session_s=0.5, peak_mib=100, sizes=(SIZE, SIZE))


def archive(cache: Path, name: str) -> Path:
    """Return the folder for the cached archive of version 1.0 of a package, marked as downloaded."""
    folder = cache / f"{name}-1.0"
    folder.mkdir()
    (folder / "done").touch()
    return folder


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with two packages; the list of packages names these and a missing one; no results exist."""
    with zipfile.ZipFile(archive(tmp_path, "wheel") / "wheel-1.0-py3-none-any.whl", "w") as packed:
        packed.writestr("wheel/__init__.py", "")
        packed.writestr("wheel/a.onnx.gz", gzip.compress(add_model(dims=["n", 8])))
        packed.writestr("wheel/broken.onnx", b"no model")
    (tmp_path / "b.onnx").write_bytes(add_model(dims=["n", 8]))
    with tarfile.open(archive(tmp_path, "source") / "source-1.0.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "b.onnx", "source-1.0/source/b.onnx")
    listed = {"wheel==1.0": {"*a.onnx": {"sizes": [{"n": 2}, {"n": 5}]}}, "source==1.0": {}, "/absent": {}}
    (tmp_path / "listed.json").write_text(json.dumps(listed))
    monkeypatch.setattr(real_models, "LISTED", tmp_path / "listed.json")
    monkeypatch.setattr(real_models, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(real_models, "TURN_SECONDS", 0.0)
    return tmp_path


def run(setting: Path, *arguments: str) -> int:
    sys.argv = ["real_models.py", "--cache", str(setting), "--lowerings", "emulated", *arguments]
    return real_models.main()


def test_files_of_archives_are_measured_and_what_fails_is_said(
    setting: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert run(setting, "--update") == 1
    printed = capsys.readouterr().out
    assert "not available: /absent: /absent: pip cannot download it" in printed
    assert "worse: wheel/broken.onnx emulated: " in printed
    assert "emulated: 2 files, " in printed
    results = real_models.table()
    assert results["wheel/broken.onnx"]["emulated"].failure
    found = results["wheel/a.onnx"]["emulated"]
    assert (found.nodes, found.of, [size.launches for size in found.sizes]) == (1, 1, [1, 1])
    assert found.is_right
    assert found.session_s > 0
    assert results["source/source/b.onnx"]["emulated"].is_right
    assert run(setting, "source") == 0


def test_a_model_that_takes_more_than_its_time_costs_its_own_line_only(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(add_model())
    assert "limit of 1 s of CPU time" in real_models.in_a_process(tmp_path / "model.onnx", Listed(), "sm_90", 1).failure


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (RESULT, []),
        (replace(RESULT, nodes=8), ["8 of 9 nodes on the provider, 9 of 9 before"]),
        (replace(RESULT, sizes=(SIZE, replace(SIZE, launches=4))), ["size 1: 4 launches, 3 before"]),
        (replace(RESULT, sizes=(replace(SIZE, ms=7.0),) * 2), ["7.00 times the CPU provider's time, 2.00 before"]),
        (
            replace(RESULT, sizes=(replace(SIZE, is_right=False),)),
            ["size 0: error 1e-06, the CPU provider moves 1e-07"],
        ),
        (Result(failure="no result after 9 s"), ["no result after 9 s"]),
    ],
)
def test_figures_that_are_worse_than_the_table_are_named(now: Result, said: list[str]) -> None:
    assert real_models.worse(now, RESULT) == said
    assert real_models.worse(RESULT, replace(now, failure="crashed")) == []


def test_maps_are_compared_by_their_numbers() -> None:
    (found,) = real_models.without_maps([{2: 0.5, 1: 0.25}])
    assert found.tolist() == [0.25, 0.5]
    assert real_models.without_maps("text") == "text"
