"""Each option of a session has an observable effect."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

import ort_cuda_plugin
from contexts import BINARY, container_of, settings
from device_models import add_and_double
from isolated import add_model, python
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.ep.device import measuring
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.ep.options import arena
from ort_cuda_plugin.ep.options.option_table import OTHER_NAMES, ROWS
from ort_cuda_plugin.ep.options.options import parse
from ort_cuda_plugin.ep.provider import Provider, last_provider
from ort_cuda_plugin.kernels.library.library_attention import attention_form
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.plan.format import encode
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.progress import events
from streamed_weights import feeds, layers

Options = Mapping[str, str]
Observer = Callable[[Options, Path], object]
"""Runs a session with these options in an empty folder; returns its observable behavior in a comparable form."""

GPU = DeviceProperties.gpu((9, 0))
LIBRARIES = frozenset({"cublaslt", "cudnn"})
WITH_LIBRARIES = DeviceProperties(emulated=False, libraries=LIBRARIES)
"""A GPU with both libraries but without TF32, so that the libraries compute float32 GEMMs and convolutions."""

PRODUCT = "(float[2048, 2048] x, float[2048, 2048] w) => (float[2048, 2048] y) { p = MatMul(x, w) y = Relu(p) }"
CONV = """(float[8, 64, 58, 58] x, float[64, 64, 3, 3] w, float[64] b) => (float[8, 64, 56, 56] y)
    { c = Conv(x, w, b) s = Sigmoid(c) y = Mul(c, s) }"""
CONV_OF_LINES = "(float[8, 256, 1026] x, float[256, 256, 3] w) => (float[8, 256, 1024] y) { y = Conv(x, w) }"
SCATTER = """(float[8, 4] x, int64[6, 4] i, float[6, 4] u) => (float[8, 4] y)
    { y = ScatterElements<axis = 0, reduction = "add">(x, i, u) }"""
ATTENTION = """(float16[2, 4, 64, 64] q, float16[2, 4, 64, 64] k, float16[2, 4, 64, 64] v) => (float16[2, 4, 64, 64] y)
    { t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) p = Softmax<axis = -1>(s) y = MatMul(p, v) }"""
HOST_ONLY = """(float[n, 4] x, int64 most, bool c) => (float[n, 4] y)
    { y = Loop(most, c, x) <body = step (int64 i, bool on, float[k, 4] state) => (bool still, float[k, 4] next)
      { few = Constant<value_int = 3>()  less = Less(i, few)  still = And(on, less)  next = Add(state, x) }> }"""

COUNTED = """(float[n, 4] x, int64 most) => (float[n, 4] y) { y = Loop(most, , x) <body = step
    (int64 i, bool on, float[n, 4] state) => (bool on, float[n, 4] next) { next = Add(state, x) }> }"""


def loaded(text: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(
        parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> observed {text}')
    )


@contextmanager
def provider_of(options: Options, model: bytes = b"") -> Iterator[tuple[Provider, ort.InferenceSession]]:
    """Return a session on the emulated device, and its provider."""
    session = ort_cuda_plugin.session(model or add_model(), emulate=True, provider_options=options)
    provider = last_provider()
    assert provider is not None
    yield provider, session


def planned(text: str, device: DeviceProperties = WITH_LIBRARIES) -> Observer:
    """Return the plan, the kernels and the library problems that a session on that device would make of a model."""

    def observe(options: Options, folder: Path) -> object:
        with provider_of(options) as (provider, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenDevice, "properties", lambda self: device)
            variant = provider._cluster(read_model(loaded(text)), fed=()).prepare()
            assert variant.plan is not None
            return encode(variant.plan), [(spec.name, spec.source) for spec in variant.kernels], variant.problems

    return observe


def measured(options: Options, folder: Path) -> object:
    """Return the number of programs that are measured for a GEMM."""
    programs: list[Any] = []

    def measure(device: OpenDevice, given: Any) -> list[float]:
        programs.extend(given)
        return [1.0 + index for index in range(len(given))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "measure", measure)
        patch.setattr("ort_cuda_plugin.compiler.caches.timing_cache.cache_folder", lambda: folder)
        planned(PRODUCT, GPU)(options, folder)
    return len(programs)


def claimed(text: str) -> Observer:
    """Return the nodes that run on the plugin, by ONNX Runtime's domains, and their clusters."""

    def observe(options: Options, folder: Path) -> object:
        with provider_of(options, loaded(text).SerializeToString()) as (provider, _):
            nodes = [(verdict.domain, verdict.op_type, verdict.supported) for verdict in provider.verdicts]
            return nodes, [fused.name for fused in provider.fused_nodes]

    return observe


