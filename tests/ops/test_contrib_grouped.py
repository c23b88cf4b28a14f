"""GroupQueryAttention with a K/V cache updated in place: long caches, unused space with NaN, quantized caches."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from contributed import DISABLED, FLOAT, FLOAT16, Array, node_model, noise, on_device
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from session_pair import ep_session

HEADS, KV_HEADS, SIZE = 4, 2, 16
GROUPED = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}


def run_in_place(session: ort.InferenceSession, feed: dict[str, Array], caches: list[ort.OrtValue]) -> Array:
    """Run a step with ``caches`` bound as past and present, and return the attention output."""
    binding = session.io_binding()
    binding.bind_output("y0")
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    for number, cache in enumerate(caches):
        binding.bind_ortvalue_input(f"x{3 + number}", cache)
        binding.bind_ortvalue_output(f"y{1 + number}", cache)
    session.run_with_iobinding(binding)
    result: Array = binding.get_outputs()[0].numpy()
    return result


def attended(q: Array, k: Array, v: Array, past: int, sink: Array | None = None, window: int = 1 << 30) -> Array:
    """Compute causal attention of q [rows, heads, size] and k, v [kv heads, keys, size] in float64.

    The first row is token number ``past``. The result is [rows, heads * size].
    """
    rows, heads, size = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[0], 0) for x in (k, v))
    scores = np.einsum("rhd,hkd->hrk", q.astype(np.float64), k) / np.sqrt(size)
    distance = np.arange(k.shape[1])[None] - (past + np.arange(rows))[:, None]
    scores = np.where((distance <= 0) & (distance > -window), scores, -np.inf)
    if sink is not None:
        scores = np.concatenate([scores, np.broadcast_to(sink[:, None, None], (heads, rows, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., : k.shape[1]]
    result: Array = np.einsum("hrk,hkd->rhd", weights, v).reshape(rows, heads * size).astype(np.float32)
    return result


def test_a_long_cache_is_read_in_parts_and_only_where_there_are_keys() -> None:
    """Split-KV attention reads only the keys of the window: others are NaN. A step changes one row of the cache."""
    room, past, window = 2100, 1500, 300
    q, k, v = (noise(1, 1, n * SIZE, seed=i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    caches = [noise(1, KV_HEADS, room, SIZE, seed=i) for i in (3, 4)]
    for cache in caches:
        cache[:, :, past:] = np.nan
        cache[:, :, : past - 2 * window] = np.nan
    sink = noise(HEADS, seed=5)
    inputs: list[Array | None] = [q, k, v, *caches, np.array([past], np.int32), np.array(past + 1, np.int32)]
    inputs += [None, None, None, None, sink]
    model = node_model("GroupQueryAttention", inputs, GROUPED | {"local_window_size": window}, [FLOAT] * 3)
    kept = [on_device(cache) for cache in caches]
    feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in (3, 4)}
    actual = run_in_place(ep_session(model, DISABLED), feed, kept)
    for cache, new, after in zip(caches, (k, v), kept, strict=True):
        cache[0, :, past] = new.reshape(KV_HEADS, SIZE)
        np.testing.assert_array_equal(after.numpy(), cache)
    key, value = (np.nan_to_num(cache[0, :, : past + 1]) for cache in caches)
    wanted = attended(q.reshape(1, HEADS, SIZE), key, value, past, sink, window)
    np.testing.assert_allclose(actual[0], wanted, 2e-5, 2e-6)


def test_a_step_of_a_full_cache_moves_little_else() -> None:
    """The traffic of a step is at most 15 % more than reading all keys and values once."""
    room, size = 1024, 64
    cache = np.zeros((1, KV_HEADS, room, size), np.float32)
    inputs: list[Array | None] = [np.zeros((1, 1, (HEADS + 2 * KV_HEADS) * size), np.float32), None, None, cache, cache]
    inputs += [np.array([room - 1], np.int32), np.array(room, np.int32), *[np.zeros((room, size // 2), np.float32)] * 2]
    text = node_model("GroupQueryAttention", inputs, GROUPED | {"do_rotary": 1}, [FLOAT] * 3, constant=[6, 7, 8])
    model = onnx.load_from_string(text)
    for info, x in zip(model.graph.input, (x for i, x in enumerate(inputs) if x is not None and i < 6), strict=True):
        info.CopyFrom(helper.make_tensor_value_info(info.name, info.type.tensor_type.elem_type, x.shape))
    cluster = CompiledCluster(read_model(model), DeviceProperties())
    cluster.prepare()
    assert cluster.traffic is not None
    assert 2 * cache.nbytes < cluster.traffic.asked.total < 1.15 * 2 * cache.nbytes


@pytest.mark.parametrize("op_type", ["GroupQueryAttention", "MultiHeadAttention"])
def test_a_prompt_holds_no_scores(op_type: str) -> None:
    """A Run with 512 tokens succeeds in half of the memory that its scores would need, with dynamic shapes."""
    tokens, is_grouped = 512, op_type == "GroupQueryAttention"
    heads = [HEADS, KV_HEADS, KV_HEADS] if is_grouped else [HEADS] * 3
    inputs: list[Array | None] = [noise(1, tokens, n * SIZE, seed=i) for i, n in enumerate(heads)]
    if is_grouped:
        inputs += [None, None, np.array([tokens - 1], np.int32), np.array(tokens, np.int32)]
    attributes = GROUPED if is_grouped else {"num_heads": HEADS, "unidirectional": 1}
    session = ep_session(node_model(op_type, inputs, attributes, [FLOAT]), DISABLED)
    ort_cuda_plugin.trim()
    ort_cuda_plugin.set_limit(None, ort_cuda_plugin.memory_stats()["device"]["TotalAllocated"] + HEADS * tokens**2 * 2)
    try:
        actual = session.run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})[0]
    finally:
        ort_cuda_plugin.set_limit(None, None)
    q, k, v = (x.reshape(tokens, -1, SIZE) for x in inputs[:3] if x is not None)
    wanted = attended(q, k.swapaxes(0, 1), v.swapaxes(0, 1), 0)
    np.testing.assert_allclose(actual[0], wanted, 1e-4, 1e-5)


KINDS = {
    "int8": (TensorProto.INT8, 8, "PER_CHANNEL"),
    "4 bits": (TensorProto.UINT8, 4, "PER_TENSOR"),
    "float8": (TensorProto.FLOAT8E4M3FN, 8, "PER_TENSOR"),
}


def stored(x: Array, scale: Array, kind: str) -> tuple[Array, Array]:
    """Return x quantized as in a cache of a kind, and the dequantized numbers."""
    if kind == "float8":
        small = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return small, small * scale
    low, high = (-8, 7) if kind == "4 bits" else (-128, 127)
    whole = np.clip(np.rint(x / scale), low, high)
    if kind == "int8":
        return whole.astype(np.int8), whole * scale
    halves = (whole + 8).astype(np.uint8)
    return halves[..., ::2] | halves[..., 1::2] << 4, whole * scale


@pytest.mark.parametrize(("kind", "real"), [("int8", FLOAT), ("4 bits", FLOAT16), ("float8", FLOAT)])
def test_a_quantized_cache(kind: str, real: int) -> None:
    """Three new tokens after four cached ones, in a cache for nine; stored codes must be exact."""
    onnx_type, bits, quantized = KINDS[kind]
    room, past, rows = 9, 4, 3
    dtype = helper.tensor_dtype_to_np_dtype(real)
    q, k, v = (
        noise(1, rows, n * SIZE, seed=i).astype(dtype).astype(np.float32)
        for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    shape = (1, KV_HEADS, 1, SIZE) if quantized == "PER_CHANNEL" else (1,)
    scales = [(0.02 + 0.01 * np.random.default_rng(i).random(shape)).astype(np.float32) for i in range(2)]
    caches, numbers = [], []
    for i, (new, scale) in enumerate(zip((k, v), scales, strict=True)):
        whole = noise(1, KV_HEADS, room, SIZE, seed=7 + i, scale=0.1 if kind == "4 bits" else 1.0)
        before = stored(whole, scale, kind)
        fresh = stored(new.reshape(1, rows, KV_HEADS, SIZE).swapaxes(1, 2), scale, kind)
        for x, y in zip(before, fresh, strict=True):
            x[:, :, past : past + rows] = y
        changed = before[0].copy()
        changed[:, :, past : past + rows] = 1
        caches.append((changed, before[0]))
        numbers.append(before[1][0, :, : past + rows])
    inputs: list[Array | None] = [q, k, v, caches[0][0], caches[1][0]]
    inputs += [np.array([past + rows - 1], np.int32), np.array(past + rows, np.int32), *[None] * 5, *scales]
    names = {"k_quant_type": quantized, "v_quant_type": quantized, "kv_cache_bit_width": bits}
    small = dict.fromkeys([3, 4], onnx_type) if kind == "float8" else {}
    model = node_model(
        "GroupQueryAttention",
        inputs,
        GROUPED | names,
        [FLOAT, *[FLOAT if small else onnx_type] * 2],
        real=real,
        wide=[3, 4, 12, 13],
        wide_outputs=[1, 2],
        small=small,
        small_outputs=[1, 2] if small else [],
    )
    feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    actual = ep_session(model, DISABLED).run(None, feed)
    for present, (_, wanted) in zip(actual[1:], caches, strict=True):
        np.testing.assert_array_equal(present[:, :, : past + rows], wanted[:, :, : past + rows])
    wanted = attended(q.reshape(rows, HEADS, SIZE), numbers[0], numbers[1], past)
    allowed = 3e-5 if real == FLOAT else 4e-3
    np.testing.assert_allclose(actual[0][0], wanted, allowed, allowed)


@pytest.mark.parametrize("op_type", ["Attention", "MultiHeadAttention"])
def test_other_attention_in_place(op_type: str) -> None:
    """Two new tokens in a shared buffer for eight, of which an input says that three are past; the rest is NaN."""
    room, past, rows, heads, size = 8, 3, 2, 2, 8
    q, k, v = (noise(1, rows, heads * size, seed=i) for i in range(3))
    before = noise(2, 1, heads, room, size, seed=4)
    before[..., past:, :] = np.nan
    count = np.array([past], np.int32)
    if op_type == "Attention":
        x, weights = np.eye(rows, dtype=np.float32)[None], np.concatenate([q, k, v], -1)[0]
        inputs: list[Array | None] = [x, weights, None, None, before, None, count]
        attributes = {"num_heads": heads, "unidirectional": 1, "past_present_share_buffer": 1}
    else:
        inputs = [q, k, v, None, None, None, before[0], before[1], count]
        attributes = {"num_heads": heads, "unidirectional": 1}
    outputs = [FLOAT] * (2 if op_type == "Attention" else 3)
    session = ep_session(node_model(op_type, inputs, attributes, outputs), DISABLED)
    y, *present = session.run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})
    after = np.stack(present) if len(present) > 1 else present[0]
    wanted = before[:, 0, :, : past + rows].copy()
    for i, new in enumerate((k, v)):
        wanted[i, :, past:] = new.reshape(rows, heads, size).swapaxes(0, 1)
    np.testing.assert_allclose(after[:, 0, :, : past + rows], wanted, 1e-6, 1e-6)
    expected = attended(q.reshape(rows, heads, size), wanted[0], wanted[1], past)
    np.testing.assert_allclose(y[0], expected, 2e-5, 2e-6)
