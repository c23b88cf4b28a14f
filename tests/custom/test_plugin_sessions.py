"""Plugins in stock sessions: the examples of the documentation, and an `enqueue` that each Run calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from custom_operators import kept_registry
from ort_cuda_plugin.custom.kernels.array_kernels import array_kernel
from ort_cuda_plugin.custom.kernels.kernels import cuda_kernel
from ort_cuda_plugin.custom.plugin import DType, Port, PortKind, register_creator, unregister_creator
from plugins import DOUBLE, ProbeCreator
from test_documentation import run

DOUBLE_SOURCE = 'extern "C" __global__ void twice(const float *x, float *y, long long n) { y[0] = x[0] * 2; }'


def double_in_numpy(x: np.ndarray, y: np.ndarray, n: int) -> None:
    y[...] = x * 2


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the documentation's plugins for the duration of a test."""
    ort_cuda_plugin.register(emulate=True)
    with kept_registry():
        for title in ("The full form", "A counter that stays on the device"):
            run(title, tmp_path_factory.mktemp("example"))
        yield


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any] | None = None) -> bytes:
    given, results = ([helper.make_tensor_value_info(*row) for row in rows] for rows in (inputs, outputs))
    graph = helper.make_graph(nodes, "g", given, results, constants or [])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.domain", 1), helper.make_opsetid("test.plugins", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def top_model(**attributes: Any) -> bytes:
    nodes = [
        helper.make_node("Largest", ["x"], ["values", "indices", "count"], "top", domain="my.domain", **attributes),
        helper.make_node("Neg", ["values"], ["negated"]),
    ]
    outputs = [("negated", TensorProto.FLOAT, ["m"]), ("indices", TensorProto.INT64, ["m"])]
    return model(nodes, [("x", TensorProto.FLOAT, ["n"])], [*outputs, ("count", TensorProto.INT64, [])])


def counter_model() -> bytes:
    start = onnx.numpy_helper.from_array(np.array([100], np.int64), "start")
    node = helper.make_node("Counter", ["x", "start"], ["y", "counted"], domain="my.domain")
    outputs = [("y", TensorProto.FLOAT, ["n"]), ("counted", TensorProto.INT64, [1])]
    return model([node], [("x", TensorProto.FLOAT, ["n"])], outputs, [start])


def probe_model(each_run: int = 1) -> bytes:
    node = helper.make_node("Probe", ["a"], ["b"], "mine", domain="test.plugins", each_run=each_run)
    nodes = [helper.make_node("Exp", ["x"], ["a"]), node, helper.make_node("Neg", ["b"], ["y"])]
    return model(nodes, [("x", TensorProto.FLOAT, ["n"])], [("y", TensorProto.FLOAT, ["n"])])


def check_top(session: Any, n: int, k: int = 4, threshold: float = 0.5) -> None:
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    negated, indices, count = session.run(None, {"x": x})
    wanted = np.argsort(-x, kind="stable")[:k]
    wanted = wanted[x[wanted] > threshold]
    np.testing.assert_array_equal(indices, wanted)
    np.testing.assert_array_equal(negated, -x[wanted])
    assert count == len(wanted)


def on_device(array: np.ndarray) -> Any:
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, _vendor())


def _vendor() -> int:
    import onnxruntime as ort

    (device,) = ort_cuda_plugin.register(emulate=True)[:1]
    return int(device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id)


def test_an_output_has_as_many_elements_as_the_kernel_found(examples: None) -> None:
    session = ort_cuda_plugin.session(top_model(k=4, threshold=0.5), emulate=True)
    check_top(session, 100)
    before = ort_cuda_plugin.counters()
    for n in (3, 50, 0, 1):
        check_top(session, n)
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["host_value_reads"] - before["host_value_reads"] == 4, "one for each Run"


def test_a_field_that_the_author_refuses_is_an_error_with_plugin_field_and_value(examples: None) -> None:
    with pytest.raises(
        Exception, match="plugin Largest-1: create_plugin with k = 0: ValueError: field k = 0 is not at"
    ):
        ort_cuda_plugin.session(top_model(k=0), emulate=True)


def test_a_counter_counts_over_runs_in_the_memory_of_its_input(examples: None) -> None:
    session = ort_cuda_plugin.session(counter_model(), emulate=True)
    counted = [int(session.run(["counted"], {"x": np.ones(n, np.float32)})[0][0]) for n in (10, 3, 5, 5, 5, 5)]
    assert counted == [110, 113, 118, 123, 128, 133], "also in a CUDA graph"
    again = ort_cuda_plugin.session(counter_model(), emulate=True)
    assert int(again.run(["counted"], {"x": np.ones(1, np.float32)})[0][0]) == 101, "a session has its own"


