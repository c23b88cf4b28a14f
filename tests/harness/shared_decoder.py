"""Test models: a decoder of com.microsoft's operators as two models that share all weights, prefill and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, HEADS, KV_HEADS, SIZE, BLOCK = 512, 128, 4, 2, 32, 32
ROOM, PROMPT = 24, 5
LAYERS = 2


def weights(seed: int = 5) -> dict[str, np.ndarray]:
    """Return random weights by the names of the initializers. The Q, K and V projections have 4 bits."""
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))

    found = {"embedding": noise(VOCABULARY, HIDDEN), "head": noise(HIDDEN, VOCABULARY)}
    for layer in range(LAYERS):
        for name, columns in (("q", HEADS * SIZE), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE)):
            found[f"{name}{layer}"] = rng.integers(0, 256, (columns, HIDDEN // BLOCK, BLOCK // 2), dtype=np.uint8)
            found[f"{name}{layer}_scales"] = np.abs(noise(columns, HIDDEN // BLOCK)) / 16 + np.float32(0.01)
        found[f"o{layer}"] = noise(HEADS * SIZE, HIDDEN)
    return found


def decoder(values: dict[str, np.ndarray], decodes: bool) -> onnx.ModelProto:
    """Return the model for decoding (one token), or for prefill (`PROMPT` tokens).

    Inputs: ``ids``, past K/V caches, ``keys`` (number of keys - 1) and ``total``. Outputs: the logits of the last
    token, and present K/V caches.
    """
    nodes = [helper.make_node("Gather", ["embedding", "ids"], ["x0"])]

    def product(x: str, name: str, columns: int) -> str:
        given = [x, name, f"{name}_scales"]
        how: dict[str, Any] = {"K": HIDDEN, "N": columns, "bits": 4, "block_size": BLOCK}
        nodes.append(helper.make_node("MatMulNBits", given, [f"{name}_y"], domain="com.microsoft", **how))
        return f"{name}_y"

    pasts, presents = [], []
    for layer in range(LAYERS):
        q = product(f"x{layer}", f"q{layer}", HEADS * SIZE)
        k, v = (product(f"x{layer}", f"{name}{layer}", KV_HEADS * SIZE) for name in "kv")
        cache = [f"past_key{layer}", f"past_value{layer}"]
        made = [f"a{layer}", f"present_key{layer}", f"present_value{layer}"]
        grouped: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        inputs = [q, k, v, *cache, "keys", "total"]
        nodes += [
            helper.make_node("GroupQueryAttention", inputs, made, domain="com.microsoft", **grouped),
            helper.make_node("MatMul", [made[0], f"o{layer}"], [f"p{layer}"]),
            helper.make_node("Add", [f"x{layer}", f"p{layer}"], [f"x{layer + 1}"]),
        ]
        pasts += cache
        presents += made[1:]
    last = f"x{LAYERS}"
    if not decodes:
        nodes.append(helper.make_node("Slice", [last, "minus_1", "end", "axis"], ["last"]))
        last = "last"
    nodes.append(helper.make_node("MatMul", [last, "head"], ["logits"]))
    shape = [1, KV_HEADS, ROOM, SIZE]
    inputs_info = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 1 if decodes else PROMPT]),
        helper.make_tensor_value_info("keys", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in pasts),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1, VOCABULARY])]
    outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in presents]
    initializers = [numpy_helper.from_array(array, name) for name, array in values.items()]
    if not decodes:
        numbers = {"minus_1": [-1], "end": [2**62], "axis": [1]}
        initializers += [numpy_helper.from_array(np.array(x, np.int64), name) for name, x in numbers.items()]
    graph = helper.make_graph(nodes, "decode" if decodes else "prefill", inputs_info, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def save_pair(folder: Path, values: dict[str, np.ndarray]) -> None:
    """Write prefill.onnx and decode.onnx, with their initializers in one file, weights.data."""
    for name in ("prefill", "decode"):
        (folder / "weights.data").unlink(missing_ok=True)  # onnx would append to an existing file
        model = decoder(values, name == "decode")
        onnx.save(model, folder / f"{name}.onnx", save_as_external_data=True, location="weights.data")


def generate(
    prefill: ort.InferenceSession, decode: ort.InferenceSession, prompt: list[int], count: int
) -> list[np.ndarray]:
    """Run prefill, then decode greedily; return the logits of the ``count`` generated tokens."""
    empty = np.zeros((1, KV_HEADS, ROOM, SIZE), np.float32)
    names = [f"past_{kind}{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    caches = dict.fromkeys(names, empty)
    ids, past, logits = np.array([prompt], np.int64), 0, []
    for _ in range(count):
        total = past + ids.shape[1]
        counts = {"keys": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
        session = decode if past else prefill
        result, *presents = session.run(None, {"ids": ids, **counts, **caches})
        caches = dict(zip(names, presents, strict=True))
        logits.append(result)
        ids, past = np.array([[int(result[0, -1].argmax())]], np.int64), total
    return logits
