"""Each pass of the table before and after, as text.

``<pass>.txt`` has a device, constants, and a model as ``onnx.parser`` reads it; behind ``----`` it has the program that
the pass gets and makes of it: a line for each step, "-" where only the program before has it, "+" where only the one
after. Nothing is compiled, so that a case takes milliseconds. With tests/harness in PYTHONPATH,
``python tests/passes/test_before_and_after.py <pass>`` writes what the pass does now into its file: read the difference
before you commit it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from ort_cuda_plugin.passes.fusion import split_k_fusion
from ort_cuda_plugin.passes.layout import l2_batch_tiling
from ort_cuda_plugin.passes.table import PASSES, Pass
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from pass_programs import change_by

FOLDER = Path(__file__).parent
DEVICES = {
    "emulated": DeviceProperties(),
    "gpu": DeviceProperties.gpu((9, 0)),
    "libraries": DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt", "cudnn"})),
}
SMALL_L2 = {(9, 0): 300_000}


def case(name: str) -> tuple[DeviceProperties, ModelProto, str]:
    """The device, the model and the expected change of a pass's file."""
    given, expected = (FOLDER / f"{name}.txt").read_text().split("----\n")
    text = "\n".join(line for line in given.splitlines() if not line.startswith(("device ", "constant ")))
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    (device,) = re.findall(r"^device (\w+)$", given, flags=re.M)
    numbers = np.random.default_rng(0)
    for constant, values in re.findall(r"^constant (\w+) = \[(.*)\]$", given, flags=re.M):
        array = np.array([int(value) for value in values.split(",")])
        model.graph.initializer.append(numpy_helper.from_array(array, constant))
    for constant, dtype, sizes in re.findall(r"^constant (\w+) (\w+) \[(.*)\]$", given, flags=re.M):
        array = numbers.uniform(1, 9, [int(size) for size in sizes.split(",") if size]).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), constant))
    return DEVICES[device], model, expected.rstrip("\n")


def change(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the pass does to its case. Small shapes take the way of large ones where a cost model decides."""
    device, model, _ = case(name)
    if name == "l2_batch_tiling":
        monkeypatch.setattr(l2_batch_tiling, "L2_BYTES", SMALL_L2)
    if name == "split_k_fusion":
        monkeypatch.setattr(split_k_fusion, "parts_along_k", lambda ctx, step: 3)
    return change_by(name, model, device)


@pytest.mark.parametrize("name", [each.name for each in PASSES])
def test_a_pass_makes_of_a_program_what_its_file_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, expected = case(name)
    assert change(name, monkeypatch) == expected
    assert re.search("^[-+] ", expected, flags=re.M), "the pass has to change something"


def test_each_pass_has_one_place_in_the_table_and_each_file_a_pass() -> None:
    names = [each.name for each in PASSES]
    assert len(set(names)) == len(names)
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(names)


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_each_pass_states_what_it_assumes_and_guarantees(each: Pass) -> None:
    text = each.run.__doc__ or ""
    assert re.search(r"^\S.*\.\n.*Assumes: \S.*Guarantees: \S.*Example: \S", text, flags=re.S), text


if __name__ == "__main__":
    for written in sys.argv[1:]:
        with pytest.MonkeyPatch.context() as patch:
            file = FOLDER / f"{written}.txt"
            file.write_text(f"{file.read_text().split('----')[0]}----\n{change(written, patch)}\n")
