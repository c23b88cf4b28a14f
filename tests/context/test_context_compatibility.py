"""The compatibility string in a compiled model, which ONNX Runtime passes to the plugin before it loads the model."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict
from pathlib import Path

import onnx
import pytest
from onnxruntime.capi import _pybind_state

import ort_cuda_plugin
from contexts import BINARY, assert_same, compile_model, container_of, load, rewrite, row_model, rows
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.context.compatibility import Fit, compatibility_info, fit
from ort_cuda_plugin.context.reader import Context, Session, StoredCluster, _stored_options
from ort_cuda_plugin.context.storage.container import Container
from ort_cuda_plugin.ep.contexts.context_session import ALLOW_VARIABLE
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.plan.format import version as plan_version
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions

KEY = f"ep_compatibility_info.{ort_cuda_plugin.get_ep_name()}"
KINDS = _pybind_state.OrtCompiledModelCompatibility


def info_of(model: onnx.ModelProto) -> str:
    return next(str(entry.value) for entry in model.metadata_props if entry.key == KEY)


def test_the_model_says_what_it_was_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = ort_cuda_plugin.register(emulate=True)[:1]
    ask = _pybind_state.get_model_compatibility_for_ep_devices
    own = info_of(compile_model(row_model(), tmp_path / "m_ctx.onnx"))
    assert ask(devices, own) == KINDS.EP_SUPPORTED_PREFER_RECOMPILATION  # host code is not allowed yet
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert ask(devices, own) == KINDS.EP_SUPPORTED_OPTIMAL
    other = info_of(compile_model(row_model(), tmp_path / "n_ctx.onnx", context_architectures="sm_90"))
    assert ask(devices, other) == KINDS.EP_SUPPORTED_PREFER_RECOMPILATION
    assert ask(devices, other.replace("format=1", "format=7")) == KINDS.EP_UNSUPPORTED
    for text in ("nonsense", "format=x", ";;=;"):
        assert ask(devices, text) == KINDS.EP_NOT_APPLICABLE


def test_each_part_of_the_line_counts() -> None:
    both = compatibility_info(["sm_90", "emulated"])
    assert fit(both, Target.cuda(9, 0), False) is Fit.OPTIMAL
    assert fit(both, Target.cuda(8, 0), False) is Fit.USABLE
    assert fit(both, Target.emulated(), True) is Fit.OPTIMAL
    assert fit(both, Target.emulated(), False) is Fit.USABLE
    assert fit(both, Target.emulated(check=True), True) is Fit.USABLE
    assert fit(both[:-1] + "z", Target.emulated(), True) is Fit.USABLE
    assert fit(both.replace("plans=", "plans=9"), Target.cuda(9, 0), False) is Fit.USABLE
    old = re.sub(r"toolkit=[^;]*", "toolkit=13.2", both)
    drivers = {"": Fit.OPTIMAL, "12.8": Fit.USABLE, "13.0": Fit.OPTIMAL, "14.0": Fit.OPTIMAL}
    assert {driver: fit(old, Target.cuda(9, 0), False, driver) for driver in drivers} == drivers


def choice(container: Container, major: int, minor: int, driver: str = "13.0") -> str:
    """Return the architecture whose stored plans a GPU would use, or the reason why it would use none."""
    device = DeviceProperties(False, frozenset())
    session = Session(Target.cuda(major, minor), device, LoweringOptions(), False, driver_version=driver)
    context = Context(container)
    ((name, row),) = context.partitions.items()
    ports = [[DType(port["dtype"]) for port in row[kind]] for kind in ("inputs", "outputs")]
    loaded = context.cluster(name, session, *ports)
    return loaded.cluster.arch if isinstance(loaded.cluster, StoredCluster) else loaded.why


def test_a_gpu_takes_the_best_of_what_is_stored(tmp_path: Path) -> None:
    compile_model(row_model(), tmp_path / "m_ctx.onnx", context_architectures="sm_80,sm_86,sm_90", enable_cudnn="0")
    whole = container_of(tmp_path / BINARY.format("m"))
    for row in whole.index["partitions"][0]["targets"]:
        row["toolkit"], row["libraries"] = "13.2", []
    assert [choice(whole, 8, 0), choice(whole, 8, 6), choice(whole, 8, 9)] == ["sm_80", "sm_86", "sm_86"]
    assert choice(whole, 9, 0) == "sm_90"
    assert "sm_90: compiled for another GPU architecture" in choice(whole, 10, 0)
    assert "sm_86: its kernels need a driver for CUDA 13.2, and the installed driver is for CUDA 12.4" in choice(
        whole, 8, 6, "12.4"
    )
    for row in whole.index["partitions"][0]["targets"]:
        row["libraries"] = ["cublaslt"]
    assert "its plans call cublaslt, which this computer lacks" in choice(whole, 9, 0)
    for row in whole.index["partitions"][0]["targets"]:
        row["libraries"], row["plan_version"] = [], 1
    assert "its plans have format version 1, this plugin reads version" in choice(whole, 9, 0)


@pytest.mark.parametrize("version", [plan_version - 1, plan_version + 1])
def test_plans_of_another_version_are_compiled_again(
    tmp_path: Path, version: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The plugin ignores stored plans of an older or newer version and compiles the stored graph."""
    source, path = row_model(), tmp_path / BINARY.format("m")
    compile_model(source, tmp_path / "m_ctx.onnx")
    (tmp_path / "right.bin").write_bytes(path.read_bytes())
    right = container_of(tmp_path / "right.bin")
    index = copy.deepcopy(right.index)
    (partition,) = index["partitions"]
    partition["options"]["of_a_later_minor_version"] = True
    (target,) = partition["targets"]
    target["plan_version"] = version
    blobs = {number: bytearray(right.array(number)) for number in target["plans"]}
    for blob in blobs.values():
        blob[4] = version
    rewrite(right, path, index, {number: bytes(blob) for number, blob in blobs.items()})
    assert_same(load(tmp_path / "m_ctx.onnx", severity=2), source, [{"x": rows(2, 3)}])
    assert (
        f"its plans have format version {version}, this plugin reads version {plan_version}" in capfd.readouterr().err
    )
    assert main(["inspect", str(path)]) == ExitCode.OK
    assert f"plans of version {version}, which this plugin cannot run" in capfd.readouterr().out


