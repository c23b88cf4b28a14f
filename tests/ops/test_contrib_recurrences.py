"""com.microsoft's causal convolutions and linear attention, compared with the CPU provider or NumPy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from contributed import BFLOAT16, DISABLED, FLOAT, FLOAT16, Array, check_in_place, check_node, node_model, noise
from emulator_harness import configured
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from session_pair import ep_session

BOUNDS = np.array([0, 1, 6, 9], np.int32)
COUNTS = np.array([2, 9, -1], np.int32)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


# ---- convolutions ----


def test_causal_conv() -> None:
    inputs = [noise(2, 3, 5), noise(3, 1, 3, seed=1), noise(3, seed=2), noise(2, 3, 4, seed=3)]
    check_node("CausalConvWithState", inputs, {"activation": "silu", "dilation": 2}, [FLOAT, FLOAT], reals=[FLOAT])


@pytest.mark.parametrize("window", [2, 4])
def test_causal_conv_with_channels_last_and_a_window(window: int) -> None:
    """With state_window, the output has the states after each of the last steps, zeros for steps before the first.

    The CPU provider lacks state_window.
    """

    def reference(x: Array, w: Array, bias: Array, past: Array) -> list[Array]:
        padded = np.concatenate([past[-1].reshape(2, 2, 6), x.reshape(2, 3, 6)], 1)
        out = sum(padded[:, j : j + 3] * w[:, 0, j] for j in range(3)) + bias
        states = np.zeros((window, 2, 2, 6), np.float32)
        for slot in range(max(window - 3, 0), window):
            first = 3 - window + slot + 1
            states[slot] = padded[:, first : first + 2]
        return [np.asarray(out).reshape(x.shape), states.reshape(window, 2, 2, 3, 2)]

    inputs = [noise(2, 3, 3, 2), noise(6, 1, 3, seed=1), noise(6, seed=2), noise(window, 2, 2, 3, 2, seed=3)]
    attributes = {"channels_last": 1, "state_window": window}
    check_node("CausalConvWithState", inputs, attributes, [FLOAT, FLOAT], reference=reference, reals=[BFLOAT16])


def varlen_conv(x: Array, w: Array, bounds: Array, bias: Array | None, state: Array, counts: Array) -> list[Array]:
    """Compute VarlenCausalConvWithState with dilation 2, SiLU and state_update_capacity 2.

    ``bounds`` are the starts of the sequences in x [tokens, channels], and the end of the last one.
    """
    out, final = np.zeros_like(x), np.zeros_like(state)
    update = np.zeros((len(counts), 2, x.shape[1]), np.float32)
    for b, (begin, end) in enumerate(pairwise(bounds)):
        padded = np.concatenate([state[b].T, x[begin:end]])
        for t in range(end - begin):
            out[begin + t] = sum(w[:, 0, j] * padded[t + 2 * j] for j in range(w.shape[2]))
        final[b] = padded[end - begin :].T
        count = int(np.clip(counts[b], 0, min(2, end - begin)))
        update[b, :count] = x[begin : begin + count]
    total = out if bias is None else out + bias
    return [total / (1 + np.exp(-total)), final, update]


def test_varlen_causal_conv() -> None:
    inputs = [noise(9, 4), noise(4, 1, 3, seed=1), BOUNDS, noise(4, seed=2), noise(3, 4, 4, seed=3), COUNTS]
    attributes = {"activation": "swish", "dilation": 2, "state_update_capacity": 2}
    outputs = [FLOAT, FLOAT, FLOAT]
    check_node("VarlenCausalConvWithState", inputs, attributes, outputs, reference=varlen_conv, reals=[FLOAT, FLOAT16])
    session = ep_session(node_model("VarlenCausalConvWithState", inputs, attributes, outputs), DISABLED)
    feed = {f"x{i}": x for i, x in enumerate(inputs)}
    check_in_place(session, feed, {"x4": "y1"})
    for bounds in ([0, 2**31 - 1, -(2**31), 9], [9, 5, 5, 2], [-3, -2, -1, 0]):
        wrong = session.run(None, feed | {"x2": np.array(bounds, np.int32), "x5": np.full(3, 2**31 - 1, np.int32)})
        assert all(np.isfinite(x).all() for x in wrong)


# ---- linear attention ----


@pytest.mark.parametrize(
    ("rule", "q_heads", "kv_heads", "key_heads", "scale"),
    [("gated_delta", 4, 2, 2, 0.0), ("gated", 2, 4, 4, 0.3), ("delta", 2, 4, 2, 0.0)],
)
def test_linear_attention(rule: str, q_heads: int, kv_heads: int, key_heads: int, scale: float) -> None:
    inputs = [
        noise(2, 4, q_heads * 3),
        noise(2, 4, key_heads * 3, seed=1, scale=0.4),
        noise(2, 4, kv_heads * 5, seed=2),
        noise(2, kv_heads, 3, 5, seed=3),
        noise(2, 4, kv_heads * 3, seed=4, scale=0.3) if "gated" in rule else None,
        noise(2, 4, kv_heads, seed=5, scale=0.3) if "delta" in rule else None,
    ]
    attributes = {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "update_rule": rule, "scale": scale}
    check_node("LinearAttention", inputs, attributes, [FLOAT, FLOAT], reals=[FLOAT], tolerance=1e-4)


@pytest.mark.parametrize("window", [2, 4])
def test_linear_attention_with_a_window(window: int) -> None:
    """With state_window, the output has the states after each of the last steps. The CPU provider lacks it."""

    def reference(q: Array, k: Array, v: Array, past: Array, decay: Array, beta: Array) -> list[Array]:
        states = np.zeros((window, 2, 2, 3, 5), np.float32)
        split = [x.reshape(6, 2, -1) for x in (q, k, v)]
        gates = [np.broadcast_to(x.reshape(6, -1, 1)[:, :, 0], (6, 2)) for x in (decay, beta)]
        for steps in range(max(4 - window, 1), 4):
            # Compute the state after ``steps`` steps from the first ``steps`` rows of both sequences.
            rows = np.concatenate([np.arange(steps), np.arange(3, 3 + steps)])
            (q, k, v), (decay, beta) = ([x[rows] for x in group] for group in (split, gates))
            out, final = gated_delta(
                q, k, v, np.array([0, steps, 2 * steps]), decay, beta, past[-1].transpose(0, 1, 3, 2)
            )
            states[window - 4 + steps] = final.transpose(0, 1, 3, 2)
        return [out.reshape(2, 3, 10), states]

    inputs = [noise(2, 3, 6), noise(2, 3, 6, seed=1, scale=0.4), noise(2, 3, 10, seed=2)]
    inputs += [noise(window, 2, 2, 3, 5, seed=3), noise(2, 3, 2, seed=4, scale=0.3), noise(2, 3, 1, seed=5)]
    attributes = {"q_num_heads": 2, "kv_num_heads": 2, "state_window": window}
    check_node(
        "LinearAttention", inputs, attributes, [FLOAT, FLOAT], reference=reference, reals=[FLOAT16], wide=[3],
        wide_outputs=[1],
    )  # fmt: skip
    model = node_model("LinearAttention", inputs, attributes, [FLOAT, FLOAT], real=FLOAT16, wide=[3], wide_outputs=[1])
    check_in_place(ep_session(model, DISABLED), {f"x{i}": x for i, x in enumerate(inputs)}, {"x3": "y1"})


def test_linear_attention_gate() -> None:
    inputs = [noise(2, 3, 4, scale=9), noise(4, seed=1), noise(4, seed=2), noise(2, 3, 4, seed=3)]
    outputs = [FLOAT, FLOAT]
    check_node("LinearAttentionGate", inputs, {}, outputs, reals=[FLOAT, BFLOAT16], wide=[1, 2])
    check_node("LinearAttentionGate", inputs[:3], {}, reals=[FLOAT], wide=[1, 2])


def gated_delta(
    q: Array, k: Array, v: Array, bounds: Array, decay: Array | None, beta: Array | None, state: Array,
    *, delta: bool = True, scale: float = 0.0, counts: Array | None = None, capacity: int = 0,
) -> list[Array]:  # fmt: skip
    """Compute the gated delta rule for sequences ``bounds`` of q, k and v [tokens, heads, size].

    ``decay`` (logarithms, per head or per element) and ``beta`` are used after their activations. Without ``delta``
    the state's prediction is not subtracted from the value.
    """
    (tokens, heads, width), size = v.shape, q.shape[2]
    out, final = np.zeros((tokens, heads, width)), state.astype(np.float64)
    parts = [np.zeros((len(state), capacity, *shape)) for shape in ((heads,), k.shape[1:], (heads, width))]
    for b, (begin, end) in enumerate(pairwise(bounds)):
        for h in range(heads):
            shared = h * q.shape[1] // heads
            matrix = final[b, h]
            for t in range(begin, end):
                if decay is not None:
                    matrix = matrix * np.exp(decay[t, h])
                seen = matrix @ k[t, shared] if delta else 0.0
                added = (1.0 if beta is None else beta[t, h]) * (v[t, h] - seen)
                matrix = matrix + np.outer(added, k[t, shared])
                out[t, h] = matrix @ q[t, shared] * (scale or size**-0.5)
                if counts is not None and t - begin < min(counts[b], capacity):
                    parts[0][b, t - begin, h] = 1.0 if decay is None else np.exp(decay[t, h])
                    parts[1][b, t - begin, shared] = k[t, shared]
                    parts[2][b, t - begin, h] = added
            final[b, h] = matrix
    results = [out, final]
    if capacity:
        results.append(np.concatenate([x.reshape(len(state), -1) for x in parts], 1))
    return [x.astype(np.float32) for x in results]


def unit(x: Array) -> Array:
    result: Array = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-12)
    return result


WIDE = [4, 5, 6, 7, 8]


def test_gated_delta_net_of_bounded_sequences() -> None:
    """Qwen's variant: raw gates, L2-normalized queries and keys, and two value heads per key head."""

    def reference(q: Array, k: Array, v: Array, bounds: Array, *rest: Array) -> list[Array]:
        decay, beta, state, a_log, dt_bias, counts = rest
        gate = -np.exp(a_log) * np.log1p(np.exp(decay + dt_bias))
        rate = 1 / (1 + np.exp(-beta))
        return gated_delta(unit(q), unit(k), v, bounds, gate, rate, state, counts=counts, capacity=2)

    inputs = [noise(9, 2, 3), noise(9, 2, 3, seed=1), noise(9, 4, 5, seed=2), BOUNDS, noise(9, 4, seed=3)]
    inputs += [noise(9, 4, seed=4), noise(3, 4, 5, 3, seed=5), noise(4, seed=6), noise(4, seed=7), COUNTS]
    attributes: dict[str, Any] = {"gate_activation": "qwen", "beta_activation": "sigmoid", "qk_l2_norm": 1}
    attributes["state_update_capacity"] = 2
    outputs = [FLOAT, FLOAT, FLOAT]
    check_node(
        "GatedDeltaNet", inputs, attributes, outputs, reference=reference, reals=[FLOAT, FLOAT16], wide=WIDE,
        wide_outputs=[1, 2], tolerance=1e-4,
    )  # fmt: skip
    session = ep_session(node_model("GatedDeltaNet", inputs, attributes, outputs), DISABLED)
    feed = {f"x{i}": x for i, x in enumerate(inputs)}
    check_in_place(session, feed, {"x6": "y1"})
    invalid = [[-3, -2, -1, 0]]
    if not os.environ.get(LOWERING_VARIABLE, "").endswith(":ptx"):
        # Blocks of overlapping sequences write the same rows. The PTX emulator's checking mode reports this as a race.
        invalid.append([0, 2**31 - 1, -(2**31), 9])
    for bounds in invalid:
        wrong = session.run(None, feed | {"x3": np.array(bounds, np.int32), "x9": np.full(3, 2**31 - 1, np.int32)})
        assert all(np.isfinite(x).all() for x in wrong)


