"""Scenarios of the fault campaign: small programs that use one feature of the plugin each.

A scenario creates its sessions (`create`), has independent steps that do Runs and check their results (`steps`), and
releases everything (`close`). It is short, so that thousands of faults can be injected.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, parser

import ort_cuda_plugin as plugin
import searches
from device_models import add_and_double, model, with_cpu_nodes
from interop import Interop
from ort_cuda_plugin import ipc
from ort_cuda_plugin.abi.core import core, ffi
from ort_cuda_plugin.abi.device import CudaError, Device
from ort_cuda_plugin.abi.host import OrtError, api
from ort_cuda_plugin.custom.plugin import register_creator, unregister_creator
from ort_cuda_plugin.ep.device import open_device
from ort_cuda_plugin.program.steps.libraries import Refusals
from plugins import DOUBLE, ProbeCreator
from profiles import Profile, profiled_session
from timelines import SharedFile, Timeline, descriptors, mappings

Array = np.ndarray
Step = Callable[[], None]


class WrongResult(AssertionError):
    """A Run succeeded with wrong results."""


class ValueWithoutMemory(Exception):
    """ONNX Runtime made a value although its allocator returned no memory, and reported no error."""


def check(result: Array, expected: Array) -> None:
    if result.shape != expected.shape or not np.allclose(result, expected, rtol=1e-5, atol=1e-6):
        raise WrongResult(f"{result.shape} instead of {expected.shape}: {result.reshape(-1)[:8]}")


def session(source: bytes, *, optimized: bool = True, **options: Any) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    if not optimized:
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return plugin.session(source, emulate=True, provider_options=options, sess_options=settings)


def on_device(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)


def space_on_device(count: int) -> ort.OrtValue:
    value = ort.OrtValue.ortvalue_from_shape_and_type([count], np.float32, "cuda", 0)
    if not value.data_ptr():
        raise ValueWithoutMemory("a value without memory")
    return value


def numbers(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


class Scenario:
    """Base class: one use of the plugin, during which calls may fail."""

    fake: ClassVar[Any] = None
    """The stand-in for a vendor library that the scenario uses, None without one. Its calls may fail too."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the scenario's process."""
    is_registered = True
    """Whether the worker registers the plugin before the scenario; otherwise `create` does."""
    fresh_process = False
    """Whether each fault needs a process that has not used the plugin before."""

    def prepare(self) -> None:
        """Create the application's own objects. No fault is injected meanwhile."""

    def finish(self) -> None:
        """Undo `prepare`."""

    def alive(self) -> dict[str, int]:
        """Return further resources that must be unchanged after all sessions are gone."""
        return {}

    def recover(self) -> None:
        """Do what an application would do after a failure, before the steps are repeated."""

    def create(self) -> None:
        raise NotImplementedError

    def steps(self) -> Sequence[Step]:
        raise NotImplementedError

    def close(self) -> None:
        self.__dict__.clear()
        gc.collect()


class Sum(Scenario):
    """A session of c = 2 (a + b) for vectors of any length."""

    options: ClassVar[Mapping[str, Any]] = {"automatic_cuda_graphs": 0}

    def create(self) -> None:
        self.session = session(add_and_double(), **self.options)

    def feed(self, count: int, seed: int) -> dict[str, Array]:
        return {"a": numbers(count, seed), "b": numbers(count, seed + 100)}

    def run(self, count: int, seed: int = 0) -> None:
        feed = self.feed(count, seed)
        check(self.session.run(None, feed)[0], 2 * (feed["a"] + feed["b"]))


class Plain(Sum):
    """Runs with NumPy arrays, of a size, of the same size again, and of a new size."""

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(8), lambda: self.run(8, 1), lambda: self.run(1000)]


class Bound(Sum):
    """Runs with IO binding: inputs on the device, outputs in memory of the application or of the session."""

    def create(self) -> None:
        super().create()
        self.values = {name: on_device(array) for name, array in self.feed(16, 0).items()}
        self.result = space_on_device(16)

    def steps(self) -> Sequence[Step]:
        return [lambda: self.bound(own=True), lambda: self.bound(own=False), lambda: self.mixed()]

    def bound(self, own: bool) -> None:
        binding = self.session.io_binding()
        for name, value in self.values.items():
            binding.bind_ortvalue_input(name, value)
        if own:
            binding.bind_ortvalue_output("c", self.result)
        else:
            binding.bind_output("c", "cuda", 0)
        self.session.run_with_iobinding(binding)
        feed = self.feed(16, 0)
        check(binding.get_outputs()[0].numpy(), 2 * (feed["a"] + feed["b"]))

    def mixed(self) -> None:
        binding = self.session.io_binding()
        feed = self.feed(16, 0)
        binding.bind_cpu_input("a", feed["a"])
        binding.bind_ortvalue_input("b", self.values["b"])
        binding.bind_output("c")
        self.session.run_with_iobinding(binding)
        check(binding.copy_outputs_to_cpu()[0], 2 * (feed["a"] + feed["b"]))


