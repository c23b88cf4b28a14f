"""Test model: greedy decoding of a Llama-like decoder as one ONNX model, with the loop over tokens as a Loop node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from genai_decoder import genai_decoder

CAPACITY = 24
"""Maximum number of tokens of a sequence: rows of the K/V caches and columns of the mask."""


def _after(prefix: str, logits: str, mask: str, tokens: str) -> list[onnx.NodeProto]:
    """Return nodes that choose the next token of each sequence, and append it to ``tokens`` and ``mask``."""

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [prefix + output], name=prefix + output, **attributes)

    return [
        node("Gather", [logits, "last_row"], "row", axis=1),  # [batch, 1, vocabulary]
        node("ArgMax", [prefix + "row"], "next", axis=2, keepdims=0),  # [batch, 1]
        node("ReduceSum", [mask, "columns"], "length", keepdims=1),
        node("Equal", ["numbers", prefix + "length"], "at"),  # [batch, capacity]
        node("Where", [prefix + "at", "one", mask], "mask"),
        node("Where", [prefix + "at", prefix + "next", tokens], "tokens"),
    ]


def loop_decoder(layers: int = 2, *, end: int | None = None, seed: int = 0) -> onnx.ModelProto:
    """Return the model.

    Inputs: ``prompt`` int64 [1, s]; ``mask`` and ``start`` int64 [1, capacity] have ones and the prompt in their first
    s columns; ``most`` is the number of new tokens after the first. Output: ``sequence`` int64 [1, capacity].

    The loop ends early after the token ``end``.
    """
    decoder = genai_decoder(layers, longest=CAPACITY, seed=seed)
    graph = decoder.graph
    caches = [value.name for value in graph.input if value.name.startswith("past")]
    kv_heads, _, width = (d.dim_value for d in graph.input[-1].type.tensor_type.shape.dim[1:])
    shape = [1, kv_heads, CAPACITY, width]
    first = compose.add_prefix(decoder, "first_", rename_initializers=False).graph
    constants = {
        "last_row": np.array([-1]),
        "columns": np.array([1]),
        "numbers": np.arange(CAPACITY),
        "one": np.array(1),
        "always": np.array(True),
        "empty_cache": np.zeros(shape, np.float32),
    }
    initializers = [*graph.initializer, *(numpy_helper.from_array(x, name) for name, x in constants.items())]
    if end is not None:
        initializers.append(numpy_helper.from_array(np.array([[end]]), "end"))
    nodes = [
        helper.make_node("Identity", ["prompt"], ["first_input_ids"]),
        helper.make_node("Identity", ["mask"], ["first_attention_mask"]),
        *(helper.make_node("Identity", ["empty_cache"], ["first_" + name]) for name in caches),
        *first.node,
        *_after("begin_", "first_logits", "mask", "start"),
    ]
    presents = [name.replace("past_key_values", "present") for name in caches]

    def value(name: str, kind: int, *dims: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, dims)

    goes_on = (
        helper.make_node("Identity", ["always"], ["goes_on"])
        if end is None
        else helper.make_node("Not", ["ended"], ["goes_on"])
    )
    ends = [
        helper.make_node("Equal", ["step_next", "end"], ["is_end"]),
        helper.make_node("Squeeze", ["is_end"], ["ended"]),
    ]
    row = ("sequences", TensorProto.INT64, 1, CAPACITY)
    body = helper.make_graph(
        [
            *graph.node,
            *_after("step_", "logits", "attention_mask", "tokens"),
            *(ends if end is not None else []),
            goes_on,
        ],
        "step",
        [
            value("number", TensorProto.INT64),
            value("on", TensorProto.BOOL),
            value("input_ids", TensorProto.INT64, 1, 1),
            value("attention_mask", *row[1:]),
            value("tokens", *row[1:]),
            *(value(name, TensorProto.FLOAT, *shape) for name in caches),
        ],
        [
            value("goes_on", TensorProto.BOOL),
            value("step_next", TensorProto.INT64, 1, 1),
            value("step_mask", *row[1:]),
            value("step_tokens", *row[1:]),
            *(value(name, TensorProto.FLOAT, *shape) for name in presents),
        ],
    )
    states = ["begin_next", "begin_mask", "begin_tokens", *("first_" + name for name in presents)]
    results = ["last_token", "last_mask", "sequence", *("last_" + name for name in presents)]
    nodes.append(helper.make_node("Loop", ["most", "always", *states], results, name="tokens", body=body))
    inputs = [
        value("prompt", TensorProto.INT64, 1, "s"),
        value("mask", *row[1:]),
        value("start", *row[1:]),
        value("most", TensorProto.INT64),
    ]
    made = helper.make_graph(nodes, "generate", inputs, [value("sequence", *row[1:])], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def prompt_feed(prompt: list[int], most: int) -> dict[str, np.ndarray]:
    """Return the inputs for a prompt and ``most`` new tokens after the first one."""
    mask, start = np.zeros((1, CAPACITY), np.int64), np.zeros((1, CAPACITY), np.int64)
    mask[0, : len(prompt)], start[0, : len(prompt)] = 1, prompt
    return {"prompt": np.array([prompt]), "mask": mask, "start": start, "most": np.array(most)}
