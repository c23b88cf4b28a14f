"""Test program for every supported version of ONNX Runtime: compares models with that version's CPU provider.

``main`` runs in a process of its own. Each model runs several times, because ONNX Runtime takes other code paths from
the second Run on; in two alternating sessions; and in threads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, parser

import copy_paths
import custom_operators
import ort_cuda_plugin as plugin
import searches
from device_models import with_cpu_nodes
from isolated import add_model
from ort_cuda_plugin import models
from ort_cuda_plugin.abi import host
from ort_cuda_plugin.custom import registry
from ort_cuda_plugin.ops.registry import CHANNELS_LAST_DOMAIN
from profiles import Profile, profiled_session

RUNS, SESSIONS, THREADS = 5, 2, 3

Arrays = dict[str, np.ndarray]


def counting(rows: int, columns: int = 4) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) - 5


@dataclass(frozen=True)
class Case:
    """A model, and a function that returns the inputs of the n-th Run."""

    model: bytes
    feeds: Callable[[int], Arrays]
    #: Operators of the main graph that must run on another provider; further operators may run there too.
    elsewhere: frozenset[str] = frozenset()
    outputs: list[str] | None = None
    tolerance: float = 0
    #: Options of the provider.
    options: dict[str, str] = field(default_factory=dict)
    #: Configuration entries of the session.
    entries: dict[str, str] = field(default_factory=dict)
    #: Operators that ONNX Runtime must convert to the channels-last domain; None: not checked.
    channels_last: frozenset[str] | None = None


def case(graph: str, *elsewhere: str, outputs: list[str] | None = None) -> Case:
    """Return the case of a graph with an input ``x`` [n, 4], and maybe a bool input ``c``."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]> version {graph}')
    conditional = any(value.name == "c" for value in model.graph.input)

    def feeds(n: int) -> Arrays:
        return {"x": counting(3 + n % 3)} | ({"c": np.array(n % 2 == 0)} if conditional else {})

    return Case(model.SerializeToString(), feeds, frozenset(elsewhere), outputs)


def in_layers(*elsewhere: str) -> Case:
    """Return a chain of nodes with layer annotations: "chosen" for Neg, "others" for the rest."""
    chosen = case(
        """(float[n, 4] x) => (float[n, 99] y) <float[4, 4] w =
        {1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0}>
        { shape = Constant<value_ints = [4, 99]>() large = ConstantOfShape<value = float[1] {2.0}>(shape)
          a = MatMul(x, w) b = Relu(a) c = Gemm(b, large) d = Neg(c) y = Add(d, c) }""",
        *elsewhere,
    )
    annotated = onnx.load_model_from_string(chosen.model)
    for node in annotated.graph.node:
        node.metadata_props.add(key="layer_ann", value="chosen" if node.op_type == "Neg" else "others")
    return replace(chosen, model=annotated.SerializeToString())


def add(dims: list[int | str]) -> Case:
    return Case(add_model(dims=dims), lambda n: {name: np.arange(8, dtype=np.float32) * n for name in "ab"})


def squeezenet() -> Case:
    model = models.with_noise_weights(onnx.load(models.find_model("light_squeezenet")))
    inputs = models.random_inputs(model)
    return Case(model.SerializeToString(), lambda n: inputs, tolerance=1e-4)


def channels_last() -> Case:
    """Return a model with a residual block, casts to strings, a pool with indices and an LSTM, of symbolic sizes."""
    graph = """version (float[n, 2, h, w] x, float[4, 2, 3, 3] w1, float[4, 4, 1, 1] w2, float[1, 12, 4] lw,
        float[1, 12, 3] lr) => (float[a, b, c, d] y, int64[n, 4, p, q] i) {
        c1 = Conv<pads = [1, 1, 1, 1]>(x, w1) r = Relu(c1) s1 = Add(r, c1)
        text = Cast<to = 8>(s1) back = Cast<to = 1>(text)
        c2 = Conv(back, w2) m, i = MaxPool<kernel_shape = [2, 2]>(c2) g = GlobalAveragePool(m)
        f = Flatten(g) zero = Constant<value_ints = [0]>() t = Unsqueeze(f, zero)
        y, last, cell = LSTM<hidden_size = 3>(t, lw, lr) }"""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {graph}')
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 2, 3, 3), "w2": (4, 4, 1, 1), "lw": (1, 12, 4), "lr": (1, 12, 3)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def feeds(n: int) -> Arrays:
        size = (1 + n % 2, 2, 5, 4 + n % 3)
        return {"x": np.random.default_rng(n).standard_normal(size, dtype=np.float32)} | weights

    return Case(
        model.SerializeToString(),
        feeds,
        frozenset({"Cast"}),
        tolerance=1e-5,
        options={"prefer_nhwc": "1"},
        channels_last=frozenset({"Conv", "MaxPool", "GlobalAveragePool"}),
    )


