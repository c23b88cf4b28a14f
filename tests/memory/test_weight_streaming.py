"""Sessions with the option weight_budget: weights larger than the device's memory, which Runs copy to the device."""

from __future__ import annotations

import gc
import re
import textwrap
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import ort_cuda_plugin
from isolated import HARNESS, python
from streamed_weights import LAYER_BYTES, changes, expected, feeds, layers, schedules, streaming_session

PREPARE = """
import sys
import numpy as np
import onnxruntime as ort
import ort_cuda_plugin
from streamed_weights import *
"""
SMALL_DEVICE = {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "4M"}
ADVERSARIAL = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial", "ORT_CUDA_PLUGIN_EMULATE_CHECK": "1"}
SETTINGS = {
    "inline": {},
    "adversarial": ADVERSARIAL,
}


def alone(code: str, env: Mapping[str, str]) -> str:
    """Run code in a process with a device of 4 MiB; return what it prints."""
    env = {**SMALL_DEVICE, **env, "PYTHONPATH": str(HARNESS)}
    return python(PREPARE + textwrap.dedent(code), env=env, preloaded=True).stdout


@pytest.mark.every_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_of_six_times_the_memory_run_with_one_copy_each(setting: str) -> None:
    """24 MiB of weights run on a device of 4 MiB, one by one and as CUDA graphs."""
    out = alone(
        """
        model, given = layers(24), feeds(2)
        reference = expected(model, given)
        session = streaming_session(model, "3M")
        resident = ort_cuda_plugin.counters()["weight_bytes"]
        assert ort_cuda_plugin.counters()["host_weight_bytes"] == 24 * LAYER_BYTES - resident
        replays = 0
        for _ in range(5):
            with changes() as run:
                (result,) = session.run(None, given)
            np.testing.assert_allclose(result, reference[0], rtol=1e-5, atol=1e-5)
            assert run["weight_bytes_streamed"] == 24 * LAYER_BYTES - resident, run
            assert run["copies_h2d"] == 24 - resident // LAYER_BYTES + 1, run  # and the input
            replays += run["graph_replays"]
        assert replays == 3, replays
        (schedule,) = schedules()
        assert schedule.resident == resident and schedule.resident + schedule.ring <= 3 << 20, schedule
        print(resident // LAYER_BYTES, schedule.ring // LAYER_BYTES)
        """,
        SETTINGS[setting],
    )
    assert out.split() == ["1", "2"]


@pytest.mark.parametrize("setting", ["inline", "adversarial"])
def test_two_runs_at_once_have_rings_of_their_own(setting: str) -> None:
    alone(
        """
        import threading
        model = layers(6)
        inputs = [feeds(2, seed) for seed in (1, 2)]
        references = [expected(model, given)[0] for given in inputs]
        session = streaming_session(model, "1M", min_num_runs_before_cuda_graph_capture="3")
        barrier = threading.Barrier(2)
        wrong = []

        def run(index):
            barrier.wait()
            for _ in range(6):
                (result,) = session.run(None, inputs[index])
                if not np.allclose(result, references[index], rtol=1e-5, atol=1e-5):
                    wrong.append(index)

        with changes() as runs:
            threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong, wrong
        assert runs["weight_bytes_streamed"] == 12 * 6 * LAYER_BYTES, runs
        """,
        SETTINGS[setting],
    )


@pytest.mark.parametrize("setting", ["inline", "adversarial"])
def test_a_compiled_model_streams_with_the_budget_of_its_session(setting: str) -> None:
    """The context file holds no schedule: the session that loads it has another budget than the one that wrote it."""
    alone(
        """
        model, given = layers(8, batch=2), feeds(2)
        folder, path = compiled(model, weight_budget="2M", **SMALL_REGIONS)
        options = ort.SessionOptions()
        devices = ort_cuda_plugin.register(emulate=True)[:1]
        chosen = {"weight_budget": "3M", "context_allow_host_code": "1", **SMALL_REGIONS}
        options.add_provider_for_devices(devices, chosen)
        session = ort.InferenceSession(str(path), options)
        assert ort_cuda_plugin.counters()["weight_bytes"] == LAYER_BYTES
        for _ in range(4):
            with changes() as run:
                (result,) = session.run(None, given)
            np.testing.assert_allclose(result, expected(model, given)[0], rtol=1e-5, atol=1e-5)
            assert run["weight_bytes_streamed"] == 7 * LAYER_BYTES, run
            assert run["plan_variants_built"] == 0, run
        folder.cleanup()
        """,
        SETTINGS[setting],
    )


