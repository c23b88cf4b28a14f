"""Copies from and to the device that ONNX Runtime makes outside of the plugin's nodes: a function for each code path.

``python copy_paths.py SEED ROUNDS [VARIANT]`` calls each function ROUNDS times, and prints as JSON how often each gave
wrong results. Tests start it with adversarial streams, with which a missing wait between copies gives wrong results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper, parser

import ort_cuda_plugin as plugin

SIZE = 1000
WEIGHTS = np.arange(SIZE, dtype=np.float32)

#: Provider options by variant. "parallel" runs the nodes of a Run on several threads, "one-stream" shares one stream
#: among all threads, and "default-stream" uses the application's default stream.
VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "parallel": {},
    "one-stream": {"use_ep_level_unified_stream": "1"},
    "default-stream": {"user_compute_stream": "0", "has_user_compute_stream": "1"},
    "no-graphs": {"automatic_cuda_graphs": "0"},
    "mempool": {"arena.use_cuda_mempool": "1"},
}
variant = "plain"

Array = np.ndarray
#: Actual and expected results.
Result = tuple[list[Array], list[Array]]
Path = Callable[[Array], Result]
PATHS: dict[str, Path] = {}


def path(function: Path) -> Path:
    """Register a function of this module. It gets new random data in each round."""
    PATHS[function.__name__] = function
    return function


@cache
def session(graph: str) -> ort.InferenceSession:
    """Return a session of a graph in ONNX's text format. If the graph reads ``w``, `WEIGHTS` are its initializer."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> copies {graph}')
    if "w" in {name for node in model.graph.node for name in node.input} | {v.name for v in model.graph.output}:
        model.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3  # hides warnings about nodes on the CPU, which are intended
    options.intra_op_num_threads = 1
    if variant == "parallel":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 2
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    provider_options = VARIANTS[variant]
    return plugin.session(
        model.SerializeToString(), emulate=True, sess_options=options, provider_options=provider_options
    )


@cache
def ep_devices() -> list[ort.OrtEpDevice]:
    """Return the emulated devices. Sessions run on the first one."""
    return [device for device in plugin.register(emulate=True) if device.ep_metadata["emulated"] == "1"]


