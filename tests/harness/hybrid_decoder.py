"""Test model: a decoder with causal convolution, linear attention and attention, as onnxruntime-genai's builder writes
Qwen 3.5.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from encoder import GraphBuilder

CONTRIB = "com.microsoft"
HIDDEN, HEADS, VOCABULARY, TAPS, PLANES = 32, 2, 61, 4, 3
WIDTH = HIDDEN // HEADS
NAMES = {
    "0.18": ("past.{}.conv", "past.{}.recurrent", "present.{}.conv", "present.{}.recurrent"),
    "before": (
        "past_key_values.{}.conv_state", "past_key_values.{}.recurrent_state",
        "present.{}.conv_state", "present.{}.recurrent_state",
    ),
    "LFM2 before": ("past_conv.{}", "past_recurrent.{}", "present_conv.{}", "present_recurrent.{}"),
}  # fmt: skip
"""Names of states by version of the builder: past states of convolution and linear attention, then the present ones."""


def hybrid_decoder(version: str = "0.18", *, window: int = 0, planes: bool = False, seed: int = 0) -> onnx.ModelProto:
    """Return the decoder: one layer each of convolution, linear attention and attention.

    ``window`` is the attribute state_window of the first two layers. With ``planes`` each token has three positions; a
    sine of their sum is added to its embedding.
    """
    b = GraphBuilder(seed)
    conv, recurrent, next_conv, next_recurrent = NAMES[version]
    counted = b.node("Sub", b.node("ReduceSum", "attention_mask", b.constant([1]), keepdims=0), b.constant([1]))
    lengths = b.node("Cast", counted, to=TensorProto.INT32)
    total = b.node("Cast", b.dim("attention_mask", 1), to=TensorProto.INT32)
    x = b.node("Gather", b.noise(VOCABULARY, HIDDEN, scale=0.3), "input_ids")
    if planes:
        number = b.node("Cast", "position_ids", to=TensorProto.FLOAT)
        place = b.node("ReduceSum", number, b.constant([0]), keepdims=0)
        x = b.node("Add", x, b.node("Sin", b.node("Unsqueeze", place, b.constant([2]))))

    def linear(y: str, outputs: int) -> str:
        return b.node("MatMul", y, b.noise(HIDDEN, outputs, scale=1 / math.sqrt(HIDDEN)))

    def contributed(op_type: str, inputs: list[str], outputs: list[str], **attributes: object) -> str:
        b.nodes.append(helper.make_node(op_type, inputs, outputs, domain=CONTRIB, **attributes))  # type: ignore[arg-type]
        return outputs[0]

    # The weights make states matter more than the last token, so that wrong states lead to wrong tokens.
    turned = b.node("Transpose", linear(x, HIDDEN), perm=[0, 2, 1])
    taps, bias = b.noise(HIDDEN, 1, TAPS, scale=3.0), b.noise(HIDDEN, scale=0.1)
    mixed = contributed(
        "CausalConvWithState", [turned, taps, bias, conv.format(0)], ["convolved", next_conv.format(0)],
        activation="silu", state_window=window,
    )  # fmt: skip
    x = b.node("Add", x, b.node("Transpose", mixed, perm=[0, 2, 1]))
    query, value = linear(x, HIDDEN), linear(b.node("Mul", x, b.constant(4.0, np.float32)), HIDDEN)
    key = b.node("LpNormalization", linear(x, HIDDEN), axis=-1)
    decay = b.node("Neg", b.node("Softplus", linear(x, HEADS)))
    beta = b.node("Sigmoid", linear(x, HEADS))
    mixed = contributed(
        "LinearAttention",
        [query, key, value, recurrent.format(1), decay, beta], ["recalled", next_recurrent.format(1)],
        q_num_heads=HEADS, kv_num_heads=HEADS, update_rule="gated_delta", scale=1.0, state_window=window,
    )  # fmt: skip
    x = b.node("Add", x, mixed)
    past = [f"past_key_values.2.{kind}" for kind in ("key", "value")]
    present = [f"present.2.{kind}" for kind in ("key", "value")]
    mixed = contributed(
        "GroupQueryAttention", [linear(x, 3 * HIDDEN), "", "", *past, lengths, total], ["attended", *present],
        num_heads=HEADS, kv_num_heads=HEADS,
    )  # fmt: skip
    linear(b.node("Add", x, mixed), VOCABULARY)
    b.nodes[-1].output[0] = "logits"

    def values(names: list[str], kind: int, *shape: int | str) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name in names]

    states = [window] if window else []
    of_conv: list[int | str] = ["batch", HIDDEN, TAPS - 1]
    of_recurrent: list[int | str] = ["batch", HEADS, WIDTH, WIDTH]
    inputs = values(["input_ids"], TensorProto.INT64, "batch", "sequence")
    inputs += values(["attention_mask"], TensorProto.INT64, "batch", "total")
    inputs += values(["position_ids"] if planes else [], TensorProto.INT64, PLANES, "batch", "sequence")
    inputs += values([conv.format(0)], TensorProto.FLOAT, *states, *of_conv)
    inputs += values([recurrent.format(1)], TensorProto.FLOAT, *states, *of_recurrent)
    inputs += values(past, TensorProto.FLOAT, "batch", HEADS, "past", WIDTH)
    outputs = values(["logits"], TensorProto.FLOAT, "batch", "sequence", VOCABULARY)
    outputs += values([next_conv.format(0)], TensorProto.FLOAT, *states, *of_conv)
    outputs += values([next_recurrent.format(1)], TensorProto.FLOAT, *states, *of_recurrent)
    outputs += values(present, TensorProto.FLOAT, "batch", HEADS, "total", WIDTH)
    graph = helper.make_graph(b.nodes, "hybrid", inputs, outputs, b.initializers)
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def next_token(session: ort.InferenceSession, tokens: list[int]) -> int:
    """Return the most probable token after ``tokens``, computed from scratch with empty caches and states."""
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
    }
    for x in session.get_inputs():
        if x.name == "position_ids":
            places = np.arange(len(tokens))
            feeds[x.name] = np.broadcast_to(places, (*x.shape[:-2], 1, len(tokens)))
        elif x.name.startswith("past"):
            shape = [size if isinstance(size, int) else int(size == "batch") for size in x.shape]
            feeds[x.name] = np.zeros(shape, np.float32)
    return int(session.run(["logits"], feeds)[0][0, -1].argmax())


def greedy(model: Path, tokens: list[int], count: int) -> list[int]:
    """Return the CPU provider's ``count`` most probable next tokens, each computed from all earlier tokens."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    tokens, start = list(tokens), len(tokens)
    for _ in range(count):
        tokens.append(next_token(session, tokens))
    return tokens[start:]
