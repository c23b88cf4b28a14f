"""Optimizes models with ``onnxruntime.transformers``, and compares the results with the CPU provider."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ort_cuda_plugin import models
from session_pair import ep_session

Feeds = dict[str, np.ndarray[Any, np.dtype[Any]]]


def optimized(model: onnx.ModelProto, kind: str, heads: int, hidden: int) -> onnx.ModelProto:
    """Return the model after ``onnxruntime.transformers.optimizer`` for GPUs; ``kind`` is its ``model_type``."""
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with contextlib.redirect_stdout(None):  # the optimizer's shape inference prints
        fused = optimizer.optimize_model(
            copy, model_type=kind, num_heads=heads, hidden_size=hidden, opt_level=0, use_gpu=True
        )
    result: onnx.ModelProto = fused.model
    return result


def in_halves(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model to float16 with ``onnxruntime.transformers``; its inputs and outputs keep their types."""
    fused = importlib.import_module("onnxruntime.transformers.onnx_model").OnnxModel(model)
    fused.convert_float_to_float16(keep_io_types=True)
    result: onnx.ModelProto = fused.model
    return result


def contributed(model: onnx.ModelProto) -> set[str]:
    """Return the operators of com.microsoft in the model's graph."""
    return {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}


def assert_runs_whole(model: onnx.ModelProto, reference: onnx.ModelProto, feeds: list[Feeds], tolerance: float) -> None:
    """Assert that the plugin runs every node of ``model``, with the CPU provider's results of ``reference``."""
    session = ep_session(model.SerializeToString())
    cpu = ort.InferenceSession(reference.SerializeToString(), providers=["CPUExecutionProvider"])
    for feed in feeds:
        for got, wanted in zip(session.run(None, feed), cpu.run(None, feed), strict=True):
            assert models.relative_error(got, wanted) <= tolerance
