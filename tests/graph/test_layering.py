"""ONNX Runtime's layering rules and memory budgets, which split a model between providers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin import get_ep_name
from ort_cuda_plugin.ep.device.devices import emulated_devices
from ort_cuda_plugin.ep.device.identity import Identity
from ort_cuda_plugin.ep.session.layering import KEYS, rules_of_others
from ort_cuda_plugin.ep.session.partitioning import KEY, goes_by_statistics, read_budget
from ort_cuda_plugin.plugin_library import ProviderName
from ort_versions import api_version

ANNOTATIONS, NAMES = KEYS
NODES = 20
KNOWS_NAMES = api_version(ort.__version__) >= 28
X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def chain(annotate: Callable[[int], str] = lambda number: "") -> onnx.ModelProto:
    """Return a chain of 20 nodes ``n00`` to ``n19``. Add and Mul also read the result of the node two before them.

    ``annotate`` returns the layer annotation of a node by its number, "" for none.
    """
    nodes = []
    for number in range(NODES):
        operator = ("Abs", "Sin", "Add", "Mul", "Sigmoid")[number % 5]
        inputs = [f"x{number}"] + [f"x{max(0, number - 2)}"] * (operator in ("Add", "Mul"))
        nodes.append(helper.make_node(operator, inputs, [f"x{number + 1}"], name=f"n{number:02d}"))
        if annotation := annotate(number):
            nodes[-1].metadata_props.add(key="layer_ann", value=annotation)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in ("x0", f"x{NODES}")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


EXPECTED = ort.InferenceSession(chain().SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x0": X})[0]


def numbers_on_ep(model: onnx.ModelProto, key: str, rules: str, as_: ProviderName | None = None) -> set[int]:
    """Create a session with layering rules and check its results. Return the numbers of the nodes on the plugin."""
    (device, *_) = ort_cuda_plugin.register(emulate=True, as_=as_)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry(key, rules)
    options.add_provider_for_devices([device], {})
    session = ort.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
    np.testing.assert_allclose(session.run(None, {"x0": X})[0], EXPECTED, rtol=1e-5, atol=1e-6)
    parts = session.get_provider_graph_assignment_info()
    return {int(n.name[1:]) for part in parts if part.ep_name == device.ep_name for n in part.get_nodes()}


@pytest.mark.parametrize("edge", range(1, NODES))
def test_rules_cut_at_every_edge(edge: int) -> None:
    before, behind = set(range(edge)), set(range(edge, NODES))
    first = ", ".join(f"n{number:02d}" for number in sorted(before))
    assert numbers_on_ep(chain(), NAMES, f"cpu({first})") == (behind if KNOWS_NAMES else before | behind)
    annotated = chain(lambda number: "first" if number < edge else "second")
    assert numbers_on_ep(annotated, ANNOTATIONS, "gpu:0(first); cpu(=second)") == before


@pytest.mark.parametrize(
    ("key", "rules", "expected"),
    [
        (NAMES, "cpu(n03, n07); gpu:0(n04)", set(range(NODES)) - ({3, 7} if KNOWS_NAMES else set())),
        (NAMES, "gpu(n05, n06)", set(range(NODES))),
        (ANNOTATIONS, "gpu:0(odd); cpu(even)", set(range(1, NODES, 2))),
        (ANNOTATIONS, "cpu(odd)", set(range(0, NODES, 2))),
        (ANNOTATIONS, "CudaPluginExecutionProvider(odd)", set(range(NODES))),
    ],
)
def test_rules_cut_more_than_once(key: str, rules: str, expected: set[int]) -> None:
    assert numbers_on_ep(chain(lambda number: "odd" if number % 2 else "even"), key, rules) == expected


def test_the_device_cuda_is_the_provider_of_that_name() -> None:
    annotated = chain(lambda number: "odd" if number % 2 else "even")
    rules = "cuda(odd); cpu(even)"
    assert numbers_on_ep(annotated, ANNOTATIONS, rules, "CUDAExecutionProvider") == set(range(1, NODES, 2))


# ---- budgets ----

PRODUCTS, WIDTH = 6, 64
WEIGHT = WIDTH * WIDTH * 4
OF_ONE = (WEIGHT + 3 * WIDTH * 4) * 3 // 2  # bytes: weight and result, and half of both for scratch


def products(shared: bool = False) -> bytes:
    """Return a chain of MatMuls, each with its own weight, or all with the same one (``shared``)."""
    rng = np.random.default_rng(1)
    names = ["w0" if shared else f"w{number}" for number in range(PRODUCTS)]
    weights = [
        numpy_helper.from_array(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8, name)
        for name in dict.fromkeys(names)
    ]
    nodes = [
        helper.make_node("MatMul", [f"x{number}", name], [f"x{number + 1}"], name=f"n{number:02d}")
        for number, name in enumerate(names)
    ]
    values = [
        helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, [3, WIDTH]) for number in range(PRODUCTS + 1)
    ]
    graph = helper.make_graph(nodes, "products", values[:1], values[-1:], weights, value_info=values[1:-1])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def products_on_ep(model: bytes, setting: str, name: ProviderName, **provider_options: str) -> tuple[list[int], int]:
    """Run a model with a memory budget and check its results.

    Return the numbers of the nodes on the plugin, and the number of clusters.
    """
    (device, *_) = ort_cuda_plugin.register(emulate=True, as_=None if name == get_ep_name() else name)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.resource_cuda_partitioning_settings", setting)
    options.add_provider_for_devices([device], provider_options)
    session = ort.InferenceSession(model, options, enable_fallback=0)
    x = np.random.default_rng(2).normal(size=(3, WIDTH)).astype(np.float32)
    (expected,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x0": x})
    np.testing.assert_allclose(session.run(None, {"x0": x})[0], expected, rtol=1e-4, atol=1e-5)
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == name]
    return sorted(int(node.name[1:]) for part in parts for node in part.get_nodes()), len(parts)


@pytest.mark.parametrize("name", ["CudaPluginExecutionProvider", "CUDAExecutionProvider"])
def test_a_budget_cuts_the_model_where_it_ends(name: ProviderName) -> None:
    for fitting in (1, 3, PRODUCTS):
        kilobytes = -(-OF_ONE * fitting // 1024)
        assert products_on_ep(products(), f"{kilobytes},", name) == ([*range(fitting)], 1)
    assert products_on_ep(products(), "1,", name) == ([], 0)
    kilobytes = -(-OF_ONE * 2 // 1024)
    assert products_on_ep(products(), f"{kilobytes},", name, single_nodes="1") == ([0, 1], 2)
    together = (WEIGHT + PRODUCTS * 3 * WIDTH * 4) * 3 // 2
    assert products_on_ep(products(shared=True), f"{-(-together // 1024)},", name) == ([*range(PRODUCTS)], 1)


@pytest.mark.parametrize("name", ["CudaPluginExecutionProvider", "CUDAExecutionProvider"])
def test_without_a_number_the_budget_is_what_the_device_has(name: ProviderName) -> None:
    assert products_on_ep(products(), ",", name) == ([*range(PRODUCTS)], 1)
    in_use = ort_cuda_plugin.memory_stats()["device"]["InUse"]
    try:
        ort_cuda_plugin.set_limit(None, in_use + 2 * OF_ONE + OF_ONE // 2)
        assert products_on_ep(products(), ",", name) == ([0, 1], 1)
    finally:
        ort_cuda_plugin.set_limit(None, None)


def test_a_budget_of_no_meaning_is_left_to_onnx_runtime() -> None:
    for setting in ("", "100", "much,", "-1,"):
        assert read_budget({KEY: setting}, lambda: 1) is None
    budget = read_budget({KEY: "2,stats.csv"}, lambda: 1)
    assert budget is not None
    assert budget.nbytes == 2048
    assert goes_by_statistics({KEY: "2,stats.csv"}, Identity.CUDA)
    assert not goes_by_statistics({KEY: "2,stats.csv"}, Identity.OWN)
    assert not goes_by_statistics({KEY: "2,"}, Identity.CUDA)


def test_what_no_rule_can_take_stays_fused() -> None:
    (info,) = emulated_devices()
    for rules in ("gpu(a)", "GPU:0(a, b)", "gpu:nvidia(a); accelerator(=b)", "CudaPluginExecutionProvider(a);", ""):
        assert rules_of_others({NAMES: rules}, Identity.OWN, info, 31) == ""
    assert rules_of_others({ANNOTATIONS: "gpu(a); cpu(b); npu(c); cpu(d)"}, Identity.OWN, info, 31) == "cpu, npu"
    assert rules_of_others({NAMES: "gpu:1(a)"}, Identity.OWN, info, 31) == "gpu:1"
    assert rules_of_others({NAMES: "cuda(a); CUDAExecutionProvider(b)"}, Identity.CUDA, info, 31) == ""
    assert rules_of_others({NAMES: "cpu(a)"}, Identity.OWN, info, 28) == "cpu"
    assert rules_of_others({NAMES: "cpu(a)"}, Identity.OWN, info, 27) == ""
    assert rules_of_others({ANNOTATIONS: "cpu(a)"}, Identity.OWN, info, 26) == "cpu"
