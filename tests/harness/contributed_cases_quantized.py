"""Cases of com.microsoft's operators on quantized numbers and weights; see contributed_sweep."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, codes, node_model, noise, number, weight_codes
from contributed_codes import packed
from contributed_sweep import Case

BYTES: Final = (np.uint8, np.int8)
INT32: Final = np.int32
ONE: Final = number(0.03)
FLOAT_ONLY: Final = (FLOAT,)


def few(*shape: int, bits: int = 4, seed: int = 0) -> Array:
    """Return random codes of ``bits`` bits, packed into bytes along the last dimension."""
    result: Array = packed(np.random.default_rng(seed).integers(0, 1 << bits, shape), bits)
    return result


def scales(*shape: int, seed: int = 0) -> Array:
    result: Array = np.abs(noise(*shape, seed=seed, scale=0.1)) + np.float32(0.01)
    return result


# ---- elementwise operators, reductions of rows, pooling ----


def _unary(name: str, dtype: Any, attributes: dict[str, Any], *, zeros: bool = True) -> Case:
    x_zero, y_zero = (100, 1) if dtype is np.uint8 else (3, -128)
    x, zero = codes(2, 20, dtype=dtype), number(y_zero, dtype)
    inputs: list[Array | None] = [x, number(0.02), number(x_zero, dtype), number(1 / 256), zero]
    if not zeros:
        inputs = [*inputs[:2], None, inputs[3], zero if name == "QLinearSoftmax" else None]
    return Case(name, inputs, attributes, steps=True)


def _binary(name: str, dtype: Any, *, last_zero: bool = True) -> Case:
    """Return an operator on two quantized inputs. Their zero points are always given: ORT requires them."""
    a, b, zero = codes(2, 16, dtype=dtype), codes(16, dtype=dtype, seed=1), number(7, dtype)
    return Case(name, [a, ONE, zero, b, ONE, zero, number(0.05), *[zero] * last_zero], steps=True)


_POOL: Final = {"kernel_shape": [2, 2], "channels_last": 1, "count_include_pad": 1, "pads": [0, 1, 0, 1]}
_POOL_2: Final = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "auto_pad": "NOTSET"}

ELEMENTS: Final = [
    *(
        case
        for dtype in BYTES
        for case in (
            _binary("QLinearAdd", dtype),
            _binary("QLinearMul", dtype),
            _unary("QLinearSigmoid", dtype, {}),
            _unary("QLinearLeakyRelu", dtype, {"alpha": 0.2}),
            _unary("QLinearSoftmax", dtype, {"axis": -1, "opset": 13}),
            Case(
                "QLinearAveragePool",
                [codes(1, 3, 4, 2, dtype=dtype), ONE, number(3, dtype), number(0.0213), number(5, dtype)],
                _POOL,
                steps=True,
            ),
            Case(
                "QLinearGlobalAveragePool",
                [codes(1, 3, 4, 2, dtype=dtype), ONE, number(3, dtype), number(0.0213), number(5, dtype)],
                {"channels_last": 1},
                steps=True,
            ),
            Case(
                "QLinearConcat",
                [
                    number(0.03), number(8, dtype), codes(2, 3, dtype=dtype), number(0.02), number(10, dtype),
                    codes(2, 2, dtype=dtype), number(0.05), number(7, dtype),
                ],
                {"axis": 1},
                steps=True,
            ),
        )
    ),
    _binary("QLinearAdd", np.uint8, last_zero=False),
    _binary("QLinearMul", np.uint8, last_zero=False),
    _unary("QLinearSigmoid", np.uint8, {}, zeros=False),
    _unary("QLinearLeakyRelu", np.uint8, {}, zeros=False),
    _unary("QLinearSoftmax", np.uint8, {"opset": 12, "axis": 0}, zeros=False),
    Case("QLinearAveragePool", [codes(1, 2, 5, 5), ONE, number(3, np.uint8), number(0.02)], _POOL_2, steps=True),
]  # fmt: skip

# ---- conversions ----

_STORED: Final = (
    np.uint8, np.int8, np.uint16, np.int16, ml_dtypes.uint4, ml_dtypes.int4,
)  # fmt: skip


def _small(dtype: Any, *shape: int, below: int = 8) -> Array:
    result: Array = np.random.default_rng(1).integers(0, below, shape).astype(dtype)
    return result


CONVERSIONS: Final = [
    *(
        Case(
            "QuantizeLinear",
            [noise(2, 3, 4, scale=0.5), np.array([0.125, 0.25, 0.5], np.float32), _small(dtype, 3, below=4)],
            {"axis": 1},
            own="" if dtype in BYTES else "scales of axes",
        )
        for dtype in _STORED
    ),
    Case("QuantizeLinear", [noise(2, 3), number(0.125)], fixed={"T2": int(TensorProto.UINT8)}),
    *(
        Case("DequantizeLinear", [_small(dtype, 2, 3, 4), scales(3), _small(dtype, 3)], {"axis": 1}, constant=[0, 2])
        for dtype in (*_STORED, np.int32)
    ),
    Case("DequantizeLinear", [codes(2, 3), number(0.125)], reals=[FLOAT16]),
]

# ---- products ----


def _products(dtype: Any) -> list[Case]:
    a, b, zeros = (
        codes(3, 7, dtype=dtype),
        codes(7, 5, dtype=dtype, seed=1),
        [number(9, dtype), np.arange(5).astype(dtype)],
    )
    whole = [a, b, number(0.02), scales(5), *zeros, noise(5, seed=2)]
    added = np.arange(5, dtype=np.int32) * 90
    parts = [a, number(0.02), zeros[0], b.T.copy(), scales(5), zeros[1], added, number(4.0), number(3, dtype)]
    fixed = {"TY": int(TensorProto.UINT8 if dtype is np.uint8 else TensorProto.INT8)}
    return [
        Case("MatMulIntegerToFloat", whole, tolerance=1e-3),
        Case("QGemm", parts, {"transB": 1, "alpha": 0.5}, fixed=fixed, steps=True),
    ]


def _lstm(dtype: Any, *, whole: bool) -> Case:
    steps, batch, depth, size = 2, 2, 3, 4
    gates, directions = 4 * size, 2
    w, r = codes(directions, depth, gates, dtype=dtype), codes(directions, size, gates, dtype=dtype, seed=1)
    factor = [np.array([0.002, 0.003], np.float32), np.array([3, 5], dtype)]
    more: list[Array | None] = [None] * 5
    attributes: dict[str, Any] = {"hidden_size": size, "direction": "bidirectional"}
    if whole:
        state = [noise(directions, batch, size, seed=i) for i in (5, 6)]
        more = [
            noise(directions, 2 * gates, scale=0.1),
            np.array([2, 1], np.int32),
            *state,
            noise(directions, 3 * size),
        ]
        attributes |= {"clip": 3.0, "input_forget": 0, "activations": ["HardSigmoid", "Tanh", "LeakyRelu"] * 2}
        attributes |= {"activation_alpha": [0.2, 0.3] * 2, "activation_beta": [0.5] * 2}

    def reference(x: Array, w: Array, r: Array, *rest: Array) -> list[Array]:
        """Run the CPU provider's float LSTM, because its DynamicQuantizeLSTM rounds inputs and states to 8 bits."""

        def real(code: Array) -> Array:
            scale, zero = (y.reshape(directions, 1, 1) for y in factor)
            wide: Array = ((code.astype(np.int32) - zero) * scale).transpose(0, 2, 1).astype(np.float32)
            return np.ascontiguousarray(wide)

        given = [x, real(w), real(r), *rest[:5]]
        model = node_model("LSTM", given, attributes, [FLOAT] * 3, domain="")
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        result: list[Array] = session.run(None, {f"x{i}": y for i, y in enumerate(given) if y is not None})
        return result

    return Case(
        "DynamicQuantizeLSTM",
        [noise(steps, batch, depth), w, r, *more, *factor, *factor],
        attributes,
        (True, True, True),
        reference=reference,
        constant=[1, 2, 9, 11],
    )