def test_an_alias_that_is_bound_to_one_memory_is_changed_there(examples: None) -> None:
    node = helper.make_node("Counter", ["x", "start"], ["y", "counted"], domain="my.domain")
    start, counted = (("start", TensorProto.INT64, [1]), ("counted", TensorProto.INT64, [1]))
    x, y = (("x", TensorProto.FLOAT, [3]), ("y", TensorProto.FLOAT, [3]))
    built = model([node], [x, start], [y, counted])
    session = ort_cuda_plugin.session(built, emulate=True, provider_options={"automatic_cuda_graphs": 0})
    binding, total = session.io_binding(), on_device(np.array([100], np.int64))
    binding.bind_ortvalue_input("x", on_device(np.ones(3, np.float32)))
    binding.bind_ortvalue_input("start", total)
    binding.bind_ortvalue_output("y", on_device(np.ones(3, np.float32)))
    binding.bind_ortvalue_output("counted", total)
    for _ in range(4):
        before = ort_cuda_plugin.counters()["copies_d2d"]
        session.run_with_iobinding(binding)
    assert ort_cuda_plugin.counters()["copies_d2d"] - before == 1, "x to y, and no counter"
    assert total.numpy().tolist() == [112]


@pytest.fixture
def probe() -> Iterator[dict[str, Any]]:
    """Register a plugin for the duration of a test; yield its methods."""
    creator = ProbeCreator()
    creator.inputs, creator.outputs = creator.inputs[:1], creator.outputs[:1]
    register_creator(creator)
    try:
        yield {"creator": creator, "methods": creator.methods}
    finally:
        unregister_creator(creator)


def run_probe(session: Any, n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], -2 * np.exp(x), rtol=1e-6)


