"""Models that ONNX Runtime optimizes for CUDAExecutionProvider, a name under which the plugin is registered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from encoder import encoder, encoder_inputs

HARNESS = Path(__file__).resolve().parents[1] / "harness"
PROGRAM = """
import sys, types
import numpy as np, onnxruntime as ort, ort_cuda_plugin

how, model, written, feeds, result = sys.argv[1:]
ort_cuda_plugin.register(as_="CUDAExecutionProvider", emulate=True)
if how == "tool":  # asks PyTorch for nothing but the kind of GPU
    torch = types.ModuleType("torch")
    torch.version = types.ModuleType("torch.version")
    torch.version.cuda, torch.version.hip = "13.0", None
    sys.modules |= {"torch": torch, "torch.version": torch.version}
    from onnxruntime.transformers.optimizer import optimize_by_onnxruntime

    optimize_by_onnxruntime(model, use_gpu=True, optimized_model_path=written, opt_level=2)
else:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = written
    ort.InferenceSession(model, options, providers=["CUDAExecutionProvider"])
options = ort.SessionOptions()
options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
session = ort.InferenceSession(written, options, providers=["CUDAExecutionProvider"])
np.save(result, session.run(None, dict(np.load(feeds)))[0])
"""


@pytest.mark.parametrize("how", ["session", "tool"])
def test_a_model_that_ort_optimized_for_cuda_has_fused_nodes_and_runs(how: str, tmp_path: Path) -> None:
    model, written, feeds, result = (tmp_path / name for name in ("model.onnx", "written.onnx", "in.npz", "out.npy"))
    onnx.save(encoder(2, 32, 4, 100, decomposed=True), model)
    feed = encoder_inputs(2, 9, vocabulary=100)
    np.savez(feeds, input_ids=feed["input_ids"], attention_mask=feed["attention_mask"])
    arguments = [how, *map(str, (model, written, feeds, result))]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {node.op_type for node in onnx.load(written).graph.node if node.domain == "com.microsoft"}
    assert {"FusedMatMul", "BiasGelu"} <= made
    cpu = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(np.load(result), cpu.run(None, feed)[0], 1e-4, 1e-4)
