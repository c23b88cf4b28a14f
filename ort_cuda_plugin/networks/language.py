"""Networks over tokens and sound, with the layers of the models of these names in Hugging Face's transformers."""

from __future__ import annotations

import numpy as np

from ort_cuda_plugin.networks.graph import INT64, NetworkGraph


def bert_base(b: NetworkGraph, layers: int = 12, tokens: int = 30522) -> None:
    """Write BERT base (Devlin et al. 2018) without the pooler: inputs ``input_ids`` and ``attention_mask``."""
    hidden, count = 768, 12
    ids = b.input("input_ids", ["batch", "sequence"], INT64)
    mask = b.input("attention_mask", ["batch", "sequence"], INT64)
    length = b.add("Unsqueeze", b.add("Gather", b.add("Shape", ids), b.constant(1), axis=0), b.constant([0]))
    places = b.add("Slice", b.noise(1, 512, hidden), b.constant([0]), length, b.constant([1]), b.constant([1]))
    x = b.add("Add", b.add("Gather", b.noise(tokens, hidden, deviation=1.0), ids), places)
    x = b.layer_norm(x, hidden, 1e-12)
    seen = b.add("Cast", b.add("Unsqueeze", mask, b.constant([1, 2])), to=b.element)
    hidden_keys = b.add("Mul", b.add("Sub", b.number(1), seen), b.number(-10000))
    for _ in range(layers):
        query, key, value = (b.heads(b.linear(x, hidden, hidden), count, hidden // count) for _ in range(3))
        mixed = b.merge_heads(b.attention(query, key, value, hidden // count, hidden_keys), hidden)
        x = b.layer_norm(b.add("Add", b.linear(mixed, hidden, hidden), x), hidden, 1e-12)
        wide = b.gelu(b.linear(x, hidden, 4 * hidden))
        x = b.layer_norm(b.add("Add", b.linear(wide, 4 * hidden, hidden), x), hidden, 1e-12)
    b.output(x, "last_hidden_state", ["batch", "sequence", hidden])


def whisper_tiny_encoder(b: NetworkGraph, layers: int = 4) -> None:
    """Write Whisper's encoder (Radford et al. 2022) for 30 s of sound, 3000 frames of 80 features; width 384."""
    hidden, count, frames = 384, 6, 1500
    x = b.gelu(b.conv(b.input("input_features", ["batch", 80, 2 * frames]), 80, hidden, [3]))
    x = b.gelu(b.conv(x, hidden, hidden, [3], strides=[2]))
    x = b.add("Add", b.add("Transpose", x, perm=[0, 2, 1]), b.noise(frames, hidden))
    for _ in range(layers):
        y = b.layer_norm(x, hidden)
        query, value = b.linear(y, hidden, hidden), b.linear(y, hidden, hidden)
        key = b.linear(y, hidden, hidden, bias=False)
        query, key, value = (b.heads(each, count, hidden // count) for each in (query, key, value))
        mixed = b.merge_heads(b.attention(query, key, value, hidden // count), hidden)
        x = b.add("Add", x, b.linear(mixed, hidden, hidden))
        wide = b.gelu(b.linear(b.layer_norm(x, hidden), hidden, 4 * hidden))
        x = b.add("Add", x, b.linear(wide, 4 * hidden, hidden))
    b.output(b.layer_norm(x, hidden), "last_hidden_state", ["batch", frames, hidden])


def llama(b: NetworkGraph, layers: int = 2, tokens: int = 16000) -> None:
    """Write Llama (Touvron et al. 2023) with the layer sizes of Llama 3.2 1B.

    The network has 2 of that model's 16 layers, and a vocabulary of 16,000 tokens. Rotary embedding, grouped-query
    attention and a K/V cache that a Concat extends are written with operators of ai.onnx.
    """
    hidden, count, groups, width, inner, longest = 2048, 32, 8, 64, 8192, 4096
    ids = b.input("input_ids", ["batch", "sequence"], INT64)
    pasts = [
        [b.input(f"past_key_values.{i}.{kind}", ["batch", groups, "past", width]) for kind in ("key", "value")]
        for i in range(layers)
    ]
    start = b.add("Slice", b.add("Shape", pasts[0][0]), b.constant([2]), b.constant([3]))
    end = b.add("Add", start, b.add("Slice", b.add("Shape", ids), b.constant([1]), b.constant([2])))
    angles = np.outer(np.arange(longest), 5e5 ** -(np.arange(0, width, 2) / width))
    turns = [
        b.add("Slice", b.constant(table[None, None], b.dtype), start, end, b.constant([2]))
        for table in (np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2))
    ]
    first, last = (b.add("Squeeze", each, b.constant([0])) for each in (start, end))
    rows = b.add("Unsqueeze", b.add("Range", first, last, b.constant(1)), b.constant([1]))
    seen = b.add("LessOrEqual", b.add("Range", b.constant(0), last, b.constant(1)), rows)
    mask = b.add("Where", seen, b.number(0), b.number(-10000))
    x = b.add("Gather", b.noise(tokens, hidden, deviation=1.0), ids)
    presents = []
    for i, past in enumerate(pasts):
        y = _rms_norm(b, x, hidden)
        query = _turn(b, b.heads(b.linear(y, hidden, hidden, bias=False), count, width), turns, width)
        key = _turn(b, b.heads(b.linear(y, hidden, groups * width, bias=False), groups, width), turns, width)
        value = b.heads(b.linear(y, hidden, groups * width, bias=False), groups, width)
        key, value = (b.add("Concat", old, new, axis=2) for old, new in zip(past, (key, value), strict=True))
        presents += [(f"present.{i}.key", key), (f"present.{i}.value", value)]
        key, value = (_repeat(b, each, groups, count // groups, width) for each in (key, value))
        mixed = b.merge_heads(b.attention(query, key, value, width, mask), hidden)
        x = b.add("Add", x, b.linear(mixed, hidden, hidden, bias=False))
        y = _rms_norm(b, x, hidden)
        gated = b.add("Mul", b.silu(b.linear(y, hidden, inner, bias=False)), b.linear(y, hidden, inner, bias=False))
        x = b.add("Add", x, b.linear(gated, inner, hidden, bias=False))
    logits = b.linear(_rms_norm(b, x, hidden), hidden, tokens, bias=False)
    b.output(logits, "logits", ["batch", "sequence", tokens])
    for name, value in presents:
        b.output(value, name, ["batch", groups, "total", width])


def _rms_norm(b: NetworkGraph, x: str, width: int) -> str:
    """Add RMSNorm in float32, as transformers computes it."""
    wide = b.add("Cast", x, to=1)
    square = b.add("ReduceMean", b.add("Pow", wide, b.constant(2.0, np.float32)), axes=[-1])
    root = b.add("Sqrt", b.add("Add", square, b.constant(1e-5, np.float32)))
    scaled = b.add("Cast", b.add("Mul", wide, b.add("Div", b.constant(1.0, np.float32), root)), to=b.element)
    return str(b.add("Mul", b.noise(width, mean=1.0), scaled))


def _turn(b: NetworkGraph, x: str, turns: list[str], width: int) -> str:
    """Add rotary embedding of queries or keys ``x`` [batch, heads, tokens, width]; ``turns``: cosines and sines."""
    first = b.add("Slice", x, b.constant([0]), b.constant([width // 2]), b.constant([3]))
    second = b.add("Slice", x, b.constant([width // 2]), b.constant([width]), b.constant([3]))
    turned = b.add("Concat", b.add("Neg", second), first, axis=-1)
    return str(b.add("Add", b.add("Mul", x, turns[0]), b.add("Mul", turned, turns[1])))


def _repeat(b: NetworkGraph, x: str, groups: int, times: int, width: int) -> str:
    """Add nodes that repeat each K/V head for the query heads that share it."""
    shape = b.add("Shape", x)
    batch = b.add("Slice", shape, b.constant([0]), b.constant([1]))
    total = b.add("Slice", shape, b.constant([2]), b.constant([3]))
    wide = b.add("Concat", batch, b.constant([groups, times]), total, b.constant([width]), axis=0)
    expanded = b.add("Expand", b.add("Unsqueeze", x, b.constant([2])), wide)
    flat = b.add("Concat", batch, b.constant([groups * times]), total, b.constant([width]), axis=0)
    return str(b.add("Reshape", expanded, flat))