def greedy_search() -> Case:
    """Return a GreedySearch that ends only at its maximum length."""
    decoder, weights = searches.small_decoder()
    prompts = [np.random.default_rng(n).integers(0, 9, (1 + n % 2, 3 + n % 3)).astype(np.int32) for n in range(RUNS)]
    room = np.array([12], np.int32)
    model = searches.search_model(
        "GreedySearch", {"input_ids": prompts[0], "max_length": room}, ["sequences"], {"decoder": decoder}, weights,
        outer=False, constant=["max_length"], eos_token_id=searches.VOCABULARY, pad_token_id=0,
    )  # fmt: skip
    return Case(model, lambda n: {"input_ids": prompts[n]})


IN_THE_MIDDLE = """(float[n, 4] x, bool c) => (float[m, 4] y)
    {{ a = Add(x, x)  {nodes}  b = Mul(middle, middle) y = Concat<axis = 0>(b, a) }}"""

CASES: dict[str, Callable[[], Case]] = {
    "fixed shape": lambda: add([8]),
    "unknown shape": lambda: add(["n"]),
    "strings in the middle": lambda: Case(
        with_cpu_nodes(1, rounds=2), lambda n: {"x": counting(3 + n % 3)}, frozenset({"Cast"})
    ),
    "sequence in the middle": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""s = SequenceConstruct(a, x) m = ArgMax<axis = 1, keepdims = 0>(x) zero = Constant<value_int = 0>()
              last = Gather(m, zero) one = Constant<value_int = 1>() i = Min(last, one) middle = SequenceAt(s, i)"""
        ),
        "SequenceConstruct",
        "SequenceAt",
    ),
    "sequence within a cluster": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""s = SequenceConstruct(a, x) i = Constant<value_int = 1>() middle = SequenceAt(s, i)"""
        ),
    ),
    "If in the middle": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""middle = If(c) <then_branch = yes () => (float[p, 4] t) { t = Mul(a, x) },
              else_branch = no () => (float[q, 4] e) { s = Cast<to = 8>(a) e = Cast<to = 1>(s) }>"""
        ),
        "Cast",
    ),
    "Loop in the middle": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""trips = Constant<value_int = 3>() middle = Loop(trips, c, a)
              <body = b (int64 i, bool on, float[p, 4] carried) => (bool still, float[p, 4] next)
               { still = Identity(on) next = Add(carried, x) }>"""
        )
    ),
    "Scan in the middle": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""axis = Constant<value_ints = [0]>() sum = ReduceSum<keepdims = 0>(a, axis)
              last, middle = Scan<num_scan_inputs = 1, body = b (float[4] state, float[4] row)
                => (float[4] next, float[4] out) { next = Add(state, row) out = Identity(next) }>(sum, a)"""
        )
    ),
    "a sequence in a loop": lambda: case(
        """(float[n, 4] x, bool c) => (float[m, 4] y)
        { trips = Constant<value_int = 3>() empty = SequenceEmpty() s = Loop(trips, c, empty)
              <body = b (int64 i, bool on, seq(float[p, 4]) carried) => (bool on, seq(float[p, 4]) next)
               { t = Abs(x) u = Mul(t, x) v = Relu(u) w = Neg(v) next = SequenceInsert(carried, w) }>
          all = SequenceInsert(s, x) y = ConcatFromSequence<axis = 0>(all) }""",
        "Loop",
        "SequenceInsert",
    ),
    "a loop that ends by what it computes": lambda: case(
        """(float[n, 4] x) => (float[m, 4] y, float[k, m, 4] each)
        { trips = Constant<value_int = 1000>() on = Constant<value = bool {1}>() y, each = Loop(trips, on, x)
              <body = b (int64 i, bool on_, float[p, 4] carried) => (bool go, float[q, 4] next, float[q, 4] out)
               { square = Mul(x, x) next = Add(carried, square) s = ReduceMax<keepdims = 0>(next)
                 most = Constant<value_float = 50.0>() go = Less(s, most) out = Identity(next) }> }"""
    ),
    "an If in a Loop in a Scan": lambda: case(
        """(float[n, 4] x) => (float[4] last, float[4, n] y)
        { zero = Constant<value_ints = [0]>() sum = ReduceSum<keepdims = 0>(x, zero)
          last, y = Scan<num_scan_inputs = 1, scan_output_axes = [1], body = outer (float[4] state, float[4] row)
            => (float[4] next, float[4] out) {
              trips = Constant<value_int = 3>() on = Constant<value = bool {1}>()
              next = Loop(trips, on, state) <body = inner (int64 i, bool on_, float[4] c) => (bool on_, float[4] d) {
                s = ReduceSum<keepdims = 0>(c) most = Constant<value_float = 100.0>() large = Greater(s, most)
                d = If(large) <then_branch = yes () => (float[4] t)
                  { half = Constant<value_float = 0.5>() t = Mul(c, half) },
                  else_branch = no () => (float[4] e) { e = Add(c, row) }> }>
              out = Neg(next) }>(sum, x) }"""
    ),
    "If and Loop within a cluster": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""trips = Constant<value_int = 3>()
              b0 = If(c) <then_branch = yes () => (float[p, 4] t) <float[4] w = {1.0, 2.0, 3.0, 4.0}> { t = Mul(a, w) },
              else_branch = no () => (float[q, 4] e) { e = Neg(a) }>
              middle = Loop(trips, , b0) <body = b (int64 i, bool on, float[p, 4] carried)
               => (bool still, float[p, 4] next) { still = Identity(on) next = Add(carried, x) }>"""
        ),
    ),
    "another domain in the middle": lambda: case(
        IN_THE_MIDDLE.format(
            nodes="""k = Constant<value = float[4, 4] {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}>()
                     middle = com.microsoft.CDist<metric = "sqeuclidean">(a, k)"""
        ),
        "CDist",
    ),
    "a size that is computed": lambda: case(
        """(float[n, 4] x) => (float[p, q] y)
        { i = NonZero(x) t = Transpose<perm = [1, 0]>(i) v = GatherND(x, t)
          one = Constant<value_ints = [1, -1]>() y = Reshape(v, one) }"""
    ),
    "several outputs": lambda: case(
        """(float[n, 4] x) => (float[n, 4] y, float[n] s, int64[2] d)
        { y = Add(x, x) axis = Constant<value_ints = [1]>() s = ReduceSum<keepdims = 0>(x, axis) d = Shape(x) }"""
    ),
    "an input that is an output": lambda: case("(float[n, 4] x) => (float[n, 4] x, float[n, 4] y) { y = Add(x, x) }"),
    "nothing but an input fetched": lambda: case(
        "(float[n, 4] x) => (float[n, 4] x, float[n, 4] y) { y = Add(x, x) }", outputs=["x"]
    ),
    "kernels of single nodes": lambda: replace(
        case(
            """(float[n, 4] x) => (float[n, 2, 2] y) <int64[3] to = {0, 2, 2}, float[4, 4] w =
            {1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0}>
            { a = MatMul(x, w) b = Relu(a) y = Reshape(b, to) }"""
        ),
        options={"single_nodes": "1"},
    ),
    "a model that rules cut": lambda: replace(
        in_layers("Neg"),
        entries={"session.layer_assignment_settings": "gpu:0(others); cpu(=chosen)"},
    ),
    "a model that a budget cuts": lambda: replace(
        in_layers("Gemm", "Neg"),
        entries={"session.resource_cuda_partitioning_settings": "1,"},  # 1 KB: MatMul fits, the weight of Gemm does not
    ),
    "channels last, with a CPU node in the middle and a recurrent layer": channels_last,
    "a search for tokens": greedy_search,
    "light_squeezenet": squeezenet,
    "light_squeezenet, channels last": lambda: replace(squeezenet(), options={"prefer_nhwc": "1"}),
}