_NBITS: Final = {"N": 4, "K": 40, "bits": 4, "block_size": 16}
_MATRIX: Final = few(4, 3, 16)

PRODUCTS: Final = [
    *(case for dtype in BYTES for case in _products(dtype)),
    Case("MatMulIntegerToFloat", [codes(3, 7), codes(7, 5), number(0.02), number(0.03)], reals=[FLOAT16]),
    Case(
        "QGemm",
        [codes(7, 3), number(0.02), number(9, np.uint8), codes(7, 5), number(0.1), number(3, np.uint8)],
        {"transA": 1},
        fixed={"TY": FLOAT},
        tolerance=1e-4,
    ),
    *(
        Case(
            "DynamicQuantizeMatMul",
            [noise(3, 7), weights, scales(5), np.arange(5).astype(weights.dtype), noise(5)],
            tolerance=1e-3,
        )
        for weights in (codes(7, 5), weight_codes(7, 5))
    ),
    Case("DynamicQuantizeMatMul", [noise(3, 7), codes(7, 5), number(0.02)], tolerance=1e-3),
    *(_lstm(dtype, whole=dtype is np.uint8) for dtype in BYTES),
    Case(
        "MatMulNBits",
        [noise(2, 40), _MATRIX, scales(4, 3), few(4, 3, seed=1), None, noise(4, seed=3)],
        _NBITS | {"accuracy_level": 1, "weight_prepacked": 0},
        tolerance=1e-4,
        constant=[1, 3],
    ),
    Case(
        "MatMulNBits",
        [noise(2, 40), _MATRIX, scales(4, 3), noise(4, 3, seed=2), np.arange(40, dtype=np.int32) % 3],
        _NBITS,
        own="the CPU provider has no zero points that are numbers with g_idx",
        tolerance=1e-4,
        constant=[1, 4],
    ),
    Case("MatMulNBits", [noise(2, 40), _MATRIX, scales(4, 3)], _NBITS, reals=[FLOAT], tolerance=1e-4, constant=[1]),
    Case(
        "MatMulBnb4",
        [noise(2, 40), codes(80), scales(10)],
        {"K": 40, "N": 4, "block_size": 16, "quant_type": 1, "transB": 1, "training_mode": 0},
    ),
]

