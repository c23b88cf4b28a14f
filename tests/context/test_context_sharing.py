"""ep.share_ep_contexts: N models give N compiled models and one file, in which equal weights are once."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
from contexts import BINARY, RNG, assert_same, load, row_model, rows, settings
from ort_cuda_plugin.context.container import Container
from ort_cuda_plugin.context.files import map_context

BIG = RNG.standard_normal((8, 40000), dtype=np.float32)


def with_big_weight(operator: str) -> bytes:
    nodes = [helper.make_node("MatMul", ["y", "big"], ["p"]), helper.make_node(operator, ["p"], ["z"])]
    return row_model(*nodes, output="z", big=BIG)


def write(source: bytes, path: Path, last: bool = False, embed: bool = False) -> None:
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(path), "ep.share_ep_contexts": "1"}
    entries["ep.context_embed_mode"] = str(int(embed))
    if last:
        entries["ep.stop_share_ep_contexts"] = "1"
    ort.InferenceSession(source, settings(entries))


def in_use() -> int:
    gc.collect()
    return ort_cuda_plugin.counters()["weight_bytes"]


@pytest.mark.usefixtures("collected")
def test_two_models_share_a_file_and_device_memory(tmp_path: Path) -> None:
    sources = {name: with_big_weight(operator) for name, operator in (("prefill", "Neg"), ("decode", "Abs"))}
    write(sources["prefill"], tmp_path / "prefill_ctx.onnx")
    write(sources["decode"], tmp_path / "decode_ctx.onnx", last=True)
    binary = BINARY.format("prefill")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([binary, "decode_ctx.onnx", "prefill_ctx.onnx"])
    assert BIG.nbytes < (tmp_path / binary).stat().st_size < 1.5 * BIG.nbytes
    assert len(Container(map_context(tmp_path, binary), "it").index["partitions"]) == 2
    before = in_use()
    sessions = {}
    for name in sources:
        options = settings({"ep.share_ep_contexts": "1"}, {"context_allow_host_code": "1"})
        sessions[name] = ort.InferenceSession(str(tmp_path / f"{name}_ctx.onnx"), options)
    assert BIG.nbytes <= in_use() - before < 1.5 * BIG.nbytes
    for name, session in sessions.items():
        assert_same(session, sources[name], [{"x": rows(2, 3)}, {"x": rows(1, 1)}])
    del session, sessions["prefill"]  # sessions end in any order
    assert_same(sessions["decode"], sources["decode"], [{"x": rows(5, 2)}])
    sessions.clear()
    assert in_use() == before


def test_the_next_group_has_a_file_of_its_own(tmp_path: Path) -> None:
    for name in "ab":
        write(row_model(), tmp_path / f"{name}_ctx.onnx", last=True)
        assert (tmp_path / BINARY.format(name)).exists()


def test_a_group_writes_to_one_folder_and_not_into_models(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(row_model(), tmp_path / "a_ctx.onnx")
    with pytest.raises(Exception, match=r"are written to one folder"):
        write(with_big_weight("Neg"), tmp_path / "other" / "b_ctx.onnx")
    with pytest.raises(Exception, match=r"ep\.context_embed_mode must be 0"):
        write(row_model(), tmp_path / "c_ctx.onnx", embed=True)
    # The error ended the group: the next session begins another one.
    write(row_model(), tmp_path / "d_ctx.onnx")
    assert (tmp_path / BINARY.format("d")).exists()
    write(row_model(), tmp_path / "e_ctx.onnx", last=True)  # with another name for its partition
    for name in "ade":
        assert_same(load(tmp_path / f"{name}_ctx.onnx"), row_model(), [{"x": rows(2, 3)}])
