"""Contradicting input shapes: they are an error before a kernel could read beyond a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel_harness import run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.model.ir import InvalidModel, NodeError

REFUSED = (NodeError, InvalidModel, PluginError)

f, i32, i64 = np.float32, np.int32, np.int64

RECURRENT = [(f, (5, 2, 3)), (f, (1, 16, 3)), (f, (1, 16, 4)), (f, (1, 32)), (i32, (2,))]
LSTM = [*RECURRENT, (f, (1, 2, 4)), (f, (1, 2, 4)), (f, (1, 12))]
BOXES = [(f, (1, 6, 4)), (f, (1, 2, 6)), (i64, (1,)), (f, (1,)), (f, (1,))]
NORMALIZED = [(f, (2, 3, 4)), (f, (3,)), (f, (3,)), (f, (3,)), (f, (3,))]
ROTATED = [(f, (2, 4, 3, 8)), (f, (2, 3, 4)), (f, (2, 3, 4))]
PLACED = [(f, (2, 4, 3, 8)), (f, (9, 4)), (f, (9, 4)), (i64, (2, 3))]
GROUPED = [(f, (2, 6, 5)), (f, (3,)), (f, (3,))]
HEADS = [(f, (2, 4, 3, 8)), (f, (2, 2, 3, 8)), (f, (2, 2, 3, 8))]
LINEAR = [(f, (2, 3, 16)), (f, (2, 3, 8)), (f, (2, 3, 6)), (f, (2, 2, 4, 3)), (f, (2, 3, 2)), (f, (2, 3, 2))]
CAUSAL = [(f, (2, 3, 5)), (f, (3, 1, 4)), (f, (3,)), (f, (2, 3, 3))]

CASES = [
    ("LSTM", {"hidden_size": 4}, LSTM, 1, (1, 4, 3)),
    ("LSTM", {"hidden_size": 4}, LSTM, 3, (1, 31)),
    ("LSTM", {"hidden_size": 4}, LSTM, 4, (1,)),
    ("LSTM", {"hidden_size": 4}, LSTM, 5, (1, 1, 4)),
    ("LSTM", {"hidden_size": 4}, LSTM, 6, (1, 2, 3)),
    ("LSTM", {"hidden_size": 4}, LSTM, 7, (1, 8)),
    ("NonMaxSuppression", {}, BOXES, 2, (0,)),
    ("NonMaxSuppression", {}, BOXES, 3, (0,)),
    ("NonMaxSuppression", {}, BOXES, 4, (0,)),
    ("BatchNormalization", {"training_mode": 1}, NORMALIZED, 3, (4,)),
    ("RotaryEmbedding", {}, ROTATED, 1, (1, 3, 4)),
    ("RotaryEmbedding", {}, ROTATED, 2, (2, 2, 4)),
    ("RotaryEmbedding", {"rotary_embedding_dim": 10}, PLACED, 1, (9, 5)),
    ("RotaryEmbedding", {}, PLACED, 3, (1, 3)),
    ("STFT", {}, [(f, (2, 64)), (i64, ()), (f, (1,)), (i64, ())], 2, (2,)),
    ("MelWeightMatrix", {}, [*[(i64, ())] * 3, (f, (1,)), (f, ())], 3, (0,)),
    ("TensorScatter", {}, [(f, (2, 1, 4, 5)), (f, (2, 1, 1, 5)), (i64, (2,))], 2, (1,)),
    ("GroupNormalization", {"num_groups": 3}, GROUPED, 1, (1,)),
    ("GroupNormalization", {"num_groups": 3}, GROUPED, 2, (4,)),
    ("Attention", {}, HEADS, 1, (1, 2, 3, 8)),
    ("Attention", {}, HEADS, 1, (2, 2, 3, 7)),
    ("Attention", {}, HEADS, 2, (2, 3, 3, 8)),
    ("Attention", {}, HEADS, 2, (2, 2, 2, 8)),
    ("LinearAttention", {"q_num_heads": 4, "kv_num_heads": 2}, LINEAR, 1, (1, 3, 8)),
    ("LinearAttention", {"q_num_heads": 4, "kv_num_heads": 2}, LINEAR, 2, (2, 2, 6)),
    ("LinearAttention", {"q_num_heads": 4, "kv_num_heads": 2}, LINEAR, 3, (2, 1, 4, 3)),
    ("LinearAttention", {"q_num_heads": 4, "kv_num_heads": 2}, LINEAR, 4, (1, 3, 2)),
    ("LinearAttention", {"q_num_heads": 4, "kv_num_heads": 2}, LINEAR, 5, (2, 1, 2)),
    ("CausalConvWithState", {}, CAUSAL, 3, (1, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("op_type", "attributes", "inputs", "number", "shape"), CASES)
def test_an_input_of_another_size_is_refused(
    op_type: str, attributes: dict[str, int], inputs: Any, number: int, shape: tuple[int, ...], dynamic: bool
) -> None:
    given = [(dtype, shape if i == number else own) for i, (dtype, own) in enumerate(inputs)]
    outputs = {"LSTM": 3, "BatchNormalization": 3, "LinearAttention": 2, "CausalConvWithState": 2}.get(op_type, 1)
    opset = {"GroupNormalization": 18, "LinearAttention": 27, "CausalConvWithState": 27}.get(op_type, 24)
    arrays = [np.ones(own, dtype) for dtype, own in given]
    with pytest.raises(REFUSED, match=r"must (have|broadcast|be)"):
        run_op(op_type, arrays, attributes, opset, outputs=outputs, dynamic=dynamic)


@pytest.mark.parametrize(
    ("op_type", "attributes", "inputs", "message"),
    [
        ("OneHot", {}, [np.zeros(2, i64), np.array(-1), np.zeros(2, f)], "depth must be at least 0"),
        ("Resize", {}, [np.zeros((4, 4), f), None, np.array([1, -1], f)], "must be positive"),
        ("Resize", {}, [np.zeros((4, 4), f), None, np.array([np.nan, 1], f)], "must be positive"),
        ("Tile", {}, [np.zeros((3, 4), f), np.array([2**62, 4])], "64-bit"),
        ("Pad", {}, [np.zeros((3, 4), f), np.array([2**61, 0, 2**61, 0])], "64-bit"),
    ],
)
def test_sizes_that_no_tensor_has_are_errors_of_the_node(
    op_type: str, attributes: dict[str, Any], inputs: list[np.ndarray | None] | list[np.ndarray], message: str
) -> None:
    with pytest.raises(REFUSED, match=rf"{op_type}.*{message}"):
        run_op(op_type, inputs, attributes)


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        ("Tile", [np.zeros((3, 4), f), np.array([2**62, 4])]),
        ("Pad", [np.zeros((3, 4), f), np.array([2**61, 0, 2**61, 0])]),
        ("DFT", [np.zeros((4, 2), f), np.array(2**62 - 1), np.array(0)]),
    ],
)
def test_sizes_that_no_tensor_has_are_errors_of_the_node_where_they_are_constants(
    op_type: str, inputs: list[np.ndarray]
) -> None:
    with pytest.raises(NodeError, match=rf"{op_type}.*more bytes than a 64-bit integer"):
        run_op(op_type, inputs, constant=range(1, len(inputs)))


def test_an_input_in_the_middle_cannot_be_left_out() -> None:
    with pytest.raises(NodeError, match=r"\(Concat\): the required input 1 is missing"):
        run_op("Concat", [np.zeros(2, f), None, np.zeros(2, f)], {"axis": 0})
