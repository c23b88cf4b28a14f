"""Test model: a Llama-like decoder as onnxruntime-genai's builder writes it, and its reference on the CPU provider."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from encoder import GraphBuilder

CONTRIB = "com.microsoft"
LONGEST = 256
"""Maximum number of tokens: rows of the rotary embedding's tables."""


class _Builder(GraphBuilder):
    def __init__(self, seed: int, block: int) -> None:
        super().__init__(seed)
        self.block = block

    def matmul(self, x: str, inputs: int, outputs: int) -> str:
        """Add a linear layer with 4-bit weights (MatMulNBits), with one scale for each block."""
        blocks = inputs // self.block
        codes = self.rng.integers(0, 256, (outputs, blocks, self.block // 2), np.uint8)
        scales = np.abs(self.rng.standard_normal((outputs, blocks), np.float32)) / (4 * math.sqrt(inputs))
        return self.node(
            "MatMulNBits",
            x,
            self.constant(codes, np.uint8),
            self.constant(scales, np.float32),
            domain=CONTRIB,
            K=inputs,
            N=outputs,
            bits=4,
            block_size=self.block,
        )

    def choice(self, condition: str, first: list[np.ndarray], second: list[np.ndarray]) -> tuple[str, str]:
        """Add an If that returns two constants: those of ``first`` if the condition holds, else those of ``second``."""
        branches = []
        for side, arrays in (("first", first), ("second", second)):
            names = [f"{side}_{number}" for number in range(2)]
            nodes = [
                helper.make_node("Constant", [], [name], value=numpy_helper.from_array(x))
                for name, x in zip(names, arrays, strict=True)
            ]
            outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
            branches.append(helper.make_graph(nodes, side, [], outputs))
        results = self.node("If", condition, outputs=2, then_branch=branches[0], else_branch=branches[1])
        return results, self.nodes[-1].output[1]

    def to(self, x: str, kind: int, given: int = TensorProto.FLOAT) -> str:
        return x if not x or kind == given else self.node("Cast", x, to=kind)

    def skip_norm(self, x: str, residual: str, hidden: int) -> tuple[str, str]:
        """Add a fused residual addition and RMSNorm; return the normalized sum, and the sum."""
        number = len(self.nodes)
        names = [f"norm_{number}", "", "", f"sum_{number}"]
        weight = self.noise(hidden, scale=0.1, offset=1.0)
        self.nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization", [residual, x, weight], names, domain=CONTRIB, epsilon=1e-6
            )
        )
        return names[0], names[3]


