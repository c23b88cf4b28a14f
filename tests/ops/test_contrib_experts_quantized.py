"""Mixture of experts with quantized weights (QMoE), compared with the CPU provider and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from contributed import FLOAT, FLOAT16, Array, check_node, node_model, noise
from contributed_codes import packed
from emulator_harness import configured
from ort_cuda_plugin.abi.emulation import findings
from ort_versions import api_version

EXPERTS, WIDTH, INNER, BLOCK = 5, 64, 64, 16
FEW, MANY = 3, 30
SIZED = range(2)
"""Inputs with static shapes: the tokens and their scores. The plan then has kernels for this number of tokens only."""


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Run each test in the checking mode with adversarial streams; fail if there are findings."""
    with configured(adversarial=1, check=1, seed=7):
        yield
        assert findings() == []


def codes(*shape: int, bits: int, seed: int) -> Array:
    result: Array = np.random.default_rng(seed).integers(0, 1 << bits, shape)
    return result


class Packed:
    """Quantized weights: the node's inputs (codes, scales, zeros), and the dequantized ``numbers``."""

    def __init__(self, rows: int, columns: int, bits: int, block: int, zeros: bool, seed: int) -> None:
        blocks = columns // block if block else 1
        values = codes(EXPERTS, rows, columns, bits=bits, seed=seed)
        shape = (EXPERTS, rows, blocks) if block else (EXPERTS, rows)
        self.scales = (np.abs(noise(*shape, seed=seed)) + np.float32(0.1)) * np.float32(0.5 / (1 << bits))
        points = codes(*shape, bits=bits, seed=seed + 1) if zeros else np.full(shape, 1 << (bits - 1))
        self.values: Array = values
        self.codes, self.zeros = packed(values, bits), packed(points, bits) if zeros else None
        wide = (points, self.scales)
        point, scale = (x if block else x[..., None] for x in wide)
        parts = values.reshape(EXPERTS, rows, blocks, -1)
        self.numbers: Array = ((parts - point[..., None]) * scale[..., None]).reshape(EXPERTS, rows, columns)


def run(first: Packed, second: Packed, count: int, attributes: dict[str, Any], **more: Any) -> None:
    inputs = [
        noise(count, WIDTH), noise(count, EXPERTS, seed=1),
        first.codes, first.scales, noise(*first.scales.shape[:2], seed=3),
        second.codes, second.scales, noise(EXPERTS, WIDTH, seed=5), None, None, None, first.zeros, second.zeros, None,
        more.pop("router_weights", None),
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"k": 2, "normalize_routing_weights": 1, **attributes}
    check_node("QMoE", inputs, attributes, constant=[2, 3, 4, 5, 6, 7, 11, 12], tolerance=2e-4, sized=SIZED, **more)


def reference(numbers: list[Array], bias: list[Array | None]) -> Callable[..., Array]:
    """Return a function that computes MoE with relu and two experts per token in float64."""
    first, second = (x.astype(np.float64) for x in numbers)
    shifts = [0.0 if x is None else x for x in bias]

    def made(x: Array, scores: Array, *_: Array) -> Array:
        result = np.zeros_like(x, np.float64)
        for token, score in enumerate(scores):
            chosen = np.argsort(-score)[:2]
            powers = np.exp(score[chosen] - score.max())
            for expert, count in zip(chosen, powers / powers.sum(), strict=True):
                hidden = np.maximum(first[expert] @ x[token] + np.broadcast_to(shifts[0], first.shape[:2])[expert], 0)
                result[token] += count * (
                    second[expert] @ hidden + np.broadcast_to(shifts[1], second.shape[:2])[expert]
                )
        return result.astype(np.float32)

    return made


@pytest.mark.parametrize(("bits", "block", "zeros"), [(2, 0, True), (8, 0, False), (8, BLOCK, True)])
def test_qmoe_of_integers(bits: int, block: int, zeros: bool) -> None:
    """NumPy is the reference: with 8-bit blockwise weights, the CPU provider rounds activations to 8 bits."""
    first, second = Packed(INNER, WIDTH, bits, block, zeros, 11), Packed(WIDTH, INNER, bits, block, zeros, 21)
    made = reference([first.numbers, second.numbers], [noise(EXPERTS, INNER, seed=3), noise(EXPERTS, WIDTH, seed=5)])
    attributes = {"expert_weight_bits": bits, **({"block_size": block} if block else {})}
    run(first, second, FEW, attributes, reference=made, reals=[FLOAT16 if bits == 2 else FLOAT])


