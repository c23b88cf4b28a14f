"""GEMMs and Gather with 2-bit to 8-bit weights, compared with dequantization in NumPy and the CPU provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import ort_cuda_plugin
from contributed import FLOAT, Array, check_node, noise
from session_pair import ep_session

N, K, BLOCK = 5, 40, 16
BLOCKS = -(-K // BLOCK)


def packed(codes: Array, bits: int) -> Array:
    """Pack codes along the last dimension into bytes, the first in the lowest bits; unused bits are 0."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    full = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = full.reshape(*codes.shape[:-1], -1, per_byte) << np.arange(0, 8, bits)
    result: Array = parts.sum(-1).astype(np.uint8)
    return result


def codes(*shape: int, bits: int, seed: int = 0) -> Array:
    result: Array = np.random.default_rng(seed).integers(0, 1 << bits, shape)
    return result


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "numbers"])
def test_matmul_nbits(bits: int, zeros: str) -> None:
    weights, scales = codes(N, BLOCKS, BLOCK, bits=bits), np.abs(noise(N, BLOCKS, scale=0.1)) + np.float32(0.01)
    points: Array = np.full((N, BLOCKS), 1 << (bits - 1)).astype(np.float32)
    given: Array | None = None
    if zeros == "packed":
        points = codes(N, BLOCKS, bits=bits, seed=1)
        given = packed(points, bits)
    elif zeros == "numbers":
        points = given = np.round(noise(N, BLOCKS, seed=2) * 4).astype(np.float32) / 4

    def reference(a: Array, _: Array, scales: Array, points_: Array | None, __: None, bias: Array) -> Array:
        wide = (weights - points[..., None]) * scales[..., None]
        result: Array = (a @ wide.reshape(N, -1)[:, :K].T + bias).astype(np.float32)
        return result

    inputs = [noise(2, 3, K), packed(weights, bits), scales, given, None, noise(N, seed=3)]
    attributes = {"N": N, "K": K, "bits": bits, "block_size": BLOCK}
    check_node(
        "MatMulNBits", inputs, attributes, reference=reference, constant=[1, 2, 3, 5], reals=[FLOAT], tolerance=5e-5
    )


def test_matmul_nbits_equals_the_cpu_provider() -> None:
    weights, scales = codes(N, BLOCKS, BLOCK, bits=4), np.abs(noise(N, BLOCKS)) * np.float32(0.1)
    inputs = [noise(3, K), packed(weights, 4), scales, packed(codes(N, BLOCKS, bits=4, seed=1), 4)]
    attributes = {"N": N, "K": K, "bits": 4, "block_size": BLOCK}
    check_node("MatMulNBits", inputs, attributes, constant=[1, 2, 3], reals=[FLOAT], tolerance=1e-4)
    check_node("MatMulNBits", inputs, attributes, reals=[FLOAT], tolerance=1e-4)


@pytest.mark.parametrize("rows", [1, 7])
def test_packed_weights_are_read_as_they_are(rows: int) -> None:
    """The device holds the packed weights only. Rows of 37 codes end within a 32-bit word and within a block."""
    columns, last = 6, 37
    blocks = -(-last // BLOCK)
    nodes, initializers, results, wanted = [], [], [], []
    a = noise(rows, last)
    nbytes = 0
    for bits in (2, 4, 8):
        numbers, scales = codes(columns, blocks, BLOCK, bits=bits, seed=bits), noise(columns, blocks, seed=bits)
        points = codes(columns, blocks, bits=bits, seed=9)
        given = {f"b{bits}": packed(numbers, bits), f"s{bits}": scales, f"z{bits}": packed(points, bits)}
        initializers += [numpy_helper.from_array(x, name) for name, x in given.items()]
        nbytes += sum(x.nbytes for x in given.values())
        attributes: dict[str, Any] = {"N": columns, "K": last, "bits": bits, "block_size": BLOCK}
        nodes.append(helper.make_node("MatMulNBits", ["a", *given], [f"y{bits}"], domain="com.microsoft", **attributes))
        results.append(helper.make_tensor_value_info(f"y{bits}", FLOAT, None))
        wide = ((numbers - points[..., None]) * scales[..., None]).reshape(columns, -1)[:, :last]
        wanted.append(a @ wide.T)
    info = helper.make_tensor_value_info("a", FLOAT, [rows, last])
    graph = helper.make_graph(nodes, "g", [info], results, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    before = ort_cuda_plugin.counters()["weight_bytes"]
    session = ep_session(model)
    actual = session.run(None, {"a": a})
    # Zero points are unpacked to a byte each.
    assert ort_cuda_plugin.counters()["weight_bytes"] - before <= nbytes + 3 * columns * blocks
    for got, expected in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(got, expected, 2e-5, 2e-5)


def test_matmul_nbits_with_the_block_of_each_row() -> None:
    weights, scales = codes(N, BLOCKS, BLOCK, bits=4), np.abs(noise(N, BLOCKS)) * np.float32(0.1)
    groups = np.random.default_rng(5).integers(0, BLOCKS, K).astype(np.int32)

    def reference(a: Array, _: Array, scales: Array, __: None, groups: Array) -> Array:
        result: Array = a @ ((weights.reshape(N, -1)[:, :K] - 8) * scales[:, groups]).T
        return result.astype(np.float32)

    attributes = {"N": N, "K": K, "bits": 4, "block_size": BLOCK}
    inputs = [noise(3, K), packed(weights, 4), scales, None, groups]
    check_node(
        "MatMulNBits", inputs, attributes, reference=reference, constant=[1, 2, 4], reals=[FLOAT], tolerance=5e-5
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_gather_block_quantized(bits: int, with_zeros: bool) -> None:
    data, scales = codes(6, 32, bits=bits), noise(6, 2, seed=1)
    zeros = packed(codes(6, 2, bits=bits, seed=2), bits) if with_zeros else None
    indices = np.array([[0, 5, -1], [2, 2, 3]])
    attributes = {"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    inputs = [packed(data, bits), indices, scales, zeros]
    check_node("GatherBlockQuantized", inputs, attributes, constant=[0, 2, 3], reals=[FLOAT])
