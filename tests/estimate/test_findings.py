"""Performance findings about kernels of models: the rules, and a sample of the benchmarks' models.

``python bench/kernel_code.py`` looks at all of these models.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import pytest
from onnx import parser

from kernel_launch import kernel
from ort_cuda_plugin.estimate import findings
from ort_cuda_plugin.estimate.count import Site
from ort_cuda_plugin.estimate.findings import ARCHITECTURES, Inspector
from ort_cuda_plugin.estimate.gather import LIBRARIES, optimized, work_of_model
from ort_cuda_plugin.estimate.sass import Code, disassembler
from ort_cuda_plugin.estimate.work import KernelStep, Work
from ort_cuda_plugin.models import find_model
from ort_cuda_plugin.networks import build
from ort_cuda_plugin.program.lowering.context import LoweringOptions

MANY = 10_000.0
"""A number of requests that together move more than `findings.MUCH` bytes."""
LABELS = ("scores (MatMul)",)


def side_by_side(kind: str, nbytes: int, requests: float = MANY) -> Site:
    return Site(kind, nbytes, requests, float(nbytes), float(nbytes))


@pytest.mark.parametrize(
    ("sites", "count"),
    [
        pytest.param([side_by_side("load", 16), side_by_side("store", 16)], 0, id="wide"),
        pytest.param([side_by_side("load", 16), side_by_side("store", 2, 8 * MANY)], 1, id="narrow stores"),
        pytest.param([side_by_side("load", 16), side_by_side("store", 4)], 0, id="the other type is smaller"),
        pytest.param([side_by_side("load", 2), side_by_side("store", 2)], 2, id="nothing is wide"),
        pytest.param([Site("load", 4, MANY, 32.0, 4.0)], 0, id="lanes are apart"),
        pytest.param([Site("load", 2, MANY, 1.0, 2.0)], 0, id="lanes read the same"),
        pytest.param([side_by_side("load", 2, 10.0)], 0, id="few bytes"),
        pytest.param([side_by_side("load", 8) for _ in range(10)], 1, id="many places"),
    ],
)
def test_narrow_accesses_of_neighbors_are_found(sites: list[Site], count: int) -> None:
    assert len(findings.narrow_accesses(sites)) == count


def test_bank_conflicts_above_two_way_are_found() -> None:
    sites = [Site("shared load", 4, MANY, 2.0, 1.0), Site("shared store", 16, MANY, 8.0, 4.0)]
    assert findings.bank_conflicts(sites) == []
    text = "bank conflicts: shared loads of 4 bytes take 4.0 wavefronts, minimum 1.0"
    assert findings.bank_conflicts([*sites, Site("shared load", 4, MANY, 4.0, 1.0)]) == [text]


def test_code_is_compared_and_looked_through() -> None:
    spec = kernel("product", ("*f32",), "def kernel(x):\n    x[0] = 1\n")
    good = {spec: Code(32, 0, 0, {"LDG.128": 1, "HMMA": 4}, 1.0)}
    bad = {spec: Code(32, 0, 8, {"LDG.64": 1, "STL": 2}, 1.0)}
    products = findings.Watched()
    products.tensor.add(LABELS)
    work = Work((), (KernelStep(LABELS, (), (), spec, (1, 1, 1), (32, 1, 1), 0, ()),))
    assert findings.of_code(good, "sm_90") == findings.of_products(work, products, good, "sm_90") == []
    assert findings.of_widths(good, good, "sm_80") == []
    assert [one.what for one in findings.of_code(bad, "sm_80")] == [
        "register spills of 8 bytes, 2 instructions that access the stack"
    ]
    assert [one.what for one in findings.of_widths(bad, good, "sm_80")] == [
        "widest LDG has 8 bytes, 16 on another architecture"
    ]
    (found,) = findings.of_products(work, products, bad, "sm_80")
    assert found.what == "uses no tensor cores for scores (MatMul)"


def test_where_neighbors_are_no_vectors_is_not_looked_at() -> None:
    """Channel shuffles and pooled rows of 14 cannot use vectors; broadcast rows and copied columns can."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> maps
        (float16[8, 4, 32, 64] x, float16[64] w, float16[8, 4, 32, 1] c, float[8, 4, 28, 28] z)
        => (float16[8, 32, 64, 4] shuffled, float16[8, 4, 32, 64] added, float16[8, 4, 32, 64] wide,
            float[8, 4, 14, 14] pooled, float16[8, 4, 16, 32] whole)
        { shuffled = Transpose<perm = [0, 2, 3, 1]>(x) added = Add(x, w)
          shape = Constant<value_ints = [8, 4, 32, 64]>() wide = Expand(c, shape)
          pooled = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(z)
          whole = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }""")
    watched = findings.Watched()
    work_of_model(model, {}, watch=watched)
    assert {labels[0].split()[-1] for labels in watched.apart} == {"(Transpose)", "(AveragePool)"}


@pytest.mark.parametrize("use_tf32", [False, True])
def test_tiles_of_products_have_no_bank_conflicts(use_tf32: bool) -> None:
    """Adjacent k elements are stored to rows of a tile that begin in different banks."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> product
        (float[64, 96] a, float[128, 96] b) => (float[64, 128] y) { y = Gemm<transB = 1>(a, b) }""")
    assert Inspector([]).look(model, frozenset(), options=LoweringOptions(use_tf32=use_tf32)) == []


def test_kernels_of_models_are_as_they_should_be_on_four_architectures() -> None:
    """Covers copies, sliding windows and row programs beside library calls, and float16 attention without libraries."""
    if disassembler() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    inspector = Inspector(list(ARCHITECTURES))
    # With one image, some launches move too few bytes for the width of their accesses to matter.
    images = optimized(find_model("light_squeezenet"), {"data_0": (32, 3, 224, 224)})
    assert inspector.look(images, LIBRARIES) == []
    whisper = build("whisper_tiny_encoder:float16")
    whisper.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(whisper, Path(folder, "whisper.onnx"))
        half = optimized(Path(folder, "whisper.onnx"))
    assert inspector.look(half, frozenset(), frozenset({"matrix_stream_96x128x64_4_f16"})) == []
    for arch in ARCHITECTURES:
        names = {spec.name for spec in inspector.code[arch]}
        assert {"conv_relu", "maxpool", "globalaveragepool", "softmax", "matrix_stream_96x128x64_4_f16"} <= names
