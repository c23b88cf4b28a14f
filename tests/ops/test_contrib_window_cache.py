"""GroupQueryAttention with a sliding-window cache (sliding_window_cache=1), compared with the CPU provider by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from contributed import DISABLED, FLOAT, Array, check_in_place, node_model, noise
from ort_versions import api_version
from session_pair import ep_session

HEADS, KV_HEADS, SIZE = 4, 2, 16
pytestmark = pytest.mark.skipif(
    api_version(ort.__version__) < 31, reason="GroupQueryAttention has sliding_window_cache since ONNX Runtime 1.31"
)


def kept(tokens: int, capacity: int, window: int) -> int:
    """Return the number of keys in a cache after ``tokens`` tokens, by the operator's definition."""
    step = capacity - window + 1
    return tokens if tokens <= capacity else tokens - step * -(-(tokens - capacity) // step)


def feeds(
    batch: int, steps: Sequence[tuple[int, Sequence[int]]], capacity: int, with_bias: bool
) -> Iterator[tuple[list[Array | None], list[int]]]:
    """Yield the inputs of each step, without the past, and the lengths of the sequences after the step.

    ``steps`` has (new tokens, lengths after the step).
    """
    for number, (rows, totals) in enumerate(steps):
        inputs: list[Array | None] = [
            noise(batch, rows, n * SIZE, seed=10 * number + i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))
        ]
        inputs += [None, None, np.array(totals, np.int32) - 1, np.array(max(totals), np.int32)]
        inputs += [noise(64, SIZE // 2, seed=i) for i in (1, 2)]
        if with_bias:
            inputs += [None, noise(1, HEADS, rows, max(totals), seed=number)]
        yield inputs, list(totals)


@pytest.mark.parametrize(
    ("capacity", "window", "batch", "steps", "with_bias"),
    [
        (6, 6, 1, [(4, [4]), (1, [5]), (1, [6]), (1, [7]), (9, [16]), (1, [17])], False),
        (9, 5, 2, [(11, [11, 11]), (1, [12, 8]), (1, [13, 9]), (1, [14, 10])], True),
    ],
    ids=["as large as the window", "larger, of two sequences"],
)
def test_steps_leave_what_the_cpu_provider_leaves(
    capacity: int, window: int, batch: int, steps: Sequence[tuple[int, Sequence[int]]], with_bias: bool
) -> None:
    """The present of a step is the past of the next one. Only keys up to a cache's last one are compared."""
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1, "local_window_size": window}
    sessions: list[Any] = []
    past = [[np.zeros((batch, KV_HEADS, capacity, SIZE), np.float32)] * 2 for _ in range(2)]
    for inputs, totals in feeds(batch, steps, capacity, with_bias):
        outputs = []
        for number, cache in enumerate(past):
            inputs[3:5] = cache
            if len(sessions) <= number:
                model = node_model("GroupQueryAttention", inputs, attributes | {"sliding_window_cache": 1}, [FLOAT] * 3)
                options = ort.SessionOptions()
                options.graph_optimization_level = DISABLED
                cpu = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
                sessions += [ep_session(model, DISABLED), cpu][number:]
            feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
            outputs.append(sessions[number].run(None, feed))
        (got, *present), (wanted, *expected) = outputs
        for row, total in enumerate(totals):
            count = min(total, inputs[0].shape[1])  # type: ignore[union-attr]
            np.testing.assert_allclose(got[row, :count], wanted[row, :count], 2e-5, 2e-5, err_msg=f"{totals}")
            there = kept(total, capacity, window)
            for x, y in zip(present, expected, strict=True):
                np.testing.assert_allclose(x[row, :, :there], y[row, :, :there], 2e-5, 2e-5, err_msg=f"{totals}")
        past = [present, present]
    check_in_place(sessions[0], feed, {"x3": "y1", "x4": "y2"})


def test_a_cache_below_the_window_is_an_error() -> None:
    ((inputs, _),) = feeds(1, [(1, [1])], 4, False)
    inputs[3:5] = [np.zeros((1, KV_HEADS, 4, SIZE), np.float32)] * 2
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1, "sliding_window_cache": 1}
    model = node_model("GroupQueryAttention", inputs, attributes | {"local_window_size": 5}, [FLOAT] * 3)
    with pytest.raises(Exception, match="local_window_size must be at most"):
        ep_session(model, DISABLED).run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})