class ReadBack(Scenario):
    """Runs with read-backs: output sizes depend on an input's contents, and on values that the device computes."""

    def create(self) -> None:
        nodes = [
            helper.make_node("Cast", ["s"], ["shape"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["x", "shape"], ["r"]),
            helper.make_node("NonZero", ["r"], ["places"]),
            helper.make_node("Transpose", ["places"], ["rows"]),
            helper.make_node("GatherND", ["r", "rows"], ["found"]),
            helper.make_node("Expand", ["found", "more"], ["y"]),
        ]
        values: list[tuple[str, int, list[int | str]]] = [
            ("x", 1, ["a", "b"]),
            ("s", 1, [2]),
            ("more", 7, [2]),
            ("y", 1, ["p", "q"]),
        ]
        infos = [helper.make_tensor_value_info(*value) for value in values]
        graph = helper.make_graph(nodes, "sizes", infos[:3], infos[3:])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        self.session = session(made.SerializeToString(), optimized=False)

    def steps(self) -> Sequence[Step]:
        return [
            lambda: self.run((4, 6), (3, 8), 2),
            lambda: self.run((4, 6), (24, 1), 3),
            lambda: self.run((2, 3), (6, 1), 1),
        ]

    def run(self, shape: tuple[int, int], computed: tuple[int, int], times: int) -> None:
        x = np.maximum(numbers(shape[0] * shape[1], shape[0]).reshape(shape), 0)
        feed = {"x": x, "s": np.array(computed, np.float32), "more": np.array([times, 1])}
        found = x.reshape(computed)[x.reshape(computed) != 0]
        check(self.session.run(None, feed)[0], np.broadcast_to(found, (times, found.size)))


class Graphs(Scenario):
    """Automatic CUDA graphs whose nodes get new addresses in every Run."""

    def create(self) -> None:
        nodes = [
            helper.make_node("Mul", ["a", "b"], ["p"]),
            helper.make_node("Softmax", ["p"], ["q"], axis=1),
            helper.make_node("Identity", ["q"], ["u"]),
            helper.make_node("Shape", ["a"], ["shape"]),
            helper.make_node("ConstantOfShape", ["shape"], ["v"]),
        ]
        shape: list[int | str] = ["n", 16]
        self.session = session(
            model(nodes, {"a": shape, "b": shape}, {"q": shape, "u": shape, "v": shape}), optimized=False
        )
        self.kept: list[object] = []

    def steps(self) -> Sequence[Step]:
        return [lambda seed=seed: self.run(seed) for seed in range(6)]  # type: ignore[misc]

    def run(self, seed: int) -> None:
        a, b = numbers(64, seed).reshape(4, 16), numbers(64, seed + 10).reshape(4, 16)
        inputs = {"a": on_device(a), "b": on_device(b)}
        outputs = self.session.run_with_ort_values(None, inputs)
        exps = np.exp(a * b)
        expected = exps / exps.sum(1, keepdims=True)
        for value, right in zip(outputs, (expected, expected, np.zeros((4, 16))), strict=True):
            check(value.numpy(), right)
        self.kept = [inputs, outputs]  # keeps this memory in use, so that the next Run gets other addresses


class Captured(Sum):
    """CUDA graphs of whole Runs, which ONNX Runtime captures."""

    options: ClassVar[Mapping[str, Any]] = {"enable_cuda_graph": 1}

    def create(self) -> None:
        super().create()
        self.values = {name: on_device(array) for name, array in self.feed(16, 0).items()}
        self.result = space_on_device(16)
        self.binding = self.session.io_binding()
        for name, value in self.values.items():
            self.binding.bind_ortvalue_input(name, value)
        self.binding.bind_ortvalue_output("c", self.result)

    def steps(self) -> Sequence[Step]:
        return [lambda seed=seed: self.replay(seed) for seed in range(6)]  # type: ignore[misc]

    def replay(self, seed: int) -> None:
        feed = self.feed(16, seed)
        for name, array in feed.items():
            ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(array)], [self.values[name]])
        self.session.run_with_iobinding(self.binding)
        check(self.result.numpy(), 2 * (feed["a"] + feed["b"]))