@pytest.mark.parametrize("active", [0, 1])
def test_gated_delta_net_of_equal_sequences(active: int) -> None:
    """Sequences of equal length as [batch, steps, ...], with queries, keys and values packed into one input."""

    def reference(x: Array, state: Array, counts: Array, active: Array) -> list[Array]:
        rows = x.reshape(6, 26)
        q, k, v = rows[:, :3].reshape(6, 1, 3), rows[:, 3:6].reshape(6, 1, 3), rows[:, 6:].reshape(6, 4, 5)
        out, final, update = gated_delta(
            q, k, v, np.array([0, 3, 6]), None, None, state, scale=0.2, counts=counts * active, capacity=1
        )
        return [out.reshape(2, 3, 4, 5), final, update]

    inputs = [noise(2, 3, 26, scale=0.5), None, None, None, None, None, noise(2, 4, 5, 3, seed=1), None, None]
    inputs += [np.array([5, 0], np.int32), np.array([active], np.int32)]
    attributes = {"update_rule": "delta", "scale": 0.2, "state_update_capacity": 1}
    check_node(
        "GatedDeltaNet", inputs, attributes, [FLOAT, FLOAT, FLOAT], reals=[FLOAT], wide=WIDE, wide_outputs=[1, 2],
        reference=lambda *given: reference(given[0], given[6], given[9], given[10]),
    )  # fmt: skip


def test_gated_delta_net_with_a_decay_for_each_element() -> None:
    def reference(q: Array, k: Array, v: Array, bounds: Array, *rest: Array) -> list[Array]:
        decay, beta = rest[:2]
        return gated_delta(q, k, v, bounds, decay[:, :, None], beta, np.zeros((3, 2, 5, 3)), delta=False)

    inputs = [noise(9, 2, 3), noise(9, 2, 3, seed=1), noise(9, 2, 5, seed=2), BOUNDS]
    inputs += [noise(9, 2, 3, seed=3, scale=0.3), noise(9, 2, seed=4)]
    attributes = {"update_rule": "gated"}
    outputs = [FLOAT, FLOAT]
    check_node("GatedDeltaNet", inputs, attributes, outputs, reference=reference, reals=[FLOAT], tolerance=1e-4)
