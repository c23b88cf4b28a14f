"""The file format of contexts: a round trip, and rejection of anything else."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ort_cuda_plugin.context.storage import container as format_module
from ort_cuda_plugin.context.storage import hashing
from ort_cuda_plugin.context.storage.container import ALIGNMENT, FIRST_ARRAY, HEADER, MAGIC, Builder, Container
from ort_cuda_plugin.context.storage.errors import ContextError
from ort_cuda_plugin.context.storage.files import ModelFolder, open_context
from ort_cuda_plugin.model.open_file import open_file

ARRAYS = [b"first", bytes(range(100)), b""]
CONTENTS = {"made_by": {"plugin": "1"}, "partitions": []}


def built() -> bytes:
    builder = Builder()
    assert [builder.add(data) for data in ARRAYS] == [0, 1, 2]
    return builder.to_bytes(CONTENTS)


def contents(data: bytes) -> tuple[Any, list[bytes]]:
    read = Container(data, "it")
    return read.index, [bytes(read.array(number)) for number in range(len(ARRAYS))]


def with_index(index: Any, arrays_end: int) -> bytes:
    """Return a container with the arrays of `built` and an arbitrary ``index``, whose hash in the header is right."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    digest = hashlib.sha256(text).digest()
    header = HEADER.pack(MAGIC, *format_module.VERSION, 0, arrays_end + len(text), arrays_end, len(text), digest)
    return header.ljust(FIRST_ARRAY, b"\0") + built()[FIRST_ARRAY:arrays_end] + text


def test_arrays_come_back_aligned_and_equal_ones_once() -> None:
    data = built()
    index, arrays = contents(data)
    assert arrays == ARRAYS
    assert index["made_by"] == {"plugin": "1"}
    assert all(offset % ALIGNMENT == 0 for offset, _, _ in index["arrays"])
    builder = Builder()
    numbers = [builder.add(np.arange(6, dtype=np.int16).reshape(2, 3)), builder.add(np.arange(6, dtype=np.int16))]
    assert numbers == [0, 0]


def test_pieces_of_a_large_array_are_hashed_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PIECE", 16)
    monkeypatch.setattr(hashing, "_cores", lambda: 3)
    pieces = [hashlib.sha256(ARRAYS[1][start : start + 16]).digest() for start in range(0, 100, 16)]
    assert hashing.array_digest(ARRAYS[1]) == hashlib.sha256(b"".join(pieces)).digest()
    data = bytearray(built())
    for position in range(FIRST_ARRAY + ALIGNMENT, FIRST_ARRAY + ALIGNMENT + 100):
        data[position] ^= 1
        with pytest.raises(ContextError, match="the hash of array 1 does not match"):
            Container(bytes(data), "it").array(1)
        data[position] ^= 1
    assert contents(bytes(data))[1] == ARRAYS


def test_every_flipped_byte_is_noticed_or_changes_nothing() -> None:
    data = built()
    expected = contents(data)
    noticed = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        try:
            assert contents(bytes(damaged)) == expected, position
        except ContextError:
            noticed += 1
    index_offset = HEADER.unpack_from(data)[5]
    gaps = index_offset - HEADER.size - sum(map(len, ARRAYS))
    minor_version = 2
    assert noticed == len(data) - gaps - minor_version


def test_every_cut_and_growth_is_noticed() -> None:
    data = built()
    for length in range(len(data)):
        with pytest.raises(ContextError):
            Container(data[:length], "it")
    with pytest.raises(ContextError, match="bytes, expected "):
        Container(data + b"\0", "it")


def test_a_reserved_number_of_the_header_is_0() -> None:
    fields = [*HEADER.unpack_from(data := built())]
    fields[3] = 7
    with pytest.raises(ContextError, match=r"it is damaged \(a reserved number in its header is 7, expected 0\)"):
        Container(HEADER.pack(*fields) + data[HEADER.size :], "it")


@pytest.mark.parametrize(
    "arrays",
    [
        [[0, 5, "00" * 32]],
        [[FIRST_ARRAY + 1, 5, "00" * 32]],
        [[FIRST_ARRAY, 2**80, "00" * 32]],
        [[FIRST_ARRAY, -1, "00" * 32]],
        [[2**64, 0, "00" * 32]],
        [[FIRST_ARRAY, 64, "00" * 32], [FIRST_ARRAY, 64, "00" * 32]],
        [[FIRST_ARRAY, 1.0, "00" * 32]],
        [[FIRST_ARRAY, True, "00" * 32]],
        [[FIRST_ARRAY, 5]],
        [5],
        None,
        {"0": 1},
        [[FIRST_ARRAY, 5, "zz"]],
    ],
)
def test_impossible_places_are_refused(arrays: Any) -> None:
    with pytest.raises(ContextError, match="compile the model again"):
        Container(with_index({"arrays": arrays}, FIRST_ARRAY + 3 * ALIGNMENT), "it")


