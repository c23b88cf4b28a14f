"""Epilogues of tensor-core GEMMs that access memory by vectors, and those that cannot."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import run_model, run_op
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.kernels.codegen.simt_fragments import Tile
from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig, tile_configs
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from team_choice import use_team

GPU = DeviceProperties.gpu((9, 0))
FEW_ROWS = TileConfig(Tile(48, 48, 32, thread_m=6, thread_n=12), 8)
"""A schedule with more threads than its tile has groups of three vectors."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)


def network(body: str, columns: int, results: str, rows: int = 150) -> ModelProto:
    """Return a model whose body reads float16 x [rows, 96] and z [rows, columns], and constants w and c."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float16[{rows}, 96] x, float16[{rows}, {columns}] z) =>'
        f" ({results}) {{ {body} }}"
    )
    for name, values in (("w", noise(96, columns, seed=3)), ("c", noise(columns, seed=4))):
        model.graph.initializer.append(numpy_helper.from_array((values / 4).astype(np.float16), name))
    return model


def product_kernel(model: ModelProto) -> KernelSpec:
    (spec,) = (spec for spec in CompiledCluster(read_model(model), GPU).prepare().kernels if "_mma" in spec.name)
    return spec


def expected(model: ModelProto, x: Array, z: Array) -> tuple[Array, Array]:
    w, c = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer)
    return x.astype(np.float64) @ w + c, z.astype(np.float64)


def assert_close(found: Array, exact: Array) -> None:
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2**-9, atol=2**-8)


def different_forms() -> list[TileConfig]:
    """Return for each width of tiles the schedules with the fewest and the most accumulators per thread."""
    forms = sorted(tile_configs("f16", along_k=True), key=lambda team: team.tile.m / team.tile.threads / team.sliced_k)
    of_width = {n: [team for team in forms if team.tile.n == n] for n in {team.tile.n for team in forms}}
    return [team for found in of_width.values() for team in (found[0], found[-1])]


@pytest.mark.parametrize("part", range(2))
def test_tiles_of_all_widths_store_vectors(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """The epilogue adds a bias and a residual; the last tiles exceed the result."""
    rows, columns = 150, 100
    x, z = noise(rows, 96, seed=1).astype(np.float16), noise(rows, columns, seed=2).astype(np.float16)
    model = network("p = MatMul(x, w) b = Add(p, c) y = Add(b, z)", columns, f"float16[{rows}, {columns}] y")
    sums, added = expected(model, x, z)
    for team in different_forms()[part::2]:
        use_team(monkeypatch, team)
        body = product_kernel(model).source
        assert "store_lanes(" in body, team
        assert body.count("load_lanes(") >= 2, team
        with configured(check=1):
            (found,) = run_model(model, [x, z])
        assert_close(found, sums + added)


@pytest.mark.parametrize("team", [TileConfig(Tile(96, 80, 32, thread_m=12, thread_n=10), 4), FEW_ROWS], ids=["4", "8"])
@pytest.mark.parametrize("columns", [75, 80])
def test_some_threads_have_fewer_rows_than_others(
    monkeypatch: pytest.MonkeyPatch, team: TileConfig, columns: int
) -> None:
    use_team(monkeypatch, team)
    x, z = noise(150, 96, seed=1).astype(np.float16), noise(150, columns, seed=2).astype(np.float16)
    model = network("p = MatMul(x, w) b = Add(p, c) y = Add(b, z)", columns, f"float16[150, {columns}] y")
    sums, added = expected(model, x, z)
    with configured(check=1):
        (found,) = run_model(model, [x, z])
    assert_close(found, sums + added)


@pytest.mark.parametrize(
    ("body", "columns", "is_wide"),
    [
        pytest.param("p = MatMul(x, w) y = Add(p, z)", 96, True, id="whole vectors"),
        pytest.param("p = MatMul(x, w) y = Add(p, z)", 98, False, id="rows of half vectors"),
        pytest.param("p = MatMul(x, w) y = Transpose <perm = [1, 0]> (p)", 96, False, id="columns apart"),
        pytest.param(
            "p = MatMul(x, w) q = Reshape(p, s) y = Transpose <perm = [1, 0, 2]> (q)", 96, True, id="heads of vectors"
        ),
        pytest.param("p = MatMul(x, w) y = Reshape(p, s)", 96, True, id="other dimensions"),
    ],
)
def test_neighbors_in_memory_are_one_access(
    monkeypatch: pytest.MonkeyPatch, body: str, columns: int, is_wide: bool
) -> None:
    use_team(monkeypatch, TileConfig(Tile(64, 32, 32, thread_m=8, thread_n=4), 2))
    shape = "12, 150, 8" if "[1, 0, 2]" in body else "150, 12, 8" if "s)" in body else "150, columns"
    shape = f"{columns}, 150" if "[1, 0]" in body else shape.replace("columns", str(columns))
    model = network(body, columns, f"float16[{shape}] y")
    model.graph.initializer.append(numpy_helper.from_array(np.array([150, 12, 8]), "s"))
    x, z = noise(150, 96, seed=1).astype(np.float16), noise(150, columns, seed=2).astype(np.float16)
    w = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    exact = x.astype(np.float64) @ w + (z if "z)" in body else 0)
    exact = exact.T if "[1, 0]>" in body else exact
    if "s)" in body:
        exact = exact.reshape(150, 12, 8)
        exact = exact.transpose(1, 0, 2) if "[1, 0, 2]" in body else exact
    assert ("store_lanes(" in product_kernel(model).source) == is_wide
    with configured(check=1):
        (found,) = run_model(model, [x, z])
    assert_close(found, exact)


def test_memory_of_the_application_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the application's memory a kernel checks the alignment at run time; the plugin's own memory is aligned."""
    use_team(monkeypatch, TileConfig(Tile(64, 32, 32, thread_m=8, thread_n=4), 2))
    asked = product_kernel(network("y = MatMul(x, w)", 96, "float16[150, 96] y"))
    known = product_kernel(network("p = MatMul(x, w) y = Softmax(p)", 96, "float16[150, 96] y"))
    assert "is_aligned(" in asked.source
    assert "is_aligned(" not in known.source
    assert "store_lanes(" in known.source


