"""ep.share_ep_contexts: N models give N compiled models and one context file, which stores equal weights once."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
import shared_decoder
from contexts import (
    BINARY,
    RNG,
    assert_same,
    container_of,
    context_nodes,
    load,
    nothing_compiled,
    row_model,
    rows,
    settings,
)
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode

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


def shared_session(path: Path) -> ort.InferenceSession:
    options = settings({"ep.share_ep_contexts": "1"}, {"context_allow_host_code": "1"})
    return ort.InferenceSession(str(path), options)


@pytest.mark.usefixtures("collected")
def test_prefill_and_decoding_of_one_decoder(tmp_path: Path) -> None:
    """`compile --share-with` stores the weights of both models once, and both sessions share them on the device."""
    values = shared_decoder.weights()
    shared_decoder.save_pair(tmp_path, values)
    source, out = ({name: tmp_path / f"{name}{end}.onnx" for name in ("prefill", "decode")} for end in ("", "_ctx"))
    command = ["compile", str(source["prefill"]), "--share-with", str(source["decode"]), "-o", str(out["prefill"])]
    assert main(command) == ExitCode.OK
    binary = BINARY.format("prefill")
    models = [path.name for path in (*source.values(), *out.values())]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*models, "weights.data", binary])
    assert [len(context_nodes(onnx.load(path))) for path in out.values()] == [1, 1]
    stored = (tmp_path / binary).read_bytes()
    large = [array for array in values.values() if array.nbytes > 4096]
    assert [stored.count(array.tobytes()) for array in large] == [1] * len(large)
    total = sum(array.nbytes for array in values.values())
    assert len(stored) < total + 500_000
    before = in_use()
    with nothing_compiled():
        sessions = {name: shared_session(path) for name, path in out.items()}
        assert sum(array.nbytes for array in large) <= in_use() - before <= total
        cpu = [ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in source.values()]
        expected = shared_decoder.generate(cpu[0], cpu[1], [1, 20, 300, 40, 5], 4)
        actual = shared_decoder.generate(sessions["prefill"], sessions["decode"], [1, 20, 300, 40, 5], 4)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    del sessions["prefill"]
    assert in_use() - before <= total
    sessions.clear()
    assert in_use() == before
    assert main(command) == ExitCode.USAGE  # compile does not overwrite its outputs


def test_what_cannot_be_shared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.onnx").write_bytes(row_model())
    first, second = (str(tmp_path / name / "m.onnx") for name in ("a", "b"))
    for arguments, said in (
        ([second], "the same name: m_ctx.onnx"),
        ([str(tmp_path / "none.onnx")], "none.onnx"),
        ([], "expected"),
    ):
        with contextlib.suppress(SystemExit):
            assert (
                main(["compile", first, "-o", str(tmp_path / "m_ctx.onnx"), "--share-with", *arguments]) != ExitCode.OK
            )
        assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*ctx*"))


@pytest.mark.usefixtures("collected")
def test_two_models_share_a_file_and_device_memory(tmp_path: Path) -> None:
    sources = {name: with_big_weight(operator) for name, operator in (("prefill", "Neg"), ("decode", "Abs"))}
    write(sources["prefill"], tmp_path / "prefill_ctx.onnx")
    write(sources["decode"], tmp_path / "decode_ctx.onnx", last=True)
    binary = BINARY.format("prefill")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([binary, "decode_ctx.onnx", "prefill_ctx.onnx"])
    assert BIG.nbytes < (tmp_path / binary).stat().st_size < 1.5 * BIG.nbytes
    assert len(container_of(tmp_path / binary).index["partitions"]) == 2
    before = in_use()
    sessions = {}
    for name in sources:
        sessions[name] = shared_session(tmp_path / f"{name}_ctx.onnx")
    assert BIG.nbytes <= in_use() - before < 1.5 * BIG.nbytes
    for name, session in sessions.items():
        assert_same(session, sources[name], [{"x": rows(2, 3)}, {"x": rows(1, 1)}])
    del session, sessions["prefill"]  # the other session must keep the shared weights
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
    with pytest.raises(Exception, match=r"must be written to one folder"):
        write(with_big_weight("Neg"), tmp_path / "other" / "b_ctx.onnx")
    with pytest.raises(Exception, match=r"ep\.context_embed_mode=1: .* write one context file"):
        write(row_model(), tmp_path / "c_ctx.onnx", embed=True)
    # The error ended the group: the next session begins another one.
    write(row_model(), tmp_path / "d_ctx.onnx")
    assert (tmp_path / BINARY.format("d")).exists()
    write(row_model(), tmp_path / "e_ctx.onnx", last=True)  # its partition gets a name unlike that of d
    for name in "ade":
        assert_same(load(tmp_path / f"{name}_ctx.onnx"), row_model(), [{"x": rows(2, 3)}])


def pair(folder: Path) -> dict[str, bytes]:
    """Write first_ctx.onnx and second_ctx.onnx with one context file; return their source models."""
    sources = {name: with_big_weight(operator) for name, operator in (("first", "Neg"), ("second", "Abs"))}
    for name, source in sources.items():
        write(source, folder / f"{name}_ctx.onnx", last=name == "second")
    return sources


def test_a_session_takes_from_the_workspace_what_another_has_read(tmp_path: Path) -> None:
    """The second session finds the container in the workspace, although the file and the first session are gone."""
    sources = pair(tmp_path)
    binary = tmp_path / BINARY.format("first")
    for is_alive in (True, False):
        sessions = [shared_session(tmp_path / "first_ctx.onnx")]
        binary.rename(tmp_path / "gone")
        if not is_alive:
            sessions.clear()
            gc.collect()
        second = shared_session(tmp_path / "second_ctx.onnx")
        with nothing_compiled():
            assert_same(second, sources["second"], [{"x": rows(2, 3)}])
        del second
        sessions.clear()
        gc.collect()
        (tmp_path / "gone").rename(binary)


def test_the_workspace_ends_with_its_last_session(tmp_path: Path) -> None:
    pair(tmp_path)
    binary = tmp_path / BINARY.format("first")
    first = shared_session(tmp_path / "first_ctx.onnx")
    last = {"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": "1"}
    options = settings(last, {"context_allow_host_code": "1"})
    second = ort.InferenceSession(str(tmp_path / "second_ctx.onnx"), options)
    binary.unlink()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*cannot be read in .*put a readable file into this folder"):
        shared_session(tmp_path / "second_ctx.onnx")
    for session in (first, second):
        session.run(None, {"x": rows(1, 1)})


def test_only_sessions_that_share_use_the_workspace(tmp_path: Path) -> None:
    """Other sessions read the file, and the workspace is not used for a file that has been replaced."""
    sources = pair(tmp_path)
    binary = tmp_path / BINARY.format("first")
    first = shared_session(tmp_path / "first_ctx.onnx")
    other = tmp_path / "other"
    other.mkdir()
    write(with_big_weight("Sqrt"), other / "first_ctx.onnx", last=True)
    contents = binary.read_bytes()
    binary.unlink()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*cannot be read"):
        load(tmp_path / "second_ctx.onnx")
    binary.write_bytes((other / binary.name).read_bytes())
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*has no partition"):
        shared_session(tmp_path / "second_ctx.onnx")
    binary.write_bytes(contents)
    assert_same(shared_session(tmp_path / "second_ctx.onnx"), sources["second"], [{"x": rows(2, 3)}])
    assert_same(first, sources["first"], [{"x": rows(2, 3)}])