class Pooled(Bound):
    """Memory from CUDA's own memory pool instead of the arena."""

    options: ClassVar[Mapping[str, Any]] = {"automatic_cuda_graphs": 1, "arena.use_cuda_mempool": 1}

    def steps(self) -> Sequence[Step]:
        runs = [lambda seed=seed: self.run(300, seed) for seed in range(4)]
        return [*super().steps(), *runs, self.run_and_trim]

    def run_and_trim(self) -> None:
        self.run(300)
        plugin.trim()


class Threads(Sum):
    """Runs of one session in three threads."""

    options: ClassVar[Mapping[str, Any]] = {}

    def steps(self) -> Sequence[Step]:
        return [self.together, self.together, self.together]

    def together(self) -> None:
        errors: list[Exception] = []

        def work(seed: int) -> None:
            try:
                for _ in range(2):
                    self.run(50 + seed, seed)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise ExceptionGroup("in threads", errors)


class Weights(Scenario):
    """Two sessions that share weights. One is destroyed and created again between Runs of the other."""

    kind = "Identity"
    """The operator that is applied to the GEMM's weights."""

    def source(self) -> bytes:
        nodes = [
            helper.make_node(self.kind, ["w"], ["v"]),
            helper.make_node("MatMul", ["x", "v"], ["p"]),
            helper.make_node("Add", ["p", "bias"], ["y"]),
        ]
        constants = [
            numpy_helper.from_array(numbers(64, 5).reshape(8, 8), "w"),
            numpy_helper.from_array(numbers(8, 6), "bias"),
        ]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
        graph = helper.make_graph(nodes, "weights", values[:1], values[1:], constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(made.SerializeToString())

    def create(self) -> None:
        self.first = session(self.source(), optimized=False)
        self.second: ort.InferenceSession | None = session(self.source(), optimized=False)

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(self.first, 3), self.exchange, lambda: self.run(self.first, 5)]

    def exchange(self) -> None:
        self.second = None
        gc.collect()
        self.second = session(self.source(), optimized=False)
        self.run(self.second, 4)

    def run(self, used: ort.InferenceSession, rows: int) -> None:
        x = numbers(8 * rows, rows).reshape(rows, 8)
        w = numbers(64, 5).reshape(8, 8)
        check(used.run(None, {"x": x})[0], x @ (w if self.kind == "Identity" else np.sin(w)) + numbers(8, 6))


class ComputedWeights(Weights):
    """Weights that a precomputation on the device computes from the model's weights."""

    kind = "Sin"


class Streamed(Scenario):
    """Weights that Runs copy to the device, one of them precomputed; in automatic graphs, and in captured Runs."""

    def create(self) -> None:
        nodes, last = [helper.make_node("Sin", ["w0"], ["v0"])], "x"
        for layer in range(4):
            name = "y" if layer == 3 else f"x{layer}"
            nodes += [
                helper.make_node("MatMul", [last, f"{'w' if layer else 'v'}{layer}"], [f"p{layer}"]),
                helper.make_node("Tanh", [f"p{layer}"], [name]),
            ]
            last = name
        constants = [numpy_helper.from_array(self.weight(layer), f"w{layer}") for layer in range(4)]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
        graph = helper.make_graph(nodes, "streamed", values[:1], values[1:], constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        source = bytes(made.SerializeToString())
        self.session = session(source, optimized=False, weight_budget=768)
        self.captured = session(source, optimized=False, weight_budget=512, enable_cuda_graph=1)
        self.x, self.y = on_device(numbers(32).reshape(4, 8)), on_device(np.zeros((4, 8), np.float32))
        self.binding = self.captured.io_binding()
        self.binding.bind_ortvalue_input("x", self.x)
        self.binding.bind_ortvalue_output("y", self.y)

    @staticmethod
    def weight(layer: int) -> Array:
        return numbers(64, layer).reshape(8, 8)

    def steps(self) -> Sequence[Step]:
        return [*(partial(self.run, seed) for seed in range(4)), *(partial(self.replay, seed) for seed in range(2))]

    def expected(self, x: Array) -> Array:
        for layer in range(4):
            weight = self.weight(layer)
            x = np.tanh(x @ (weight if layer else np.sin(weight)))
        return x

    def run(self, seed: int) -> None:
        x = numbers(32, seed).reshape(4, 8)
        check(self.session.run(None, {"x": x})[0], self.expected(x))

    def replay(self, seed: int) -> None:
        x = numbers(32, seed).reshape(4, 8)
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(x)], [self.x])
        self.captured.run_with_iobinding(self.binding)
        check(self.y.numpy(), self.expected(x))