def quietly(entries: dict[str, str] | None = None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    options.log_severity_level = 3  # hides warnings about nodes on other providers, which are intended
    options.intra_op_num_threads = 1
    return options


def check(chosen: Case, session: ort.InferenceSession, n: int, expected: list[np.ndarray], bound: bool = False) -> None:
    feeds = chosen.feeds(n)
    if bound:
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name in chosen.outputs or [value.name for value in session.get_outputs()]:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        results = binding.copy_outputs_to_cpu()
    else:
        results = session.run(chosen.outputs, feeds)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=chosen.tolerance, atol=chosen.tolerance)


def in_threads(work: Callable[[int], None]) -> None:
    """Call ``work`` in `THREADS` threads at once, with the thread's number."""
    start = Barrier(THREADS)

    def begin(thread: int) -> None:
        start.wait()
        work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


def run(chosen: Case) -> None:
    """Check a case in two alternating sessions, without and with IO binding, and then in threads that share them."""
    cpu = ort.InferenceSession(chosen.model, quietly(), providers=["CPUExecutionProvider"])
    expected = [cpu.run(chosen.outputs, chosen.feeds(n)) for n in range(RUNS)]
    sessions = [
        plugin.session(
            chosen.model, emulate=True, sess_options=quietly(chosen.entries), provider_options=chosen.options
        )
        for _ in range(SESSIONS)
    ]
    before = plugin.counters()["runs"]
    for bound in (False, True):
        for n in range(RUNS):
            for session in sessions:
                check(chosen, session, n, expected[n], bound)
    if chosen.outputs is None:
        assert plugin.counters()["runs"] > before
    placed = {
        node.op_type
        for part in sessions[0].get_provider_graph_assignment_info()
        if part.ep_name != plugin.get_ep_name()
        for node in part.get_nodes()
    }
    assert chosen.elsewhere <= placed, placed
    converted = {
        node.op_type
        for part in sessions[0].get_provider_graph_assignment_info()
        for node in part.get_nodes()
        if node.domain == CHANNELS_LAST_DOMAIN
    }
    assert chosen.channels_last in (None, converted)

    def work(thread: int) -> None:
        for n in range(RUNS):
            check(chosen, sessions[thread % SESSIONS], n, expected[n], bound=n % 2 == 1)

    in_threads(work)
    for session in sessions:
        session.set_ep_dynamic_options({"automatic_cuda_graphs": "0", "cuda_graph_cache_size": "2"})
    work(0)