def vendor() -> int:
    return int(ep_devices()[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id)


def on_device(array: Array, ordinal: int = 0) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", ordinal, vendor())


def on_host(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array.copy())


def without_waiting() -> ort.RunOptions:
    """Return run options with which a Run returns before its device work has ended."""
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


DOUBLE = "(float[n] x) => (float[n] y) { y = Add(x, x) }"
HANDED_THROUGH = "(float[n] x) => (float[n] x, float[n] y) { y = Add(x, x) }"
#: A graph with enough launches that work of different streams can interleave.
CHAIN = "(float[n] x) => (float[n] y) { a = Add(x, x) b = Mul(a, x) c = Add(b, a) y = Add(c, x) }"


def chain(x: Array) -> Array:
    a = x + x
    result: Array = (a * x + a) + x
    return result


@path
def input_fetched_alone(x: Array) -> Result:
    return session(HANDED_THROUGH).run(["x"], {"x": x}), [x]


@path
def input_fetched_with_an_output(x: Array) -> Result:
    return session(HANDED_THROUGH).run(["y", "x"], {"x": x}), [x + x, x]


@path
def inputs_fetched_crosswise(x: Array) -> Result:
    made = session("(float[n] x, float[n] z) => (float[n] z, float[n] x, float[n] y) { y = Add(x, z) }")
    return made.run(["x", "z"], {"x": x, "z": x + 1}), [x, x + 1]


@path
def one_input_as_several_outputs(x: Array) -> Result:
    made = session(
        "(float[n] x) => (float[n] p, float[n] q, float[n] y) { p = Identity(x) q = Identity(x) y = Add(x, x) }"
    )
    return made.run(["p", "q"], {"x": x}), [x, x]


@path
def initializer_fetched(x: Array) -> Result:
    made = session("(float[n] x) => (float[1000] w, float[n] y) { y = Add(x, w) }")
    return made.run(["w"], {"x": x}) + made.run(["y"], {"x": x}), [WEIGHTS, x + WEIGHTS]


@path
def input_for_both_providers(x: Array) -> Result:
    made = session(
        """(float[n] x) => (float[n] y, float[n] z)
        { y = Add(x, x) text = Cast<to = 8>(x) z = Cast<to = 1>(text) }"""
    )
    return made.run(["z"], {"x": x}) + made.run(["z", "y"], {"x": x}), [x, x, x + x]


@path
def up_and_down_between_cpu_nodes(x: Array) -> Result:
    made = session(
        """(float[n] x) => (float[n] y, float[n] v, float[n] z)
        { text = Cast<to = 8>(x) v = Cast<to = 1>(text) y = Add(v, v)
          again = Cast<to = 8>(v) z = Cast<to = 1>(again) }"""
    )
    return made.run(["v", "z"], {"x": x}) + made.run(None, {"x": x}), [x, x, x + x, x, x]


@path
def sequence_of_inputs(x: Array) -> Result:
    made = session(
        """(float[n] x) => (float[n] first, float[n] second, float[n] y)
        { a = Add(x, x) s = SequenceConstruct(x, a) i = Constant<value_int = 0>() j = Constant<value_int = 1>()
          first = SequenceAt(s, i) second = SequenceAt(s, j) y = Add(second, first) }"""
    )
    return made.run(["first"], {"x": x}) + made.run(None, {"x": x}), [x, x, x + x, x + x + x]


IF = """(float[n] x, bool c) => (float[n] y, float[n] z)
    {{ a = Add(x, x)
       z = If(c) <then_branch = yes () => (float[n] t) {{ {yes} }}, else_branch = no () => (float[n] e) {{ {no} }}>
       y = Add(z, a) }}"""


def both_branches(yes: str, no: str, x: Array, taken: Array, other: Array) -> Result:
    made = session(IF.format(yes=yes, no=no))
    got, expected = [], []
    for condition, z in ((True, taken), (False, other)):
        feeds = {"x": x, "c": np.array(condition)}
        got += made.run(["z"], feeds) + made.run(None, feeds)
        expected += [z, z + (x + x), z]
    return got, expected


@path
def if_hands_through(x: Array) -> Result:
    return both_branches("t = Identity(x)", "e = Identity(a)", x, x, x + x)


@path
def if_computes(x: Array) -> Result:
    return both_branches("t = Add(x, a)", "u = Mul(a, x) e = Add(u, a)", x, x + (x + x), (x + x) * x + (x + x))


@path
def if_with_cpu_nodes(x: Array) -> Result:
    text = "s = Cast<to = 8>(a) f = Cast<to = 1>(s) t = Add(f, x)"
    return both_branches(text, "s = Cast<to = 8>(x) e = Cast<to = 1>(s)", x, (x + x) + x, x)


LOOP = """(float[n] x, int64 trips) => (float[n] y, float[n] last, float[k, n] all)
    {{ a = Add(x, x) go = Constant<value = bool {{1}}>()
       last, all = Loop(trips, go, a)
         <body = b (int64 i, bool on, float[n] carried) => (bool still, float[n] next, float[n] scanned) {{ {body} }}>
       y = Add(last, x) }}"""


@path
def loop_hands_through(x: Array) -> Result:
    made = session(LOOP.format(body="still = Identity(on) next = Identity(carried) scanned = Identity(x)"))
    got, expected = [], []
    for trips in (1, 3):
        feeds = {"x": x, "trips": np.array(trips)}
        got += made.run(["last", "all"], feeds) + made.run(["y"], feeds)
        expected += [x + x, np.tile(x, (trips, 1)), x + x + x]
    return got, expected


@path
def loop_computes(x: Array) -> Result:
    made = session(LOOP.format(body="still = Identity(on) next = Add(carried, x) scanned = Mul(next, x)"))
    got, expected = [], []
    for trips in (1, 3):
        carried, scanned = x + x, []
        for _ in range(trips):
            carried = carried + x
            scanned.append(carried * x)
        got += made.run(None, {"x": x, "trips": np.array(trips)})
        expected += [carried + x, carried, np.stack(scanned)]
    return got, expected


@path
def scan_hands_through(x: Array) -> Result:
    made = session(
        """(float[m, n] x) => (float[m, n] y, float[n] last)
        { a = Add(x, x) axis = Constant<value_ints = [0]>() row = ReduceSum<keepdims = 0>(a, axis)
          last, y = Scan<num_scan_inputs = 1, body = b (float[n] state, float[n] element)
            => (float[n] next, float[n] out) { next = Add(state, element) out = Identity(element) }>(row, a) }"""
    )
    x = x.reshape(4, -1)
    a = x + x
    state = a.sum(0)
    for element in a:
        state = state + element
    y, last = made.run(None, {"x": x})
    return [y, last], [a, state]


# ---- values of the application ----


@path
def value_made_and_read(x: Array) -> Result:
    value = on_device(x)
    first = value.numpy()
    value.update_inplace(x + 1)
    return [first, value.numpy()], [x, x + 1]


@path
def tensors_copied_with_and_without_a_stream(x: Array) -> Result:
    """Copies with a stream return before they are done. Copies without one must wait for earlier work."""
    stream = ep_devices()[0].create_sync_stream()
    middle, other, back = on_device(x - 1), on_device(x - 2), on_host(x - 3)
    ort.copy_tensors([on_host(x)], [middle], stream)
    ort.copy_tensors([middle], [other])
    ort.copy_tensors([other], [back], stream)
    ort.copy_tensors([on_host(x + 1)], [middle])
    ort.copy_tensors([middle], [other], stream)
    return [back.numpy().copy(), middle.numpy(), other.numpy()], [x, x + 1, x + 1]


@path
def tensors_copied_between_devices(x: Array) -> Result:
    """Copy between two devices with a stream of either device, and without a stream."""
    streams = [device.create_sync_stream() for device in ep_devices()]
    got = []
    for stream in (*streams, None):
        for across, down in ((None, stream), (stream, None)):
            first, second, back = on_device(x - 1), on_device(x - 2, len(streams) - 1), on_host(x - 3)
            ort.copy_tensors([on_host(x)], [first], stream)
            ort.copy_tensors([first], [second], across)
            ort.copy_tensors([second], [back], down)
            got += [second.numpy(), back.numpy().copy()]
    return got, [x] * len(got)


@path
def inputs_bound_from_host(x: Array) -> Result:
    made = session(HANDED_THROUGH)
    binding = made.io_binding()
    got = []
    for step in range(3):
        binding.bind_cpu_input("x", x + step)
        binding.bind_output("x")
        binding.bind_output("y")
        made.run_with_iobinding(binding)
        got += binding.copy_outputs_to_cpu()
    return got, [each for step in range(3) for each in (x + step, (x + step) + (x + step))]


@path
def outputs_copied_to_the_host(x: Array) -> Result:
    made = session(HANDED_THROUGH)
    device = ort.OrtDevice.make("gpu", 0, vendor())
    binding = made.io_binding()
    binding.bind_ortvalue_input("x", on_device(x))
    for name in ("x", "y"):
        binding._iobinding.bind_output(name, device._get_c_device())
    made.run_with_iobinding(binding)
    bound = [value.numpy() for value in binding.get_outputs()]
    return bound + binding.copy_outputs_to_cpu(), [x, x + x, x, x + x]


@path
def outputs_of_a_run_that_was_not_waited_for(x: Array) -> Result:
    made = session(CHAIN)
    got: list[Array] = []
    for copy_outputs in (False, True):
        source, result = on_device(x), on_device(np.zeros_like(x))
        binding = made.io_binding()
        binding.bind_ortvalue_input("x", source)
        binding.bind_ortvalue_output("y", result)
        made.run_with_iobinding(binding, without_waiting())
        got += binding.copy_outputs_to_cpu() if copy_outputs else [result.numpy()]
    return got, [chain(x), chain(x)]


@path
def input_changed_after_a_run_that_was_not_waited_for(x: Array) -> Result:
    made = session(CHAIN)
    source, result = on_device(x), on_device(np.zeros_like(x))
    binding = made.io_binding()
    binding.bind_ortvalue_input("x", source)
    binding.bind_ortvalue_output("y", result)
    made.run_with_iobinding(binding, without_waiting())
    source.update_inplace(x + 1)
    first = result.numpy()
    made.run_with_iobinding(binding, without_waiting())
    ort.copy_tensors([on_host(x + 2)], [source])
    return [first, result.numpy()], [chain(x), chain(x + 1)]


@path
def inputs_bound_after_a_run_that_was_not_waited_for(x: Array) -> Result:
    """Bind new inputs while earlier Runs are unfinished: a new input must not get the memory that a Run still reads."""
    made, expected = session(CHAIN), []
    results = [on_device(np.zeros_like(x)) for _ in range(3)]
    for step, result in enumerate(results):
        binding = made.io_binding()
        binding.bind_cpu_input("x", x + step)
        binding.bind_ortvalue_output("y", result)
        made.run_with_iobinding(binding, without_waiting())
        expected.append(chain(x + step))
    return [result.numpy() for result in results], expected


@path
def fetches_of_runs_that_are_not_waited_for(x: Array) -> Result:
    made = session(HANDED_THROUGH)
    got = made.run(["x"], {"x": x}, without_waiting()) + made.run(None, {"x": x + 1}, without_waiting())
    return got, [x, x + 1, (x + 1) + (x + 1)]


# ---- threads ----


@cache
def other_threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    return ThreadPoolExecutor(1), ThreadPoolExecutor(1)


def produced(x: Array, options: ort.RunOptions | None) -> ort.OrtValue:
    made = session(CHAIN)
    binding = made.io_binding()
    binding.bind_ortvalue_input("x", on_device(x))
    binding._iobinding.bind_output("y", ort.OrtDevice.make("gpu", 0, vendor())._get_c_device())
    made.run_with_iobinding(binding, options)
    return binding.get_outputs()[0]


@path
def value_of_one_thread_consumed_by_another(x: Array) -> Result:
    first, second = other_threads()
    value = first.submit(produced, x, None).result()

    def consume() -> list[Array]:
        made = session(HANDED_THROUGH)
        binding = made.io_binding()
        binding.bind_ortvalue_input("x", value)
        binding.bind_output("x")
        binding.bind_output("y")
        made.run_with_iobinding(binding)
        results: list[Array] = binding.copy_outputs_to_cpu()
        return results

    return second.submit(consume).result(), [chain(x), chain(x) + chain(x)]


@path
def value_of_a_run_that_was_not_waited_for_read_by_another_thread(x: Array) -> Result:
    first, second = other_threads()
    value = first.submit(produced, x, without_waiting()).result()
    return [second.submit(value.numpy).result()], [chain(x)]


@path
def value_copied_on_a_stream_read_by_another_thread(x: Array) -> Result:
    first, second = other_threads()
    stream = ep_devices()[0].create_sync_stream()
    value = on_device(np.zeros_like(x))
    first.submit(ort.copy_tensors, [on_host(x)], [value], stream).result()
    return [second.submit(value.numpy).result()], [x]


@path
def value_copied_while_another_thread_runs(x: Array) -> Result:
    """Copy on one thread while a session runs on another thread, without waits between them."""
    first, second = other_threads()

    def runs() -> list[Array]:
        return [session(CHAIN).run(None, {"x": x + step})[0] for step in range(5)]

    def copies() -> list[Array]:
        return [on_device(x + step).numpy() for step in range(5)]

    running, copying = first.submit(runs), second.submit(copies)
    return running.result() + copying.result(), [chain(x + i) for i in range(5)] + [x + i for i in range(5)]


def wrong_results(seed: int, rounds: int) -> dict[str, int]:
    """Call each registered function ``rounds`` times; return how often each gave wrong results, without zeros."""
    rng = np.random.default_rng(seed)
    wrong: dict[str, int] = {}
    for name, function in PATHS.items():
        for _ in range(rounds):
            got, expected = function(rng.integers(-100, 100, SIZE).astype(np.float32))
            same = len(got) == len(expected) and all(map(np.array_equal, got, expected))
            wrong[name] = wrong.get(name, 0) + (not same)
    return {name: count for name, count in wrong.items() if count}


def main(seed: str, rounds: str, chosen: str = "plain") -> None:
    global variant
    variant = chosen
    print(json.dumps(wrong_results(int(seed), int(rounds))))


if __name__ == "__main__":
    main(*sys.argv[1:])