def test_enqueue_of_each_run_gets_sizes_memory_and_the_stream(probe: dict[str, Any]) -> None:
    seen = []

    def enqueue(input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
        seen.append((input_desc[0].dims, workspace.nbytes))
        assert stream.is_emulated
        assert int(stream) == inputs[0].__cuda_array_interface__["stream"]
        stream.memset(workspace, 1)
        half = stream.read(inputs[0])
        stream.write(outputs[0], half)
        stream.launch(DOUBLE, 1, 1, [inputs[0], outputs[0], inputs[0].size])

    probe["methods"].update(enqueue=enqueue, get_workspace_size=lambda *_: 48)
    assert (
        "each Run calls enqueue of plugin Probe-1 in Python"
        in ort_cuda_plugin.explain(probe_model(), emulate=True)[1].note
    )
    session = ort_cuda_plugin.session(probe_model(), emulate=True)
    for n in (5, 5, 9, 5):
        run_probe(session, n)
    assert seen == [((5,), 48), ((5,), 48), ((9,), 48), ((5,), 48)]
    changes = [inputs[0].dims for inputs, _ in probe["creator"].arguments("on_shape_change")]
    assert changes == [(5,), (9,), (5,)]
    assert len(probe["creator"].arguments("attach_to_context")) == 1


@array_kernel
def double_array(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        y[i] = x[i] * 2


@pytest.mark.parametrize("each_run", [0, 1])
def test_a_kernel_of_arrays_is_launched(probe: dict[str, Any], each_run: int) -> None:
    probe["methods"].update(enqueue=lambda a, b, x, y, w, stream: stream.launch(double_array, 1, 1, [x[0], y[0]]))
    session = ort_cuda_plugin.session(probe_model(each_run), emulate=True)
    for n in (3, 8):
        run_probe(session, n)


@pytest.mark.parametrize("each_run", [False, True])
def test_an_input_that_is_left_out_is_none_in_each_list(each_run: bool) -> None:
    def lists(name: str) -> list[list[Any]]:
        return [list(arguments[0]) for arguments in creator.arguments(name)]

    class Three(ProbeCreator):
        inputs = tuple(Port(name, {DType.FLOAT32}, "T", PortKind.OPTIONAL) for name in "xbw")

    def enqueue(input_desc: Any, output_desc: Any, inputs: Any, *others: Any) -> None:
        outputs, _, stream = others
        assert [desc and desc.dims[0] for desc in input_desc][1:] == [None, 3]
        assert [x and x.shape[0] for x in inputs][1:] == [None, 3]
        stream.launch(DOUBLE, 1, 1, [inputs[0], outputs[0], inputs[0].size])

    creator = Three(
        enqueue=enqueue, get_output_data_types=lambda types: types[:1], get_output_shapes=lambda shapes, *_: shapes[:1]
    )
    register_creator(creator)
    try:
        node = helper.make_node("Probe", ["x", "", "w"], ["y"], domain="test.plugins", each_run=int(each_run))
        inputs = [("x", TensorProto.FLOAT, ["n"]), ("w", TensorProto.FLOAT, [3])]
        session = ort_cuda_plugin.session(model([node], inputs, [("y", TensorProto.FLOAT, ["n"])]), emulate=True)
        x, w = np.ones(5, np.float32), np.ones(3, np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": x, "w": w})[0], x * 2)
    finally:
        unregister_creator(creator)
    for method in ("get_output_data_types", "get_output_shapes", "configure_plugin", "on_shape_change"):
        assert all(len(given) == 3 and given[1] is None for given in lists(method)), method
    assert {arguments[0] for arguments in creator.arguments("supports_format_combination")} == {0, 2, 3}


def test_runs_at_the_same_time_have_clones_of_their_own(probe: dict[str, Any]) -> None:
    session = ort_cuda_plugin.session(probe_model(), emulate=True)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(run_probe, session, n) for n in (3, 50, 700) * 4]:
            done.result()
    assert 1 <= len(probe["creator"].arguments("attach_to_context")) <= 3
    assert len(probe["creator"].arguments("enqueue")) == 12


def test_an_exception_in_enqueue_is_an_error_of_the_run_and_its_traceback_is_in_the_log(
    probe: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def enqueue(input_desc: Any, _: Any, inputs: Any, outputs: Any, __: Any, stream: Any) -> None:
        if input_desc[0].dims[0] == 7:
            raise RuntimeError("no sevens")
        stream.copy(outputs[0], inputs[0])

    probe["methods"]["enqueue"] = enqueue
    session = ort_cuda_plugin.session(probe_model(), emulate=True)
    message = r"'mine \(Probe\)': .*plugin Probe-1: enqueue for inputs of \[7\]: RuntimeError: no sevens"
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones(7, np.float32)})
    assert 'raise RuntimeError("no sevens")' in capfd.readouterr().err
    session.run(None, {"x": np.ones(8, np.float32)})


def test_an_enqueue_of_each_run_that_writes_nothing_is_an_error(probe: dict[str, Any]) -> None:
    def enqueue(input_desc: Any, _: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
        if inputs[0].size == 2:
            stream.copy(outputs[0].view(outputs[0].dtype, (2,)), inputs[0])
        if inputs[0].size == 3:
            taken.append(outputs[0].__cuda_array_interface__)

    taken: list[Any] = []
    probe["methods"]["enqueue"] = enqueue
    session = ort_cuda_plugin.session(probe_model(), emulate=True)
    message = r"\(Probe\)': .*enqueue for inputs of \[1\]: nothing writes output 0: launch a kernel that does"
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones(1, np.float32)})
    for size in (0, 2, 3):
        session.run(None, {"x": np.ones(size, np.float32)})
    assert taken


def test_a_twin_in_numpy_runs_in_an_enqueue_of_each_run(probe: dict[str, Any]) -> None:
    kernel = cuda_kernel(DOUBLE_SOURCE, "twice", ("*f32", "*f32", "i64"), numpy_twin=double_in_numpy)

    def enqueue(_: Any, __: Any, inputs: Any, outputs: Any, ___: Any, stream: Any) -> None:
        stream.launch(kernel, 1, 1, [inputs[0], outputs[0], inputs[0].size])

    probe["methods"]["enqueue"] = enqueue
    run_probe(ort_cuda_plugin.session(probe_model(), emulate=True), 5)


def test_cuda_graphs_of_the_host_refuse_a_call_of_python(probe: dict[str, Any]) -> None:
    session = ort_cuda_plugin.session(
        probe_model(),
        emulate=True,
        provider_options={"enable_cuda_graph": 1, "min_num_runs_before_cuda_graph_capture": 1},
    )
    x = on_device(np.ones(4, np.float32))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", on_device(np.ones(4, np.float32)))
    with pytest.raises(Exception, match="runs Python code in each Run, which a CUDA graph cannot capture"):
        session.run_with_iobinding(binding)


@pytest.mark.full
def test_plugins_are_right_with_adversarial_streams_in_the_checking_mode() -> None:
    environment = os.environ | {
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial",
        "ORT_CUDA_PLUGIN_EMULATE_SEED": "1",
        "ORT_CUDA_PLUGIN_EMULATE_CHECK": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-k", "elements or sizes_memory or same_time"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