def looped(options: Options, folder: Path) -> object:
    """Return how many loops on the device a Run of a Loop has."""
    session = ort_cuda_plugin.session(loaded(COUNTED).SerializeToString(), emulate=True, provider_options=options)
    before = ort_cuda_plugin.counters()["device_loops"]
    session.run(None, {"x": np.ones((2, 4), np.float32), "most": np.array(3)})
    return ort_cuda_plugin.counters()["device_loops"] - before


def graphs(options: Options, folder: Path) -> object:
    """Run three sizes four times each; return the changes of the graph counters."""
    gc.collect()
    before = ort_cuda_plugin.counters()
    memory = ort_cuda_plugin.register(emulate=True)[-1].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    vendor = memory.device_vendor_id
    with provider_of(options, add_and_double()) as (_, session):
        for size in (2, 3, 4):
            binding = session.io_binding()
            for name in "abc":
                value = ort.OrtValue.ortvalue_from_numpy(np.ones(size, np.float32), "gpu", 0, vendor)
                bind = binding.bind_ortvalue_output if name == "c" else binding.bind_ortvalue_input
                bind(name, value)
            run_options = ort.RunOptions()
            run_options.add_run_config_entry("gpu_graph_id", str(size))
            for _ in range(4):
                session.run_with_iobinding(binding, run_options)
        after = ort_cuda_plugin.counters()
        return {name: after[name] - before[name] for name in before if name.startswith("graph")}


def streams(options: Options, folder: Path) -> object:
    """Return whether the session has no stream that the user gave, or the error of creating the session."""
    try:
        with provider_of(options) as (provider, _):
            return provider.stream == ffi.NULL
    except Exception as error:
        return str(error)