class State(Scenario):
    """A node with a state on the device: a random number generator."""

    def create(self) -> None:
        nodes = [helper.make_node("RandomUniformLike", ["x"], ["r"], low=2.0, high=3.0)]
        self.session = session(model(nodes, {"x": [8]}, {"r": [8]}))
        self.last = np.zeros(8, np.float32)

    def steps(self) -> Sequence[Step]:
        return [self.draw, self.draw]

    def draw(self) -> None:
        (drawn,) = self.session.run(None, {"x": np.zeros(8, np.float32)})
        if drawn.min() < 2 or drawn.max() >= 3 or np.array_equal(drawn, self.last):
            raise WrongResult(f"random numbers {drawn}")
        self.last = drawn


class Called(Scenario):
    """An application's plugin whose `enqueue` is called in each Run: copies to the host and back, launches a kernel."""

    def prepare(self) -> None:
        def enqueue(_: Any, __: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
            stream.memset(workspace, 0)
            stream.write(outputs[0], stream.read(inputs[0]))
            stream.launch(DOUBLE, 1, 1, [inputs[0], outputs[0], inputs[0].size])

        self.creator = register_creator(ProbeCreator(enqueue=enqueue, get_workspace_size=lambda *_: 64))

    def finish(self) -> None:
        unregister_creator(self.creator)

    def create(self) -> None:
        nodes = [
            helper.make_node("Exp", ["x"], ["a"]),
            helper.make_node("Probe", ["a"], ["b"], domain="test.plugins", each_run=1),
            helper.make_node("Neg", ["b"], ["y"]),
        ]
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
        graph = helper.make_graph(nodes, "called", infos[:1], infos[1:])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("test.plugins", 1)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        self.session = session(made.SerializeToString())

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(5), lambda: self.run(9), lambda: self.run(5)]

    def run(self, count: int) -> None:
        x = numbers(count)
        check(self.session.run(None, {"x": x})[0], -2 * np.exp(x))

    def close(self) -> None:
        creator = self.creator
        super().close()
        self.creator = creator


class Values(Scenario):
    """OrtValues, copies and streams outside of sessions, with ONNX Runtime's shared allocators."""

    def create(self) -> None:
        pass

    def steps(self) -> Sequence[Step]:
        return [self.there_and_back, self.on_a_stream, self.statistics]

    def there_and_back(self) -> None:
        x = numbers(500)
        first = on_device(x)
        second = on_device(np.zeros(500, np.float32))
        ort.copy_tensors([first], [second])
        check(second.numpy(), x)
        second.update_inplace(2 * x)
        check(second.numpy(), 2 * x)

    def on_a_stream(self) -> None:
        device = next(device for device in plugin.register(emulate=True) if device.ep_metadata["emulated"] == "1")
        stream = device.create_sync_stream()
        x = numbers(300)
        value, result = on_device(np.zeros(300, np.float32)), np.zeros(300, np.float32)
        host = ort.OrtValue.ortvalue_from_numpy(result)
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(x)], [value], stream)
        ort.copy_tensors([value], [host], stream)
        core().device_trim(plugin_device())
        check(value.numpy(), x)

    def statistics(self) -> None:
        plugin.set_limit(0, 1 << 20)
        value = on_device(numbers(10))
        plugin.set_limit(0, None)
        if plugin.memory_stats()["device"]["InUse"] < 40:
            raise WrongResult(f"{plugin.memory_stats()} with {value}")
        plugin.trim()


class CpuNodes(Scenario):
    """Nodes of the CPU provider between clusters: ONNX Runtime copies to the host and back on its streams."""

    def create(self) -> None:
        self.session = session(with_cpu_nodes(TensorProto.FLOAT, rounds=2))

    def steps(self) -> Sequence[Step]:
        return [lambda rows=rows: self.run(rows) for rows in (3, 3, 7)]  # type: ignore[misc]

    def run(self, rows: int) -> None:
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        check(self.session.run(None, {"x": x})[0], np.tile(x, (8, 1)))


