"""Hostile weight files of compiled models: invalid paths and sizes, files that change, and killed writers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from contexts import BINARY, WEIGHT, compile_model, container_of, load, row_model, rows
from isolated import ROOT
from ort_cuda_plugin.context.storage.container import Builder, Container
from ort_cuda_plugin.context.storage.errors import ContextError
from ort_cuda_plugin.context.storage.files import ModelFolder, open_context
from ort_cuda_plugin.context.storage.source_model import SourceModel

MUTANTS = 3000


def compiled_without_weights(folder: Path, external: bool = False) -> onnx.ModelProto:
    """Write m.onnx and a weightless m_ctx.onnx compiled from it; with ``external`` the weights are in m.data."""
    made = onnx.load_from_string(row_model())
    onnx.save(made, folder / "m.onnx", save_as_external_data=external, location="m.data", size_threshold=64)
    return compile_model(str(folder / "m.onnx"), folder / "m_ctx.onnx", context_weightless="1")


@pytest.mark.parametrize(
    "file", ["/{}/outside/m.onnx", "../outside/m.onnx", "link.onnx", "door/m.onnx", "pipe", "", "a\\m"]
)
def test_a_node_leads_to_no_source_outside_of_its_folder(tmp_path: Path, file: str) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    compiled = compiled_without_weights(inside)
    (inside / "m.onnx").rename(outside / "m.onnx")
    (inside / "link.onnx").symlink_to(outside / "m.onnx")
    (inside / "door").symlink_to(outside)
    os.mkfifo(inside / "pipe")
    name = file.format(str(tmp_path)[1:]).encode()
    next(each for each in compiled.graph.node[0].attribute if each.name == "onnx_model_filename").s = name
    onnx.save(compiled, inside / "m_ctx.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*source model .*ep\.context_source_model_path"):
        load(inside / "m_ctx.onnx")


BAD_PLACES = {
    "location": ["/etc/passwd", "../m.data", "link", "", "none", "m.onnx\0", "door/m.data"],
    "offset": ["-1", "4", "18446744073709551615", "9" * 40, "x", "1e3"],
    "length": ["-1", "0", "513", "9" * 40, ""],
}


def test_a_source_leads_to_no_data_outside_of_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    compiled_without_weights(inside, external=True)
    data = (inside / "m.data").read_bytes()
    (tmp_path / "m.data").write_bytes(data)
    (inside / "link").symlink_to(tmp_path / "m.data")
    (inside / "door").symlink_to(tmp_path)
    load(inside / "m_ctx.onnx").run(None, {"x": rows(1, 1)})
    source = onnx.load(inside / "m.onnx", load_external_data=False)
    (tensor,) = source.graph.initializer
    right = [(entry.key, entry.value) for entry in tensor.external_data]
    for key, values in BAD_PLACES.items():
        for value in values:
            del tensor.external_data[:]
            for name, text in {**dict(right), key: value}.items():
                tensor.external_data.add(key=name, value=text)
            onnx.save(source, inside / "m.onnx")
            with pytest.raises(Exception, match=r"INVALID_GRAPH.*'m\.onnx'"):
                load(inside / "m_ctx.onnx")


def test_files_that_become_shorter_are_errors(tmp_path: Path) -> None:
    """Truncating an open file is an error. Renaming another file over it is harmless: the handle keeps the old file."""
    compiled_without_weights(tmp_path, external=True)
    binary = tmp_path / BINARY.format("m")
    folder = ModelFolder.at(tmp_path)
    container = Container(open_context(folder, binary.name), "the context")
    source = SourceModel(folder.open("m.onnx", "the source"), "the source", folder)
    (tensor,) = source.tensors.values()
    assert source.array(tensor).tobytes() == WEIGHT.tobytes()
    replaced = tmp_path / "new"
    replaced.write_bytes(b"other")
    replaced.replace(tmp_path / "m.data")
    assert source.array(tensor).tobytes() == WEIGHT.tobytes()  # still the contents of the opened file
    os.truncate(binary, 100)
    with pytest.raises(ContextError, match=r"the context: .* changed while it was read"):
        container.array(0)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*damaged"):
        load(tmp_path / "m_ctx.onnx")


def hostile_source() -> bytes:
    kinds = onnx.TensorProto
    tensors = [
        numpy_helper.from_array(WEIGHT, "raw"),
        helper.make_tensor("floats", kinds.FLOAT, [2, 2], [1, 2, 3, 4]),
        helper.make_tensor("int4", kinds.INT4, [5], [1, -2, 3, -4, 5]),
        helper.make_tensor("int64", kinds.INT64, [3], [1, -(2**63), 2**63 - 1]),
    ]
    outside = tensors[0].__class__()
    outside.CopyFrom(tensors[0])
    onnx.external_data_helper.set_external_data(outside, "m.data", 0, WEIGHT.nbytes)
    outside.ClearField("raw_data")
    outside.name, outside.data_location = "outside", kinds.EXTERNAL
    graph = helper.make_graph([], "g", [], [], [*tensors, outside])
    return bytes(helper.make_model(graph, ir_version=10).SerializeToString())


def test_damaged_sources_are_errors_or_readable(tmp_path: Path) -> None:
    """Models with random byte changes and truncations either load, or raise ContextError; nothing else is raised."""
    (tmp_path / "m.data").write_bytes(WEIGHT.tobytes())
    whole, rng = hostile_source(), random.Random(4)
    first = SourceModel(whole, "it", ModelFolder.at(tmp_path))
    for tensor, expected in zip(first.tensors.values(), onnx.load_from_string(whole).graph.initializer, strict=True):
        array = WEIGHT if tensor.name == "outside" else numpy_helper.to_array(expected)
        np.testing.assert_array_equal(first.array(tensor), array.astype(first.array(tensor).dtype))
    small = whole.index(b"raw") + 3  # mutations skip the weight bytes, which are most of the file
    outcomes = {"read": 0, "refused": 0}
    for _ in range(MUTANTS):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            place = rng.choice([rng.randrange(small), rng.randrange(small + WEIGHT.nbytes, len(whole))])
            data[place] = rng.choice([data[place] ^ 1 << rng.randrange(8), 0, 127, 128, 255])
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        try:
            source = SourceModel(bytes(data), "it", ModelFolder.at(tmp_path))
            for tensor in source.tensors.values():
                with contextlib.suppress(ContextError):
                    source.array(tensor)
            outcomes["read"] += 1
        except ContextError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes


WRITER = """
import sys
from pathlib import Path
from ort_cuda_plugin.context.storage.container import Builder
path, mark, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
number = 0
print("started", flush=True)
while number != count:
    builder = Builder()
    for part in range(8):
        builder.add(bytes([mark, number % 256, part]) * 300_000)
    builder.write(path, {"mark": mark})
    number += 1
"""


def started(path: Path, mark: int, count: int) -> subprocess.Popen[bytes]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(mark), str(count)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"started\n"
    return writer


def read_all(path: Path) -> int:
    container = container_of(path)
    for number in range(len(container.index["arrays"])):
        container.array(number)
    mark: int = container.index["mark"]
    return mark


def test_two_processes_write_one_file_and_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "shared.bin"
    writers = [started(path, mark, 12) for mark in (1, 2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        with contextlib.suppress(ContextError) if not path.exists() else contextlib.nullcontext():
            seen.add(read_all(path))
    assert [writer.wait() for writer in writers] == [0, 0]
    assert read_all(path) in (1, 2)
    assert seen <= {1, 2}
    assert [each.name for each in tmp_path.iterdir()] == ["shared.bin"]


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    path, rng = tmp_path / "killed.bin", random.Random(1)
    Builder().write(path, {"mark": 9})
    for mark in range(4):
        writer = started(path, mark, -1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(rng.uniform(0.02, 0.3))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert read_all(path) in (9, *range(mark + 1))
        # A writer killed before its rename may leave a complete file under a temporary name, never a partial one.
        assert all(read_all(each) <= 9 for each in tmp_path.iterdir())
