"""LoRA adapters: results as on the CPU provider, one plan for all adapters, and parameters that stay on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import ort_cuda_plugin
from genai_decoder import CpuDecoder, genai_decoder
from ort_cuda_plugin import cli
from ort_cuda_plugin.generate import Decoder
from ort_cuda_plugin.lora import DeviceAdapter, restore_default_inputs

Array = np.ndarray[Any, Any]
WIDTH, COLUMNS = 32, 24
PARAMETERS = {"qa": (WIDTH, None), "qb": (None, COLUMNS), "va": (WIDTH, None), "vb": (None, COLUMNS)}
"""Shapes of an adapter's parameters; None is the rank."""


def model() -> onnx.ModelProto:
    """Return two projections with adapters, whose parameters are inputs with defaults of rank 0."""
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 22]>
        g (float[batch, tokens, {WIDTH}] x, float[{WIDTH}, r] qa, float[r, {COLUMNS}] qb, float[{WIDTH}, r] va,
           float[r, {COLUMNS}] vb) => (float[batch, tokens, {COLUMNS}] q, float[batch, tokens, {COLUMNS}] v) {{
          q0 = MatMul(x, wq) q1 = MatMul(x, qa) q2 = MatMul(q1, qb) q3 = Mul(q2, s) q = Add(q0, q3)
          v0 = MatMul(x, wv) v1 = MatMul(x, va) v2 = MatMul(v1, vb) v = Add(v0, v2) }}"""
    )
    rng = np.random.default_rng(0)
    constants = {name: rng.standard_normal((WIDTH, COLUMNS)).astype(np.float32) for name in ("wq", "wv")}
    constants["s"] = np.array(0.5, np.float32)
    constants |= {name: np.zeros([size or 0 for size in shape], np.float32) for name, shape in PARAMETERS.items()}
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return made


def parameters(rank: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {name: [rank if size is None else size for size in shape] for name, shape in PARAMETERS.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def export(path: Path, values: dict[str, Array]) -> Path:
    written = ort.AdapterFormat()
    written.set_adapter_version(1)
    written.set_model_version(1)
    written.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in values.items()})
    written.export_adapter(str(path))
    return path


def host_adapter(path: Path) -> Any:
    adapter = ort.LoraAdapter()
    adapter.Load(str(path))
    return adapter


def run(session: Any, count: int, adapter: Any) -> Any:
    """Run a session with ``count`` tokens and an active adapter, which RunOptions do not keep alive."""
    options = ort.RunOptions()
    options.add_active_adapter(adapter)
    return session.run(None, {"x": tokens(count)}, options)


@pytest.fixture(scope="module")
def sessions() -> tuple[Any, Any]:
    """Return sessions on the plugin and on the CPU provider."""
    text = model().SerializeToString()
    return ort_cuda_plugin.session(text, emulate=True), ort.InferenceSession(text, providers=["CPUExecutionProvider"])


def tokens(count: int) -> Array:
    return np.random.default_rng(9).standard_normal((2, count, WIDTH)).astype(np.float32)


def check(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def changes(before: dict[str, int], *names: str) -> list[int]:
    after = ort_cuda_plugin.counters()
    return [after[name] - before[name] for name in names]


def test_all_nodes_are_claimed_and_an_adapter_adds_one_launch_for_each_projection(sessions: tuple[Any, Any]) -> None:
    session, _ = sessions
    assert all(verdict.supported for verdict in ort_cuda_plugin.explain(model().SerializeToString(), emulate=True))
    launched = []
    for rank in (0, 4):
        before = ort_cuda_plugin.counters()
        session.run(None, {"x": tokens(3), **parameters(rank, 1)})
        launched += changes(before, "launches")
    assert launched == [2, 4]


def test_ranks_and_adapters_change_between_runs_without_a_new_plan(sessions: tuple[Any, Any], tmp_path: Path) -> None:
    session, cpu = sessions
    adapters = [host_adapter(export(tmp_path / f"{rank}", parameters(rank, rank))) for rank in (4, 8, 16, 0)]
    session.run(None, {"x": tokens(5)})
    before = ort_cuda_plugin.counters()
    for _ in range(4):  # later rounds replay automatic CUDA graphs
        for adapter in adapters:
            for count in (5, 1):
                check(run(session, count, adapter), run(cpu, count, adapter))
        check(session.run(None, {"x": tokens(5)}), cpu.run(None, {"x": tokens(5)}))
    assert changes(before, "python_calls", "plan_variants_built") == [0, 0]
    assert changes(before, "graph_replays") > [0]


def test_a_device_adapter_is_copied_once_and_no_run_copies_it(sessions: tuple[Any, Any], tmp_path: Path) -> None:
    session, cpu = sessions
    values = parameters(8, 5)
    path = export(tmp_path / "adapter", values)
    before = ort_cuda_plugin.counters()
    adapter = DeviceAdapter(path, emulate=True)
    assert changes(before, "copies_h2d") == [len(values)]
    assert adapter.nbytes == sum(value.nbytes for value in values.values())
    session.run(None, {"x": tokens(3), **adapter.parameters})
    before = ort_cuda_plugin.counters()
    results = session.run(None, {"x": tokens(3), **adapter.parameters})
    assert changes(before, "python_calls", "copies_h2d", "copies_d2d") == [0, 1, 0]
    on_host = host_adapter(path)
    check(results, run(cpu, 3, on_host))
    before = ort_cuda_plugin.counters()
    check(run(session, 3, on_host), results)
    assert changes(before, "copies_h2d") == [1 + len(values)]


def test_adapters_of_a_binding_change_between_runs_and_in_place(sessions: tuple[Any, Any], tmp_path: Path) -> None:
    session, cpu = sessions
    paths = [export(tmp_path / f"{seed}", parameters(4, seed)) for seed in range(3)]
    adapters = [DeviceAdapter(path, emulate=True) for path in paths[:2]]
    binding = session.io_binding()
    x = ort.OrtValue.ortvalue_from_numpy(tokens(3))
    binding.bind_ortvalue_input("x", x)
    for name in ("q", "v"):
        binding.bind_output(name)

    def check_binding(path: Path) -> None:
        session.run_with_iobinding(binding)
        check(binding.copy_outputs_to_cpu(), run(cpu, 3, host_adapter(path)))

    for adapter, path in zip(adapters, paths[:2], strict=True):
        adapter.bind(binding)
        check_binding(path)
    adapters[1].update(paths[2])
    check_binding(paths[2])


def test_a_device_adapter_may_have_rank_zero_and_types_that_numpy_lacks(tmp_path: Path) -> None:
    empty = DeviceAdapter(export(tmp_path / "empty", parameters(0, 0)), emulate=True)
    assert [list(value.shape()) for value in empty.parameters.values()].count([WIDTH, 0]) == 2
    written = ort.AdapterFormat()
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    written.set_parameters({"b": ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)})
    written.export_adapter(str(tmp_path / "bfloat16"))
    value = DeviceAdapter(tmp_path / "bfloat16", emulate=True).parameters["b"]
    copy = np.zeros_like(bits)
    ort.copy_tensors([value], [ort.OrtValue.ortvalue_from_numpy_with_onnx_type(copy, onnx.TensorProto.BFLOAT16)])
    np.testing.assert_array_equal(copy, bits)


def test_files_that_are_no_adapters_and_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        DeviceAdapter(tmp_path / "missing", emulate=True)
    good = export(tmp_path / "good", parameters(4, 1))
    for number, contents in enumerate((b"", b"x" * 100, good.read_bytes()[:200])):
        damaged = tmp_path / f"damaged{number}"
        damaged.write_bytes(contents)
        with pytest.raises(ValueError, match="not an adapter file"):
            DeviceAdapter(damaged, emulate=True)
    adapter = DeviceAdapter(good, emulate=True)
    with pytest.raises(ValueError, match=r"parameter qa: got tensor\(float\) \[32, 5\], expected tensor\(float\)"):
        adapter.update(export(tmp_path / "other", parameters(5, 1)))


def test_a_compiled_model_takes_adapters_of_each_rank(sessions: tuple[Any, Any], tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "layer.onnx")
    compiled = tmp_path / "layer_ctx.onnx"
    assert cli.main(["compile", str(tmp_path / "layer.onnx"), "-o", str(compiled), "--arch", "emulated"]) == 0
    session = ort_cuda_plugin.session(compiled, emulate=True, provider_options={"context_allow_host_code": "1"})
    assert {x.name for x in session.get_overridable_initializers()} == set(PARAMETERS)
    before = ort_cuda_plugin.counters()
    for rank in (0, 4, 8):
        feeds = {"x": tokens(3), **parameters(rank, rank)}
        check(session.run(None, feeds), sessions[1].run(None, feeds))
    assert changes(before, "python_calls", "plan_variants_built") == [0, 0]
    assert restore_default_inputs(compiled, tmp_path / "layer.onnx") == []


def decoder_model(values: dict[str, Array] | None = None) -> onnx.ModelProto:
    """Return a decoder with an adapter of its first 4-bit product; with ``values``, these are constants instead."""
    made = genai_decoder(1)
    graph = made.graph
    number, base = next((i, node) for i, node in enumerate(graph.node) if node.op_type == "MatMulNBits")
    x, result = base.input[0], base.output[0]
    base.output[0] = "base"
    nodes = [("MatMul", [x, "a"], "down"), ("MatMul", ["down", "b"], "up"), ("Add", ["base", "up"], result)]
    for offset, (op_type, inputs, output) in enumerate(nodes, 1):
        graph.node.insert(number + offset, helper.make_node(op_type, inputs, [output]))
    sizes = {attribute.name: attribute.i for attribute in base.attribute}
    for name, shape in (("a", (sizes["K"], "r")), ("b", ("r", sizes["N"]))):
        default = np.zeros([size if isinstance(size, int) else 0 for size in shape], np.float32)
        graph.initializer.append(numpy_helper.from_array(default if values is None else values[name], name))
        if values is None:
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return made


def test_a_decoder_uses_adapters_in_turn(tmp_path: Path) -> None:
    """The adapter changes the tokens; a token of the steady state calls no Python and copies nothing to the device."""
    sizes = {"a": (64, 4), "b": (4, 128)}
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
    paths = [tmp_path / f"{name}.onnx" for name in ("plain", "constant")]
    onnx.save(decoder_model(), paths[0])
    onnx.save(decoder_model(values), paths[1])
    adapter = DeviceAdapter(export(tmp_path / "adapter", values), emulate=True)
    decoder = Decoder(paths[0], max_length=24, emulate=True)
    prompt = np.array([[1, 5, 9]])
    expected = [CpuDecoder(path).greedy(prompt, 6)[0].tolist() for path in paths]
    assert expected[0] != expected[1]
    for used, tokens in ((None, expected[0]), (adapter, expected[1]), (None, expected[0]), (adapter, expected[1])):
        decoder.rewind(0)
        decoder.use_adapter(None if used is None else used.parameters)
        found = [token.tolist()[0] for token in decoder.generate(prompt, new_tokens=6)]
        assert found == tokens
    # An adapter that changes between two tokens applies to the whole sequence so far.
    decoder.rewind(0)
    decoder.use_adapter(None)
    tokens = []
    for token in decoder.generate(prompt, new_tokens=30):  # 22 tokens fill the cache
        tokens.append(token.tolist()[0])
        if len(tokens) == 3:
            decoder.use_adapter(adapter.parameters)
    after = np.array([[*prompt[0].tolist(), *tokens[:3]]])
    assert tokens[:3] == expected[0][:3]
    assert tokens[3:] == CpuDecoder(paths[1]).greedy(after, 19)[0].tolist()
    decoder.rewind(0)
    list(decoder.generate(prompt, new_tokens=4))
    list(decoder.generate([[7]], new_tokens=4))
    before = ort_cuda_plugin.counters()
    list(decoder.generate([[8]], new_tokens=4))
    assert changes(before, "python_calls", "plan_variants_built") == [0, 0]
    with pytest.raises(ValueError, match="parameter c: the model has no input of this name"):
        decoder.use_adapter({"c": adapter.parameters["a"]})
