"""Overlapping inputs and outputs: each Run computes as if it read all inputs before it wrote any output."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from states import Arrays, Memory, StateModel, bound, run_bound, spread

MODELS = {
    "rolling window": StateModel(
        "float[2,40,32] s, float[2,1,32] x",
        "float[2,40,32] next_s",
        "one = Constant<value_ints=[1]>() end = Constant<value_ints=[9999]>() "
        "t = Slice(s, one, end, one) next_s = Concat<axis=1>(t, x)",
    ),
    "roll": StateModel(
        "float[40,32] s, float[40,32] x",
        "float[40,32] next_s",
        "zero = Constant<value_ints=[0]>() three = Constant<value_ints=[3]>() end = Constant<value_ints=[9999]>() "
        "a = Slice(s, three, end, zero) b = Slice(s, zero, three, zero) c = Concat<axis=0>(a, b) next_s = Add(c, x)",
    ),
    "shift with a pad": StateModel(
        "float[8,40] s",
        "float[8,40] next_s",
        "zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() last = Constant<value_ints=[-1]>() "
        "t = Slice(s, zero, last, one) pads = Constant<value_ints=[0,1,0,0]>() next_s = Pad(t, pads)",
    ),
    "transpose": StateModel(
        "float[48,48] s, float[48,48] x",
        "float[48,48] next_s",
        "t = Transpose<perm=[1,0]>(s) next_s = Add(t, x)",
    ),
    "reverse": StateModel(
        "float[70,16] s, float[70,16] x",
        "float[70,16] next_s",
        "m = Constant<value_ints=[-1]>() end = Constant<value_ints=[-9999]>() zero = Constant<value_ints=[0]>() "
        "t = Slice(s, m, end, zero, m) next_s = Add(t, x)",
    ),
    "first row added to all": StateModel(
        "float[40,32] s",
        "float[40,32] next_s",
        "zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() row = Slice(s, zero, one) "
        "next_s = Add(s, row)",
    ),
    "mean subtracted": StateModel(
        "float[40,32] s, float[40,32] x",
        "float[40,32] next_s",
        "axes = Constant<value_ints=[0]>() mean = ReduceMean(s, axes) t = Sub(x, mean) next_s = Add(t, s)",
    ),
    "normalized rows": StateModel(
        "float[6,1200] s, float[1200] x",
        "float[6,1200] next_s",
        "t = Softmax<axis=1>(s) next_s = Mul(t, x)",
    ),
    "cumulative sum": StateModel(
        "float[6,40] s", "float[6,40] next_s", "axis = Constant<value_int=1>() next_s = CumSum(s, axis)"
    ),
    "product with the state": StateModel(
        "float[48,48] s, float[48,48] x",
        "float[48,48] next_s",
        "scale = Constant<value_float=0.125>() t = MatMul(x, s) next_s = Mul(t, scale)",
    ),
    "outer product": StateModel(
        "float[32,40] s, float[32,1] k, float[1,40] v, float[1,32] q",
        "float[32,40] next_s, float[1,40] y",
        "decay = Constant<value_float=0.5>() a = Mul(s, decay) b = Mul(k, v) next_s = Add(a, b) y = MatMul(q, next_s)",
    ),
    "convolution with a cache": StateModel(
        "float[1,16,3] s, float[1,16,8] x, float[16,1,4] w",
        "float[1,16,3] next_s, float[1,16,8] y",
        "t = Concat<axis=2>(s, x) y = Conv<group=16>(t, w) two = Constant<value_ints=[2]>() "
        "first = Constant<value_ints=[8]>() end = Constant<value_ints=[9999]>() next_s = Slice(t, first, end, two)",
    ),
    "short convolution with a cache": StateModel(
        "float[1,16,3] s, float[1,16,1] x, float[1,16,4] w",
        "float[1,16,3] next_s, float[1,16,1] y",
        "t = Concat<axis=2>(s, x) p = Mul(t, w) two = Constant<value_ints=[2]>() y = ReduceSum(p, two) "
        "first = Constant<value_ints=[1]>() end = Constant<value_ints=[9999]>() next_s = Slice(t, first, end, two)",
    ),
    "scatter": StateModel(
        "float[40,32] s, int64[2,1] at, float[2,32] x",
        "float[40,32] next_s, float[40] y",
        "next_s = ScatterND(s, at, x) one = Constant<value_ints=[1]>() y = ReduceSum<keepdims=0>(s, one)",
        {"at": [3, 17]},
    ),
    "gather": StateModel(
        "float[8,32] s, int64[8] at, float[32] x",
        "float[8,32] next_s",
        "t = Gather<axis=0>(s, at) next_s = Add(t, x)",
        {"at": [7, 0, 1, 1, 3, 6, 2, 2]},
    ),
    "where": StateModel(
        "float[40,32] s, float[40,32] x",
        "float[40,32] next_s, float[40,32] y",
        "zero = Constant<value_float=0.0>() m = Greater(x, zero) next_s = Where(m, s, x) y = Sub(s, next_s)",
    ),
    "sorted": StateModel(
        "float[4,200] s, float[4,200] x",
        "float[4,200] next_s",
        "k = Constant<value_ints=[200]>() t, i = TopK<axis=1>(s, k) next_s = Add(t, x)",
    ),
    "recurrent network": StateModel(
        "float[1,2,16] s, float[3,2,8] x, float[1,48,8] w, float[1,48,16] r",
        "float[3,1,2,16] y, float[1,2,16] next_s",
        "y, next_s = GRU<hidden_size=16>(x, w, r, , , s)",
    ),
    "cache of keys": StateModel(
        "float[1,2,12,16] s, float[1,2,12,16] v, float[1,1,32] q, float[1,1,32] k, float[1,1,32] value, int32[1] last",
        "float[1,1,32] y, float[1,2,12,16] next_s, float[1,2,12,16] next_v",
        "total = Constant<value = int32[1] {6}>() "
        "y, next_s, next_v = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>"
        "(q, k, value, s, v, last, total)",
        {"last": [5]},
        rows=6,
    ),
    "two states that swap": StateModel(
        "float[40,32] s, float[40,32] r, float[40,32] x",
        "float[40,32] next_s, float[40,32] next_r",
        "next_s = Add(r, x) next_r = Sub(s, x)",
    ),
    "two states that swap rows": StateModel(
        "float[40,32] s, float[40,32] r, float[32] x",
        "float[40,32] next_s, float[40,32] next_r",
        "m = Constant<value_ints=[-1]>() end = Constant<value_ints=[-9999]>() zero = Constant<value_ints=[0]>() "
        "a = Slice(s, m, end, zero, m) b = Slice(r, m, end, zero, m) next_s = Add(b, x) next_r = Add(a, x)",
    ),
    "sum of the last two": StateModel(
        "float[40,32] s, float[40,32] r",
        "float[40,32] next_s, float[40,32] next_r",
        "next_s = Identity(r) next_r = Add(s, r)",
    ),
    "state that another output reads": StateModel(
        "float[40,32] s, float[40,32] x, float[32,32] w",
        "float[40,32] next_s, float[40,32] y, float[40] z",
        "next_s = Tanh(x) y = MatMul(s, w) one = Constant<value_ints=[1]>() z = ReduceSum<keepdims=0>(s, one)",
    ),
    "size on the device": StateModel(
        "float[40] s, float[40] x",
        "float[40] next_s, float[n] y",
        "next_s = Add(s, x) zero = Constant<value_float=0.0>() m = Greater(x, zero) t = Compress(x, m) "
        "first = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() e = Slice(s, first, one) y = Add(t, e)",
    ),
    "nodes on the CPU in between": StateModel(
        "float[40,32] s, float[40,32] x",
        "float[40,32] next_s",
        "t = Transpose<perm=[1,0]>(s) text = Cast<to=8>(t) back = Cast<to=1>(text) u = Transpose<perm=[1,0]>(back) "
        "m = Constant<value_ints=[-1]>() end = Constant<value_ints=[-9999]>() zero = Constant<value_ints=[0]>() "
        "r = Slice(s, m, end, zero, m) v = Add(u, r) next_s = Add(v, x)",
    ),
}
DECAYING = StateModel(
    "float[4] s, float[4] x",
    "float[4] next_s",
    "half = Constant<value_float=0.5>() a = Tanh(s) b = Mul(a, half) c = Add(b, x) next_s = Identity(c)",
)
STEPS = 4
ALLOWED = {"context_allow_host_code": "1"}
MODES = {
    "records": {"automatic_cuda_graphs": "0"},
    "graphs": {"min_num_runs_before_cuda_graph_capture": "1"},
}


@cache
def expected(name: str) -> list[tuple[Arrays, Arrays]]:
    """Return the inputs and outputs of `STEPS` Runs on the CPU provider, where no tensors overlap."""
    model = MODELS[name]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.build(), options, providers=["CPUExecutionProvider"])
    steps = []
    for step in range(STEPS):
        feeds = model.feeds(step)
        results = session.run(None, feeds)
        steps.append((feeds, dict(zip([x.name for x in session.get_outputs()], results, strict=True))))
    return steps


def session_of(name: str, mode: str = "records", **options: str) -> ort.InferenceSession:
    return ort_cuda_plugin.session(MODELS[name].build(), emulate=True, provider_options=MODES[mode] | options)


def check(name: str, session: ort.InferenceSession, offsets_of_step: list[dict[str, int]], memories: int = 1) -> None:
    """Run all steps and compare with `expected`.

    ``offsets_of_step`` has the byte offsets of all tensors in an allocation, for each step in turn. ``memories`` is the
    number of allocations, which the steps use in turn.
    """
    feeds, results = expected(name)[0]
    memory = [Memory(spread(feeds | results)[1]) for _ in range(memories)]
    for step, (feeds, results) in enumerate(expected(name)):
        offsets = offsets_of_step[step % len(offsets_of_step)]
        found = run_bound(session, memory[step % memories], offsets, feeds, results)
        for output, wanted in results.items():
            assert_close(name, found[output], output, wanted, step)


def assert_close(name: str, got: np.ndarray, output: str, wanted: np.ndarray, step: int) -> None:
    if output.startswith("next_") and (rows := MODELS[name].rows):
        got, wanted = got[:, :, :rows], wanted[:, :, :rows]
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{output}, step {step}")


def in_place(name: str) -> dict[str, int]:
    """Return byte offsets at which each next value (``next_s``) has the memory of its state (``s``)."""
    feeds, results = expected(name)[0]
    offsets, _ = spread(feeds | {k: v for k, v in results.items() if not k.startswith("next_")})
    return offsets | {k: offsets[k.removeprefix("next_")] for k in results if k.startswith("next_")}


@pytest.mark.parametrize("lowering", ["", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", MODELS)
def test_a_state_may_be_bound_as_input_and_output(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, lowering)
    for mode in MODES:
        session = session_of(name, mode)
        check(name, session, [in_place(name)])
        check(name, session, [in_place(name)], memories=2)


def shifted(name: str, by: int) -> dict[str, int]:
    """Return byte offsets at which each next value begins ``by`` bytes after its state."""
    feeds, results = expected(name)[0]
    offsets, _ = spread(feeds | {k: v for k, v in results.items() if not k.startswith("next_")})
    return offsets | {k: max(offsets[k.removeprefix("next_")] + by, 0) for k in results if k.startswith("next_")}


@pytest.mark.parametrize("lowering", ["", "sm_90"])
@pytest.mark.parametrize("name", MODELS)
def test_an_output_may_begin_within_an_input(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, lowering)
    session = session_of(name, "graphs")
    check(name, session, [shifted(name, 64), in_place(name), shifted(name, -128), shifted(name, 4)])


@pytest.mark.parametrize("name", ["two states that swap", "two states that swap rows", "sum of the last two"])
def test_two_states_may_change_places(name: str) -> None:
    feeds, _ = expected(name)[0]
    offsets, _ = spread(feeds)
    exchanged = offsets | {"next_s": offsets["r"], "next_r": offsets["s"]}
    for mode in MODES:
        check(name, session_of(name, mode), [exchanged, in_place(name)])


def test_an_input_may_be_bound_twice() -> None:
    name = "two states that swap"
    feeds, results = expected(name)[0]
    offsets, end = spread(feeds)
    offsets |= {"r": offsets["s"], "next_s": offsets["s"], "next_r": offsets["x"]}
    found = run_bound(session_of(name), Memory(end), offsets, feeds, results)
    np.testing.assert_array_equal(found["next_s"], feeds["r"] + feeds["x"])
    np.testing.assert_array_equal(found["next_r"], feeds["r"] - feeds["x"])


@pytest.mark.parametrize("lowering", ["", "sm_90"])
@pytest.mark.parametrize(
    "name", ["outer product", "where", "cache of keys", "two states that swap", "size on the device"]
)
def test_a_state_that_a_plan_may_write_in_place_costs_no_copy(
    name: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, lowering)
    before = ort_cuda_plugin.counters()["outputs_redirected"]
    check(name, session_of(name), [in_place(name)])
    assert ort_cuda_plugin.counters()["outputs_redirected"] == before
    check(name, session_of(name), [shifted(name, 4)])
    assert ort_cuda_plugin.counters()["outputs_redirected"] > before


def test_several_outputs_in_one_memory_leave_what_the_run_reads() -> None:
    """All outputs and an input share one address. Afterwards the memory begins with one of the outputs."""
    name = "state that another output reads"
    feeds, results = expected(name)[0]
    offsets, end = spread(feeds)
    for mode in MODES:
        session = session_of(name, mode)
        for _ in range(3):
            found = run_bound(session, Memory(end), offsets | dict.fromkeys(results, offsets["s"]), feeds, results)
            first = [y.reshape(-1)[:40] for y in results.values()]
            assert any(np.allclose(found["z"], y, rtol=2e-5, atol=2e-5) for y in first)


def test_a_compiled_model_keeps_what_may_be_one_memory(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "compiled.onnx"
    for name in ("outer product", "transpose"):
        source.write_bytes(MODELS[name].build())
        options = ort.SessionOptions()
        options.add_provider_for_devices(ort_cuda_plugin.register(emulate=True)[:1], ALLOWED)
        ort.ModelCompiler(options, str(source)).compile_to_file(str(target))
        session = ort_cuda_plugin.session(str(target), emulate=True, provider_options=ALLOWED | MODES["records"])
        before = ort_cuda_plugin.counters()["outputs_redirected"]
        check(name, session, [in_place(name)])
        redirected = ort_cuda_plugin.counters()["outputs_redirected"] - before
        assert redirected == (STEPS if name == "transpose" else 0)
        target.unlink()


# ---- capture by ONNX Runtime, which repeats the first Run until it is captured ----

CAPTURE = {"enable_cuda_graph": "1"}
NOT_CAPTURED = ("size on the device", "nodes on the CPU in between")


def stepped(name: str, session: ort.InferenceSession, steps: int = 2) -> None:
    """Run a model several times on its own state: each Run overwrites the state in place, and is compared."""
    offsets, model = in_place(name), MODELS[name]
    cpu = ort.InferenceSession(model.build(), providers=["CPUExecutionProvider"])
    feeds, results = (dict(arrays) for arrays in expected(name)[0])
    memory = Memory(spread(feeds | results)[1])
    for array_name, array in feeds.items():
        memory.write(offsets[array_name], array)
    binding = bound(session, memory, offsets, feeds, results)
    for step in range(steps):
        session.run_with_iobinding(binding)
        results = dict(zip(results, cpu.run(list(results), feeds), strict=True))
        for output, wanted in results.items():
            assert_close(name, memory.read(offsets[output], wanted), output, wanted, step)
        feeds |= {k.removeprefix("next_"): v for k, v in results.items() if k.startswith("next_")}


@pytest.mark.parametrize("lowering", ["", "sm_90"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_CAPTURED])
def test_a_run_that_is_captured_steps_a_state_once(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, lowering)
    stepped(name, session_of(name, **CAPTURE))


@pytest.mark.parametrize("warm_runs", [1, 3, 7])
@pytest.mark.parametrize("single_nodes", ["0", "1"])
def test_nodes_that_are_captured_one_by_one_step_a_state_once(single_nodes: str, warm_runs: int) -> None:
    """The warm-up Runs must not advance the state, although one node reads it and another one writes it."""
    options = {"single_nodes": single_nodes, "min_num_runs_before_cuda_graph_capture": str(warm_runs)}
    gc.collect()
    before = ort_cuda_plugin.counters()
    session = ort_cuda_plugin.session(DECAYING.build(), emulate=True, provider_options=CAPTURE | options)
    memory, offsets = Memory(1024), {"s": 0, "x": 512, "next_s": 0}
    feeds, value = {name: np.ones(4, np.float32) for name in "sx"}, np.ones(4)
    for name, array in feeds.items():
        memory.write(offsets[name], array)
    binding = bound(session, memory, offsets, feeds, {"next_s": feeds["s"]})
    for _ in range(4):
        session.run_with_iobinding(binding)
        value = np.tanh(value) / 2 + 1
        np.testing.assert_allclose(memory.read(0, feeds["s"]), value, rtol=1e-5)
    assert ort_cuda_plugin.counters()["copies_d2d"] - before["copies_d2d"] == 2 * warm_runs, "there and back"
    del session, memory, binding
    gc.collect()
    assert ort_cuda_plugin.counters()["device_bytes_in_use"] == before["device_bytes_in_use"]


def test_a_cache_that_only_gets_new_rows_is_not_kept_twice() -> None:
    name = "cache of keys"
    session = session_of(name, **CAPTURE)
    before = ort_cuda_plugin.counters()["copies_d2d"]
    stepped(name, session)
    assert ort_cuda_plugin.counters()["copies_d2d"] == before
