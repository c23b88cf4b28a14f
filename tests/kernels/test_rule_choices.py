"""Schedules that rules choose, and the autotuner's candidates, by size and device.

rule_choices.txt lists for each model and device the chosen schedule, then the other candidates. Nothing is compiled.
After a change of rules or cost models, with tests/harness in PYTHONPATH, ``python tests/kernels/test_rule_choices.py``
writes what they choose now: read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.device import DeviceProperties
from ort_cuda_plugin.program.lowering.context import Lowering, Tuner
from ort_cuda_plugin.program.steps.schedule import Choice, Schedule, describe
from ort_cuda_plugin.program.steps.steps import Sums

FILE = Path(__file__).with_name("rule_choices.txt")
DEVICES = {
    "sm_80": DeviceProperties.gpu((8, 0)),
    "sm_90": DeviceProperties.gpu((9, 0)),
    "sm_90 with libraries": DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt", "cudnn"})),
    "emulated": DeviceProperties(),
}
FLOATS = ("float16", "float")
PRODUCTS = [
    (rows, k, n)
    for rows, sizes in {
        "1": [(768, 768), (4096, 1000)],
        "3": [(64, 131)],
        "16": [(1024, 100)],
        "40": [(192, 48)],
        "64": [(32, 2)],
        "128": [(768, 3072)],
        "197": [(768, 768), (768, 770)],
        "3136": [(64, 256)],
        "rows": [(256, 80), (68, 256)],
    }.items()
    for k, n in sizes
]
IMAGES = [
    ("1", 3, 224, 64, 7, 2),
    ("1", 64, 56, 64, 3, 1),
    ("1", 256, 14, 256, 3, 1),
    ("1", 512, 7, 512, 1, 1),
    ("8", 24, 28, 100, 1, 1),
    ("n", 32, 9, 48, 3, 1),
]
"""Number of images, channels, height and width, output channels, window size, stride."""
QUERIES = [
    ("8, 197, 64", "8, 197, 64"),
    ("2, 1, 32", "2, 500, 32"),
    ("96, 128, 128", "96, 128, 128"),
    ("2, 1, 64", "2, 1000, 64"),
    ("2, 1, 64", "2, 9000, 64"),
    ("2, 1, 64", "2, 200, 64"),
    ("8, 300, 160", "8, 300, 160"),
    ("200, 128, 64", "200, 128, 64"),
    ("200, 48, 64", "200, 48, 64"),
]
"""Shapes of queries, and of keys and values."""
MODELS = {
    **{
        f"product {dtype} [{rows}, {k}] x [{k}, {n}]": (
            f"({dtype}[{rows}, {k}] x) => ({dtype}[{rows}, {n}] y) {{ y = MatMul(x, w) }}",
            (dtype, (k, n)),
        )
        for dtype in FLOATS
        for rows, k, n in PRODUCTS
    },
    "product float [4096, 64] x [64, 4096], with an epilogue that cuBLASLt lacks": (
        "(float[4096, 64] x) => (float[4096, 4096] y) { t = MatMul(x, w) u = Sin(t) y = Mul(t, u) }",
        ("float", (64, 4096)),
    ),
    **{
        f"product int8 [{rows}, {k}] x [{k}, {n}]": (
            f"(int8[{rows}, {k}] x) => (int32[{rows}, {n}] y) {{ y = MatMulInteger(x, w) }}",
            ("int8", (k, n)),
        )
        for rows, k, n in PRODUCTS[::2]
    },
    **{
        f"convolution {dtype} [{images}, {c}, {size}, {size}] {kernel}x{kernel}/{stride} -> {channels}": (
            f"""({dtype}[{images}, {c}, {size}, {size}] x) => ({dtype}[{images}, {channels}, a, b] y)
            {{ y = Conv<pads=[{", ".join([str(kernel // 2)] * 4)}], strides=[{stride}, {stride}]>(x, w) }}""",
            (dtype, (channels, c, kernel, kernel)),
        )
        for dtype in FLOATS
        for images, c, size, channels, kernel, stride in IMAGES
    },
    **{
        f"attention {dtype} [{q}] x [{k}]": (
            f"""({dtype}[{q}] q, {dtype}[{k}] k, {dtype}[{k}] v) => ({dtype}[{q}] y)
            {{ t = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, t) p = Softmax<axis=-1>(s) y = MatMul(p, v) }}""",
            None,
        )
        for dtype in FLOATS
        for q, k in QUERIES
    },
}


class Noting(Tuner):
    """A tuner that leaves each choice to the rules and notes the candidates."""

    def __init__(self) -> None:
        self.found: list[Choice] = []

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        self.found += choices
        return None


def choices(name: str, device: DeviceProperties) -> str:
    """Return the schedule that the rules give the model's step, then the autotuner's other candidates."""
    text, weights = MODELS[name]
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    if weights is not None:
        dtype, shape = weights
        array = np.ones(shape, {"float": "float32"}.get(dtype, dtype))
        model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    noting = Noting()
    cluster = CompiledCluster(read_model(model), device, tuner=noting)
    taken: list[Schedule] = []

    def watch(_: str, steps: Sequence[object]) -> None:
        taken.extend(step.schedule for step in steps if isinstance(step, Sums) and step.schedule is not None)

    cluster.watch = watch
    cluster.prepare()
    candidates = dict.fromkeys([*taken[-1:], *(choice.schedule for choice in noting.found)])
    return "; ".join(map(describe, candidates))


def section(device: str) -> Iterator[str]:
    yield f"# {device}"
    for name in MODELS:
        yield f"{name}: {choices(name, DEVICES[device])}"


@pytest.mark.every_case
@pytest.mark.parametrize("device", DEVICES)
def test_rules_choose_what_the_table_says(device: str) -> None:
    sections = {part.partition("\n")[0]: part.splitlines()[1:] for part in FILE.read_text().split("# ")[1:]}
    assert list(section(device))[1:] == sections[device]


if __name__ == "__main__":
    FILE.write_text("\n".join(line for device in DEVICES for line in section(device)) + "\n")
