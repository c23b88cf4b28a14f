"""Checks single nodes of com.microsoft in sessions of symbolic sizes, against the CPU provider or a NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from interpreted import interpret
from session_pair import ep_session

Array = np.ndarray[Any, np.dtype[Any]]
DISABLED = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
FLOAT, FLOAT16, BFLOAT16 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
TOLERANCES = {FLOAT: 2e-5, FLOAT16: 4e-3, BFLOAT16: 3e-2}


def node_model(
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any],
    outputs: Sequence[int | None],
    *,
    constant: Collection[int] = (),
    real: int = FLOAT,
    wide: Collection[int] = (),
    wide_outputs: Collection[int] = (),
    sized: Collection[int] = (),
    small: Mapping[int, int] | None = None,
    small_outputs: Collection[int] = (),
    domain: str = "com.microsoft",
) -> bytes:
    """Return a model of one node ``op_type`` with float32 inputs and outputs, and Casts to the node's element types.

    Float32 inputs are cast to ``real``, except those in ``wide``; ``small`` gives other types by input index. Float
    outputs that the node computes in another type, those in ``small_outputs`` included, are cast back. ``outputs`` has
    the type of each output, None for an omitted one. Inputs in ``constant`` are initializers, inputs in ``sized`` have
    known sizes.
    """
    small = small or {}
    nodes, names, infos, initializers = [], [], [], []
    for i, x in enumerate(inputs):
        names.append("" if x is None else f"x{i}")
        if x is None:
            continue
        if i in constant:
            initializers.append(numpy_helper.from_array(x, f"x{i}"))
        else:
            kind = helper.np_dtype_to_tensor_dtype(x.dtype)
            shape = list(x.shape) if i in sized else [f"d{i}_{axis}" for axis in range(x.ndim)]
            infos.append(helper.make_tensor_value_info(f"x{i}", kind, shape))
        taken = small.get(i, real if x.dtype == np.float32 and i not in wide else FLOAT)
        if taken != FLOAT:
            nodes.append(helper.make_node("Cast", [f"x{i}"], [f"n{i}"], to=taken))
            names[-1] = f"n{i}"
    results, after, values = [], [], []
    for i, wanted in enumerate(outputs):
        results.append("" if wanted is None else f"y{i}")
        if wanted is None:
            continue
        if wanted == FLOAT and (i in small_outputs or (real != FLOAT and i not in wide_outputs)):
            results[-1] = f"r{i}"
            after.append(helper.make_node("Cast", [f"r{i}"], [f"y{i}"], to=FLOAT))
        values.append(helper.make_tensor_value_info(f"y{i}", wanted, None))
    nodes.append(helper.make_node(op_type, names, results, name="the node", domain=domain, **attributes))
    graph = helper.make_graph(nodes + after, "contributed", infos, values, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def rounded(x: Array, real: int) -> Array:
    """Round float32 numbers to the type ``real``, and return them as float32."""
    if real == FLOAT:
        return x
    dtype = helper.tensor_dtype_to_np_dtype(real)
    return x.astype(dtype).astype(np.float32)


def check_node(
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] | None = None,
    outputs: Sequence[int | None] = (FLOAT,),
    *,
    reals: Sequence[int] = (FLOAT, FLOAT16, BFLOAT16),
    reference: Callable[..., Sequence[Array] | Array] | None = None,
    constant: Collection[int] = (),
    wide: Collection[int] = (),
    wide_outputs: Collection[int] = (),
    sized: Collection[int] = (),
    small: Mapping[int, int] | None = None,
    small_outputs: Collection[int] = (),
    tolerance: float | None = None,
    part: Callable[[int, Array], Array] = lambda number, y: y,
    step: bool = False,
) -> None:
    """Assert that the plugin runs the node, and that ``part`` of each output equals the CPU provider's in float32.

    ``reference`` computes the expected outputs instead of the CPU provider. With ``step`` a tenth of the integers may
    differ by 1. The other parameters are those of `node_model`.
    """
    attributes = attributes or {}
    for real in reals:
        given = [
            rounded(x, real) if x is not None and x.dtype == np.float32 and i not in wide else x
            for i, x in enumerate(inputs)
        ]
        feed = {f"x{i}": x for i, x in enumerate(given) if x is not None and i not in constant}
        if reference is None:
            plain = node_model(op_type, given, attributes, outputs, constant=constant, sized=sized)
            options = ort.SessionOptions()
            options.graph_optimization_level = DISABLED
            cpu = ort.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
            expected = cpu.run(None, feed)
        else:
            made = reference(*given)
            expected = [made] if isinstance(made, np.ndarray) else list(made)
        model = node_model(
            op_type,
            given,
            attributes,
            outputs,
            constant=constant,
            real=real,
            wide=wide,
            wide_outputs=wide_outputs,
            sized=sized,
            small=small,
            small_outputs=small_outputs,
        )
        actual = ep_session(model, DISABLED).run(None, feed)
        loaded_model = loaded(model)
        interpret(loaded_model, [feed[value.name] for value in loaded_model.graph.input])
        allowed = TOLERANCES[real] if tolerance is None else max(tolerance, TOLERANCES[real])
        assert len(actual) == len(expected)
        for number, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            assert got.shape == wanted.shape, (number, got.shape, wanted.shape)
            assert got.dtype == wanted.dtype, number
            if step and got.dtype.kind in "iu":
                distance = np.abs(got.astype(np.int64) - wanted)
                assert distance.max(initial=0) <= 1
                assert np.count_nonzero(distance) <= distance.size / 10
                continue
            np.testing.assert_allclose(part(number, got), part(number, wanted), allowed, allowed, err_msg=f"{number}")


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def codes(*shape: int, dtype: type[np.generic] = np.uint8, seed: int = 0) -> Array:
    """Return random values from the whole range of an 8-bit integer type."""
    limits = np.iinfo(np.dtype(dtype))
    result: Array = np.random.default_rng([seed, *shape]).integers(limits.min, limits.max + 1, shape, dtype=dtype)
    return result


def weight_codes(*shape: int, seed: int = 0) -> Array:
    """Return random int8 values from -64 to 63.

    On x86-64 without VNNI the CPU provider adds pairs of uint8 x int8 products in int16. With 8-bit values these sums
    would saturate.
    """
    return np.right_shift(codes(*shape, dtype=np.int8, seed=seed), 1)


def number(value: float, dtype: type[np.generic] = np.float32) -> Array:
    return np.array(value, dtype)


def loaded(model: bytes) -> onnx.ModelProto:
    return onnx.load_from_string(model)


def on_device(array: Array) -> ort.OrtValue:
    """Copy an array to the device."""
    memory = ort_cuda_plugin.register(emulate=True)[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, memory.device_vendor_id)


def run_in_place(session: ort.InferenceSession, feed: Mapping[str, Array], shared: Mapping[str, str]) -> list[Array]:
    """Run with shared buffers, and return the outputs. ``shared`` maps an input to the output that gets its memory."""
    binding = session.io_binding()
    states = {output: on_device(feed[name]) for name, output in shared.items()}
    for name, array in feed.items():
        if name in shared:
            binding.bind_ortvalue_input(name, states[shared[name]])
        else:
            binding.bind_cpu_input(name, array)
    for value in session.get_outputs():
        if value.name in states:
            binding.bind_ortvalue_output(value.name, states[value.name])
        else:
            binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    return [y.numpy() for y in binding.get_outputs()]


def check_in_place(
    session: ort.InferenceSession,
    feed: Mapping[str, Array],
    shared: Mapping[str, str],
    part: Callable[[int, Array], Array] = lambda number, y: y,
) -> None:
    """Assert that a Run with shared buffers gives equal outputs (``part`` of each) without extra copies."""
    before = ort_cuda_plugin.counters()["outputs_redirected"]
    in_place = run_in_place(session, feed, shared)
    assert ort_cuda_plugin.counters()["outputs_redirected"] == before
    for number, (got, wanted) in enumerate(zip(in_place, session.run(None, feed), strict=True)):
        np.testing.assert_array_equal(part(number, got), part(number, wanted), err_msg=f"{number}")
