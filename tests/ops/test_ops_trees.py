"""Tree ensembles, compared with the CPU provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from kernel_harness import run_op
from ort_cuda_plugin.model.ir import InvalidModel, NodeError, Unsupported
from ort_cuda_plugin.model.ort.ort_attributes import LONG
from ort_cuda_plugin.ops.ml import trees

Array = np.ndarray[Any, np.dtype[Any]]
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
FEATURES = 5


def rows(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Return features [count, FEATURES]: small integers, many of them equal to thresholds, and some NaN for floats."""
    x = rng.integers(-3, 4, (count, FEATURES)).astype(dtype)
    if x.dtype.kind == "f":
        x[rng.random(x.shape) < 0.15] = np.nan
    return x


def model(op_type: str, outputs: Mapping[str, int], dtype: Any, version: int, attributes: dict[str, Any]) -> bytes:
    node = helper.make_node(op_type, ["x"], list(outputs), domain="ai.onnx.ml", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node],
        "trees",
        [helper.make_tensor_value_info("x", kind, ["n", FEATURES])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("ai.onnx.ml", version), helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def check(source: bytes, x: Array, reference: bytes = b"") -> None:
    """Compare the plugin with the CPU provider, for all rows and for one row.

    The CPU provider runs the model ``reference`` if it is given. All nodes must run on the plugin.
    """
    tolerance = 1e-5
    cpu = ort.InferenceSession(reference or source, providers=["CPUExecutionProvider"])
    session = ort_cuda_plugin.session(source, emulate=True)
    assert {part.ep_name for part in session.get_provider_graph_assignment_info()} == {ort_cuda_plugin.get_ep_name()}
    for part in (x, x[:1]):
        for got, wanted in zip(session.run(None, {"x": part}), cpu.run(None, {"x": part}), strict=True):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


class Lists:
    """Random trees in the attributes of TreeEnsembleRegressor and TreeEnsembleClassifier (parallel lists)."""

    def __init__(self, rng: np.random.Generator, trees: int, depth: int, modes: list[str], missing: bool) -> None:
        self.rng, self.modes = rng, modes
        self.nodes: list[tuple[Any, ...]] = []
        self.leaves: list[tuple[int, int]] = []
        for tree in range(trees):
            self._grow(3 * tree + 1, [0], depth)
        self.missing = missing

    def _grow(self, tree: int, next_id: list[int], depth: int) -> int:
        own = next_id[0]
        next_id[0] += 1
        at = len(self.nodes)
        self.nodes.append(())
        if depth == 0 or self.rng.random() < 0.15:
            self.nodes[at] = (tree, own, 0, "LEAF", 0.0, 0, 0)
            self.leaves.append((tree, own))
            return own
        yes, no = (self._grow(tree, next_id, depth - 1) for _ in range(2))
        feature, value = int(self.rng.integers(FEATURES)), float(self.rng.integers(-3, 4))
        self.nodes[at] = (tree, own, feature, str(self.rng.choice(self.modes)), value, yes, no)
        return own

    def attributes(self) -> dict[str, Any]:
        names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
        result = {
            f"nodes_{name}": list(column) for name, column in zip(names, zip(*self.nodes, strict=True), strict=True)
        }
        if self.missing:
            result["nodes_missing_value_tracks_true"] = self.rng.integers(0, 2, len(self.nodes)).tolist()
        return result

    def weights(self, prefix: str, targets: list[int], complete: bool, low: float = -1.0) -> dict[str, Any]:
        """Return the leaf weights as attributes: for all targets of each leaf (``complete``), or for a random one."""
        found = []
        for tree, node in self.leaves:
            for target in targets if complete else [int(self.rng.choice(targets))]:
                found.append((tree, node, target, float(np.float32(self.rng.uniform(low, 1)))))
        names = ("treeids", "nodeids", "ids", "weights")
        return {f"{prefix}_{name}": list(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_regressor(aggregate: str) -> None:
    rng = np.random.default_rng(0)
    for targets, complete, dtype, modes, missing, transform in (
        (1, True, np.float32, MODES, True, "NONE"),
        (1, True, np.float64, MODES[:1], False, "NONE"),
        (3, False, np.float32, MODES[3:], True, "LOGISTIC"),
        (3, True, np.float32, MODES[:1], True, "SOFTMAX"),
    ):
        lists = Lists(rng, 7, 4, modes, missing)
        attributes = lists.attributes() | lists.weights("target", list(range(targets)), complete)
        attributes |= {"n_targets": targets, "aggregate_function": aggregate, "post_transform": transform}
        if missing:
            attributes["base_values"] = np.linspace(0.5, -0.25, targets).tolist()
        version = 1
        if dtype is np.float64:
            version = 3
            for name in ("nodes_values", "target_weights"):
                array = np.array(attributes.pop(name), np.float64)
                attributes[f"{name}_as_tensor"] = numpy_helper.from_array(array + 1e-9 * array, name)
        source = model("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, dtype, version, attributes)
        check(source, rows(rng, 33, dtype))


def test_trees_of_a_single_leaf() -> None:
    lists = {"treeids": [0, 1], "nodeids": [0, 0], "featureids": [0, 0], "truenodeids": [0, 0], "falsenodeids": [0, 0]}
    attributes: dict[str, Any] = {f"nodes_{name}": numbers for name, numbers in lists.items()}
    attributes |= {"nodes_modes": ["LEAF", "LEAF"], "nodes_values": [0.0, 0.0], "n_targets": 1}
    attributes |= {"target_treeids": [0, 1], "target_nodeids": [0, 0], "target_ids": [0, 0]}
    attributes["target_weights"] = [2.5, 0.25]
    source = model("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, np.float32, 1, attributes)
    check(source, rows(np.random.default_rng(0), 5, np.float32))


def test_trees_of_long_lists_in_any_order() -> None:
    """Test attributes long enough to be `LongList`s, and node ids that are not in the order of the nodes."""
    rng = np.random.default_rng(7)
    lists = Lists(rng, 60, 7, MODES[:2], True)
    attributes = lists.attributes() | lists.weights("target", [0, 1], True) | {"n_targets": 2}
    assert len(attributes["nodes_nodeids"]) > LONG
    source = model("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, np.float32, 1, attributes)
    check(source, rows(rng, 9, np.float32))
    last = len(attributes["nodes_nodeids"]) - 1
    for name in ("nodes_nodeids", "nodes_truenodeids", "nodes_falsenodeids", "target_nodeids"):
        attributes[name] = [last - number for number in attributes[name]]
    check(model("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, np.float32, 1, attributes), rows(rng, 9, np.float32))


LABELS = [5, 7, -2, 9]
OUTPUTS: dict[str, int] = {"y": TensorProto.INT64, "z": TensorProto.FLOAT}


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_classifier_of_many_classes(transform: str) -> None:
    rng = np.random.default_rng(1)
    for complete, with_base, dtype in ((True, False, np.float32), (False, True, np.int64), (False, False, np.float64)):
        lists = Lists(rng, 6, 3, MODES, True)
        attributes = lists.attributes() | lists.weights("class", [0, 1, 3], complete, 0.0)
        attributes |= {"classlabels_int64s": LABELS, "post_transform": transform}
        if with_base:
            attributes["base_values"] = [0.5, -0.25, 0.125, 1.0]
        check(model("TreeEnsembleClassifier", OUTPUTS, dtype, 1, attributes), rows(rng, 40, dtype))


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classifier_of_two_classes(transform: str) -> None:
    """Compare leaf weights for one or both classes, with and without negative weights and base values."""
    rng = np.random.default_rng(2)
    for targets in ([0], [1], [0, 1]):
        for low in (0.0, -1.0):
            for base in ([], [0.25], [0.25, -0.5]):
                for complete in (True, False) if len(targets) == 2 and not base else (True,):
                    lists = Lists(rng, 3, 2, MODES[:1], False)
                    attributes = lists.attributes() | lists.weights("class", targets, complete, low)
                    attributes |= {"classlabels_int64s": LABELS[:2], "post_transform": transform}
                    if base:
                        attributes["base_values"] = base
                    source = model("TreeEnsembleClassifier", OUTPUTS, np.float32, 3, attributes)
                    check(source, rows(rng, 9, np.float32))


class Arrays:
    """Random trees in the attributes of TreeEnsemble (version 5), where leaves are separate from nodes."""

    def __init__(self, rng: np.random.Generator, trees: int, depth: int, modes: list[int]) -> None:
        self.rng, self.modes = rng, modes
        self.nodes: list[list[Any]] = []
        self.leaves: list[tuple[int, float]] = []
        self.members: list[list[float]] = []
        self.roots = [self._grow(depth) for _ in range(trees)]

    def _grow(self, depth: int) -> int:
        own = len(self.nodes)
        mode = int(self.rng.choice(self.modes))
        self.nodes.append([int(self.rng.integers(FEATURES)), mode, float(self.rng.integers(-3, 4))])
        if mode == 6:
            self.members.append(self.rng.choice(np.arange(-3.0, 4.0), self.rng.integers(1, 5), replace=False).tolist())
        for _ in range(2):
            if depth == 0 or self.rng.random() < 0.15:
                self.leaves.append((int(self.rng.integers(2)), float(np.float16(self.rng.uniform(-1, 1)))))
                self.nodes[own] += [len(self.leaves) - 1, 1]
            else:
                child = self._grow(depth - 1)
                self.nodes[own] += [child, 0]
        return own

    def attributes(self, dtype: Any) -> dict[str, Any]:
        features, modes, splits, yes, yes_leaf, no, no_leaf = map(list, zip(*self.nodes, strict=True))
        targets, weights = map(list, zip(*self.leaves, strict=True))

        def tensor(name: str, values: list[Any], dtype: Any) -> onnx.TensorProto:
            return numpy_helper.from_array(np.array(values, dtype), name)

        result = {
            "tree_roots": self.roots, "n_targets": 2, "nodes_featureids": features,
            "nodes_modes": tensor("modes", modes, np.uint8), "nodes_splits": tensor("splits", splits, dtype),
            "nodes_truenodeids": yes, "nodes_trueleafs": yes_leaf,
            "nodes_falsenodeids": no, "nodes_falseleafs": no_leaf,
            "leaf_targetids": targets, "leaf_weights": tensor("weights", weights, dtype),
        }  # fmt: skip
        if self.members:
            flat = [value for part in self.members for value in [*part, np.nan]]
            result["membership_values"] = tensor("members", flat, dtype)
        return result


def ensemble(dtype: Any, attributes: dict[str, Any]) -> bytes:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model("TreeEnsemble", {"y": kind}, dtype, 5, attributes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_version_5(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    for modes, aggregate, transform in ((range(6), 1, 0), ([0], 0, 2), ([0, 6], 1, 1), ([6], 3, 0), ([4], 2, 0)):
        attributes = Arrays(rng, 5, 3, list(modes)).attributes(dtype)
        attributes |= {"aggregate_function": aggregate}
        x = rows(rng, 40, dtype)
        # The numbers 1 and 2 mean SOFTMAX and LOGISTIC in ONNX's enum, but are exchanged in the CPU provider.
        source, reference = (
            ensemble(dtype, attributes | {"post_transform": number})
            for number in (transform, {1: 2, 2: 1}.get(transform, transform))
        )
        check(source, np.nan_to_num(x) if 6 in modes else x, reference)


def test_more_rows_than_leaf_numbers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    source = ensemble(np.float32, Arrays(rng, 5, 3, [0, 6]).attributes(np.float32))
    monkeypatch.setattr(trees, "MAX_LEAF_NUMBERS", 20)
    check(source, np.nan_to_num(rows(rng, 9, np.float32)))


def test_missing_values_in_sets() -> None:
    """At a set-membership node, a NaN takes the branch of nodes_missing_value_tracks_true, even if the set has NaN."""
    leaf = {"leaf_targetids": [0, 0], "leaf_weights": numpy_helper.from_array(np.array([1, 2], np.float32), "w")}
    node = {
        "tree_roots": [0], "nodes_featureids": [0], "nodes_truenodeids": [0], "nodes_falsenodeids": [1],
        "nodes_trueleafs": [1], "nodes_falseleafs": [1],
        "nodes_modes": numpy_helper.from_array(np.array([6], np.uint8), "m"),
        "nodes_splits": numpy_helper.from_array(np.array([0], np.float32), "s"),
        "membership_values": numpy_helper.from_array(np.array([3, 5, np.nan], np.float32), "v"),
    }  # fmt: skip
    x = np.array([[3], [4], [5], [np.nan]], np.float32)
    for tracks, expected in (([0], [1, 2, 1, 2]), ([1], [1, 2, 1, 1])):
        attributes = leaf | node | {"nodes_missing_value_tracks_true": tracks}
        (y,) = run_op("TreeEnsemble", [x], attributes, domain="ai.onnx.ml", version=5)
        np.testing.assert_array_equal(y[:, 0], expected)


def hostile(**changes: Any) -> Any:
    """Run a tree with one node and two leaves after replacing some attributes."""
    attributes: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0],
    } | changes  # fmt: skip
    x = np.zeros((2, 3), np.float32)
    return run_op("TreeEnsembleRegressor", [x], attributes, domain="ai.onnx.ml", version=3)


def test_contradictions_are_refused_before_anything_runs() -> None:
    hostile()
    big = 2**40
    for changes, text in (
        ({"nodes_featureids": [3, 0, 0]}, "the number of features must be at least 4"),
        ({"nodes_featureids": [-1, 0, 0]}, "the index of a feature in a tree must be in [0, "),
        ({"nodes_featureids": [big, 0, 0]}, "the index of a feature in a tree must be in [0, "),
        (
            {"nodes_truenodeids": [7, 0, 0]},
            "tree 0 must have each node that another node names as a child, got node id 7, which does not exist",
        ),
        (
            {"nodes_truenodeids": [0, 0, 0]},
            "each node of a tree must be a root or the child of one other node",
        ),
        ({"nodes_nodeids": [0, 1, 1]}, "nodes_nodeids must be unique in each tree"),
        ({"nodes_treeids": [0, 1, 0]}, "tree 0 must have each node"),
        ({"nodes_modes": ["BRANCH_LEQ", "LEAF", "TWIG"]}, "got 'TWIG'"),
        ({"nodes_values": [0.0]}, "nodes_values must have the same length"),
        ({"target_ids": [0, 1]}, "the index of a target in a tree must be in [0, 1), got 1"),
        ({"target_ids": [0, -1]}, "the index of a target in a tree must be in [0, 1), got -1"),
        (
            {"target_nodeids": [1, 9]},
            "tree 0 must have each node to which a weight belongs, got node id 9, which does not exist",
        ),
        ({"target_weights": [1.0]}, "weights must have the same length"),
        ({"n_targets": 0}, "n_targets must be in [1, "),
        ({"n_targets": 2**62}, "got 4611686018427387904"),
        ({"base_values": [1.0, 2.0]}, "base_values must have 0 or 1 entries, got 2"),
        ({"post_transform": "ROT13"}, "got 'ROT13'"),
        ({"aggregate_function": "PRODUCT"}, "got 'PRODUCT'"),
        ({"nodes_missing_value_tracks_true": [1]}, "nodes_missing_value_tracks_true must have 3 entries, got 1"),
    ):
        with pytest.raises((InvalidModel, NodeError)) as caught:
            hostile(**changes)
        assert text in str(caught.value)


def test_trees_without_end_are_refused() -> None:
    chain = 5000
    attributes = {
        "nodes_treeids": [0] * (2 * chain + 1), "nodes_nodeids": list(range(2 * chain + 1)),
        "nodes_featureids": [0] * (2 * chain + 1), "nodes_modes": ["BRANCH_LEQ", "LEAF"] * chain + ["LEAF"],
        "nodes_values": [0.0] * (2 * chain + 1),
        "nodes_truenodeids": [i + 1 if i % 2 == 0 else 0 for i in range(2 * chain + 1)],
        "nodes_falsenodeids": [i + 2 if i % 2 == 0 else 0 for i in range(2 * chain + 1)],
    }  # fmt: skip
    with pytest.raises((Unsupported, NodeError), match="up to 4096 comparisons"):
        hostile(**attributes)
    cycle = {"nodes_modes": ["BRANCH_LEQ"] * 3, "nodes_truenodeids": [1, 2, 1], "nodes_falsenodeids": [2, 1, 2]}
    with pytest.raises((InvalidModel, NodeError), match="must be a root or the child of one other node"):
        hostile(**cycle)


def test_a_model_that_is_declined_says_why() -> None:
    rng = np.random.default_rng(5)
    lists = Lists(rng, 2, 2, MODES, False)
    attributes = lists.attributes() | lists.weights("class", [0, 1], True)
    source = model("TreeEnsembleClassifier", OUTPUTS | {"y": TensorProto.STRING}, np.float32, 3,
                   attributes | {"classlabels_strings": ["a", "b"]})  # fmt: skip
    (verdict,) = ort_cuda_plugin.explain(source, emulate=True)
    assert (verdict.kind, verdict.reason) == (
        "dtype",
        "TreeEnsembleClassifier: classlabels_strings is given; supported: classlabels_int64s",
    )


def test_float16() -> None:
    """ONNX Runtime lacks a float16 kernel. Thresholds and weights are exact in float16, so float32 is the reference."""
    rng = np.random.default_rng(6)
    arrays = Arrays(rng, 4, 3, [0, 6])
    x = np.nan_to_num(rows(rng, 9, np.float32))
    wide = ort.InferenceSession(ensemble(np.float32, arrays.attributes(np.float32)), providers=["CPUExecutionProvider"])
    attributes = arrays.attributes(np.float16)
    (y,) = run_op("TreeEnsemble", [x.astype(np.float16)], attributes, domain="ai.onnx.ml", version=5)
    np.testing.assert_allclose(y, wide.run(None, {"x": x})[0].astype(np.float16), rtol=1e-3, atol=1e-3)