@pytest.mark.parametrize("setting", ["inline", "adversarial"])
def test_a_run_that_onnx_runtime_captures_copies_in_each_replay(setting: str) -> None:
    alone(
        """
        model, given = layers(6, batch=2), feeds(2)
        session = streaming_session(model, "2M", enable_cuda_graph="1")
        memory = ort_cuda_plugin.register(emulate=True)[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        vendor = int(memory.device_vendor_id)
        x, y = (ort.OrtValue.ortvalue_from_numpy(a, "gpu", 0, vendor) for a in (given["x"], np.zeros_like(given["x"])))
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_ortvalue_output("y", y)
        for seed in (1, 2, 3, 4):
            given = feeds(2, seed)
            ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(given["x"])], [x])
            session.run_with_iobinding(binding)
            np.testing.assert_allclose(y.numpy(), expected(model, given)[0], rtol=1e-5, atol=1e-5)
        """,
        SETTINGS[setting],
    )


def test_results_do_not_change_with_the_budget() -> None:
    """Shapes of two plans; the second plan streams what the first one left in host memory."""
    model = layers(5)
    whole = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    session = streaming_session(model, "3M")
    for batch in (1, 70, 1, 70, 70, 70):
        given = feeds(batch)
        with changes() as run:
            streamed = session.run(None, given)
        np.testing.assert_array_equal(streamed[0], whole.run(None, given)[0])
        assert run["weight_bytes_streamed"] == 4 * LAYER_BYTES


def test_sessions_share_streamed_weights() -> None:
    gc.collect()
    model = layers(4)
    with changes() as first:
        one = streaming_session(model, "2M")
    with changes() as second:
        other = streaming_session(model, "2M")
    assert (first["host_weight_bytes"], second["host_weight_bytes"]) == (4 * LAYER_BYTES, 0)
    with changes() as closed:
        del one
        gc.collect()
    assert closed["host_weight_bytes"] == 0
    np.testing.assert_allclose(other.run(None, feeds(3))[0], expected(model, feeds(3))[0], rtol=1e-5, atol=1e-5)
    with changes() as closed:
        del other
        gc.collect()
    assert (closed["host_weight_bytes"], closed["pinned_bytes_in_use"]) == (-4 * LAYER_BYTES, -4 * LAYER_BYTES)


def test_the_schedule_names_weights_steps_and_bytes() -> None:
    _session = streaming_session(layers(4, batch=2), "3M")
    (schedule,) = schedules()
    assert (schedule.budget, schedule.resident, schedule.ring) == (3 << 20, LAYER_BYTES, 2 * LAYER_BYTES)
    assert [(weight.name, weight.nbytes) for weight in schedule.weights] == [(f"w{i}", LAYER_BYTES) for i in (1, 2, 3)]
    assert [weight.issue for weight in schedule.weights] == [0, 0, 2]  # w3 overwrites w1, which step 1 reads
    assert schedule.nbytes == 3 * LAYER_BYTES


def test_a_budget_with_room_for_all_weights_streams_nothing() -> None:
    session = streaming_session(layers(3), "3M")
    with changes() as run:
        session.run(None, feeds(2))
    assert run["weight_bytes_streamed"] == 0
    assert schedules() == []


@pytest.mark.parametrize(("text", "resident"), [("0.00001", None), ("50%", 4), ("0", 4), ("2097152", 0), ("3M", 1)])
def test_a_budget_is_bytes_or_a_share(text: str, resident: int | None) -> None:
    """The emulated device of the tests has more than 8 MiB of memory."""
    if resident is None:
        with pytest.raises(Exception, match=r"weight_budget leaves \d+ bytes .* expected at least"):
            streaming_session(layers(4), text)
        return
    gc.collect()
    with changes() as created:
        _session = streaming_session(layers(4), text)
    assert created["weight_bytes"] == resident * LAYER_BYTES


