"""Test models of one search node (GreedySearch, BeamSearch, ...) with a tiny decoder, as
onnxruntime.transformers.convert_generation writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, HEAD, POSITIONS = 17, 8, 2, 4, 40
MS = "com.microsoft"

Array = npt.NDArray[Any]


def _noise(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def gpt_decoder(
    layers: int = 1, dtype: int = TensorProto.FLOAT, seed: int = 0
) -> tuple[onnx.GraphProto, dict[str, Array]]:
    """Return the body of a GPT-2-like decoder with K/V caches, and the weights that it reads from the outer graph."""
    real = helper.tensor_dtype_to_np_dtype(dtype)
    weights: dict[str, Array] = {
        "tokens": _noise(seed, VOCABULARY, WIDTH),
        "places": _noise(seed + 1, POSITIONS, WIDTH),
        "scale": np.ones(WIDTH, np.float32),
        "shift": np.zeros(WIDTH, np.float32),
        "head": _noise(seed + 2, WIDTH, VOCABULARY),
    }
    nodes = [
        helper.make_node("Gather", ["tokens", "input_ids"], ["token"]),
        helper.make_node("Gather", ["places", "position_ids"], ["place"]),
        helper.make_node("Add", ["token", "place"], ["x0"]),
    ]
    cache = (2, "batch", HEADS, "past", HEAD)
    present = (2, "batch", HEADS, "total", HEAD)
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "new"]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT32, ["batch", "new"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", dtype, ["batch", "new", VOCABULARY])]
    for layer in range(layers):
        weights[f"qkv{layer}"] = _noise(seed + 10 * layer + 3, WIDTH, 3 * WIDTH, scale=0.7)
        weights[f"bias{layer}"] = _noise(seed + 10 * layer + 4, 3 * WIDTH)
        x, normal, attended = f"x{layer}", f"normal{layer}", f"attended{layer}"
        nodes += [
            helper.make_node("LayerNormalization", [x, "scale", "shift"], [normal]),
            helper.make_node(
                "Attention",
                [normal, f"qkv{layer}", f"bias{layer}", "attention_mask", f"past_{layer}"],
                [attended, f"present_{layer}"],
                domain=MS,
                num_heads=HEADS,
                unidirectional=1,
            ),
            helper.make_node("Add", [x, attended], [f"x{layer + 1}"]),
        ]
        inputs.append(helper.make_tensor_value_info(f"past_{layer}", dtype, cache))
        outputs.append(helper.make_tensor_value_info(f"present_{layer}", dtype, present))
    nodes += [
        helper.make_node("LayerNormalization", [f"x{layers}", "scale", "shift"], ["normal"]),
        helper.make_node("MatMul", ["normal", "head"], ["logits"]),
    ]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs)
    return graph, {name: weight.astype(real) for name, weight in weights.items()}


def small_decoder(
    dtype: int = TensorProto.FLOAT, seed: int = 0, scale: float = 1.0
) -> tuple[onnx.GraphProto, dict[str, Array]]:
    """Return a decoder with the interface of `gpt_decoder` but without GEMMs, and its weights.

    Its logits depend on tokens, positions, the mask and the cache.
    """
    real = helper.tensor_dtype_to_np_dtype(dtype)
    weights: dict[str, Array] = {
        "after": _noise(seed, VOCABULARY, VOCABULARY, scale=scale),
        "at": _noise(seed + 1, POSITIONS, VOCABULARY, scale=scale),
        "each": _noise(seed + 2, VOCABULARY, scale=0.3 * scale),
    }
    nodes = [
        helper.make_node("Gather", ["after", "input_ids"], ["by token"]),
        helper.make_node("Gather", ["at", "position_ids"], ["by place"]),
        helper.make_node("Add", ["by token", "by place"], ["sum"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=dtype),
        helper.make_node("ReduceMean", ["mask"], ["share"], axes=[1]),
        helper.make_node("Unsqueeze", ["share", "last"], ["share 3"]),
        helper.make_node("Mul", ["share 3", "each"], ["by mask"]),
        helper.make_node("Unsqueeze", ["sum", "around"], ["key"]),
        helper.make_node("Mul", ["key", "each"], ["value"]),
        helper.make_node("Concat", ["key", "value"], ["new"], axis=0),
        helper.make_node("Concat", ["past_0", "new"], ["present_0"], axis=3),
        helper.make_node("ReduceMean", ["present_0"], ["by cache"], axes=[0, 2, 3], keepdims=0),
        helper.make_node("Unsqueeze", ["by cache", "first"], ["by cache 3"]),
        helper.make_node("Add", ["sum", "by cache 3"], ["total"]),
        helper.make_node("Add", ["total", "by mask"], ["logits"]),
    ]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "new"]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT32, ["batch", "new"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"]),
        helper.make_tensor_value_info("past_0", dtype, (2, "batch", 1, "past", VOCABULARY)),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", dtype, ["batch", "new", VOCABULARY]),
        helper.make_tensor_value_info("present_0", dtype, (2, "batch", 1, "total", VOCABULARY)),
    ]
    made: dict[str, Array] = {name: weight.astype(real) for name, weight in weights.items()}
    made |= {"first": np.array([1]), "last": np.array([2]), "around": np.array([0, 2])}
    return helper.make_graph(nodes, "decoder", inputs, outputs), made


def search_model(
    op_type: str,
    inputs: Mapping[str, Array | None],
    outputs: Sequence[str],
    bodies: Mapping[str, onnx.GraphProto],
    weights: Mapping[str, Array],
    *,
    outer: bool = True,
    constant: Collection[str] = (),
    **attributes: Any,
) -> bytes:
    """Return a model of one search node. Its inputs are graph inputs, or initializers if they are in ``constant``; None
    stands for an omitted input.

    With ``outer`` the weights are initializers of the outer graph, as convert_generation writes them; ONNX Runtime
    1.26 refuses that. Otherwise the bodies have them.
    """
    initializers = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    if not outer:
        for body in bodies.values():
            used = {name for node in body.node for name in node.input}
            body.initializer.extend(x for x in initializers if x.name in used)
        initializers = []
    given = {name: array for name, array in inputs.items() if array is not None}
    initializers += [numpy_helper.from_array(given[name], name) for name in constant]
    names = [name if array is not None else "" for name, array in inputs.items()]
    node = helper.make_node(op_type, names, outputs, op_type, domain=MS, **bodies, **attributes)
    fed = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), [1] if array.shape == (1,) else [None] * array.ndim
        )
        for name, array in given.items()
        if name not in constant
    ]
    results = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name == "sequences" else TensorProto.FLOAT, None)
        for name in outputs
    ]
    graph = helper.make_graph([node], "search", fed, results, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def encoder_decoder(
    *, whisper: bool = False, decodes_first: bool = True, hidden: bool = False
) -> tuple[dict[str, onnx.GraphProto], dict[str, Array]]:
    """Return the bodies of a search with an encoder, without GEMMs, and their weights.

    ``decodes_first``: the encoder's body computes the logits of the first tokens. ``hidden``: the decoder has an input
    encoder_hidden_states. It does not read it, because ONNX Runtime passes only its shape.
    """
    weights: dict[str, Array] = {
        "after": _noise(1, VOCABULARY, VOCABULARY, scale=0.7),
        "each": _noise(2, VOCABULARY),
        "first": np.array([1]),
        "around": np.array([1, 3]),
    }
    encoder = [
        helper.make_node("Transpose", ["encoder_input_ids"], ["encoder_hidden_states"], perm=[0, 2, 1])
        if whisper
        else helper.make_node("Gather", ["after", "encoder_input_ids"], ["encoder_hidden_states"]),
        helper.make_node("Unsqueeze", ["encoder_hidden_states", "first"], ["present_key_cross_0"]),
        helper.make_node("Mul", ["present_key_cross_0", "each"], ["present_value_cross_0"]),
    ]

    def decode(ids: str, past: bool) -> list[onnx.NodeProto]:
        """Return the nodes of the decoder, which does not mask later tokens."""
        nodes = [
            helper.make_node("Gather", ["after", ids], ["x"]),
            helper.make_node("Unsqueeze", ["x", "first"], ["key"]),
            helper.make_node("Mul", ["key", "each"], ["value"]),
        ]
        for name in ("key", "value"):
            present = f"present_{name}_self_0"
            parts = [f"past_{name}_self_0", name] if past else [name]
            nodes.append(helper.make_node("Concat", parts, [present], axis=2))
        cross = "past" if past else "present"
        keys = f"{cross}_key_cross_0"
        if not whisper:
            nodes += [
                helper.make_node("Cast", ["encoder_attention_mask"], ["mask"], to=TensorProto.FLOAT),
                helper.make_node("Unsqueeze", ["mask", "around"], ["mask 4"]),
                helper.make_node("Mul", [keys, "mask 4"], ["masked"]),
            ]
            keys = "masked"
        nodes += [
            helper.make_node("ReduceMean", ["present_key_self_0"], ["by keys"], axes=[2], keepdims=0),
            helper.make_node("ReduceMax", ["present_value_self_0"], ["by values"], axes=[2], keepdims=0),
            helper.make_node("ReduceMean", [keys], ["by cross keys"], axes=[2], keepdims=0),
            helper.make_node("ReduceMax", [f"{cross}_value_cross_0"], ["by cross values"], axes=[2], keepdims=0),
            helper.make_node("Sum", ["x", "by keys", "by values", "by cross keys", "by cross values"], ["logits"]),
        ]
        return nodes

    def info(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    def caches(prefix: str, of: str, length: str) -> list[onnx.ValueInfoProto]:
        return [info(f"{prefix}_{name}_{of}_0", "b", 1, length, VOCABULARY) for name in ("key", "value")]

    ids = info("decoder_input_ids", "b", "first tokens", dtype=TensorProto.INT32)
    mask_info = info("encoder_attention_mask", "b", "encoded", dtype=TensorProto.INT32)
    encoder_inputs = [info("encoder_input_ids", "b", "encoded", dtype=TensorProto.INT32), mask_info]
    if whisper:
        encoder_inputs = [info("encoder_input_ids", "b", VOCABULARY, "encoded")]
    encoder_outputs = caches("present", "cross", "encoded")
    if decodes_first:
        encoder_inputs.append(ids)
        encoder += decode("decoder_input_ids", past=False)
        first = [
            info("logits", "b", "first tokens", VOCABULARY),
            info("encoder_hidden_states", "b", "encoded", VOCABULARY),
        ]
        encoder_outputs = [*first, *caches("present", "self", "first tokens"), *encoder_outputs]
    decoder_inputs = [info("input_ids", "b", 1, dtype=TensorProto.INT32), *[mask_info] * (not whisper)]
    if hidden:
        decoder_inputs.append(info("encoder_hidden_states", "b", "encoded", VOCABULARY))
    decoder_inputs += [*caches("past", "self", "past"), *caches("past", "cross", "encoded")]
    decoder_outputs = [info("logits", "b", 1, VOCABULARY), *caches("present", "self", "total")]
    bodies = {
        "encoder": helper.make_graph(encoder, "encoder", encoder_inputs, encoder_outputs),
        "decoder": helper.make_graph(decode("input_ids", past=True), "decoder", decoder_inputs, decoder_outputs),
    }
    return bodies, weights