def genai_decoder(
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 100,
    *,
    block: int = 32,
    longest: int = LONGEST,
    positions: bool = False,
    real: int = TensorProto.FLOAT,
    cache_type: int | None = None,
    longrope: int | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """Return the decoder. Inputs: ``input_ids``, ``attention_mask`` and past K/V caches; outputs: ``logits`` and
    present K/V caches.

    With ``positions`` it has an input ``position_ids``, and separate RotaryEmbedding nodes. Attention computes in the
    type ``real``; its cache has that type, or is quantized to ``cache_type`` with a scale. Masks wider than
    ``longrope`` select other rotary angles, as in models with LongRoPE.
    """
    b = _Builder(seed, block)
    width = hidden // heads
    angles = np.outer(np.arange(longest), 1e4 ** -(np.arange(width // 2) * 2 / width))
    tables = [[np.cos(x).astype(np.float32), np.sin(x).astype(np.float32)] for x in (angles, angles / 5)]
    if longrope is None:
        turns = b.constant(tables[0][0], np.float32), b.constant(tables[0][1], np.float32)
    else:
        turns = b.choice(b.node("Greater", b.dim("attention_mask", 1), b.constant(longrope)), tables[1], tables[0])
    counted = b.node("Sub", b.node("ReduceSum", "attention_mask", b.constant([1]), keepdims=0), b.constant([1]))
    lengths = b.node("Cast", counted, to=TensorProto.INT32)
    total = b.node("Cast", b.dim("attention_mask", 1), to=TensorProto.INT32)
    residual = b.node("Gather", b.noise(vocabulary, hidden, scale=1.0), "input_ids")
    x = b.node("SimplifiedLayerNormalization", residual, b.noise(hidden, scale=0.1, offset=1.0), epsilon=1e-6, axis=-1)
    turns = b.to(turns[0], real), b.to(turns[1], real)
    scales = [b.constant([0.05], np.float32)] * 2 if cache_type is not None else []
    quant: dict[str, Any] = (
        {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8} if scales else {}
    )
    cache = []
    for layer in range(layers):
        if positions:
            query, key, value = (b.matmul(x, hidden, width * n) for n in (heads, kv_heads, kv_heads))
            query, key = (
                b.node("RotaryEmbedding", y, "position_ids", *turns, domain=CONTRIB) for y in (query, key)
            )  # fmt: skip
        else:
            query, key, value = b.matmul(x, hidden, width * (heads + 2 * kv_heads)), "", ""
        query, key, value = (b.to(y, real) for y in (query, key, value))
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        cache += present
        rotation = ["", ""] if positions else [*turns]
        b.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [query, key, value, *past, lengths, total, *rotation, *([""] * 3 if scales else []), *scales],
                [f"mixed_{layer}", *present],
                domain=CONTRIB,
                num_heads=heads,
                kv_num_heads=kv_heads,
                do_rotary=int(not positions),
                scale=1 / math.sqrt(width),
                **quant,
            )
        )
        mixed = b.to(f"mixed_{layer}", TensorProto.FLOAT, real)
        x, residual = b.skip_norm(b.matmul(mixed, hidden, hidden), residual, hidden)
        gate, up = b.matmul(x, hidden, 2 * hidden), b.matmul(x, hidden, 2 * hidden)
        gated = b.node("Mul", b.node("Mul", gate, b.node("Sigmoid", gate)), up)
        x, residual = b.skip_norm(b.matmul(gated, 2 * hidden, hidden), residual, hidden)
    logits = b.matmul(x, hidden, vocabulary)
    b.nodes[-1].output[0] = "logits"
    assert logits

    def values(names: list[str], kind: int, *shape: int | str) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name in names]

    inputs = values(["input_ids"], TensorProto.INT64, "batch", "sequence")
    inputs += values(["attention_mask"], TensorProto.INT64, "batch", "total")
    inputs += values(["position_ids"] if positions else [], TensorProto.INT64, "batch", "sequence")
    of_past = [name.replace("present", "past_key_values") for name in cache]
    kept = real if cache_type is None else cache_type
    inputs += values(of_past, kept, "batch", kv_heads, "past", width)
    outputs = values(["logits"], TensorProto.FLOAT, "batch", "sequence", vocabulary)
    outputs += values(cache, kept, "batch", kv_heads, "total", width)
    graph = helper.make_graph(b.nodes, "decoder", inputs, outputs, b.initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compulsory_bytes(model: onnx.ModelProto, longest: int, batch: int = 1) -> int:
    """Return the minimum bytes that decoding a token reads: weights, and float32 K/V caches of ``longest`` tokens.

    Embedding tables and rotary tables do not count, because a token reads only single rows of them.
    """
    tables = {name for node in model.graph.node if node.op_type == "Gather" for name in node.input[:1]}
    tables |= {name for node in model.graph.node if node.op_type == "GroupQueryAttention" for name in node.input[7:]}
    weights = [x for x in model.graph.initializer if x.name not in tables]
    total: int = sum(numpy_helper.to_array(x).nbytes for x in weights)
    for x in model.graph.input:
        if x.name.startswith("past"):
            dims = x.type.tensor_type.shape.dim
            total += batch * dims[1].dim_value * longest * dims[3].dim_value * 4
    return total


def genai_config(model: onnx.ModelProto, filename: str, heads: int = 4) -> str:
    """Return the text of the ``genai_config.json`` for a model of `genai_decoder`."""
    caches = [x for x in model.graph.input if x.name.startswith("past")]
    _, kv_heads, _, width = (d.dim_value for d in caches[0].type.tensor_type.shape.dim)
    vocabulary = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    inputs |= {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
    outputs = {"logits": "logits"} | {f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": filename,
        "head_size": width,
        "hidden_size": width * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": len(caches) // 2,
        "num_key_value_heads": kv_heads,
        "inputs": inputs,
        "outputs": outputs,
    }
    top = {"type": "llama", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "context_length": LONGEST}
    search = {"past_present_share_buffer": True, "max_length": LONGEST}
    whole: dict[str, Any] = {"model": top | {"vocab_size": vocabulary, "decoder": decoder}, "search": search}
    return json.dumps(whole)


class CpuDecoder:
    """Runs a decoder on the CPU provider, and keeps its K/V caches between calls."""

    def __init__(self, model: Path, batch: int = 1) -> None:
        self.session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.names = [x.name for x in self.session.get_outputs()]
        self.cache = {
            x.name: np.zeros((batch, x.shape[1], LONGEST, x.shape[3]), np.float32)
            for x in self.session.get_inputs()
            if x.name.startswith("past")
        }
        self.has_positions = "position_ids" in {x.name for x in self.session.get_inputs()}
        self.length = 0

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of the last of ``tokens`` [batch, n], which follow those of earlier calls."""
        batch, new = tokens.shape
        feeds: dict[str, np.ndarray] = {"input_ids": tokens, **self.cache}
        feeds["attention_mask"] = np.ones((batch, self.length + new), np.int64)
        if self.has_positions:
            feeds["position_ids"] = np.arange(self.length, self.length + new)[None].repeat(batch, 0)
        self.length += new
        results = dict(zip(self.names, self.session.run(None, feeds), strict=True))
        self.cache = {name: results[name.replace("past_key_values", "present")] for name in self.cache}
        last: np.ndarray = results["logits"][:, -1]
        return last

    def greedy(self, prompt: np.ndarray, new_tokens: int) -> np.ndarray:
        """Return the most probable tokens after the prompt, int64 [batch, new_tokens]."""
        tokens, found = prompt, []
        for _ in range(new_tokens):
            tokens = self.logits(tokens).argmax(-1)[:, None]
            found.append(tokens)
        return np.concatenate(found, axis=1)
