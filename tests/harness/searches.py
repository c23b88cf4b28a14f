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
