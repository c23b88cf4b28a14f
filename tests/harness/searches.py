"""Models of one search node, with a tiny decoder such as onnxruntime.transformers.convert_generation makes."""

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
    """A decoder like GPT-2 with its caches, and the weights that it reads of the graph around it."""
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
    """A model of one search node. Its inputs are fed, except those in ``constant``; None stands for one left out.

    With ``outer`` the weights belong to the graph around the bodies, as convert_generation leaves them. ONNX Runtime
    1.26 refuses that.
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
    """The bodies of a search with an encoder, with one layer of one head, and their weights.

    ``decodes_first``: the encoder's body gives the logits of the first tokens. ``hidden``: the decoder has an input
    for what the encoder's layers give, and leaves it alone, since ONNX Runtime passes its shape only.
    """
    weights: dict[str, Array] = {
        "tokens": _noise(1, VOCABULARY, WIDTH),
        "head": _noise(2, WIDTH, VOCABULARY, scale=0.5),
        "first": np.array([1]),
        "lowest": np.array(-10000.0, np.float32),
        "nothing": np.zeros((), np.float32),
    }
    for number, name in enumerate(["q", "k", "v", "cross q", "cross k", "cross v", "features"]):
        weights[name] = _noise(number + 3, WIDTH, WIDTH, scale=0.6)
    encoder: list[onnx.NodeProto] = []
    if whisper:
        encoder.append(helper.make_node("Transpose", ["encoder_input_ids"], ["frames"], perm=[0, 2, 1]))
        encoder.append(helper.make_node("MatMul", ["frames", "features"], ["encoder_hidden_states"]))
    else:
        encoder.append(helper.make_node("Gather", ["tokens", "encoder_input_ids"], ["encoder_hidden_states"]))
    for cache, weight in (("present_key_cross_0", "cross k"), ("present_value_cross_0", "cross v")):
        encoder.append(helper.make_node("MatMul", ["encoder_hidden_states", weight], [f"flat {cache}"]))
        encoder.append(helper.make_node("Unsqueeze", [f"flat {cache}", "first"], [cache]))

    def attend(query: str, key: str, value: str, result: str, mask: str = "") -> list[onnx.NodeProto]:
        nodes = [
            helper.make_node("Transpose", [key], [f"{result} t"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", [query, f"{result} t"], [f"{result} scores"]),
        ]
        scores = f"{result} scores"
        if mask:
            nodes += [
                helper.make_node("Cast", [mask], [f"{result} bool"], to=TensorProto.BOOL),
                helper.make_node("Where", [f"{result} bool", "nothing", "lowest"], [f"{result} bias"]),
                helper.make_node("Unsqueeze", [f"{result} bias", "first"], [f"{result} bias 3"]),
                helper.make_node("Unsqueeze", [f"{result} bias 3", "first"], [f"{result} bias 4"]),
                helper.make_node("Add", [scores, f"{result} bias 4"], [f"{result} masked"]),
            ]
            scores = f"{result} masked"
        nodes += [
            helper.make_node("Softmax", [scores], [f"{result} weights"], axis=-1),
            helper.make_node("MatMul", [f"{result} weights", value], [f"{result} 4"]),
            helper.make_node("Squeeze", [f"{result} 4", "first"], [result]),
        ]
        return nodes

    def decode(ids: str, past: bool) -> list[onnx.NodeProto]:
        """For the logits of the last token; it does not hide later tokens from earlier ones."""
        nodes = [helper.make_node("Gather", ["tokens", ids], ["x"])]
        for weight, name in (("q", "query"), ("k", "key"), ("v", "value")):
            nodes.append(helper.make_node("MatMul", ["x", weight], [f"flat {name}"]))
            nodes.append(helper.make_node("Unsqueeze", [f"flat {name}", "first"], [name]))
        for name in ("key", "value"):
            present = f"present_{name}_self_0"
            if past:
                nodes.append(helper.make_node("Concat", [f"past_{name}_self_0", name], [present], axis=2))
            else:
                nodes.append(helper.make_node("Identity", [name], [present]))
        which = "past" if past else "present"
        mask = "" if whisper else "encoder_attention_mask"
        nodes += attend("query", "present_key_self_0", "present_value_self_0", "own")
        nodes.append(helper.make_node("Add", ["x", "own"], ["y"]))
        nodes.append(helper.make_node("MatMul", ["y", "cross q"], ["flat cross query"]))
        nodes.append(helper.make_node("Unsqueeze", ["flat cross query", "first"], ["cross query"]))
        nodes += attend("cross query", f"{which}_key_cross_0", f"{which}_value_cross_0", "cross", mask)
        nodes.append(helper.make_node("Add", ["y", "cross"], ["z"]))
        nodes.append(helper.make_node("MatMul", ["z", "head"], ["logits"]))
        return nodes

    def info(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    def caches(prefix: str, of: str, length: str) -> list[onnx.ValueInfoProto]:
        return [info(f"{prefix}_{name}_{of}_0", "b", 1, length, WIDTH) for name in ("key", "value")]

    ids = info("decoder_input_ids", "b", "first tokens", dtype=TensorProto.INT32)
    mask_info = info("encoder_attention_mask", "b", "encoded", dtype=TensorProto.INT32)
    encoder_inputs = [info("encoder_input_ids", "b", "encoded", dtype=TensorProto.INT32), mask_info]
    if whisper:
        encoder_inputs = [info("encoder_input_ids", "b", WIDTH, "encoded")]
    encoder_outputs = caches("present", "cross", "encoded")
    if decodes_first:
        encoder_inputs.append(ids)
        encoder += decode("decoder_input_ids", past=False)
        first = [info("logits", "b", "first tokens", VOCABULARY), info("encoder_hidden_states", "b", "encoded", WIDTH)]
        encoder_outputs = [*first, *caches("present", "self", "first tokens"), *encoder_outputs]
    decoder_inputs = [info("input_ids", "b", 1, dtype=TensorProto.INT32), *[mask_info] * (not whisper)]
    if hidden:
        decoder_inputs.append(info("encoder_hidden_states", "b", "encoded", WIDTH))
    decoder_inputs += [*caches("past", "self", "past"), *caches("past", "cross", "encoded")]
    decoder_outputs = [info("logits", "b", 1, VOCABULARY), *caches("present", "self", "total")]
    bodies = {
        "encoder": helper.make_graph(encoder, "encoder", encoder_inputs, encoder_outputs),
        "decoder": helper.make_graph(decode("input_ids", past=True), "decoder", decoder_inputs, decoder_outputs),
    }
    return bodies, weights