def logged(options: Options, folder: Path) -> object:
    """Return the levels of the provider's log messages, one of which is about an option without effect."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ort_cuda_plugin.abi.host.log", lambda level, message, *_: lines.append(level))
        with provider_of({**options, "fpa_intb_gemm": "1"}):
            return lines


def displayed(options: Options, folder: Path) -> object:
    """Return whether a display of progress exists while a session lives, and after it."""
    with provider_of(options) as (provider, _):
        shown = [events.is_watched()]
        provider.session.progress.close()
        return [*shown, events.is_watched()]


def created(options: Options, folder: Path) -> object:
    """Return the error of creating a session, or "created"."""
    try:
        with provider_of(options):
            return "created"
    except Exception as error:
        return str(error)


def files(options: Options, folder: Path) -> object:
    """Return the suffixes of the files that a session writes into the program folder."""
    inside = {key: str(folder) if key == "program_folder" else value for key, value in options.items()}
    with provider_of(inside):
        return sorted(path.suffix for path in folder.iterdir())


WEIGHTS = {"w": np.arange(32, dtype=np.float32).reshape(8, 4)}


def weighted(scale: float = 1) -> bytes:
    model = loaded(
        "(float[n, 8] x, float[p, q] b, float[8, 4] w) => (float[n, 4] y) { m = MatMul(x, w) y = Add(m, b) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS["w"] * np.float32(scale), "w"))
    del model.graph.input[2]
    return bytes(model.SerializeToString())


def compile_into(folder: Path, options: Options) -> Path:
    """Compile the model m.onnx to m_ctx.onnx and return the path of the result."""
    (folder / "m.onnx").write_bytes(weighted())
    path = folder / "m_ctx.onnx"
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(path), "ep.context_embed_mode": "0"}
    ort.InferenceSession(str(folder / "m.onnx"), settings(entries, options))
    return path


def compiled(options: Options, folder: Path) -> object:
    """Return the targets of a compiled model with the number of plans for each, and whether it stores weights."""
    compile_into(folder, options)
    index = container_of(folder / BINARY.format("m")).index
    targets = [(target["arch"], len(target["plans"])) for target in index["partitions"][0]["targets"]]
    return targets, [sorted(row) for row in index["constants"]]


def streamed(options: Options, folder: Path) -> object:
    """Return the bytes of weights that a Run copies to the device."""
    session = ort_cuda_plugin.session(layers(4).SerializeToString(), emulate=True, provider_options=options)
    before = ort_cuda_plugin.counters()["weight_bytes_streamed"]
    session.run(None, feeds(1))
    return ort_cuda_plugin.counters()["weight_bytes_streamed"] - before


def reloaded(options: Options, folder: Path) -> object:
    """Return whether a session of a compiled model compiles kernels, or its error, if the source model has other
    weights.
    """
    path = compile_into(folder, {"context_weightless": "1"})
    (folder / "m.onnx").write_bytes(weighted(scale=2))
    before = ort_cuda_plugin.counters()["plan_variants_built"]
    try:
        session = ort.InferenceSession(str(path), settings({}, {"context_refit": "1", **options}), enable_fallback=0)
        session.run(None, {"x": np.ones((1, 8), np.float32), "b": np.ones((1, 1), np.float32)})
    except Exception as error:
        return str(error)
    return ort_cuda_plugin.counters()["plan_variants_built"] - before


@dataclass(frozen=True)
class Effect:
    """How to observe an option's effect: ``observe`` has to return different results for the options ``given`` alone
    and for these with the tested option at ``value``.
    """

    value: str
    observe: Observer
    given: Options = field(default_factory=dict)


ALLOWED = {"context_allow_host_code": "1"}
EFFECTS = {
    "automatic_cuda_graphs": Effect("0", graphs),
    "autotune": Effect("1", measured),
    "claim_unprofitable_nodes": Effect("1", claimed(HOST_ONLY), {"device_loops": "0"}),
    "context_allow_host_code": Effect("1", reloaded),
    "context_architectures": Effect("sm_90,emulated", compiled),
    "context_refit": Effect("0", reloaded, ALLOWED),
    "context_shapes": Effect("x=3x8,b=1x4", compiled),
    "context_weightless": Effect("1", compiled),
    "cuda_graph_cache_size": Effect("1", graphs),
    "cudnn_conv1d_pad_to_nc1d": Effect("0", planned(CONV_OF_LINES)),
    "cudnn_conv_algo_search": Effect("EXHAUSTIVE", planned(CONV)),
    "cudnn_conv_use_max_workspace": Effect("1", planned(CONV)),
    "deterministic": Effect("1", planned(SCATTER, GPU)),
    "device_id": Effect("7", created),
    "device_loops": Effect("0", looped),
    "device_ids": Effect("0,7", created),
    "device_of": Effect("*:7", created),
    "enable_cuda_graph": Effect("1", graphs),
    "enable_cudnn": Effect("0", planned(CONV)),
    "fuse_conv_bias": Effect("0", planned(CONV)),
    "fusion": Effect("0", planned(PRODUCT, GPU)),
    "has_user_compute_stream": Effect("1", streams),
    "keep_float32": Effect("MatMul,Softmax", planned(ATTENTION, GPU)),
    "log_level": Effect("ERROR", logged),
    "min_num_runs_before_cuda_graph_capture": Effect("3", graphs),
    "prefer_nhwc": Effect("1", claimed(CONV)),
    "program_folder": Effect("a folder", files),
    "progress": Effect("1", displayed),
    "sdpa_kernel": Effect("16", planned(ATTENTION, GPU)),
    "single_nodes": Effect("1", claimed(PRODUCT)),
    "tunable_op_enable": Effect("1", planned(PRODUCT), {"tunable_op_tuning_enable": "1"}),
    "tunable_op_max_tuning_duration_ms": Effect(
        "5", planned(PRODUCT), {"tunable_op_enable": "1", "tunable_op_tuning_enable": "1"}
    ),
    "tunable_op_tuning_enable": Effect("1", planned(PRODUCT), {"tunable_op_enable": "1"}),
    "weight_budget": Effect("3M", streamed),
    "use_ep_level_unified_stream": Effect("1", streams),
    "use_tf32": Effect("0", planned(PRODUCT, GPU)),
    "user_compute_stream": Effect("0", streams),
}


def test_the_effect_of_each_option_is_known() -> None:
    assert EFFECTS.keys() == ROWS.keys(), "an option without an observation of what it decides"


@pytest.mark.parametrize("key", sorted(EFFECTS))
def test_an_option_decides_something(key: str, tmp_path: Path) -> None:
    effect = EFFECTS[key]
    seen = []
    for number, options in enumerate((effect.given, effect.given, {**effect.given, key: effect.value})):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.append(json_like(effect.observe(options, folder), folder))
    assert seen[0] == seen[1], "the observation differs by itself"
    assert seen[1] != seen[2], f"{key}={effect.value} decides nothing"


def json_like(seen: object, folder: Path) -> str:
    return repr(seen).replace(str(folder), "")


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_another_name_of_an_option_means_the_same(name: str) -> None:
    value = EFFECTS[OTHER_NAMES[name]].value
    assert parse({name: value}) == parse({OTHER_NAMES[name]: value}) != parse({})


POOL = {"arena.use_cuda_mempool": "1"}
ARENAS: dict[str, tuple[str, Options]] = {
    "arena.extend_strategy": ("1", {}),
    "arena.initial_chunk_size_bytes": ("65536", {}),
    "arena.max_dead_bytes_per_chunk": ("16384", {}),
    "arena.initial_growth_chunk_size_bytes": ("4M", {}),
    "arena.max_power_of_two_extend_bytes": ("1M", {}),
    "arena.max_mem": ("64M", {}),
    "arena.use_cuda_mempool": ("1", {}),
    "arena.cuda_mempool_release_threshold": ("1M", POOL),
    "arena.cuda_mempool_bytes_to_keep_on_shrink": ("1M", POOL | {"arena.cuda_mempool_release_threshold": "16M"}),
    "gpu_mem_limit": ("64M", {}),
    "arena_extend_strategy": ("kSameAsRequested", {}),
}
"""A non-default value of each arena option, with the options that it needs."""

RUN_AND_TRIM = """
import gc, json, sys, numpy as np, ort_cuda_plugin as plugin
model, cases = bytes.fromhex(sys.argv[1]), json.loads(sys.argv[2])
x = np.ones((240, 1024), np.float32)  # 960 KiB of a region of 1 MiB
for options in cases:
    plugin.register(emulate=True)
    session, seen = plugin.session(model, emulate=True, provider_options=options), []
    for work in (lambda: session.run(None, {"a": x, "b": x}), plugin.trim) * 2:
        work()
        seen.append(plugin.memory_stats()["device"])
    print(json.dumps(seen))
    del session, work
    gc.collect()
    plugin.unregister()
