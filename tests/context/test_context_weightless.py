"""Weightless compiled models: they read their weights from the source model and check the weights' hashes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from contexts import BINARY, assert_same, container_of, load, nothing_compiled, settings
from ort_cuda_plugin.abi import host
from ort_cuda_plugin.context.storage import constants
from session_pair import FLOAT, INT64, info

RNG = np.random.default_rng(12)
Weights = dict[str, np.ndarray]


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))


def weights() -> Weights:
    """Return the weights of `model`, one for each way in which the plugin transforms weights.

    depth is packed; scale, bias, mean and variance are folded; q and k are concatenated; table is precomputed on the
    device. Plans depend on the values of half and shape.
    """
    found = {"depth": noise(4, 1, 3), "scale": noise(4), "bias": noise(4), "mean": noise(4)}
    found |= {"variance": np.abs(noise(4)) + 1, "q": noise(24, 16), "k": noise(24, 16), "table": noise(4, 4)}
    return found | {"half": np.array(0.5, np.float32), "shape": np.array([-1, 8, 2], np.int64)}


def model(weights: Mapping[str, np.ndarray], path: Path | None = None, external: bool = False) -> bytes:
    nodes = [
        helper.make_node("Conv", ["x", "depth"], ["a"], group=4, pads=[1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "bias", "mean", "variance"], ["d"]),
        helper.make_node("MatMul", ["d", "q"], ["qs"]),
        helper.make_node("MatMul", ["d", "k"], ["ks"]),
        helper.make_node("Transpose", ["ks"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["qs", "kt"], ["p"]),
        helper.make_node("Exp", ["table"], ["e"]),
        helper.make_node("Mul", ["e", "half"], ["h"]),
        helper.make_node("Add", ["p", "h"], ["s"]),
        helper.make_node("Reshape", ["s", "shape"], ["y"]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, ["n", 4, 24])], [info("y", FLOAT, None)], initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if path is not None:
        onnx.save(made, path, save_as_external_data=external, location=f"{path.stem}.data", size_threshold=64)
    return bytes(made.SerializeToString())


def feeds() -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.standard_normal((n, 4, 24), dtype=np.float32)} for n in (1, 3)]


def compile_weightless(
    source: Path | bytes, output: Path, entries: Mapping[str, str] | None = None, **how: Any
) -> None:
    options = settings(entries, {"context_weightless": "1"})
    given = source if isinstance(source, bytes) else str(source)
    ort.ModelCompiler(options, given, embed_compiled_data_into_model=False, **how).compile_to_file(str(output))


def load_with(path: Path | bytes, entries: Mapping[str, str] | None = None, **options: str) -> ort.InferenceSession:
    made = settings(entries, {"context_allow_host_code": "1", **options})
    return ort.InferenceSession(path if isinstance(path, bytes) else str(path), made)


def rows_of(path: Path) -> list[Any]:
    rows: list[Any] = container_of(path).index["constants"]
    return rows


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """Return a folder with a weightless m_ctx.onnx and its source m.onnx, and the weights. Tests change copies."""
    folder = tmp_path_factory.mktemp("weightless")
    values = weights()
    model(values, folder / "m.onnx")
    compile_weightless(folder / "m.onnx", folder / "m_ctx.onnx")
    return folder, values


def copied(folder: Path, to: Path, *names: str) -> None:
    for name in names or ("m_ctx.onnx", BINARY.format("m"), "m.onnx"):
        (to / name).write_bytes((folder / name).read_bytes())


def test_weights_stay_in_the_source_model(compiled: tuple[Path, Weights]) -> None:
    folder, values = compiled
    rows = rows_of(folder / BINARY.format("m"))
    assert {row["source"][1] for row in rows if "source" in row} == set(values)
    assert {row["recipe"][0] for row in rows if "recipe" in row} >= {
        "batch_norm_factor",
        "batch_norm_offset",
        "join",
        "strips",
    }
    binary = (folder / BINARY.format("m")).read_bytes()
    for name, array in values.items():
        assert array.nbytes < 64 or array.tobytes()[:64] not in binary, name
    with nothing_compiled():
        assert_same(load(folder / "m_ctx.onnx"), model(values), feeds())


def test_another_models_weights_are_an_error_that_names_the_first(
    compiled: tuple[Path, Weights], tmp_path: Path
) -> None:
    folder, values = compiled
    copied(folder, tmp_path)
    model({**values, "depth": values["depth"] + 1, "k": values["k"] * 2}, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*initializer 'depth' of source model 'm.onnx' differs"):
        load(tmp_path / "m_ctx.onnx")
    model({**values, "q": values["q"][:, :8]}, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*'q' of .* has type FLOAT32 and shape \[24, 8\]"):
        load(tmp_path / "m_ctx.onnx")
    model({name: array for name, array in values.items() if name != "table"}, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*'m.onnx' has no initializer 'table'"):
        load(tmp_path / "m_ctx.onnx")
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*'m.onnx' cannot be read.*ep.context_source_model_path"):
        load(tmp_path / "m_ctx.onnx")


def test_refit_takes_new_values(compiled: tuple[Path, Weights], tmp_path: Path) -> None:
    """With context_refit=1, all derived weights are computed from the new values, without compiling a kernel."""
    folder, values = compiled
    copied(folder, tmp_path)
    new = {**weights(), "half": values["half"], "shape": values["shape"]}
    model(new, tmp_path / "m.onnx")
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx", context_refit="1"), model(new), feeds())
    # Without permission for host code, the session compiles the stored graph, also with the new values.
    assert_same(load(tmp_path / "m_ctx.onnx", host_code=False, context_refit="1"), model(new), feeds())


@pytest.mark.parametrize(("name", "value"), [("half", np.array(2, np.float32)), ("shape", np.array([-1, 2, 8]))])
def test_refit_refuses_what_plans_depend_on(
    compiled: tuple[Path, Weights], tmp_path: Path, name: str, value: np.ndarray
) -> None:
    folder, values = compiled
    copied(folder, tmp_path)
    model({**values, name: value}, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=f"INVALID_GRAPH.*initializer '{name}' .* has new contents, but"):
        load(tmp_path / "m_ctx.onnx", context_refit="1")


def test_refit_refuses_what_onnx_runtime_computed_with(tmp_path: Path) -> None:
    """ONNX Runtime's optimizer folds u + v into a new initializer, which a new value of u would make wrong."""
    nodes = [
        helper.make_node("Add", ["u", "v"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]

    def saved(u: np.ndarray) -> bytes:
        initializers = [numpy_helper.from_array(u, "u"), numpy_helper.from_array(v, "v")]
        graph = helper.make_graph(nodes, "g", [info("x", FLOAT, ["n", 24])], [info("y", FLOAT, None)], initializers)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(made, tmp_path / "m.onnx")
        return bytes(made.SerializeToString())

    u, v = noise(24, 64), noise(24, 64)
    source = saved(u)
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    compile_weightless(tmp_path / "m.onnx", tmp_path / "m_ctx.onnx", graph_optimization_level=level)
    feed = [{"x": noise(3, 24)}]
    assert_same(load(tmp_path / "m_ctx.onnx", context_refit="1"), source, feed)
    saved(u * 2)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*'u' .* constants that ONNX Runtime computed"):
        load(tmp_path / "m_ctx.onnx", context_refit="1")
    assert_same(load(tmp_path / "m_ctx.onnx"), source, feed)  # the folded weight is stored


def test_weights_in_external_data(tmp_path: Path) -> None:
    """A session entry names the folder of the source's external data if they are no longer beside the source."""
    values = weights()
    source = model(values)
    model(values, tmp_path / "m.onnx", external=True)
    compile_weightless(tmp_path / "m.onnx", tmp_path / "m_ctx.onnx")
    assert (tmp_path / "m.data").stat().st_size > 3000
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, feeds())
    (tmp_path / "data").mkdir()
    (tmp_path / "m.data").rename(tmp_path / "data" / "m.data")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*external data 'm.data' of source model 'm.onnx'"):
        load(tmp_path / "m_ctx.onnx")
    entries = {"session.model_external_initializers_file_folder_path": str(tmp_path / "data")}
    entries["ep.context_file_path"] = str(tmp_path / "m_ctx.onnx")  # else ORT reports a path in data/
    assert_same(load_with(tmp_path / "m_ctx.onnx", entries), source, feeds()[:1])


def test_ep_context_source_model_path(compiled: tuple[Path, Weights], tmp_path: Path) -> None:
    """The entry names the source model if it is in another folder, or if either model is loaded from memory."""
    folder, values = compiled
    copied(folder, tmp_path, "m_ctx.onnx", BINARY.format("m"))
    entries = {"ep.context_source_model_path": str(folder / "m.onnx")}
    with nothing_compiled():
        assert_same(load_with(tmp_path / "m_ctx.onnx", entries), model(values), feeds()[:1])
    data = (tmp_path / "m_ctx.onnx").read_bytes()
    entries["ep.context_file_path"] = str(tmp_path / "m_ctx.onnx")
    assert_same(load_with(data, entries), model(values), feeds()[:1])
    source = (folder / "m.onnx").read_bytes()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*set ep.context_source_model_path"):
        compile_weightless(source, tmp_path / "n_ctx.onnx")
    compile_weightless(source, tmp_path / "n_ctx.onnx", entries | {"ep.context_file_path": ""})
    assert_same(load_with(tmp_path / "n_ctx.onnx", entries), model(values), feeds()[:1])


@pytest.mark.parametrize("entry", ["ep.enable_weightless", "ep.enable_weightless_ep_context_nodes"])
def test_onnx_runtimes_own_entries(compiled: tuple[Path, Weights], tmp_path: Path, entry: str) -> None:
    """ONNX Runtime's own entries also request weightless models. Since 1.29, the device's metadata announce support."""
    folder, values = compiled
    copied(folder, tmp_path, "m.onnx")
    options = settings({entry: "1", "ep.context_embed_mode": "1"})
    compiler = ort.ModelCompiler(options, str(tmp_path / "m.onnx"), embed_compiled_data_into_model=True)
    compiler.compile_to_file(str(tmp_path / "m_ctx.onnx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m_ctx.onnx"]
    assert_same(load(tmp_path / "m_ctx.onnx"), model(values), feeds()[:1])
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(Exception, match=r"source model 'm\.onnx'"):
        load(tmp_path / "m_ctx.onnx")
    assert host.api_version() < 29 or ort.get_ep_devices()[-1].ep_metadata["weightless_support"] == "all"


def test_every_form_of_an_initializer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read TensorProto's typed fields, raw data and packed elements; store uniform constants as one element."""
    kinds = onnx.TensorProto
    tensors = [
        helper.make_tensor("f32", kinds.FLOAT, [3, 2], noise(3, 2).reshape(-1).tolist()),
        helper.make_tensor("f16", kinds.FLOAT16, [3, 2], noise(3, 2).reshape(-1).tolist()),
        helper.make_tensor("f64", kinds.DOUBLE, [3, 2], noise(3, 2).astype(np.float64).reshape(-1).tolist()),
        helper.make_tensor("i8", kinds.INT8, [3, 2], [-3, 2, 1, 0, 127, -128]),
        helper.make_tensor("i64", kinds.INT64, [3, 2], [-3, 2, 1, 0, 2**62, -(2**63)]),
        helper.make_tensor("u64", kinds.UINT64, [3, 2], [3, 2, 1, 0, 2**62, 2**64 - 1]),
        helper.make_tensor("u4", kinds.UINT4, [3, 2], [3, 2, 1, 0, 15, 7]),
        numpy_helper.from_array(noise(3, 2), "raw"),
    ]
    nodes = [helper.make_node("Cast", [tensor.name], [f"{tensor.name}_d"], to=kinds.DOUBLE) for tensor in tensors]
    nodes.append(
        helper.make_node("ConstantOfShape", ["dims"], ["one"], value=helper.make_tensor("v", FLOAT, [1], [1.5]))
    )
    nodes.append(helper.make_node("Cast", ["one"], ["one_d"], to=kinds.DOUBLE))
    summed = [f"{tensor.name}_d" for tensor in tensors] + ["x"]
    nodes.append(helper.make_node("Sum", summed, ["s"]))
    nodes.append(helper.make_node("MatMul", ["s", "one_d"], ["y"]))
    double, dims = kinds.DOUBLE, helper.make_tensor("dims", INT64, [2], [2, 700])
    graph = helper.make_graph(nodes, "g", [info("x", double, ["n", 3, 2])], [info("y", double, None)], [*tensors, dims])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, tmp_path / "m.onnx")
    compile_weightless(tmp_path / "m.onnx", tmp_path / "m_ctx.onnx")
    rows = rows_of(tmp_path / BINARY.format("m"))
    assert {row["source"][1] for row in rows if "source" in row} == {tensor.name for tensor in tensors} | {"dims"}
    assert [row["shape"] for row in rows if row.get("repeats")] == [[2, 700]]
    feed = [{"x": noise(4, 3, 2).astype(np.float64)}]
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), made.SerializeToString(), feed)
    monkeypatch.setattr(constants, "_MAX_UNIFORM_BYTES", 1)
    with pytest.raises(Exception, match="stored as one element: got 5600 bytes, expected at most 1"):
        load(tmp_path / "m_ctx.onnx")
    ort.ModelCompiler(settings(), str(tmp_path / "m.onnx")).compile_to_file(str(tmp_path / "whole.onnx"))
    assert_same(load(tmp_path / "whole.onnx"), made.SerializeToString(), feed)
