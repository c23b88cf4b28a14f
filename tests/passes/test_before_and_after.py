"""Each pass of the table: the program before and after it, as text.

`pass_programs` describes the files in this folder: "-" marks a step that only the program before the pass has, "+" a
step that only the program after it has. Nothing is compiled, so that a case takes milliseconds. With tests/harness in
PYTHONPATH, ``python tests/passes/test_before_and_after.py <name>`` writes into the file what the pass does now; read
the difference before you commit it.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from onnx import numpy_helper, parser

from ort_cuda_plugin.passes.table import PASSES, Pass
from pass_programs import DEVICES, FOLDER, case, case_names, change_by, change_of


@pytest.mark.parametrize("name", case_names())
def test_a_pass_makes_of_a_program_what_its_file_says(name: str) -> None:
    one = case(name)
    assert change_of(one) == one.expected
    assert re.search("^[-+] ", one.expected, flags=re.M), "the pass has to change something"


def test_each_pass_has_one_place_in_the_table_and_each_file_a_pass() -> None:
    names = [each.name for each in PASSES]
    assert len(set(names)) == len(names)
    assert set(names) <= set(case_names())
    assert {name.partition(".")[0] for name in case_names()} == set(names)


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_each_pass_states_what_it_assumes_and_guarantees(each: Pass) -> None:
    text = each.run.__doc__ or ""
    assert re.search(r"^\S.*\.\n.*Assumes: \S.*Guarantees: \S.*Example: \S", text, flags=re.S), text


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 64, 32), (64, 0, 32), (64, 64, 0)])
def test_integer_gemms_without_elements_are_not_merged(rows: int, depth: int, columns: int) -> None:
    text = f"""(uint8[{rows}, {depth}] q) => (int32[{rows}, 64] y, int32[{rows}, {columns}] u)
    {{ y = MatMulInteger(q, w) u = MatMulInteger(q, v) }}"""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    for name, size in (("w", 64), ("v", columns)):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((depth, size), np.int8), name))
    change = change_by("horizontal_integer_gemm", model, DEVICES["libraries"])
    assert change
    assert [line for line in change.splitlines() if not line.startswith("  ")] == []


if __name__ == "__main__":
    for written in sys.argv[1:]:
        file = FOLDER / f"{written}.txt"
        file.write_text(f"{file.read_text().split('----')[0]}----\n{change_of(case(written))}\n")