class Pressure(Scenario):
    """A device with 1 MiB: automatic graphs must free their slabs, and a Run that cannot fit must fail."""

    environment: ClassVar[Mapping[str, str]] = {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1M"}
    axes = (1, 0, 1)
    """Normalizations along different axes do not fuse."""

    def create(self) -> None:
        names = ["x", "a", "b", "y"]
        nodes = [helper.make_node("Softmax", [names[i]], [names[i + 1]], axis=self.axes[i]) for i in range(3)]
        shape: list[int | str] = ["rows", 256]
        source = model(nodes, {"x": shape}, {"y": shape})
        options: dict[str, Any] = {"arena.extend_strategy": 1}
        self.first, self.second = session(source, **options), session(source, **options)

    def steps(self) -> Sequence[Step]:
        first = [lambda: self.run(self.first, 156)] * 4
        return [*first, lambda: self.run(self.second, 190), self.too_large, lambda: self.run(self.first, 156)]

    def recover(self) -> None:
        plugin.trim()  # returns cached chunks to the driver; they would fragment the small memory

    def run(self, used: ort.InferenceSession, rows: int) -> None:
        x = numbers(rows * 256, rows).reshape(rows, 256)
        y = used.run(None, {"x": x})[0]
        for axis in self.axes:
            x = np.exp(x - x.max(axis, keepdims=True))
            x /= x.sum(axis, keepdims=True)
        check(y, x)

    def too_large(self) -> None:
        try:
            self.run(self.second, 500)
        except Exception as error:
            if "out of memory on emulated CUDA device 0" not in str(error):
                raise
        else:
            raise WrongResult("there was room")


class Profiled(Sum):
    """A profiled session. Events must name their nodes; a failure may only make events missing."""

    def steps(self) -> Sequence[Step]:
        return [self.profile]

    def create(self) -> None:
        pass  # `profile` creates the session, because profiling ends once per session

    def profile(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.session = profiled_session(add_and_double(), Path(folder))
            try:
                for seed in range(4):  # the last Runs replay a graph
                    self.run(8, seed)
            finally:
                profile = Profile(self.session.end_profiling())
                del self.session
        for event in profile.kernels:
            if not {"Trilu", "Add"} & set(event.args["op_types"]):
                raise WrongResult(f"{event.name}: {event.args}")


class Registration(Plain):
    """Registration and unregistration of the library as part of the scenario."""

    is_registered = False

    def create(self) -> None:
        plugin.register(emulate=True)
        super().create()

    def close(self) -> None:
        super().close()
        plugin.unregister()


class FirstUse(Registration):
    """The first use in a process, which starts the emulator and opens the device."""

    fresh_process = True


class OwnStream(Sum):
    """Runs on the application's stream, with its arrays bound by the CUDA array interface."""

    def prepare(self) -> None:
        device = Device.emulated()
        self.stream = device.stream()
        self.arrays = {name: device.upload(array) for name, array in self.feed(32, 0).items()}
        self.output = device.empty(32, np.float32)

    def create(self) -> None:
        handle = int(ffi.cast("uintptr_t", self.stream.handle))
        self.session = session(add_and_double(), user_compute_stream=handle)

    def steps(self) -> Sequence[Step]:
        return [self.arrays_in_place] * 5

    def arrays_in_place(self) -> None:
        binding = self.session.io_binding()
        for name, array in self.arrays.items():
            plugin.bind_input(binding, name, array)
        plugin.bind_output(binding, "c", self.output)
        self.session.run_with_iobinding(binding)
        feed = self.feed(32, 0)
        check(binding.get_outputs()[0].numpy(), 2 * (feed["a"] + feed["b"]))

    def close(self) -> None:
        self.__dict__.pop("session", None)
        gc.collect()

    def finish(self) -> None:
        for give_up in (*(array.free for array in (*self.arrays.values(), self.output)), self.stream.destroy):
            with suppress(CudaError):  # a lost device returns an error, but releases the resource
                give_up()
        self.__dict__.clear()


class Imports(Scenario):
    """Imports of memory and of a semaphore, for which a stream waits. This process is the exporter, too."""

    def prepare(self) -> None:
        self.file, self.timeline = SharedFile(4096), Timeline()

    def create(self) -> None:
        self.interop = Interop()
        self.stream = self.interop.stream()

    def steps(self) -> Sequence[Step]:
        return [self.turn] * 3

    def turn(self) -> None:
        interop, turn, values = self.interop, self.timeline.value + 1, numbers(32, self.timeline.value)
        with ExitStack() as releases:
            memory = interop.memory(self.file, 4096)
            releases.callback(interop.release_memory, memory)
            semaphore = interop.semaphore(self.timeline)
            releases.callback(interop.release_semaphore, semaphore)
            tensor = interop.tensor(memory, [32], 128)
            releases.callback(api().ReleaseValue, tensor)
            releases.callback(self.timeline.signal, turn + 1)  # so that the stream ends its wait if a check fails
            interop.wait(semaphore, self.stream, turn)
            self.file.array(np.float32, 128, 32)[:] = values
            self.timeline.signal(turn)
            check(interop.download(tensor, 32, self.stream), values)
            interop.signal(semaphore, self.stream, turn + 1)

    def alive(self) -> dict[str, int]:
        interop, file = Interop(), SharedFile(4096)
        with suppress(OrtError):  # the device may be lost
            interop.release_memory(interop.memory(file, 4096))  # also retries releases that failed earlier
        interop.close()
        file.close()
        del file
        gc.collect()
        return {"descriptors": len(descriptors()), "mappings": mappings()}

    def close(self) -> None:
        if stream := self.__dict__.pop("stream", None):
            api().ReleaseSyncStream(stream)
        if interop := self.__dict__.pop("interop", None):
            interop.close()

    def finish(self) -> None:
        self.file.close()
        self.timeline.close()
        self.__dict__.clear()


class Processes(Scenario):
    """Exports of a tensor and an event, and imports of those of another process."""

    EXPORTER = """if True:
        import pickle, sys
        import numpy as np
        from ort_cuda_plugin import ipc
        from ort_cuda_plugin.abi.device import Device
        array, event = Device.emulated().upload(np.arange(32, dtype=np.float32)), ipc.Event()
        event.record()
        event.synchronize()
        print(pickle.dumps([ipc.get_handle(array), event.handle()]).hex(), flush=True)
        sys.stdin.read()
    """
    handles: ClassVar[tuple[ipc.MemoryHandle, ipc.EventHandle] | None] = None

    def prepare(self) -> None:
        if type(self).handles is None:
            command = [sys.executable, "-c", self.EXPORTER]
            environment = os.environ | {"ORT_CUDA_PLUGIN_EMULATE": "1"}
            pipe = subprocess.PIPE
            exporter = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            atexit.register(exporter.communicate)
            assert exporter.stdout is not None
            type(self).handles = tuple(pickle.loads(bytes.fromhex(exporter.stdout.readline().decode())))

    def create(self) -> None:
        pass

    def steps(self) -> Sequence[Step]:
        return [self.share] * 3

    def share(self) -> None:
        assert self.handles is not None
        with ExitStack() as releases:
            value = on_device(numbers(32, 1))
            ipc.get_handle(value)
            own = releases.enter_context(ipc.Event())
            own.handle()
            own.record()
            event = releases.enter_context(ipc.open_event(self.handles[1]))
            event.wait()
            event.synchronize()
            own.synchronize()
            tensor = releases.enter_context(ipc.open_handle(self.handles[0]))
            check(tensor.ortvalue().numpy(), np.arange(32, dtype=np.float32))

    def alive(self) -> dict[str, int]:
        gc.collect()
        return {"mappings": mappings()}


class Library(Scenario):
    """GEMMs of the cuBLASLt stand-in, in automatic CUDA graphs."""

    name, number = "cublaslt", 0
    fake: ClassVar[Any] = None

    def prepare(self) -> None:
        if type(self).fake is None:
            from c_programs import fake_library
            from library_scenarios import use

            with tempfile.TemporaryDirectory() as folder:  # a loaded library no longer needs its file
                type(self).fake = use(self.name, self.number, str(fake_library(self.name, Path(folder))))
            self.configure()
        # Forget refusals that earlier faults caused. Otherwise, the plugin would not call the library again.
        for opened in open_device._open.values():
            vars(opened)["refusals"] = Refusals()

    def configure(self) -> None:
        copy = int(ffi.cast("uintptr_t", core().driver_emulator().MemcpyDtoDAsync))
        ctypes.c_void_p.in_dll(self.fake, "fake_copy").value = copy

    def alive(self) -> dict[str, int]:
        names = ("fake_handles", "fake_descriptors")
        return {name: ctypes.c_int64.in_dll(self.fake, name).value for name in names} if self.fake else {}

    def create(self) -> None:
        nodes = [helper.make_node("MatMul", ["x", "one"], ["p"]), helper.make_node("Mul", ["p", "x"], ["y"])]
        self.session = session(model(nodes, {"x": [8, 8], "one": [8, 8]}, {"y": [8, 8]}))
        self.kept: list[object] = []

    def steps(self) -> Sequence[Step]:
        return [lambda seed=seed: self.run(seed) for seed in range(6)]  # type: ignore[misc]

    def run(self, seed: int) -> None:
        x = numbers(64, seed).reshape(8, 8)
        inputs = {"x": on_device(x), "one": on_device(np.eye(8, dtype=np.float32))}
        outputs = self.session.run_with_ort_values(None, inputs)
        check(outputs[0].numpy(), x**2)
        self.kept = [inputs, outputs]


class Convolutions(Library):
    """Convolutions with epilogues of the cuDNN stand-in. It computes at once, so streams must be inline."""

    environment: ClassVar[Mapping[str, str]] = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "inline"}
    name, number = "cudnn", 1
    fake: ClassVar[Any] = None

    def configure(self) -> None:
        pass

    def create(self) -> None:
        nodes = [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[1, 1]),
            helper.make_node("Add", ["c", "x"], ["s"]),
            helper.make_node("Relu", ["s"], ["y"]),
        ]
        shape: list[int | str] = ["n", 2, 3, 3]
        self.session = session(model(nodes, {"x": shape, "w": [2, 2, 1, 1], "b": [2]}, {"y": shape}))

    def steps(self) -> Sequence[Step]:
        return [lambda images=images: self.convolve(images) for images in (1, 1, 2)]  # type: ignore[misc]

    def convolve(self, images: int) -> None:
        x, w = numbers(18 * images, images).reshape(images, 2, 3, 3), numbers(4, 9).reshape(2, 2, 1, 1)
        bias = numbers(2, 8)
        sums = np.einsum("nchw,dc->ndhw", x, w[:, :, 0, 0]) + bias.reshape(-1, 1, 1) + x
        check(self.session.run(None, {"x": x, "w": w, "b": bias})[0], np.maximum(sums, 0))


