"""docs/parity.md is what the registries say now, and the comparison finds what is lacking."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from ort_cuda_plugin.conformance.parity import (
    WRITE_COMMAND,
    Kernel,
    additions,
    digest,
    gaps,
    names_of_host,
    packaged_digest,
    read_digest,
    unknown_constraints,
)
from ort_cuda_plugin.ops.kernel_definitions import UNLIMITED

REPORT = Path(__file__).resolve().parents[2] / "docs" / "parity.md"


def parity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ort_cuda_plugin", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def kernel(since: int, until: int, **types: str) -> Kernel:
    return Kernel("", "Op", since, until, {name: frozenset(text.split()) for name, text in types.items()})


def test_the_report_is_not_stale() -> None:
    written = REPORT.read_text()
    if f"with onnxruntime {onnxruntime.__version__};" not in written:
        pytest.skip(f"{REPORT.name} is not of onnxruntime {onnxruntime.__version__}, whose schemas differ")
    stale = set(parity().stdout.splitlines()) ^ set(written.splitlines())
    assert not stale, "\n".join([f"{REPORT.name} is stale: {WRITE_COMMAND}", *sorted(stale)])


def test_nothing_of_the_built_in_provider_is_lacking_without_a_reason_outside_its_own_domain() -> None:
    _, second, _ = REPORT.read_text().split("\n## ")
    rows = [line for line in second.splitlines() if line.startswith("| ") and "com.microsoft" not in line][1:]
    assert len(rows) <= 5
    assert all("not implemented" not in row for row in rows), "\n".join(rows)


def test_the_packaged_list_has_every_combination_of_types() -> None:
    rows = [kernel(1, 4, T="float", U=other) for other in ("int32", "int64")] + [kernel(1, 4, T="double", U="int32")]
    again = read_digest(digest("two", rows))

    def combinations(kernels: list[Kernel]) -> set[tuple[str, ...]]:
        return {types for k in kernels for types in itertools.product(k.types["T"], k.types["U"])}

    assert combinations(again) == combinations(rows)
    assert len(again) < len(rows)
    assert len(packaged_digest()[1]) > 500


def test_lacking_versions_and_types_are_found() -> None:
    ours = [kernel(1, 6, T="float"), kernel(7, 12, T="float double")]
    assert gaps([kernel(1, 6, T="float"), kernel(7, 12, T="double")], ours) == []
    (gap,) = gaps([kernel(1, 12, T="double")], ours)
    assert (gap.versions, gap.types) == (((1, 12),), ("T: double",))
    (gap,) = gaps([kernel(13, UNLIMITED, T="float")], ours)
    assert gap.types == ("version 13",)
    (gap,) = gaps([kernel(1, 6, T="float")], [])
    assert gap.types == ()
    assert gaps([kernel(1, 6, T="float", shape="int64")], ours) == [], "a kernel without a constraint takes all types"


def test_constraints_that_no_schema_has_are_found(tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    rows = [
        {"domain": "", "op": "Relu", "versions": [14, UNLIMITED], "types": {"Q": ["tensor(float)"]}},
        {"domain": "", "op": "Relu", "versions": [6, 12], "types": {"X": ["tensor(float)"]}},  # X names an input
        {"domain": "", "op": "Add", "versions": [7, 13], "types": {"T": ["tensor(float)"], "T1": ["tensor(float)"]}},
        {"domain": "mine", "op": "Relu", "versions": [1, 1], "types": {"Q": ["tensor(float)"]}},  # without a schema
    ]
    file.write_text(json.dumps({"kernels": rows}))
    found = json.loads(parity("--against", str(file), "--json").stdout)
    assert [(gap["domain"], gap["name"], gap["types"]) for gap in found] == [
        ("", "Add", ["type constraint T1"]),
        ("", "Relu", ["type constraint Q"]),
        ("mine", "Relu", []),
    ]
    assert "its schema has no such constraint" in found[1]["reason"]
    ours = [Kernel("", "Relu", 14, UNLIMITED, {"Q": frozenset({"float"}), "T": frozenset({"float"})})]
    assert [name for _, name in unknown_constraints(ours, names_of_host())] == ["Q"]
    _, second, _ = parity("--against", str(file)).stdout.split("\n## ")
    assert "type constraint Q" in second


def test_what_only_we_have_is_listed() -> None:
    other = Kernel("x", "Mine", 1, 1, {})
    assert additions([kernel(1, 1)], [kernel(1, 1), other]) == {"x": ["Mine"]}


def test_another_list_and_another_provider_can_be_compared_with(tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    row = {"domain": "", "op": "NoSuchOperator", "versions": [1, 3], "types": {"T": ["tensor(float)"]}}
    file.write_text(json.dumps({"kernels": [row]}))
    (gap,) = json.loads(parity("--against", str(file), "--json").stdout)
    assert (gap["name"], gap["versions"], gap["reason"]) == ("NoSuchOperator", [[1, 3]], "not implemented")
    assert "onnxruntime" in parity("--against", "CudaPluginExecutionProvider").stdout


@pytest.mark.parametrize(
    ("against", "message"),
    [("NoSuchProvider", "neither a file nor a provider"), ("broken.json", "expected a JSON object")],
)
def test_what_cannot_be_compared_with_is_named(against: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"kernels": 7}')
    done = parity("--against", str(tmp_path / against) if "." in against else against)
    assert done.returncode != 0
    assert message in done.stderr