@pytest.mark.parametrize("text", ["-1", "110%", "0%", "1.5", "much", "-5%", "nan"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="a share of the device's memory such as 25%"):
        streaming_session(layers(1), text)


def test_a_budget_below_one_weight_says_what_it_needs() -> None:
    with pytest.raises(Exception, match=rf"weight_budget leaves 500000 bytes .*expected at least {LAYER_BYTES}.*tanh"):
        streaming_session(layers(4), "500000")


def needed_budget(model: onnx.ModelProto) -> int:
    """Return the budget that the error of a budget without room for one weight names."""
    with pytest.raises(Exception, match="Raise weight_budget to") as error:
        streaming_session(model, "256")
    found = re.search(r"Raise weight_budget to (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("batch", [2, "batch"])
def test_the_budget_that_an_error_names_suffices_and_one_byte_less_does_not(batch: int | str) -> None:
    model = layers(4, batch=batch, width=160)
    needed = needed_budget(model)
    given = feeds(2, width=160)
    (result,) = streaming_session(model, str(needed)).run(None, given)
    np.testing.assert_allclose(result, expected(model, given)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match=rf"Raise weight_budget to {needed} bytes"):
        streaming_session(model, str(needed - 1)).run(None, given)


def test_the_budget_that_an_error_names_is_that_of_the_session_not_of_a_part() -> None:
    """A Cast to strings is not on the plugin, and divides the model into two parts with a share each."""
    model = layers(4, width=160)
    cut = next(node for node in model.graph.node if node.name == "product2")
    model.graph.node.insert(4, helper.make_node("Cast", [cut.input[0]], ["text"], to=TensorProto.STRING))
    model.graph.node.insert(5, helper.make_node("Cast", ["text"], ["number"], to=TensorProto.FLOAT))
    cut.input[0] = "number"
    needed = needed_budget(model)
    given = feeds(2, width=160)
    streaming_session(model, str(needed)).run(None, given)
    with pytest.raises(Exception, match=rf"Raise weight_budget to {needed} bytes"):
        streaming_session(model, str(needed - 1)).run(None, given)


def test_the_budget_of_a_living_session_cannot_change() -> None:
    session = streaming_session(layers(4), "2M")
    with pytest.raises(Exception, match=r"'weight_budget' cannot change .*create another session"):
        session.set_ep_dynamic_options({"weight_budget": "3M"})


LOOP = """<ir_version: 10, opset_import: ["" : 20]> g (float[2, 64] x) => (float[2, 64] y) {
    n = Constant<value_int = 3>() one = Constant<value_int = 1>() on = Cast<to = 9>(one)
    y = Loop(n, on, x) <body = b (int64 i, bool c, float[2, 64] s) => (bool still, float[2, 64] next)
        { still = Identity(c) p = MatMul(s, w) next = Tanh(p) }> }"""


def test_a_body_with_weights_that_do_not_fit_is_refused() -> None:
    model = parser.parse_model(LOOP)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    with pytest.raises(Exception, match=r"weights in bodies of If, Loop or Scan have 16384 bytes"):
        streaming_session(model, "20000", device_loops="0")
    x = np.ones((2, 64), np.float32)
    session = streaming_session(model, "1M", device_loops="0")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], np.tanh(np.tanh(np.tanh(x))))


@pytest.mark.every_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_loop_on_the_device_reads_streamed_weights(setting: str) -> None:
    """Two of three weights fit. The loop's weight stays in the ring for all iterations, and each is copied once."""
    out = alone(
        """
        from onnx import numpy_helper, parser
        model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 20]>
            g (float[2, 512] x, int64 n) => (float[2, 512] y) {
            a = MatMul(x, u) b = Tanh(a)
            c = Loop(n, , b) <body = b (int64 i, bool on, float[2, 512] s) => (bool on, float[2, 512] t)
                { p = MatMul(s, w) q = Tanh(p) r = MatMul(q, v) t = Tanh(r) }>
            d = MatMul(c, z) y = Tanh(d) }''')
        numbers = np.random.default_rng(1)
        for name in "uvwz":
            weights = numbers.standard_normal((512, 512)).astype(np.float32) / 20
            model.graph.initializer.append(numpy_helper.from_array(weights, name))
        x = numbers.standard_normal((2, 512)).astype(np.float32)
        cpu = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        session = streaming_session(model, "3M")
        resident = ort_cuda_plugin.counters()["weight_bytes"]
        replays = []
        for n in (3, 3, 3, 3, 0, 5, 3):
            given = {"x": x, "n": np.array(n)}
            with changes() as run:
                (result,) = session.run(None, given)
            np.testing.assert_allclose(result, cpu.run(None, given)[0], rtol=1e-4, atol=1e-4)
            assert run["weight_bytes_streamed"] == (4 << 20) - resident > 0, run
            assert run["device_loops"] == 1, run
            replays.append(run["graph_replays"])
        print(replays)
        """,
        SETTINGS[setting],
    )
    assert out.strip() == "[0, 0, 1, 1, 0, 0, 0]"  # the third Run with an unchanged n replays a graph


def test_sessions_of_single_nodes_refuse_a_budget() -> None:
    with pytest.raises(Exception, match="weight_budget: ONNX Runtime runs each node of this session"):
        streaming_session(layers(4), "2M", single_nodes="1")