class ControlFlow(Scenario):
    """A Loop whose end depends on computed values, and a Scan along the last axis."""

    MODEL = """<ir_version: 9, opset_import: ["" : 18]> m (float[n, 4] x, int64 most)
        => (float[s, n, 4] each, float[4, n] sums) {
          yes = Constant<value = bool {1}>()
          last, each = Loop(most, yes, x) <body = step (int64 i, bool on, float[n, 4] state)
            => (bool still, float[n, 4] next, float[n, 4] out) { next = Add(state, state)  sum = ReduceMax(next)
              limit = Constant<value_float = 10.0>()  still = Less(sum, limit)  out = Neg(next) }>
          axis = Constant<value_ints = [1]>()  total = ReduceSum<keepdims = 0>(x, axis)  zeros = Sub(total, total)
          end, sums = Scan<num_scan_inputs = 1, scan_input_axes = [1], body = row (float[n] a, float[n] b)
            => (float[n] c, float[n] d) { c = Add(a, b)  d = Identity(c) }>(zeros, x) }"""

    def create(self) -> None:
        self.session = session(parser.parse_model(self.MODEL).SerializeToString(), automatic_cuda_graphs=0)

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(3), lambda: self.run(5)]

    def run(self, rows: int) -> None:
        x = np.abs(numbers(4 * rows).reshape(rows, 4)) + np.float32(0.5)
        each, sums = self.session.run(None, {"x": x, "most": np.array(3)})
        check(sums, np.cumsum(x, axis=1).T)
        states = [x * 2**k for k in (1, 2, 3)]
        end = next((k for k, state in enumerate(states) if state.max() >= 10), 2)
        check(each, -np.array(states[: end + 1]))


