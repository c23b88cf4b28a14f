"""docs/operators.md is what the operator table and lowering say now."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from ort_cuda_plugin.conformance.coverage import NO_LAUNCH, WRITE_COMMAND, recorded, render
from ort_cuda_plugin.ops import registry

COVERAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"


@pytest.fixture(autouse=True)
def _without_operators_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide operators that other tests have registered in this process."""
    list(registry.operators())  # loads all operators
    own = {key: versions for key, versions in registry._table.items() if key[0] in registry.NEWEST_OPSETS}
    monkeypatch.setattr(registry, "_table", own)


@pytest.mark.full
def test_the_coverage_table_is_not_stale() -> None:
    written = COVERAGE.read_text()
    if f"with onnx {onnx.__version__};" not in written:
        pytest.skip(f"{COVERAGE.name} is not of onnx {onnx.__version__}, whose tests and definitions differ")
    stale = set(render().splitlines()) ^ set(written.splitlines())
    assert not stale, "\n".join([f"{COVERAGE.name} is stale: {WRITE_COMMAND}", *sorted(stale)])


def test_every_declaration_has_a_row() -> None:
    rows = re.findall(r"^\| ([\w.]+) \|", COVERAGE.read_text(), re.MULTILINE)
    assert set(rows) - {"operator"} == {f"{o.domain}.{o.name}".lstrip(".") for o in registry.operators()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("MatMul", {"cuBLASLt", "kernel"}),
        ("Conv", {"cuDNN"}),
        ("Add", {"kernel"}),
        ("Shape", {NO_LAUNCH}),
        ("NonZero", {"kernel", "read-back"}),
    ],
)
def test_what_an_operator_became_is_recorded(name: str, kinds: set[str]) -> None:
    found = set().union(*(kinds for (_, recorded_name, _), kinds in recorded().items() if recorded_name == name))
    assert kinds <= found
    assert ("cuDNN" in found) == (name == "Conv")