"""


def test_each_option_of_an_arena_decides_something() -> None:
    assert ARENAS.keys() == {row.key for row in arena.ROWS}, "an option without an observation of what it decides"
    cases = [case for key, (value, given) in ARENAS.items() for case in (given, {**given, key: value})]
    done = python(
        RUN_AND_TRIM,
        add_model(dims=["n", "m"]).hex(),
        json.dumps(cases),
        env={"CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) == len(cases)
    idle = [key for key, without, given in zip(ARENAS, seen[::2], seen[1::2], strict=True) if without == given]
    assert idle == []


def attention_model() -> bytes:
    shape = [2, 8, 16]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("q", "k", "v", "y")]
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "attention", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(("kernels", "apart"), [("0", False), ("1", False), ("17", False), ("16", True)])
def test_the_kernels_of_attention_are_kept_apart_on_request(kernels: str, apart: bool, tmp_path: Path) -> None:
    options = {"sdpa_kernel": kernels, "program_folder": str(tmp_path)}
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options=options)
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=(2, 8, 16)).astype(np.float32) for name in "qkv"}
    cpu = ort.InferenceSession(attention_model(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feed)[0], cpu.run(None, feed)[0], rtol=1e-5, atol=1e-6)
    (program,) = [file.read_text() for file in tmp_path.glob("*.txt")]
    emitted = program.rpartition("after emission")[2].partition("passes that")[0]
    assert ("attention_" not in emitted) == ("softmax" in emitted) == apart, emitted


@pytest.mark.parametrize(("kernels", "may"), [("0", True), ("8", True), ("24", True), ("1", False), ("16", False)])
def test_attention_is_cudnns_only_where_its_bit_is_set(kernels: str, may: bool) -> None:
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options={"sdpa_kernel": kernels})
    provider = last_provider()
    assert provider is not None
    assert provider.options.lowering.allows_cudnn_attention == may
    step: Any = SimpleNamespace(operands=(None, None, None), score_shape=(1, 64, 64))
    ctx: Any = SimpleNamespace(
        options=provider.options.lowering, device=DeviceProperties(libraries=frozenset({"cudnn"}))
    )
    if not may:
        assert attention_form(ctx, step) is None
    del session


@pytest.mark.parametrize(("value", "offered"), [("1", {"cublaslt", "cudnn"}), ("0", {"cublaslt"})])
def test_cudnn_can_be_left_out(value: str, offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = DeviceProperties(libraries=frozenset({"cublaslt", "cudnn"}))
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options={"enable_cudnn": value})
    monkeypatch.setattr(OpenDevice, "properties", lambda self: libraries)
    provider = last_provider()
    assert provider is not None
    assert provider.session.properties().libraries == offered
    del session