class DeviceLoops(Scenario):
    """A Loop whose condition the device evaluates, and a Scan: nodes of CUDA graphs from the third Run on."""

    MODEL = """<ir_version: 9, opset_import: ["" : 18]> m (float[n, 4] x, float bound)
        => (float[n, 4] last, float[n] end)
        { most = Constant<value_int = 9>()
          last = Loop(most, , x) <body = step (int64 i, bool on, float[n, 4] state) => (bool still, float[n, 4] next)
            { next = Add(state, x)  top = ReduceMax<keepdims = 0>(next)  still = Less(top, bound) }>
          axis = Constant<value_ints = [1]>()  total = ReduceSum<keepdims = 0>(x, axis)  zeros = Sub(total, total)
          end = Scan<num_scan_inputs = 1, scan_input_axes = [1], body = row (float[n] a, float[n] b) => (float[n] c)
            { c = Add(a, b) }>(zeros, x) }"""

    def create(self) -> None:
        self.session = session(parser.parse_model(self.MODEL).SerializeToString(), optimized=False)
        self.kept: list[object] = []

    def steps(self) -> Sequence[Step]:
        return [lambda seed=seed: self.run(seed) for seed in range(5)]  # type: ignore[misc]

    def run(self, seed: int) -> None:
        x = np.abs(numbers(12, seed).reshape(3, 4)) + np.float32(0.5)
        steps = seed % 3 + 1
        bound = np.array(x.max() * (steps + 0.5), np.float32)
        inputs = {"x": on_device(x), "bound": on_device(bound)}
        outputs = self.session.run_with_ort_values(None, inputs)
        check(outputs[0].numpy(), x * (steps + 1))
        check(outputs[1].numpy(), x.sum(axis=1))
        self.kept = [inputs, outputs]  # keeps this memory in use, so that the next Run gets other addresses