def run_captured() -> None:
    """Check Runs that ONNX Runtime captures in CUDA graphs (enable_cuda_graph), in sessions and threads."""
    chosen = add([8])
    sessions = [
        plugin.session(chosen.model, emulate=True, sess_options=quietly(), provider_options={"enable_cuda_graph": "1"})
        for _ in range(SESSIONS)
    ]

    def work(thread: int) -> None:
        session = sessions[thread % SESSIONS]
        values = {name: copy_paths.on_device(np.zeros(8, np.float32)) for name in "abc"}
        binding = session.io_binding()
        for name in "ab":
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_ortvalue_output("c", values["c"])
        for n in range(RUNS):
            for name, array in chosen.feeds(n).items():
                values[name].update_inplace(array)
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(values["c"].numpy(), 2 * np.arange(8) * n)

    before = plugin.counters()["graph_captures"]
    work(0)
    assert plugin.counters()["graph_captures"] > before
    in_threads(work)  # each thread captures graphs of its own


def run_profiled() -> None:
    """Check that ONNX Runtime's profile of a session names the node of each launch."""
    chosen = add([8])
    with tempfile.TemporaryDirectory() as folder:
        session = profiled_session(chosen.model, Path(folder))
        for n in range(RUNS):
            session.run(None, chosen.feeds(n))
        kernels = Profile(session.end_profiling()).kernels
    assert [kernel.args["op_types"] for kernel in kernels] == [["Add"]] * RUNS


def run_custom() -> None:
    """Check a custom operator in a session that gets it from the provider's factory, and in one that registers the
    library as a custom-operator library.
    """
    built = custom_operators.model(
        [helper.make_node("Double", ["x"], ["y"], domain=custom_operators.DOMAIN)], {"x": ["n", 4]}, ["y"]
    )
    with custom_operators.kept_registry():
        registry.register(custom_operators.operator())
        by_name = ort.SessionOptions()
        by_name.register_custom_ops_library(plugin.get_library_path())
        sessions = [
            custom_operators.stock_session(built),
            ort.InferenceSession(built, by_name, providers=[plugin.get_ep_name()]),
        ]
    for session in sessions:
        assert session.get_outputs()[0].shape == ["n", 4]
        np.testing.assert_array_equal(session.run(None, {"x": counting(3)})[0], 2 * counting(3))


def main(version: str, *left_out: str) -> None:
    """Run all cases, except those ``left_out``; print the API version and the results as JSON. The current case is
    printed to stderr, so that it is known after a crash.
    """
    assert ort.__version__ == version, (ort.__version__, ort.__file__)
    done = []
    for name in [name for name in CASES if name not in left_out]:
        print(name, file=sys.stderr, flush=True)
        run(CASES[name]())
        done.append(name)
    run_captured()
    run_profiled()
    run_custom()
    print(json.dumps({"api": host.api_version(), "done": done, "wrong copies": copy_paths.wrong_results(0, 2)}))
    plugin.unregister()


if __name__ == "__main__":
    main(*sys.argv[1:])
