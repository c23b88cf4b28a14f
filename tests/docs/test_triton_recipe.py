"""docs/recipes/triton.md: its class answers the requests of a batch, with a stand-in of Triton's Python module."""

from __future__ import annotations

from pathlib import Path

import recipe_models
import recipes
from document_blocks import blocks
from isolated import python

STAND_IN = """
class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class InferenceResponse:
    def __init__(self, output_tensors):
        self.output_tensors = output_tensors


def get_input_tensor_by_name(request, name):
    return next(tensor for tensor in request if tensor.name == name)
"""
"""The part of triton_python_backend_utils that the class uses; a request is a list of tensors."""

BATCH = """
import sys
import numpy as np
folder = sys.argv[1]
sys.path.insert(0, f"{folder}/1")
from model import TritonPythonModel
from triton_python_backend_utils import Tensor
model = TritonPythonModel()
model.initialize({"model_instance_device_id": "0", "model_repository": folder, "model_version": "1"})
runs = []
run = model.session.run
model.session.run = lambda names, feeds: runs.append(len(feeds["x"])) or run(names, feeds)
rows = [2, 1, 3]
inputs = [np.full((count, 8), index + 1, np.float32) for index, count in enumerate(rows)]
answers = model.execute([[Tensor("x", x)] for x in inputs])
assert runs == [6], runs
assert len(answers) == len(inputs)
for x, answer in zip(inputs, answers):
    (y,) = answer.output_tensors
    assert y.name == "y"
    np.testing.assert_array_equal(y.as_numpy(), run(["y"], {"x": x})[0])
    np.testing.assert_allclose(y.as_numpy()[0], x[0, 0] * np.array([0.64, 0.4, 0.16, 0]), rtol=1e-5, atol=1e-5)
"""


def test_the_class_answers_the_requests_of_a_batch_with_one_run(tmp_path: Path) -> None:
    page = (recipes.FOLDER / "triton.md").read_text()
    (code,) = [block.text for block in blocks(page) if block.text.startswith("# model.py")]
    version = tmp_path / "1"
    version.mkdir()
    recipe_models.small_model(version)
    (version / "model.py").write_text(code)
    (version / "triton_python_backend_utils.py").write_text(STAND_IN)
    python(BATCH, str(tmp_path), env={"ORT_CUDA_PLUGIN_EMULATE": "1", "CUDA_VISIBLE_DEVICES": ""}, preloaded=True)
