"""Memory traffic of programs: the minimum, and the launches' traffic."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import parser

from decoder import decoder
from encoder import encoder
from ort_cuda_plugin import models
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.analysis.traffic import ProgramTraffic, Traffic
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.schedule import AttentionTile
from ort_cuda_plugin.schedule import attention as attention_schedule

EMULATED = DeviceProperties()
GPU = DeviceProperties(emulated=False)
LIBRARIES = DeviceProperties(emulated=False, libraries=frozenset({"cublaslt", "cudnn"}))
LIMIT = 1.3


def traffic(
    model: onnx.ModelProto, device: DeviceProperties = GPU, shapes: list[tuple[int, ...]] | None = None
) -> ProgramTraffic:
    cluster = CompiledCluster(read_model(onnx.shape_inference.infer_shapes(model)), device)
    cluster.prepare()
    if shapes is not None:
        cluster.build(shapes, [])
    assert cluster.traffic is not None
    return cluster.traffic


def of(text: str, device: DeviceProperties = GPU) -> ProgramTraffic:
    return traffic(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> traffic {text}'), device)


def test_an_element_counts_once_however_often_it_is_repeated_or_viewed() -> None:
    once = of("(float[10, 20] x, float[20] b) => (float[10, 20] y) { y = Add(x, b) }")
    assert once.compulsory == once.asked == Traffic(4 * (200 + 20), 4 * 200)
    twice = of(
        """(float[10, 20] x) => (float[10, 19] y)
        { zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>() end = Constant<value_ints = [99]>()
          last = Constant<value_ints = [-1]>() axis = Constant<value_ints = [1]>()
          a = Slice(x, one, end, axis) b = Slice(x, zero, last, axis) y = Add(a, b) }"""
    )
    assert twice.compulsory == twice.asked == Traffic(4 * 200, 4 * 190)


def test_a_gather_reads_what_it_takes() -> None:
    few = of("(float[1000, 8] x, int64[3] i) => (float[3, 8] y) { y = Gather(x, i) }")
    assert few.asked == few.compulsory == Traffic(4 * 24 + 8 * 3, 4 * 24)
    many = of("(float[10, 8] x, int64[300] i) => (float[300, 8] y) { y = Gather(x, i) }")
    assert many.asked == Traffic(4 * 80 + 8 * 300, 4 * 2400)


def test_a_row_is_read_in_each_pass_that_does_not_find_it_kept() -> None:
    text = "(float[6, 384] x) => (float[6, 384] y) { y = Softmax(x) }"
    size = 4 * 6 * 384
    assert of(text, GPU).asked == Traffic(size, size)
    assert of(text, EMULATED).asked == Traffic(3 * size, size)
    assert of(text, EMULATED).compulsory == Traffic(size, size)


def test_each_block_of_rows_of_attention_reads_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    form = AttentionTile(16, 64, 64, 64, resident=True)
    monkeypatch.setattr(attention_schedule, "choose_multi_pass_tile", lambda ctx, rows, keys, width: (form, ()))
    found = of(
        """(float[2, 40, 32] q, float[2, 32, 50] k, float[2, 50, 32] v) => (float[2, 40, 32] y)
        { s = MatMul(q, k) w = Softmax(s) y = MatMul(w, v) }"""
    )
    queries, keys = 4 * 2 * 40 * 32, 4 * 2 * 50 * 32
    assert found.compulsory == Traffic(queries + 2 * keys, queries)
    assert found.asked == Traffic(queries + 3 * 2 * keys, queries)


def test_what_a_library_leaves_goes_through_memory() -> None:
    text = "(float[64, 32] a, float[32, 48] b) => (float[64, 48] y) { p = MatMul(a, b) y = Erf(p) }"
    result = 4 * 64 * 48
    assert of(text, GPU).asked == of(text, GPU).compulsory == Traffic(4 * (64 * 32 + 32 * 48), result)
    assert of(text, LIBRARIES).asked == Traffic(4 * (64 * 32 + 32 * 48) + result, 2 * result)


def test_of_two_kernels_for_a_product_the_one_that_runs_counts() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]> traffic
        (float[n, 32] a, float[32, 48] b) => (float[n, 48] y) { y = MatMul(a, b) }"""
    )
    found = traffic(model, GPU, [(3, 32), (32, 48)])
    assert found.asked == found.compulsory == Traffic(4 * (3 * 32 + 32 * 48), 4 * 3 * 48)


def test_a_part_of_a_concatenation_that_others_read_is_stored_once() -> None:
    found = of(
        """(float[1, 3, 7, 7] x, float[20, 3, 3, 3] w, float[20, 20, 3, 3] v)
        => (float[1, 23, 7, 7] y, float[1, 20, 5, 5] z, float[1, 20, 5, 5] q)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w) y = Concat<axis = 1>(x, c) z = Conv(c, v)
          q = MaxPool<kernel_shape = [3, 3]>(c) }"""
    )
    assert found.compulsory.written == 4 * (23 * 49 + 2 * 20 * 25)


def wheel_model(name: str) -> onnx.ModelProto:
    return models.with_noise_weights(onnx.load(models.wheel_models()[name]))


def of_decoder(sequence: int, past: int) -> ProgramTraffic:
    model = decoder(2, 384, 12)
    cache = [(8, 12, past, 32)] * (len(model.graph.input) - 1)
    return traffic(model, GPU, [(8, sequence), *cache])


MODELS: dict[str, tuple[Callable[[], ProgramTraffic], float]] = {
    "densenet121": (lambda: traffic(wheel_model("light_densenet121")), 1.01),
    "inception_v2": (lambda: traffic(wheel_model("light_inception_v2")), 1.05),
    "shufflenet": (lambda: traffic(wheel_model("light_shufflenet")), 1.07),
    "squeezenet": (lambda: traffic(wheel_model("light_squeezenet")), 1.01),
    "encoder": (lambda: traffic(encoder(2), GPU, [(8, 128), (8, 128)]), 1.22),
    "decoder": (lambda: of_decoder(1, 200), 1.01),
    "decoder_prompt": (lambda: of_decoder(64, 0), 1.06),
}
"""Models, and the largest ratio of their traffic to the minimum; a ratio above LIMIT counts as LIMIT."""


@pytest.mark.parametrize("name", MODELS)
def test_models_ask_for_little_more_than_they_must(name: str) -> None:
    measure, most = MODELS[name]
    found = measure()
    assert found.compulsory.total <= found.asked.total <= min(most, LIMIT) * found.compulsory.total
