"""The folders of ops/: each has at most a dozen modules, and the registry imports all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import Unsupported
from ort_cuda_plugin.ops import registry

PACKAGE = Path(ort_cuda_plugin.__file__).parent
FOLDERS = [folder for folder in (PACKAGE / "ops").rglob("*") if folder.is_dir() and folder.name != "__pycache__"]


def test_a_folder_has_at_most_a_dozen_sources() -> None:
    sizes = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("[!_]*.py"))) for folder in FOLDERS}
    assert {folder: size for folder, size in sizes.items() if size > 12} == {}


def test_every_module_is_imported_with_the_table() -> None:
    registry.operators()
    names = {
        ".".join(("ort_cuda_plugin", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in (PACKAGE / "ops").rglob("[!_]*.py")
    }
    assert names - sys.modules.keys() - {"ort_cuda_plugin.ops.kernel_definitions"} == set()


def test_attributes_of_a_family_are_those_of_each_operator() -> None:
    conv = registry.lookup("", "Conv", 11)
    assert [*conv.attributes] == ["group", "kernel_shape", "auto_pad", "pads", "strides", "dilations"]
    assert str(conv.attributes["strides"].annotation) == "Ints | None"
    assert [parameter.name for parameter in conv.inputs] == ["x", "w", "b"]
    assert conv.bind_attributes({"strides": (2, 2)}) == {"strides": (2, 2)}
    with pytest.raises(Unsupported, match="the attribute 'padding' is unknown; supported: group, kernel_shape"):
        conv.bind_attributes({"padding": 1})