_SMALL_FLOATS: Final = (
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float4_e2m1fn,
)  # fmt: skip

GATHERS: Final = [
    Case(
        "GatherBlockQuantized",
        [few(6, 32), np.array([[0, 5], [2, 2]]), scales(6, 2), few(6, 2, seed=2)],
        {"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0},
        constant=[0, 3],
    ),
    *(
        Case(
            "GatherBlockQuantized",
            [_small(dtype, 6, 32), np.array([[0, 5], [2, 2]], np.int32), scales(6, 2)],
            {"block_size": 16, "quantize_axis": 1},
            reals=[FLOAT16],
            constant=[0],
        )
        for dtype in (ml_dtypes.uint4, ml_dtypes.int4, *_SMALL_FLOATS)
    ),
]

# ---- mixtures of experts ----

_EXPERTS, _INNER, _FULL = 3, 32, 32
_TOKENS: Final = [noise(2, _FULL), noise(2, _EXPERTS, seed=1)]
_ROUTED: Final[dict[str, Any]] = {"k": 2, "normalize_routing_weights": 1}


def _matrices(seed: int) -> Array:
    return noise(_EXPERTS, _INNER, _FULL, seed=seed, scale=0.3)


def _integers(seed: int, *, zeros: bool) -> list[Array | None]:
    """Return packed weights, scales and zero points."""
    return [
        few(_EXPERTS, _INNER, _FULL, seed=seed),
        scales(_EXPERTS, _INNER, 2, seed=seed),
        few(_EXPERTS, _INNER, 2, seed=seed + 1) if zeros else None,
    ]


_FIRST, _SECOND, _THIRD = (_integers(seed, zeros=True) for seed in (11, 21, 31))
_SHIFTS: Final = [noise(_EXPERTS, _INNER, seed=i) for i in (3, 4, 5)]
_FP8: Final = [_matrices(seed).astype(ml_dtypes.float8_e4m3fn) for seed in (1, 2)]
_SCALES_8: Final = np.ones((2, 1), ml_dtypes.float8_e4m3fn)
_TOTALS: Final = [np.full(_EXPERTS, x, np.float32) for x in (0.3, 0.2)]


def _powers(columns: int) -> Array:
    """Return block scales that are powers of two (FLOAT8E8M0), shape [experts, columns, 1]."""
    exponents = np.random.default_rng(5).integers(124, 128, (_EXPERTS, columns, 1), np.uint8)
    return exponents.view(ml_dtypes.float8_e8m0fnu)


EXPERTS: Final = [
    Case(
        "MoE",
        [*_TOKENS, _matrices(2), _SHIFTS[0], _matrices(3), _SHIFTS[1], _matrices(4), _SHIFTS[2]],
        _ROUTED | {"activation_type": "silu", "use_sparse_mixer": 0},
        own="the CPU provider has no third weights",
        reals=[BFLOAT16],
    ),
    Case(
        "MoE",
        [*_TOKENS, noise(_EXPERTS, 2 * _INNER, _FULL, seed=2, scale=0.3), None, _matrices(3)],
        {
            "k": 1, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0,
            "swiglu_limit": 0.5,
        },
        reals=[FLOAT16],
        on_cpu={3: np.zeros((_EXPERTS, 2 * _INNER), np.float32), 5: np.zeros((_EXPERTS, _FULL), np.float32)},
    ),
    Case(
        "QMoE",
        [
            *_TOKENS, *_FIRST[:2], _SHIFTS[0], *_SECOND[:2], _SHIFTS[1], *_THIRD[:2], _SHIFTS[2],
            _FIRST[2], _SECOND[2], _THIRD[2], np.abs(noise(2, _EXPERTS, seed=9)),
        ],
        _ROUTED
        | {
            "activation_type": "silu", "block_size": 16, "expert_weight_bits": 4, "fc1_expert_weight_bits": 4,
            "fc3_expert_weight_bits": 4, "fc2_expert_weight_bits": 4, "quant_type": "int", "accuracy_level": 0,
        },
        own="the CPU provider has no third weights",
        reals=[FLOAT16, BFLOAT16],
        constant=[2, 5, 8, 11, 12, 13],
    ),
    Case(
        "QMoE",
        # The scales allow an implementation to round activations; the plugin does not.
        [*_TOKENS, _FP8[0], None, None, _FP8[1], *[None] * 9, *_TOTALS, *_TOTALS, *[_SCALES_8] * 2],
        _ROUTED | {"quant_type": "fp8"},
        own="the CPU provider has no such weights",
        reals=[BFLOAT16],
        tolerance=2e-4,
        constant=[2, 5],
    ),
    Case(
        "QMoE",
        [
            *_TOKENS, few(_EXPERTS, 2 * _INNER, _FULL, seed=1), _powers(2 * _INNER), None,
            few(_EXPERTS, _INNER, _FULL, seed=2), _powers(_FULL), *[None] * 8, *_TOTALS,
        ],
        {
            "k": 2, "use_sparse_mixer": 1, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7,
            "activation_beta": 1.0, "swiglu_limit": 0.5, "quant_type": "fp4",
        },
        own="the CPU provider has no such weights",
        reals=[FLOAT16],
        tolerance=2e-4,
        constant=[2, 5],
    ),
]  # fmt: skip
