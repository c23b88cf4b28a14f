"""Options that change while a session lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.ep.device.identity import Identity
from ort_cuda_plugin.ep.options.dynamic_options import KEYS, parse_changes
from ort_cuda_plugin.ep.options.options import OptionError, Options
from ort_cuda_plugin.ep.provider import Provider, last_provider


def product_model() -> bytes:
    """Return a model of y = ((x * x) @ x) + x: two launches, which are enough for a CUDA graph."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "n"]) for name in "xy"]
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["a"]),
        helper.make_node("MatMul", ["a", "x"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["c"], keepdims=1),
        helper.make_node("Add", ["c", "x"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    )


@pytest.fixture
def session() -> Iterator[ort.InferenceSession]:
    session = ort_cuda_plugin.session(product_model(), emulate=True)
    yield session
    ort_cuda_plugin.set_limit(None, None)


def provider() -> Provider:
    found = last_provider()
    assert found is not None
    return found


def run(session: ort.InferenceSession, times: int = 1) -> int:
    """Run a session ``times`` times and return the number of graph replays."""
    before = ort_cuda_plugin.counters()["graph_replays"]
    x = np.eye(4, dtype=np.float32)
    for _ in range(times):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x + 4)
    return ort_cuda_plugin.counters()["graph_replays"] - before


def test_automatic_graphs_are_turned_off_and_on(session: ort.InferenceSession, collected: None) -> None:
    assert run(session, 6) == 4
    live = ort_cuda_plugin.counters()["graphs_live"]
    session.set_ep_dynamic_options({"automatic_cuda_graphs": "0"})
    assert ort_cuda_plugin.counters()["graphs_live"] == live - 1
    assert run(session, 4) == 0
    session.set_ep_dynamic_options({"ep.cudapluginexecutionprovider.automatic_cuda_graphs": "1"})
    assert run(session, 12) > 0  # after its graph was evicted, an instance needs more warm Runs


def test_the_limit_of_memory_changes(session: ort.InferenceSession) -> None:
    for key in ("gpu_mem_limit", "arena.max_mem"):
        session.set_ep_dynamic_options({key: "123456789"})
        assert ort_cuda_plugin.memory_stats()["device"]["Limit"] == 123456789
        session.set_ep_dynamic_options({key: "0"})
        assert ort_cuda_plugin.memory_stats()["device"]["Limit"] == 2**63 - 1


def test_the_level_of_the_log_changes(session: ort.InferenceSession, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("ort_cuda_plugin.abi.host.log", lambda level, message, *_: lines.append(f"{level} {message}"))
    provider().session.log("INFO", "first")
    session.set_ep_dynamic_options({"log_level": "warning"})
    provider().session.log("INFO", "second")
    provider().session.log("ERROR", "third")
    assert lines == ["INFO first", "ERROR third"]


def test_a_wrong_option_changes_nothing_and_is_told_what_is_known(session: ort.InferenceSession) -> None:
    with pytest.raises(Exception, match="no option 'no_such_key' that can change; known: ") as error:
        session.set_ep_dynamic_options({"automatic_cuda_graphs": "0", "no_such_key": "1"})
    assert all(key in str(error.value) for key in KEYS)
    assert provider().options.automatic_cuda_graphs
    for values, said in [
        ({"use_tf32": "0"}, "'use_tf32' cannot change after the session was created; can change: "),
        ({"automatic_cuda_graphs": "perhaps"}, "automatic_cuda_graphs='perhaps': use 1 or 0"),
        ({"gpu_mem_limit": "much"}, "option gpu_mem_limit='much': use a number of bytes"),
        ({"log_level": "5"}, "log_level='5': use one of VERBOSE"),
        ({"ep.dynamic.workload_type": "Lazy"}, "use Default or Efficient"),
    ]:
        with pytest.raises(OptionError, match=said):
            parse_changes(values, Options(), Identity.OWN)


def test_what_every_provider_has_to_take_is_taken(session: ort.InferenceSession) -> None:
    session.set_ep_dynamic_options({"ep.dynamic.workload_type": "Efficient"})
    assert run(session) == 0


def test_options_change_beside_runs_of_other_threads(session: ort.InferenceSession) -> None:
    stop = threading.Event()
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                run(session)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(60):
        session.set_ep_dynamic_options(
            {
                "automatic_cuda_graphs": str(number % 2),
                "cuda_graph_cache_size": str(1 + number % 3),
                "gpu_mem_limit": str((number % 2) << 40),
            }
        )
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