def test_code_for_a_gpu_stores_four_halves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_team(monkeypatch, TileConfig(Tile(64, 32, 32, thread_m=8, thread_n=4), 2))
    spec = product_kernel(network("p = MatMul(x, w) b = Add(p, c) y = Softmax(b)", 96, "float16[150, 96] y"))
    (code,) = sass.code_of([spec], Target.cuda(9, 0))
    assert code.widest("STG") == 8
    assert "STG" not in code.mix or sass.disassembler() is None


@pytest.mark.parametrize(("groups", "is_wide"), [(1, True), (2, False), (3, True)])
def test_groups_of_channels_begin_at_vectors(monkeypatch: pytest.MonkeyPatch, groups: int, is_wide: bool) -> None:
    """With groups of 6 output channels, the second group begins between vectors of 4."""
    use_team(monkeypatch, TileConfig(Tile(32, 16, 32, thread_m=4, thread_n=4), 2))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float16[2, {8 * groups}, 9, 9] x) => (float16[2, 9, 9, 12] y)'
        f" {{ p = Conv <pads = [1, 1, 1, 1], group = {groups}> (x, w) y = Transpose <perm = [0, 2, 3, 1]> (p) }}"
    )
    x, w = noise(2, 8 * groups, 9, 9, seed=1).astype(np.float16), (noise(12, 8, 3, 3, seed=2) / 8).astype(np.float16)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    given = [one.astype(np.float64) for one in (x, w)]
    (exact,) = run_op("Conv", given, {"pads": [1] * 4, "group": groups})
    assert ("store_lanes(" in product_kernel(model).source) == is_wide
    with configured(check=1):
        (found,) = run_model(model, [x])
    assert_close(found, exact.transpose(0, 2, 3, 1))