class Search(Scenario):
    """A GreedySearch, whose states are allocated and freed in each iteration."""

    def prepare(self) -> None:
        decoder, weights = searches.small_decoder()
        self.source = searches.search_model(
            "GreedySearch", {"input_ids": self.prompt(2), "max_length": np.array([7], np.int32)}, ["sequences"],
            {"decoder": decoder}, weights, outer=False, constant=["max_length"],
            eos_token_id=searches.VOCABULARY, pad_token_id=0,
        )  # fmt: skip
        on_cpu = ort.InferenceSession(self.source, providers=["CPUExecutionProvider"])
        self.expected = {rows: on_cpu.run(None, {"input_ids": self.prompt(rows)})[0] for rows in (2, 3)}

    def create(self) -> None:
        self.session = session(self.source, automatic_cuda_graphs=0)

    def close(self) -> None:
        self.__dict__.pop("session", None)
        gc.collect()

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(2), lambda: self.run(3)]

    def run(self, rows: int) -> None:
        check(self.session.run(None, {"input_ids": self.prompt(rows)})[0], self.expected[rows])

    @staticmethod
    def prompt(rows: int) -> Array:
        return np.arange(4 * rows, dtype=np.int32).reshape(rows, 4) % 9 + 1


class Devices(Scenario):
    """A session on two devices, with Runs of two shapes: the second device reads x, and computes an output."""

    environment: ClassVar[Mapping[str, str]] = {"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}

    def create(self) -> None:
        nodes = [
            helper.make_node("Softmax", ["x"], ["p"], axis=1),
            helper.make_node("Exp", ["p"], ["q"]),
            helper.make_node("Mul", ["q", "x"], ["y"]),
        ]
        shape: list[int | str] = ["n", 16]
        source = model(nodes, {"x": shape}, {"p": shape, "y": shape})
        self.session = session(source, optimized=False, device_ids="0,1", device_of="p:0,q:1,y:1")

    def steps(self) -> Sequence[Step]:
        return [lambda: self.run(2), lambda: self.run(3), lambda: self.run(2)]

    def run(self, rows: int) -> None:
        x = numbers(16 * rows).reshape(rows, 16)
        exps = np.exp(x)
        p = exps / exps.sum(1, keepdims=True)
        for value, right in zip(self.session.run(None, {"x": x}), (p, np.exp(p) * x), strict=True):
            check(value, right)


def plugin_devices() -> list[Any]:
    """Return the ``ocp_device *`` of each emulated device."""
    return [plugin_device(ordinal) for ordinal in range(int(os.environ.get("ORT_CUDA_PLUGIN_EMULATE_DEVICES", "1")))]


def plugin_device(ordinal: int = 0) -> Any:
    """Return the ``ocp_device *`` of an emulated device."""
    error = ffi.new("ocp_error *")
    device = core().device_open(1, ordinal, error)
    assert device != ffi.NULL, ffi.string(error.text)
    return device


SCENARIOS: dict[str, type[Scenario]] = {
    "plain": Plain,
    "bound": Bound,
    "read-back": ReadBack,
    "graphs": Graphs,
    "captured": Captured,
    "mempool": Pooled,
    "threads": Threads,
    "weights": Weights,
    "computed-weights": ComputedWeights,
    "state": State,
    "values": Values,
    "cpu-nodes": CpuNodes,
    "control-flow": ControlFlow,
    "device-loops": DeviceLoops,
    "search": Search,
    "pressure": Pressure,
    "profiled": Profiled,
    "registration": Registration,
    "own-stream": OwnStream,
    "imports": Imports,
    "processes": Processes,
    "library": Library,
    "convolutions": Convolutions,
    "first-use": FirstUse,
    "called": Called,
    "devices": Devices,
    "streamed": Streamed,
}
