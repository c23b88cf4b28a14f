"""Bodies of WhisperBeamSearch and BeamSearch with attention, as exporters write them: small encoders and decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from searches import HEAD, HEADS, MS, POSITIONS, VOCABULARY, WIDTH, Array

SELF_ATTENTION = ("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "MatMul")
"""Operators of the decoder's self-attention: a fused one, or MatMul and Softmax of ai.onnx."""

SHAPES: dict[str, tuple[int | str, ...]] = {
    "past_sequence_length": (1,),
    "beam_width": (1,),
    "cache_indirection": ("prompts", "beams", "room"),
}
"""Inputs of a decoder whose past and present caches share buffers, with their shapes."""
SHARED = tuple(SHAPES)

Info = onnx.ValueInfoProto


def _info(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> Info:
    return helper.make_tensor_value_info(name, dtype, shape)


class _Nodes:
    """Nodes under construction; each operator's result gets a name of its own."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.nodes: list[onnx.NodeProto] = []

    def add(self, kind: str, inputs: list[str], outputs: str | list[str] = "", domain: str = "", **more: Any) -> str:
        names = outputs if isinstance(outputs, list) else [outputs or f"{self.part} {kind} {len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, inputs, names, names[0], domain=domain, **more))
        return names[0]

    def heads(self, x: str, name: str = "") -> str:
        """Split x [batch, sequence, heads * size] into heads: [batch, heads, sequence, size]."""
        return self.add("Transpose", [self.add("Reshape", [x, "split"])], name, perm=[0, 2, 1, 3])

    def attention(self, query: str, keys: str, values: str) -> str:
        """Return attention of ai.onnx for Q, K and V of rank 4."""
        scores = self.add("MatMul", [query, self.add("Transpose", [keys], perm=[0, 1, 3, 2])])
        shares = self.add("Softmax", [self.add("Mul", [scores, "scale"])], axis=-1)
        mixed = self.add("Transpose", [self.add("MatMul", [shares, values])], perm=[0, 2, 1, 3])
        return self.add("Reshape", [mixed, "merge"])


def _weights(layers: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def noise(*shape: int, scale: float = 0.5) -> Array:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights: dict[str, Array] = {
        "tokens": noise(VOCABULARY, WIDTH, scale=1.5),
        "places": noise(POSITIONS, WIDTH, scale=1.5),
        "head": noise(WIDTH, VOCABULARY, scale=1.5),
        "from frames": noise(WIDTH, WIDTH),
        "split": np.array([0, 0, HEADS, HEAD]),
        "merge": np.array([0, 0, WIDTH]),
        "scale": np.array(HEAD**-0.5, np.float32),
        "buckets": noise(8, HEADS, scale=2.0),
        **{f"index {number}": np.array(number) for number in range(3)},
        **{f"axis {number}": np.array([number]) for number in range(4)},
        "to end": np.array([2**63 - 1]),
    }
    for layer in range(layers):
        names = [f"self {kind} {layer}" for kind in "qkvo"] + [f"cross {kind} {layer}" for kind in "qkvo"]
        weights |= {name: noise(WIDTH, WIDTH) for name in names}
    return weights


def _decoder(
    ids: str, layers: int, attention: str, *, has_past: bool, t5: bool, shared: tuple[str, ...]
) -> list[onnx.NodeProto]:
    """Return the nodes of a decoder that reads the tokens ``ids``."""
    b = _Nodes("decoder")
    new = b.add("Gather", [b.add("Shape", [ids]), "index 1"])
    start = "index 0"
    if shared:
        start = b.add("Cast", [b.add("Squeeze", ["past_sequence_length"])], to=TensorProto.INT64)
    elif has_past:
        start = b.add("Gather", [b.add("Shape", ["past_key_self_0"]), "index 2"])
    end = b.add("Add", [start, new])
    x = b.add("Gather", ["tokens", ids])
    bias = ""
    if t5:
        lengths = b.add("Unsqueeze", [end, "axis 0"])
        whole = b.add("RelativePositionBias", ["buckets", lengths, lengths], domain=MS, max_distance=16)
        last = b.add("Neg", [b.add("Unsqueeze", [new, "axis 0"])])
        bias = b.add("Slice", [whole, last, "to end", "axis 2"])
    else:
        first, last = (b.add("Unsqueeze", [each, "axis 0"]) for each in (start, end))
        x = b.add("Add", [x, b.add("Slice", ["places", first, last, "axis 0"])])
    for layer in range(layers):
        q, k, v = (b.add("MatMul", [x, f"self {kind} {layer}"]) for kind in "qkv")
        caches = [f"present_{kind}_self_{layer}" for kind in ("key", "value")]
        pasts = [name.replace("present", "past") for name in caches]
        out = f"attended {layer} {has_past}"
        if not has_past:
            b.add(
                "MultiHeadAttention",
                [q, k, v, "", "", bias],
                [out, *caches],
                MS,
                num_heads=HEADS,
                unidirectional=1,
            )
        elif attention == "MatMul":
            keys, values = (
                b.add("Concat", [past, b.heads(each)], name, axis=2)
                for past, each, name in zip(pasts, (k, v), caches, strict=True)
            )
            out = b.attention(b.heads(q), keys, values)
        elif attention == "MultiHeadAttention":
            given = [q, k, v, "", "", bias, *pasts, *shared[:1]]
            b.add(attention, given, [out, *caches], MS, num_heads=HEADS)
        else:
            more = {"past_present_share_buffer": 1} if shared else {}
            b.add(attention, [q, k, v, "", bias, *pasts, *shared], [out, *caches], MS, num_heads=HEADS, **more)
        x = b.add("Add", [x, b.add("MatMul", [out, f"self o {layer}"])])
        cross = "past" if has_past else "present"
        others = [f"{cross}_{kind}_cross_{layer}" for kind in ("key", "value")]
        query = b.add("MatMul", [x, f"cross q {layer}"])
        if has_past and attention == "DecoderMaskedMultiHeadAttention":
            mixed = b.add(attention, [query, *others], domain=MS, num_heads=HEADS)
        else:
            mixed = b.attention(b.heads(query), *others)
        x = b.add("Add", [x, b.add("MatMul", [mixed, f"cross o {layer}"])])
    b.add("MatMul", [x, "head"], "logits")
    return b.nodes


def attention_bodies(
    attention: str = "MultiHeadAttention", layers: int = 1, seed: int = 0, *, t5: bool = False, is_shared: bool = False
) -> tuple[dict[str, onnx.GraphProto], dict[str, Array]]:
    """Return the bodies of a Whisper search, or with ``t5`` of a T5 one, and their weights.

    ``attention`` is one of `SELF_ATTENTION`. Whisper's decoder adds positions to the tokens, from the past's length on.
    T5's adds a bias to the scores that depends on the distance between query and key. The encoder is one product. With
    ``is_shared``, past and present caches of the decoder share buffers, as in exports for CUDAExecutionProvider.
    """
    shared = SHARED[: 1 if attention == "MultiHeadAttention" else 3] if is_shared else ()
    b = _Nodes("encoder")
    source = b.add("Gather", ["tokens", "encoder_input_ids"]) if t5 else "encoder_input_ids"
    if not t5:
        source = b.add("Transpose", [source], perm=[0, 2, 1])
    b.add("MatMul", [source, "from frames"], "encoder_hidden_states")
    for layer in range(layers):
        for kind, weight in (("key", "k"), ("value", "v")):
            projected = b.add("MatMul", ["encoder_hidden_states", f"cross {weight} {layer}"])
            b.heads(projected, f"present_{kind}_cross_{layer}")
    first = _decoder("decoder_input_ids", layers, attention, has_past=False, t5=t5, shared=())
    nodes = _decoder("input_ids", layers, attention, has_past=True, t5=t5, shared=shared)

    def caches(prefix: str, of: str, length: str) -> list[Info]:
        numbers = [(kind, layer) for layer in range(layers) for kind in ("key", "value")]
        return [_info(f"{prefix}_{kind}_{of}_{layer}", "b", HEADS, length, HEAD) for kind, layer in numbers]

    ids = _info("decoder_input_ids", "b", "first tokens", dtype=TensorProto.INT32)
    mask = _info("encoder_attention_mask", "b", "encoded", dtype=TensorProto.INT32)
    encoder_inputs = [_info("encoder_input_ids", "b", WIDTH, "encoded"), ids]
    if t5:
        encoder_inputs = [_info("encoder_input_ids", "b", "encoded", dtype=TensorProto.INT32), mask, ids]
    encoder_outputs = [
        _info("logits", "b", "first tokens", VOCABULARY),
        _info("encoder_hidden_states", "b", "encoded", WIDTH),
        *caches("present", "self", "first tokens"),
        *caches("present", "cross", "encoded"),
    ]
    decoder_inputs = [
        _info("input_ids", "b", 1, dtype=TensorProto.INT32),
        *[mask] * t5,
        *caches("past", "self", "past"),
        *caches("past", "cross", "encoded"),
        *(_info(name, *SHAPES[name], dtype=TensorProto.INT32) for name in shared),
    ]
    decoder_outputs = [_info("logits", "b", 1, VOCABULARY), *caches("present", "self", "total")]
    bodies = {
        "encoder": helper.make_graph([*b.nodes, *first], "encoder", encoder_inputs, encoder_outputs),
        "decoder": helper.make_graph(nodes, "decoder", decoder_inputs, decoder_outputs),
    }
    return bodies, _weights(layers, seed)
