"""com.microsoft's position biases and rotary embeddings, compared with NumPy and the CPU provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contributed import FLOAT, Array, check_node, noise

B, S, N, H = 2, 4, 2, 8
REALS = [FLOAT]


def test_relative_position_bias() -> None:
    """The table's memory is [heads, buckets], although its declared shape is [buckets, heads]."""
    buckets, heads, length, most = 8, 2, 12, 20

    def bucket(distance: int, bidirectional: bool) -> int:
        count = buckets // 2 if bidirectional else buckets
        first = count if bidirectional and distance > 0 else 0
        distance, exact = abs(distance), count // 2
        if distance < exact:
            return first + distance
        far = exact + int(np.log(distance / exact) / np.log(most / exact) * (count - exact))
        return first + min(far, count - 1)

    for bidirectional in (0, 1):

        def reference(table: Array, *_: Array, bidirectional: bool = bool(bidirectional)) -> Array:
            chosen = [[bucket(k - q, bidirectional) for k in range(length)] for q in range(length)]
            result: Array = table.reshape(heads, buckets)[:, chosen][None]
            return result

        lengths = [np.array(length, np.int64)] * 2
        attributes = {"is_bidirectional": bidirectional, "max_distance": most}
        check_node(
            "RelativePositionBias", [noise(buckets, heads), *lengths], attributes, reference=reference, reals=REALS
        )  # fmt: skip


def test_gated_relative_position_bias() -> None:
    columns = 6
    places = np.array([[0, 1, 2, 4], [5, 3, 6, 7]], np.int32)

    def gated(x: Array, b: Array, rel: Array, weight: Array, bias: Array, eco: Array, at: Array | None) -> Array:
        if at is not None:
            padded = np.zeros((B * S, x.shape[1]), np.float32)
            padded[at.reshape(-1)[: len(x)]] = x
            x = padded.reshape(B, S, -1)
        heads = (x + b).reshape(*x.shape[:2], N, H).transpose(0, 2, 1, 3)
        sums = (heads @ weight + bias).reshape(*heads.shape[:3], 2, -1).sum(-1)
        u, r = np.split(1 / (1 + np.exp(-sums)), 2, -1)
        result: Array = ((u * (r * eco - 1.0) + 2.0) * rel).astype(np.float32)
        return result

    shared = [noise(N * H, seed=1), noise(1, N, S, S, seed=2), noise(H, columns, seed=3), noise(columns, seed=4)]
    shared.append(noise(1, N, 1, 1, seed=5))
    for query, given, reals in ((noise(B, S, N * H), None, [FLOAT]), (noise(5, N * H), places, [FLOAT])):
        check_node(
            "GatedRelativePositionBias",
            [query, *shared, given],
            {"num_heads": N},
            reference=gated,
            reals=reals,
            tolerance=1e-4,
        )


@pytest.mark.parametrize("layout", [0, 1])
def test_multimodal_rotary_embedding(layout: int) -> None:
    positions = np.random.default_rng(1).integers(0, 12, (3, B, S))
    angles = np.outer(np.arange(12), 0.7 ** np.arange(8)).astype(np.float32)
    attributes: dict[str, Any] = {"mrope_section": [3, 3, 2], "mrope_layout": layout, "interleaved": layout}
    x = noise(B, N, S, 16) if layout else noise(B, S, N * 24)
    if not layout:
        attributes |= {"num_heads": N, "rotary_embedding_dim": 16}
    inputs = [x, positions, np.cos(angles), np.sin(angles)]
    check_node("MRotaryEmbedding", inputs, attributes, reals=[FLOAT])
