"""com.microsoft's attention with sparsity patterns: blocks (SparseAttention), window and global tokens (Longformer)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnxruntime as ort
import pytest

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, check_node, node_model, noise
from emulator_harness import configured

HEADS, KV_HEADS, SIZE, ROOM = 4, 2, 16, 64
BLOCK = 16
MASK = np.array(
    [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]]
)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def compressed(mask: Array) -> tuple[Array, Array]:
    """Return the block masks [layouts, rows, columns] in CSR form: row starts, and column indices padded with -1."""
    starts = np.zeros((len(mask), mask.shape[1] + 1), np.int32)
    starts[:, 1:] = np.cumsum(mask.sum(2), 1)
    columns = np.full((len(mask), starts.max()), -1, np.int32)
    for layout, rows in enumerate(mask):
        named = np.nonzero(rows)[1]
        columns[layout, : len(named)] = named
    return starts, columns


def on_cpu(inputs: Sequence[Array], attributes: Mapping[str, float]) -> list[Array]:
    """Run SparseAttention on the CPU provider, which requires past and present in one buffer."""
    model = node_model("SparseAttention", inputs, attributes, [FLOAT] * 3)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_output("y0")
    copies = [array.copy() for array in inputs]  # an OrtValue does not keep its array alive
    for number, array in enumerate(copies):
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(f"x{number}", value)
        if number in (3, 4):
            binding.bind_ortvalue_output(f"y{number - 2}", value)
    session.run_with_iobinding(binding)
    return [binding.get_outputs()[0].numpy(), *copies[3:5]]


@pytest.mark.parametrize(
    ("rows", "lengths", "reals"),
    [(40, [40, 40], [FLOAT16]), (1, [50, 37], [FLOAT, BFLOAT16])],
    ids=["prompt", "token"],
)
def test_sparse_attention_equals_the_cpu_provider(rows: int, lengths: list[int], reals: list[int]) -> None:
    """The CPU provider is wrong for sequences of different lengths, so it runs one sequence at a time."""
    angles = np.outer(np.arange(ROOM), 0.7 ** np.arange(SIZE // 2)).astype(np.float32)
    inputs = [
        *(noise(2, rows, heads * SIZE, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))),
        *(noise(2, KV_HEADS, ROOM, SIZE, seed=i) for i in (3, 4)),
        *compressed(MASK),
        np.array(max(lengths), np.int32),
        np.array(lengths, np.int32),
        np.cos(angles),
        np.sin(angles),
    ]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": BLOCK, "do_rotary": 1}
    more: dict[str, float] = {"rotary_interleaved": 1, "scale": 0.4} if rows == 1 else {}

    def reference(*given: Array) -> list[Array]:
        single = []
        for row, length in enumerate(lengths):
            own = [x[row : row + 1] for x in given[:5]]
            total = np.array(length, np.int32)
            single.append(on_cpu([*own, *given[5:7], total, total.reshape(1), *given[9:]], attributes | more))
        return [np.concatenate(parts) for parts in zip(*single, strict=True)]

    def valid(number: int, y: Array) -> Array:
        """Return the defined part of an output: a cache has arbitrary contents after its sequence's last token."""
        if number == 0:
            return y
        return np.concatenate([row[:, :count].reshape(-1) for row, count in zip(y, lengths, strict=True)])

    check_node(
        "SparseAttention", inputs, attributes | more, [FLOAT] * 3, reals=reals, part=valid, reference=reference
    )  # fmt: skip


def test_block_indices_that_do_not_exist() -> None:
    """Row starts and column indices out of range select no block, so the attention output is 0."""
    starts = np.array([[-3, 1 << 30, 7, -9, 2]], np.int32)
    columns = np.array([[99, -1, 1 << 20]], np.int32)
    inputs = [noise(1, 20, (HEADS + 2 * KV_HEADS) * SIZE), None, None, *[noise(1, KV_HEADS, ROOM, SIZE)] * 2]
    inputs += [starts, columns, np.array(20, np.int32), np.array([20], np.int32)]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": BLOCK}

    def reference(*_: Array | None) -> Array:
        return np.zeros((1, 20, HEADS * SIZE), np.float32)

    check_node(
        "SparseAttention",
        inputs,
        attributes,
        [FLOAT] * 3,
        reals=[FLOAT],
        reference=lambda *given: [reference(), *[np.zeros((1, KV_HEADS, ROOM, SIZE), np.float32)] * 2],
        part=lambda number, y: y if number == 0 else y[:0],
        sized=[0],
    )


def test_longformer_attention() -> None:
    batch, rows, hidden, heads, window = 2, 12, 16, 2, 2
    is_global = np.zeros((batch, rows), np.int32)
    is_global[0, [0, 7]] = is_global[1, 3] = 1
    mask = np.where(np.arange(rows) < np.array([[rows], [9]]), 0, -10000).astype(np.float32)

    def attended(x: Array, weights: Array, bias: Array, added: Array) -> Array:
        q, k, v = (y.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3) for y in np.split(x @ weights + bias, 3, 2))
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]) + added
        e = np.exp(scores - scores.max(-1, keepdims=True))
        result: Array = ((e / e.sum(-1, keepdims=True)) @ v).transpose(0, 2, 1, 3).reshape(batch, rows, -1)
        return result

    def reference(x: Array, w: Array, b: Array, mask: Array, gw: Array, gb: Array, flags: Array) -> Array:
        added = mask[:, None, None]
        distance = np.abs(np.arange(rows)[:, None] - np.arange(rows))
        near = (distance <= window) | (flags[:, None, None] != 0)
        local = attended(x, w, b, np.where(near, added, -np.inf))
        result: Array = np.where(flags[..., None] != 0, attended(x, gw, gb, added), local).astype(np.float32)
        return result

    inputs = [
        noise(batch, rows, hidden),
        noise(hidden, 3 * hidden, seed=1, scale=0.3),
        noise(3 * hidden, seed=2),
        mask,
        noise(hidden, 3 * hidden, seed=3, scale=0.3),
        noise(3 * hidden, seed=4),
        is_global,
    ]
    check_node(
        "LongformerAttention",
        inputs,
        {"num_heads": heads, "window": window},
        reference=reference,
        reals=[FLOAT],
        tolerance=5e-5,
        constant=[1, 2, 4, 5],
    )