@pytest.mark.parametrize(
    "index",
    [b"[1]", b'{"arrays": [], "arrays": []}', b'{"arrays": [' + b"[" * 100000, b"\xff", b'{"arrays": NaN}', b""],
)
def test_what_is_no_index_is_refused(index: bytes) -> None:
    with pytest.raises(ContextError, match="is damaged"):
        Container(with_index(index, FIRST_ARRAY), "it")


def test_another_version_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "VERSION", (2, 0))
    newer = built()
    monkeypatch.undo()
    with pytest.raises(ContextError, match=r"format 2\.0, this plugin reads 1\.x; compile the model again"):
        Container(newer, "it")
    monkeypatch.setattr(format_module, "VERSION", (1, 7))
    later = built()
    monkeypatch.undo()
    assert contents(later)[1] == ARRAYS


def test_numbers_of_arrays_are_checked() -> None:
    read = Container(built(), "it")
    for number in (-1, 3, True, 1.0, "0", None, [0]):
        with pytest.raises(ContextError):
            read.array(number)


def contents_of(folder: Path, name: str) -> bytes:
    file = open_context(ModelFolder.at(folder), name)
    return bytes(file.read(0, len(file)))


def test_a_name_leads_nowhere_out_of_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    for each in (folder, outside, folder / "sub"):
        each.mkdir()
    for place in (folder / "a.bin", folder / "sub" / "b.bin", outside / "c.bin"):
        place.write_bytes(b"data")
    (folder / "inside.bin").symlink_to("sub/b.bin")
    (folder / "link.bin").symlink_to(outside / "c.bin")
    (folder / "door").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    (folder / "empty").touch()
    for name in ("a.bin", "sub/b.bin", "inside.bin"):
        assert contents_of(folder, name) == b"data"
    assert contents_of(folder, "empty") == b""
    refused = {
        "../outside/c.bin": "'..'",
        "sub/../a.bin": "'..'",
        str(outside / "c.bin"): "inside the model's folder",
        "": "inside the model's folder",
        "a\0b": "inside the model's folder",
        "..\\c.bin": "inside the model's folder",
        "link.bin": "leaves the model's folder",
        "door/c.bin": "leaves the model's folder",
        "pipe": "is not a regular file",
        "sub": "is not a regular file",
        "missing.bin": "put a readable file into this folder",
    }
    for name, reason in refused.items():
        with pytest.raises(ContextError, match=reason):
            contents_of(folder, name)


def test_a_link_may_lead_to_where_the_models_file_is(tmp_path: Path) -> None:
    """In the Hugging Face hub's cache, each file in ``snapshots`` is a link to a file in ``blobs``."""
    for name in ("blobs", "snapshot/onnx", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for place in ("blobs/0", "blobs/1", "elsewhere/2", "blobs/only.bin"):
        (tmp_path / place).write_bytes(place.encode())
    snapshot = tmp_path / "snapshot" / "onnx"
    for name, target in {"m.onnx": "blobs/0", "m.bin": "blobs/1", "away.bin": "elsewhere/2"}.items():
        (snapshot / name).symlink_to(f"../../{target}")
    folder = ModelFolder.of(snapshot / "m.onnx")
    os.link(tmp_path / "elsewhere" / "2", snapshot / "hard.bin")
    kept = open_file(tmp_path / "elsewhere" / "2")  # open_context("hard.bin") must return this handle
    for name, expected in {"m.bin": b"blobs/1", "hard.bin": b"elsewhere/2", "only.bin": b"blobs/only.bin"}.items():
        assert open_context(folder, name).read(0, len(expected)) == expected
    assert open_context(folder, "hard.bin") is kept
    for name in ("away.bin", "../../blobs/1"):
        with pytest.raises(ContextError, match=r"leaves the model's folder|without '\.\.'"):
            open_context(folder, name)
    with pytest.raises(ContextError, match="leaves the model's folder"):
        open_context(ModelFolder.at(snapshot), "m.bin")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"before")
    builder = Builder()
    builder.add(b"data")
    with pytest.raises(TypeError):
        builder.write(path, {"partitions": object()})
    with pytest.raises(ContextError, match="cannot be written"):
        builder.write(tmp_path / "no folder" / "m.bin", CONTENTS)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("m.bin", b"before")]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    builders = []
    for number in range(4):
        builders.append(Builder())
        builders[-1].add(bytes([number]) * 1000)
    threads = [threading.Thread(target=builder.write, args=(path, CONTENTS)) for builder in builders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(bytes(Container(open_context(ModelFolder.at(tmp_path), "m.bin"), "it").array(0)))) == 1
    assert list(tmp_path.iterdir()) == [path]
    for number, builder in enumerate(builders):  # a builder reads its own file, not the last writer's
        assert bytes(Container(builder.to_bytes(CONTENTS), "it").array(0)) == bytes([number]) * 1000
