"""Compares fused programs with unfused ones bit by bit: the onnx wheel's light models and encoders, in three types.

    python tests/harness/fused_bits.py [MODEL ...] [--types float32 float16 bfloat16]

Kernels are compiled without FMA contraction: otherwise a product and a sum that fusion brings into one kernel would be
rounded once, not twice as in the unfused program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from encoder import encoder, encoder_inputs
from kernel_harness import Array, run_model
from ort_cuda_plugin import models
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.program.lowering.context import LoweringOptions

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
ENCODERS = {"encoder": False, "encoder, decomposed": True}


@contextmanager
def uncontracted() -> Iterator[None]:
    """Compile kernels without FMA contraction within the block."""
    with mock.patch.object(OpenDevice, "target", property(lambda self: Target.emulated(contract=False))):
        yield


def as_type(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Replace float32 by ``dtype`` in the model, and return it."""
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = dtype
    del model.graph.value_info[:]
    for initializer in model.graph.initializer:
        if initializer.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(initializer).astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.type == AttributeProto.INT and attribute.i == TensorProto.FLOAT:
                attribute.i = dtype
    return model


def differences(model: onnx.ModelProto, inputs: list[Array], *, dynamic: bool = False) -> list[str]:
    """Return the outputs whose bits differ between the fused and the unfused program, as text."""
    fused, plain = (run_model(model, inputs, dynamic, LoweringOptions(fusion=fusion)) for fusion in (True, False))
    found = []
    for number, (one, other) in enumerate(zip(fused, plain, strict=True)):
        same = np.ascontiguousarray(one).view(np.uint8) == np.ascontiguousarray(other).view(np.uint8)
        if one.shape != other.shape or not same.all():
            found.append(f"output {number}: {(~same).sum()} of {same.size} bytes")
    return found


def source_of(name: str, dtype: str) -> tuple[onnx.ModelProto, list[Array]]:
    """Return the model ``name`` in the element type ``dtype``, and its inputs."""
    if name in ENCODERS:
        model, feeds = encoder(2, 96, 3, decomposed=ENCODERS[name]), encoder_inputs(2, 7)
    else:
        model = models.with_noise_weights(onnx.load(models.wheel_models()[name]))
        feeds = models.random_inputs(model)
    storage = onnx.helper.tensor_dtype_to_np_dtype(TYPES[dtype])
    inputs = [feeds[value.name] for value in model.graph.input if value.name in feeds]
    return as_type(model, TYPES[dtype]), [x.astype(storage) if x.dtype == np.float32 else x for x in inputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*ENCODERS, *sorted(models.wheel_models())])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    arguments = parser.parse_args()
    failed = False
    with uncontracted():
        for name in arguments.models:
            for dtype in arguments.types:
                begun = time.perf_counter()
                found = differences(*source_of(name, dtype), dynamic=name in ENCODERS)
                failed |= bool(found)
                seconds = time.perf_counter() - begun
                print(f"{name}, {dtype}: {'; '.join(found) or 'the same bits'} ({seconds:.0f} s)", flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
