"""Stress test: many threads on several sessions with random shapes; checks the results, and that all resources are
freed.

    python bench/stress.py [--seconds 120] [--threads 8] [--streams inline|adversarial] [--seed 0] [--replace]
                            [--json]

The threads share four sessions: a classifier with a dynamic batch, a convolution with a dynamic image size, a selection
whose output size depends on the data, and a model with nodes of the CPU provider in the middle. Each thread picks
sessions and shapes at random, compares results with NumPy, and sometimes uses IO binding. Each thread also has a
recurrent state whose input and output share a buffer, and advances it with automatic CUDA graphs; one thread has a
second state, in a session whose graphs ONNX Runtime captures. Now and then a thread requests more memory than the
device has; that must fail with the out-of-memory error and affect no other Run.

With --replace a session is replaced by a new one every five seconds. The report at the end has the number of Runs, the
growth of the process's memory per minute after the first ten seconds, and what is still allocated.

Exits with 1 if a result was wrong, a Run failed, or anything is still allocated.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

WARM_UP = 10.0
"""Seconds before the first memory sample that counts; kernels, plans and thread pools are created meanwhile."""
SIZES = range(1, 17)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Model:
    name: str
    proto: bytes
    feeds: Callable[[np.random.Generator, int], Arrays]
    expected: Callable[[Arrays], NDArray[Any]]


@dataclass
class Outcome:
    runs: int = 0
    out_of_memory: int = 0
    failures: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)

    def growth_per_minute(self) -> float:
        """Return the growth of memory in bytes per minute, from the samples after the first ten seconds.

        It is the median slope between any two samples (Theil-Sen estimator), on which a single peak has little effect.
        """
        start = self.resident[0][0] if self.resident else 0.0
        late = np.array([(at, size) for at, size in self.resident if at - start >= WARM_UP], np.float64)
        if len(late) < 2:
            return 0.0
        first, second = np.triu_indices(len(late), 1)
        slopes = (late[second, 1] - late[first, 1]) / (late[second, 0] - late[first, 0])
        return float(np.median(slopes) * 60)


def build(nodes: list[onnx.NodeProto], x: list[Any], y: list[Any], constants: Arrays) -> bytes:
    graph = helper.make_graph(
        nodes,
        "stress",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def classifier() -> Model:
    rng = np.random.default_rng(1)
    first, second = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 70), (70, 10)))
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "second"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ]

    def expected(feeds: Arrays) -> NDArray[Any]:
        logits = np.maximum(feeds["x"] @ first, 0) @ second
        exponents = np.exp(logits - logits.max(-1, keepdims=True))
        result: NDArray[Any] = exponents / exponents.sum(-1, keepdims=True)
        return result

    proto = build(nodes, ["n", 40], ["n", 10], {"first": first, "second": second})
    return Model("classifier", proto, lambda rng, n: {"x": rng.standard_normal((n, 40)).astype(np.float32)}, expected)


def convolution() -> Model:
    weights = np.random.default_rng(2).standard_normal((6, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]

    def expected(feeds: Arrays) -> NDArray[Any]:
        padded = np.pad(feeds["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        result: NDArray[Any] = np.einsum("nchwij,fcij->nfhw", windows, weights).mean((2, 3))
        return result

    def feeds(rng: np.random.Generator, n: int) -> Arrays:
        return {"x": rng.standard_normal((1 + n % 3, 3, n + 2, 2 * n)).astype(np.float32)}

    return Model("convolution", build(nodes, ["n", 3, "h", "w"], ["n", 6], {"w": weights}), feeds, expected)


def selection() -> Model:
    zero = np.zeros((), np.float32)
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["positive"]),
        helper.make_node("Compress", ["x", "positive"], ["chosen"], axis=0),
        helper.make_node("Add", ["chosen", "chosen"], ["y"]),
    ]
    return Model(
        "selection",
        build(nodes, ["n"], ["m"], {"zero": zero}),
        lambda rng, n: {"x": rng.standard_normal(n * n).astype(np.float32)},
        lambda feeds: 2 * feeds["x"][feeds["x"] > 0],
    )


def with_cpu_nodes() -> Model:
    nodes = [
        helper.make_node("Concat", ["x", "x"], ["twice"], axis=0),
        helper.make_node("Cast", ["twice"], ["text"], to=TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["number", "number"], ["y"]),
    ]

    def feeds(rng: np.random.Generator, n: int) -> Arrays:
        return {"x": rng.integers(-99, 99, (n, 3)).astype(np.float32)}

    return Model(
        "with_cpu_nodes", build(nodes, ["n", 3], ["m", 3], {}), feeds, lambda feeds: np.tile(feeds["x"], (2, 1)) ** 2
    )


MODELS = [classifier(), convolution(), selection(), with_cpu_nodes()]
STATE = (6, 8)
DEVICE_BYTES = 2**28
"""Limit of device memory in bytes; `ask_for_too_much` requests four times as much."""


def shifted_state() -> bytes:
    """Return the model next = concat(state[1:], x). In place, each row moves to the memory of the row before."""
    nodes = [
        helper.make_node("Slice", ["state", "one", "end", "zero"], ["kept"]),
        helper.make_node("Concat", ["kept", "x"], ["next"], axis=0),
    ]
    constants = {name: np.array([value], np.int64) for name, value in (("zero", 0), ("one", 1), ("end", STATE[0]))}
    graph = helper.make_graph(
        nodes,
        "shifted_state",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, STATE[1]]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, STATE),
        ],
        [helper.make_tensor_value_info("next", TensorProto.FLOAT, STATE)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def filled() -> bytes:
    """Return a model whose result is a tensor of ones; its input is the size of the result."""
    one = onnx.numpy_helper.from_array(np.ones(1, np.float32))
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["y"], value=one)],
        "filled",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


class State:
    """A recurrent state that one thread advances: input and output share a buffer."""

    def __init__(self, session: Any) -> None:
        import onnxruntime as ort

        import ort_cuda_plugin

        memory = ort_cuda_plugin.register(emulate=True)[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        zeros = [np.zeros(shape, np.float32) for shape in ((1, STATE[1]), STATE)]
        vendor = memory.device_vendor_id
        self.x, self.state = (ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, vendor) for array in zeros)
        self.expected = zeros[1]
        self.session, self.binding = session, session.io_binding()
        self.binding.bind_ortvalue_input("x", self.x)
        self.binding.bind_ortvalue_input("state", self.state)
        self.binding.bind_ortvalue_output("next", self.state)

    def step(self, rng: np.random.Generator) -> None:
        x = rng.standard_normal((1, STATE[1])).astype(np.float32)
        self.x.update_inplace(x)
        self.session.run_with_iobinding(self.binding)
        self.expected = np.concatenate([self.expected[1:], x])
        np.testing.assert_array_equal(self.state.numpy(), self.expected, err_msg="state")


class Stress:
    """The sessions that threads share. One thread replaces sessions now and then."""

    def __init__(self, seed: int) -> None:
        import onnxruntime as ort

        import ort_cuda_plugin

        self.make: Callable[[Model], ort.InferenceSession] = lambda model: ort_cuda_plugin.session(
            model.proto, emulate=True
        )
        self.seed = seed
        self.sessions = [self.make(model) for model in MODELS]
        self.states = [
            ort_cuda_plugin.session(shifted_state(), emulate=True, provider_options=options)
            for options in ({}, {"enable_cuda_graph": "1"})
        ]
        self.filled = ort_cuda_plugin.session(filled(), emulate=True)
        ort_cuda_plugin.set_limit(None, DEVICE_BYTES)
        self.outcome = Outcome()
        self.lock = threading.Lock()
        self.end = 0.0

    def run_once(self, rng: np.random.Generator, choose: random.Random, states: list[State]) -> None:
        chance = choose.random()
        if chance < 0.2:
            choose.choice(states).step(rng)
            return
        if chance < 0.21:
            self.ask_for_too_much()
            return
        index = choose.randrange(len(MODELS))
        model, session = MODELS[index], self.sessions[index]
        feeds = model.feeds(rng, choose.choice(SIZES))
        if choose.random() < 0.3:
            binding = session.io_binding()
            for name, value in feeds.items():
                binding.bind_cpu_input(name, value)
            binding.bind_output("y")
            session.run_with_iobinding(binding)
            result = binding.copy_outputs_to_cpu()[0]
        else:
            result = session.run(None, feeds)[0]
        np.testing.assert_allclose(result, model.expected(feeds), rtol=1e-4, atol=1e-5, err_msg=model.name)

    def ask_for_too_much(self) -> None:
        """Raise AssertionError if a Run that needs too much memory succeeds, or fails with another error."""
        said = "nothing"
        try:
            self.filled.run(None, {"shape": np.array([DEVICE_BYTES], np.int64)})
        except Exception as error:
            said = str(error)
        assert "memory" in said, f"a Run asked for {4 * DEVICE_BYTES} of {DEVICE_BYTES} bytes, and the error is {said}"
        with self.lock:
            self.outcome.out_of_memory += 1

    def work(self, number: int) -> None:
        rng, choose = np.random.default_rng([self.seed, number]), random.Random(self.seed * 1000 + number)
        runs, states = 0, self.make_states(number)
        while time.monotonic() < self.end and not self.outcome.failures:
            try:
                self.run_once(rng, choose, states)
                runs += 1
            except Exception as error:
                self.outcome.failures.append(f"{type(error).__name__}: {error}")
        with self.lock:
            self.outcome.runs += runs

    def make_states(self, number: int) -> list[State]:
        """Return a thread's states: one with automatic graphs, and for thread 0 one with graphs that ORT captures.

        A session that captures serves one thread.
        """
        return [State(session) for session in self.states[: 2 if number == 0 else 1]]

    def watch(self, replace: bool) -> None:
        import psutil

        process = psutil.Process()
        choose = random.Random(self.seed)
        while time.monotonic() < self.end and not self.outcome.failures:
            time.sleep(1)
            self.outcome.resident.append((time.monotonic(), process.memory_full_info().uss))
            if replace and len(self.outcome.resident) % 5 == 0:
                index = choose.randrange(len(MODELS))
                self.sessions[index] = self.make(MODELS[index])

    def run(self, seconds: float, threads: int, *, replace: bool) -> Outcome:
        self.end = time.monotonic() + seconds
        workers = [threading.Thread(target=self.work, args=(number,)) for number in range(threads)]
        workers.append(threading.Thread(target=self.watch, args=(replace,)))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.sessions.clear()
        self.states.clear()
        del self.filled
        gc.collect()
        return self.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", choices=["inline", "adversarial"], default="inline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replace", action="store_true", help="replace sessions by new ones while the others run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["ORT_CUDA_PLUGIN_EMULATE_STREAMS"] = arguments.streams
    import onnxruntime as ort

    import ort_cuda_plugin

    ort.set_default_logger_severity(4)  # hides errors that requesting too much memory causes on purpose

    outcome = Stress(arguments.seed).run(arguments.seconds, arguments.threads, replace=arguments.replace)
    counters = ort_cuda_plugin.counters()
    left = {name: counters[name] for name in ("device_bytes_in_use", "pinned_bytes_in_use", "weight_bytes")}
    report = {
        "streams": arguments.streams,
        "runs": outcome.runs,
        "out_of_memory": outcome.out_of_memory,
        "failures": outcome.failures,
        "host_bytes_per_minute": round(outcome.growth_per_minute()),
        **left,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    return 1 if outcome.failures or any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