def test_a_stored_list_of_float32_nodes_has_names_only() -> None:
    assert _stored_options({"keep_float32": ["Pow", "h"]}) == LoweringOptions(keep_float32=("Pow", "h"))
    for malformed in (5, "Pow", [5], {"Pow": 1}, None):
        with pytest.raises(TypeError, match="keep_float32: expected a list of names"):
            _stored_options({"keep_float32": malformed})


def test_options_of_earlier_contexts_keep_their_meaning() -> None:
    former = {
        "use_tf32": False,
        "channels_last": True,
        "conv_epilogue": False,
        "conv_search": "DEFAULT",
        "large_workspace": True,
        "line_first": False,
        "measure_products": True,
        "measuring_ms": 5,
        "attention": True,
        "library_attention": False,
        "what_a_later_version_has": 1,
    }
    options = _stored_options(former)
    assert options == LoweringOptions(
        use_tf32=False,
        prefer_nhwc=True,
        fuse_conv_bias=False,
        cudnn_conv_algo_search="DEFAULT",
        cudnn_conv_use_max_workspace=True,
        cudnn_conv1d_pad_to_nc1d=False,
        tunable_op_enable=True,
        tunable_op_tuning_enable=True,
        tunable_op_max_tuning_duration_ms=5,
        sdpa_kernel=1,
    )
    assert not options.allows_cudnn_attention
    assert not _stored_options({**former, "attention": False}).fuses_attention
    assert _stored_options(asdict(options)) == options
    assert _stored_options({}) == LoweringOptions()
