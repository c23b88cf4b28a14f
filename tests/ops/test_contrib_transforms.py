"""com.microsoft's Fourier transforms, Inverse, UnfoldTensor, time warping, ConvTranspose, and bit-mask dropout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto

from contributed import DISABLED, FLOAT, FLOAT16, Array, check_node, loaded, node_model, noise
from emulator_harness import configured
from session_pair import ep_session

INT32, UINT32, DOUBLE, INT64 = (
    int(kind) for kind in (TensorProto.INT32, TensorProto.UINT32, TensorProto.DOUBLE, TensorProto.INT64)
)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def parts(z: Array) -> Array:
    result: Array = np.stack([z.real, z.imag], -1)
    return result


def test_rfft_and_irfft() -> None:
    """Transform the last two dimensions; spectra have a further dimension of 2: real and imaginary part."""

    def reference(x: Array) -> Array:
        result: Array = np.fft.irfft2(x[..., 0] + 1j * x[..., 1])
        return result.astype(np.float32)

    signal = noise(2, 5, 40)
    spectrum = parts(np.fft.rfft2(signal)).astype(np.float32)
    check_node("Rfft", [signal], {"signal_ndim": 2}, reals=[FLOAT], reference=lambda x: spectrum, tolerance=1e-5)
    check_node("Irfft", [spectrum], {"signal_ndim": 2}, reals=[FLOAT], reference=reference, tolerance=1e-5)
    session = ep_session(node_model("Irfft", [spectrum], {"signal_ndim": 2}, [FLOAT]), DISABLED)
    with pytest.raises(Exception, match="must have the size 2"):
        session.run(None, {"x0": spectrum[..., :1]})


def test_inverse() -> None:
    """Test matrices that need row exchanges, and a matrix with more rows than a block has threads."""
    matrices = noise(3, 2, 4, 4) * np.array([0, 1, 1, 1], np.float32)[:, None] + np.eye(4, dtype=np.float32)[::-1]
    check_node("Inverse", [matrices.astype(np.float64)], {}, [DOUBLE], reals=[FLOAT], tolerance=1e-9)
    large = np.eye(70, dtype=np.float32)[::-1] + noise(70, 70, scale=0.05)
    check_node("Inverse", [large], {}, reals=[FLOAT, FLOAT16], tolerance=1e-3)
    session = ep_session(node_model("Inverse", [large], {}, [FLOAT]), DISABLED)
    assert not np.isfinite(session.run(None, {"x0": np.zeros((2, 2), np.float32)})[0]).all()


def test_unfold() -> None:
    whole = np.arange(48, dtype=np.int64).reshape(2, 8, 3)
    check_node("UnfoldTensor", [whole], {"dim": -2, "size": 2, "step": 3}, [INT64], reals=[FLOAT])
    check_node("UnfoldTensor", [whole], {"size": 3}, [INT64], reals=[FLOAT])


def test_time_warping() -> None:
    costs = [np.abs(noise(1, 6, 9)), np.ones((5, 3), np.float32), np.zeros((1, 1), np.float32), np.abs(noise(40, 300))]
    for cost in costs:
        check_node("DynamicTimeWarping", [cost], {}, [INT32], reals=[FLOAT])


def test_time_warping_ends_whatever_the_costs_are() -> None:
    session = ep_session(node_model("DynamicTimeWarping", [noise(3, 4)], {}, [INT32]), DISABLED)
    for cost in (np.nan, np.inf, -np.inf):
        path = session.run(None, {"x0": np.full((3, 4), cost, np.float32)})[0]
        assert path.shape[1] <= 6
        assert path.min() >= 0
        assert path[:, -1].tolist() == [2, 3]


def test_conv_transpose_with_dynamic_pads() -> None:
    name, pads = "ConvTransposeWithDynamicPads", np.array([1, 0, 2, 1])
    inputs = [noise(2, 3, 4, 5), noise(3, 2, 3, 3, seed=1), pads, noise(2, seed=2)]
    attributes = {"strides": [2, 1], "output_padding": [1, 0]}
    check_node(name, inputs, attributes, reals=[FLOAT], constant=[1, 2])
    model = loaded(node_model(name, inputs, attributes, [FLOAT], constant=[1]))
    next(x for x in model.graph.input if x.name == "x2").type.tensor_type.shape.dim[0].dim_value = len(pads)
    session = ep_session(model.SerializeToString(), DISABLED)
    whole = session.run(None, {"x0": inputs[0], "x2": np.zeros(4, np.int64), "x3": inputs[3]})[0]
    cut = session.run(None, {"x0": inputs[0], "x2": pads, "x3": inputs[3]})[0]
    np.testing.assert_array_equal(cut, whole[:, :, 1:-2, : whole.shape[3] - 1])
    with pytest.raises(Exception, match="pads must be at least 0"):
        session.run(None, {"x0": inputs[0], "x2": -pads, "x3": inputs[3]})


def bits_of(words: Array, size: int) -> Array:
    result: Array = np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)
    return result


def test_bitmask_dropout() -> None:
    data, ratio, training = noise(7, 9) + 3, np.array(0.25, np.float32), np.array(True)
    inputs = [data, ratio, training]
    session = ep_session(node_model("BitmaskDropout", inputs, {"seed": 5}, [FLOAT, UINT32]), DISABLED)
    out, mask = session.run(None, {"x0": data, "x1": ratio, "x2": training})
    kept = bits_of(mask, 63).reshape(7, 9)
    assert mask.shape == (2,)
    assert 0 < kept.sum() < 63
    assert not bits_of(mask, 64)[63]
    np.testing.assert_allclose(out, np.where(kept, data / 0.75, 0), 1e-6)
    out, mask = session.run(None, {"x0": data, "x1": ratio, "x2": np.array(False)})
    np.testing.assert_allclose(out, data, 1e-6)
    assert np.all(mask == 2**32 - 1)


def test_bitmask_dropout_of_a_biased_sum() -> None:
    inputs = [noise(5, 8), noise(8, seed=1), noise(5, 8, seed=2), np.array(0.5, np.float32), np.array(True)]
    session = ep_session(node_model("BitmaskBiasDropout", inputs, {}, [FLOAT, UINT32], constant=[4]), DISABLED)
    out, mask = session.run(None, {f"x{i}": x for i, x in enumerate(inputs[:4])})
    kept = bits_of(mask, 40).reshape(5, 8)
    np.testing.assert_allclose(out, np.where(kept, 2 * (inputs[0] + inputs[1]), 0) + inputs[2], 1e-5, 1e-6)
    # Without the input training_mode, dropout keeps all elements.
    check_node(
        "BitmaskBiasDropout", inputs[:3], {}, [FLOAT, UINT32], reals=[FLOAT],
        reference=lambda x, bias, skip: [x + bias + skip, np.full(2, 2**32 - 1, np.uint32)],
    )  # fmt: skip
