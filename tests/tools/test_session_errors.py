"""Explanations of ONNX Runtime's errors."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from isolated import add_model, python
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.ep.session.lost_nodes import _ON_CPU
from ort_cuda_plugin.session_errors import NoProviderError
from ort_versions import api_version


def compiled_model(source: str | None) -> bytes:
    """Return a model of Abs and an EPContext node, which holds a model that the provider ``source`` compiled."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    attributes = {} if source is None else {"source": source}
    nodes = [
        helper.make_node("Abs", ["x"], ["a"], name="first"),
        helper.make_node("EPContext", ["a"], ["y"], name="lost", domain="com.microsoft", main_context=1, **attributes),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def only_on_gpus() -> bytes:
    """Return a model of a node that the plugin declines, and for which the CPU provider has no kernel."""
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8])]
    node = helper.make_node("Rfft", ["x"], ["y"], name="lost", domain="com.microsoft")
    for name, value in {"normalized": 1, "onesided": 1, "signal_ndim": 1}.items():
        node.attribute.append(helper.make_attribute(name, value))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


@pytest.mark.parametrize(
    ("source", "who"),
    [
        ("CUDAExecutionProvider", "CUDAExecutionProvider"),
        ("Other", "Other"),
        (None, "a provider that it does not name"),
    ],
)
def test_a_compiled_model_that_nobody_loads_is_named_with_the_reason(source: str | None, who: str) -> None:
    with pytest.raises(NoProviderError, match=r"runs the node 'lost' \(com.microsoft.EPContext-1\): ") as error:
        ort_cuda_plugin.session(compiled_model(source), emulate=True)
    assert f"it contains a model that {who} compiled, and Cuda" in str(error.value)
    verdicts = ort_cuda_plugin.explain(compiled_model(source), emulate=True)
    assert [verdict.supported for verdict in verdicts] == [True, False]
    assert verdicts[1].reason.endswith("; no other provider runs it")


def test_a_node_of_our_own_without_a_context_is_an_error() -> None:
    with pytest.raises(
        Exception, match=r"INVALID_GRAPH .* node lost \(EPContext\): attribute ep_cache_context " r"is missing"
    ):
        ort_cuda_plugin.session(compiled_model(ort_cuda_plugin.get_ep_name()), emulate=True)


def test_a_node_of_com_microsoft_that_nobody_runs_is_named_with_the_reason() -> None:
    with pytest.raises(NoProviderError, match=r"'lost' \(com.microsoft.Rfft-1\): Rfft: .*normalized. is"):
        ort_cuda_plugin.session(only_on_gpus(), emulate=True)


def test_the_log_says_so_before_onnx_runtime_does() -> None:
    for model, said in [
        (compiled_model("Other"), "the session fails if none of them runs com.microsoft.EPContext-1 of (FLOAT32)"),
        (only_on_gpus(), "none of them runs com.microsoft.Rfft-1 of (FLOAT32)"),
    ]:
        done = python(
            "import sys, onnxruntime as ort, ort_cuda_plugin as plugin\n"
            "plugin.register(emulate=True)\n"
            "ort.InferenceSession(bytes.fromhex(sys.argv[1]), providers=[plugin.get_ep_name()], enable_fallback=0)",
            model.hex(),
            check=False,
            preloaded=True,
        )
        assert done.returncode != 0
        assert "node 'lost' is left to other providers (" in done.stderr
        assert done.stderr.index(said) < done.stderr.index("Traceback")


@pytest.mark.skipif(api_version(onnxruntime.__version__) < 31, reason="has fewer of them")
def test_onnx_runtime_has_the_cpu_kernels_that_are_expected_of_it() -> None:
    listed = onnxruntime.capi._pybind_state.get_all_opkernel_def()
    assert {known.op_name for known in listed if known.domain == "com.microsoft"} >= _ON_CPU


def test_explain_shows_a_node_that_runs_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compiled.onnx"
    path.write_bytes(compiled_model("Other"))
    assert main(["explain", str(path), "--device", "emulated"]) == ExitCode.OK
    assert "nowhere" in capsys.readouterr().out


def newer(version: int, producer: str) -> bytes:
    model = onnx.load(io.BytesIO(add_model()))
    model.ir_version = version
    model.producer_name = producer
    model.producer_version = "3.1" if producer else ""
    return bytes(model.SerializeToString())


def test_a_model_of_a_newer_format_says_what_wrote_it_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"by exporter 3.1 with IR version 99, which is newer than"):
        ort_cuda_plugin.session(newer(99, "exporter"), emulate=True)
    with pytest.raises(RuntimeError, match=r"by a program that it does not name .* model.ir_version = \d+; onnx.save"):
        ort_cuda_plugin.explain(newer(99, ""), emulate=True)
    path = tmp_path / "newer.onnx"
    path.write_bytes(newer(99, "exporter"))
    for command in ("run", "explain"):
        assert main([command, str(path), "--device", "emulated"]) == ExitCode.MODEL_FAILED
        assert "Install a newer onnxruntime, or lower the IR version" in capsys.readouterr().err


def test_run_suggests_the_sizes_that_it_had_to_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", None]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [5, 3], [1.0] * 15)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    path = tmp_path / "open.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    assert main(["run", str(path), "--device", "emulated"]) == ExitCode.MODEL_FAILED
    assert "Sizes that the model does not fix had defaults: try --dim n=N --dim x.1=N" in capsys.readouterr().err


def test_integers_that_were_made_up_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[2, 6] x, int64[2] shape) => (float[a, b] y)
        { y = Reshape(x, shape) }"""
    path = tmp_path / "shape.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    for command in ("run", "compare", "profile", "bench"):
        assert main([command, str(path), "--device", "emulated"]) == ExitCode.MODEL_FAILED
        assert "Integer inputs had random values, 0 or 1: try --input shape=FILE.npy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (False, "the provider has no kernel for MatMul(13) of node 'mm' with its types"),
        (
            True,
            "the provider cannot run the model, because CudaPluginExecutionProvider compiled it. Compare the original "
            "model instead",
        ),
    ],
)
def test_a_model_that_the_cpu_provider_cannot_run_is_run_and_not_compared(
    compiled: bool, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """<ir_version: 9, opset_import: ["" : 19]> g (float[2, 2] x) => (float[2, 2] y)
        { b = Cast <to: int = 16> (x)  [mm] c = MatMul(b, b)  y = Cast <to: int = 1> (c) }"""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    if compiled:
        monkeypatch.setenv("ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE", "1")
        path = tmp_path / "compiled.onnx"
        source = str(tmp_path / "model.onnx")
        assert main(["compile", source, "-o", str(path), "--arch", "emulated"]) == 0
    for command in (["run"], ["bench", "--runs", "1", "--warmup", "0", "--no-creation"]):
        capsys.readouterr()
        assert main([*command, str(path), "--device", "emulated"]) == ExitCode.OK
        assert f"cpu: {reason}" in capsys.readouterr().out
    assert main(["compare", str(path), "--device", "emulated"]) == ExitCode.UNAVAILABLE
    assert f"--against CPUExecutionProvider: {reason}" in capsys.readouterr().err