def interleaved(values: Array, bits: int) -> Array:
    """Permute and pack codes [outputs, inputs] as CUDAExecutionProvider's kernels read them.

    The result is declared as [inputs, outputs / pack], with ``pack`` codes per byte. The steps are those of ONNX
    Runtime's packer for compute capability 8.0.
    """
    outputs, inputs = values.shape
    turns, word = 16 // bits, 32 // bits
    rows = np.arange(8 * turns)
    # With J = ``turns``, row 2J*i + 2j + p of a fragment is input 8j + 2i + p.
    fragment = 8 * (rows % (2 * turns) // 2) + 2 * (rows // (2 * turns)) + rows % 2
    permuted = values.reshape(outputs, -1, 8 * turns)[:, :, fragment].reshape(outputs, inputs)
    tiles = permuted.reshape(outputs // turns, turns, inputs // 64, 64).transpose(0, 2, 1, 3)
    words = tiles.reshape(-1, word)
    order = [*range(0, word, 2), *range(1, word, 2)]
    return packed(words[:, order].reshape(inputs, outputs), bits)


@pytest.mark.parametrize(
    ("bits", "block", "prepacked"), [(4, 0, None), (4, 32, None), (8, 64, None), (2, 64, 1), (4, 32, 1)]
)
def test_qmoe_of_weights_in_the_order_of_cuda_kernels(bits: int, block: int, prepacked: int | None) -> None:
    """Weights packed for CUDA kernels are recognized by weights_prepacked, or by the shape [experts, inputs, ...]."""
    inner = 128
    first, second = Packed(inner, WIDTH, bits, block, False, 11), Packed(WIDTH, inner, bits, block, False, 21)
    made = reference([first.numbers, second.numbers], [noise(EXPERTS, inner, seed=3), noise(EXPERTS, WIDTH, seed=5)])
    for weights in (first, second):
        weights.codes = np.stack([interleaved(x, bits) for x in weights.values])
    attributes: dict[str, Any] = {"expert_weight_bits": bits, **({"block_size": block} if block else {})}
    if prepacked is not None:
        attributes["weights_prepacked"] = prepacked
    run(first, second, FEW, attributes, reference=made, reals=[FLOAT16])


@pytest.mark.parametrize(("real", "prepacked", "inner"), [(FLOAT, None, 128), (FLOAT16, 0, 128), (FLOAT16, None, 96)])
def test_qmoe_of_weights_of_the_older_shape_in_the_order_of_the_schema(
    real: int, prepacked: int | None, inner: int
) -> None:
    """Weights of the shape [experts, inputs, outputs / 2] are not in the order of CUDA kernels in three cases.

    These are float32 and 96 inputs, for which CUDAExecutionProvider has no kernel, and weights_prepacked=0.
    """
    first, second = Packed(inner, WIDTH, 4, 32, False, 31), Packed(WIDTH, inner, 4, 32, False, 41)
    made = reference([first.numbers, second.numbers], [noise(EXPERTS, inner, seed=3), noise(EXPERTS, WIDTH, seed=5)])
    for weights in (first, second):
        experts, outputs, row = weights.codes.shape
        weights.codes = weights.codes.reshape(experts, row * 2, outputs // 2)
    attributes = {"expert_weight_bits": 4, "block_size": 32}
    if prepacked is not None:
        attributes["weights_prepacked"] = prepacked
    run(first, second, FEW, attributes, reference=made, reals=[real])


@pytest.mark.parametrize("count", [FEW, MANY])
def test_qmoe_equals_the_cpu_provider(count: int) -> None:
    first, second = Packed(2 * INNER, WIDTH, 4, BLOCK, True, 31), Packed(WIDTH, INNER, 4, BLOCK, True, 41)
    attributes = {"expert_weight_bits": 4, "block_size": BLOCK, "activation_type": "swiglu", "swiglu_fusion": 1}
    given = np.abs(noise(count, EXPERTS, seed=9))
    run(first, second, count, attributes, reals=[FLOAT])
    if count == FEW:
        run(first, second, count, attributes, reals=[FLOAT], router_weights=given)


def test_projections_may_have_weights_of_different_widths() -> None:
    first, second = Packed(INNER, WIDTH, 4, BLOCK, True, 31), Packed(WIDTH, INNER, 8, BLOCK, True, 21)
    made = reference([first.numbers, second.numbers], [noise(EXPERTS, INNER, seed=3), noise(EXPERTS, WIDTH, seed=5)])
    run(first, second, FEW, {"fc2_expert_weight_bits": 8, "block_size": BLOCK}, reference=made, reals=[FLOAT])


def small_floats(kind: str, rows: int, columns: int, seed: int) -> tuple[list[Array | None], Array]:
    """Return the node's inputs (weights, block scales, scale per expert), and the dequantized numbers."""
    values = noise(EXPERTS, rows, columns, seed=seed)
    if kind == "fp8 in squares":
        stored = values.astype(ml_dtypes.float8_e4m3fn)
        scales = np.abs(noise(EXPERTS, -(-rows // BLOCK), -(-columns // BLOCK), seed=seed + 1)) * np.float32(0.2)
        wide = np.repeat(np.repeat(scales, BLOCK, 1), BLOCK, 2)[:, :rows, :columns]
        return [stored, scales, None], stored.astype(np.float32) * wide
    total = np.abs(noise(EXPERTS, seed=seed + 2)) * np.float32(0.2) + np.float32(0.1)
    if kind == "fp8":
        stored = values.astype(ml_dtypes.float8_e4m3fn)
        return [stored, None, total], stored.astype(np.float32) * total[:, None, None]
    bits = values.astype(ml_dtypes.float4_e2m1fn)
    turned = np.ascontiguousarray(bits.view(np.uint8).transpose(0, 2, 1))
    block = 16 if kind == "nvfp4" else 32
    powers = codes(EXPERTS, rows, -(-columns // block), bits=2, seed=seed).astype(np.uint8) + 124
    scales = powers.view(ml_dtypes.float8_e8m0fnu)
    if kind == "nvfp4":
        scales = (np.float32(0.3) * (powers - 120)).astype(ml_dtypes.float8_e4m3fn)
    wide = np.repeat(scales.astype(np.float32), block, 2)[:, :, :columns]
    stored = packed(turned.astype(np.int64), 4).reshape(EXPERTS, rows, columns // 2)
    return [stored, scales, total], bits.astype(np.float32) * wide * total[:, None, None]


@pytest.mark.parametrize("older", [False, True], ids=["", "older shape"])
@pytest.mark.parametrize("kind", ["fp4", "wfp4afp8", "nvfp4", "fp8", "fp8 in squares"])
def test_qmoe_of_small_floats(kind: str, older: bool) -> None:
    """onnxruntime-genai's builder declares the older shape [experts, inputs, ...]; square weights look the same."""
    inner = 96 if older else INNER
    weights = [small_floats(kind, inner, WIDTH, 51), small_floats(kind, WIDTH, inner, 61)]
    if older:
        for inputs, numbers in weights:
            stored = inputs[0]
            assert stored is not None
            inputs[0] = stored.reshape(EXPERTS, numbers.shape[2], -1)
    (first, first_numbers), (second, second_numbers) = weights
    inputs = [
        noise(FEW, WIDTH), noise(FEW, EXPERTS, seed=1), first[0], first[1], None, second[0], second[1],
        *[None] * 8, first[2], second[2],
    ]  # fmt: skip
    quant_type = "fp8" if kind == "fp8 in squares" else kind
    attributes: dict[str, Any] = {"k": 2, "normalize_routing_weights": 1, "quant_type": quant_type}
    if kind == "fp8 in squares":
        attributes["block_size"] = BLOCK
        inputs = inputs[:7]
    made = reference([first_numbers, second_numbers], [None, None])
    constant, wide = [2, 3, 5, 6, 15, 16], [3, 6, 15, 16]
    check_node(
        "QMoE",
        inputs,
        attributes,
        reference=made,
        constant=constant,
        wide=wide,
        reals=[FLOAT],
        tolerance=2e-4,
        sized=SIZED,
    )


def test_what_qmoe_declines_has_a_reason() -> None:
    first, second = Packed(INNER, WIDTH, 4, 0, False, 11), Packed(WIDTH, INNER, 4, 0, False, 21)
    inputs = [noise(FEW, WIDTH), noise(FEW, EXPERTS), first.codes, first.scales, None, second.codes, second.scales]
    # Since ONNX Runtime 1.32, the CPU provider's kernel rejects the value 2, so no session can be created.
    prepacked = [({"weights_prepacked": 2}, "weights_prepacked must be one of -1, 0, 1, got 2")]
    for attributes, reason in (
        *(prepacked if api_version(ort.__version__) < 32 else ()),
        ({"quant_type": "nvfp4"}, "fc1_global_scale must be given for quant_type 'nvfp4'"),
        ({"quant_type": "fp2"}, "got 'fp2'"),
    ):
        model = node_model("QMoE", inputs, attributes, [FLOAT], constant=[2, 3, 5, 6])
        assert any(reason in place.reason for place in ort_cuda_plugin.explain(model, emulate=True))
