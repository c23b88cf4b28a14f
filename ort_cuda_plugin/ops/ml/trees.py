"""Tree ensembles: each row descends each tree, then leaf weights are aggregated per target."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import Constant, DType, Node
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import le
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ...program.steps.row_program import Reduction, Values
from .. import requirements as require
from ..folds import in_order
from ..layouts import column_of
from ..onnx.math.elementwise import cast
from ..registry import T1, T, attributes_of, op
from .features import DOMAIN, NUMBERS
from .forest import (
    COMPARISONS,
    EQUAL,
    GREATER,
    LESS,
    NAN,
    UNORDERED,
    Forest,
    Ints,
    Nodes,
    Numbers,
    equal_lengths,
    make_forest,
    with_missing,
)
from .post_transform import POST_TRANSFORMS, binary_scores, label_of_best, post_transform, regression_transform

IntList = Sequence[int]
FloatList = Sequence[float]

_FLOAT32 = DType.FLOAT32.onnx
MAX_LEAF_NUMBERS = 1 << 28
"""Maximum rows * trees for a kernel with one thread per row and tree, which stores a leaf index.

With more, one thread per row and target descends all trees.
"""
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_forests: weakref.WeakKeyDictionary[Node, dict[DType, Forest]] = weakref.WeakKeyDictionary()
"""Checked trees by node and element type, shared by all plans."""


def _forest(ctx: Lowering, dtype: DType, make: Callable[[], Forest]) -> Forest:
    """Return the current node's forest with thresholds and weights of ``dtype``, from the cache if possible."""
    known = {} if ctx.node is None else _forests.setdefault(ctx.node, {})
    if dtype not in known:
        known[dtype] = make()
    return known[dtype]


def _compute_type(x: Tensor) -> DType:
    return DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32


def _numbers(values: FloatList | None, tensor: Constant | None, dtype: DType, what: str) -> Numbers:
    """Return the values of an attribute that is a list or a tensor, as ``dtype``.

    Raises InvalidModel if both are given, Unsupported for a tensor of another type.
    """
    require.that(not values or tensor is None, f"{what} and {what}_as_tensor", "be given one at a time", "both")
    if tensor is None:
        return np.array(() if values is None else values, np.float32).astype(dtype.numpy)
    if tensor.dtype is not dtype:
        wanted = f"{dtype.short}, in which the trees are evaluated"
        raise require.unsupported("dtype", f"the type of {what}_as_tensor", tensor.dtype.short, wanted)
    return tensor.array.reshape(-1)


# ---- evaluation on the device ----


def _rows(ctx: Lowering, x: Tensor, forest: Forest) -> Tensor:
    """Return x as [rows, features]; a vector is one row."""
    require.rank((1, 2), X=x)
    if x.rank == 1:
        x = ctx.view(x, (1, *x.shape), (0, *x.strides), x.offset)
    require.least_dim(ctx, forest.max_feature + 1, **{"the number of features": x.shape[1]})
    return x


def _walk(ctx: Lowering, maps: IndexMap, forest: Forest, x: Tensor, row: Scalar, tree: Scalar) -> Scalar:
    """Return the index of the leaf that ``row`` of x reaches in ``tree``."""
    rows = maps.source(x)
    tables = forest.features, forest.thresholds, forest.comparisons, forest.children, forest.roots, forest.depths
    features, thresholds, comparisons, children, roots, depths = (
        maps.source(ctx.initializer(table)) for table in tables
    )

    def compare(value: Scalar, threshold: Scalar) -> Scalar:
        bit: Scalar = s.constant(UNORDERED, DType.INT64)
        less, equal, greater = value < threshold, s.equal(value, threshold), value > threshold
        for holds, number in ((less, LESS), (equal, EQUAL), (greater, GREATER), (s.is_nan(value), NAN)):
            bit = s.where(holds, s.constant(number, DType.INT64), bit)
        return bit

    def step(totals: Values, _: Values) -> Values:
        (node,) = totals
        feature = s.cast(features.at([node]), DType.INT64)
        threshold = thresholds.at([node])
        value = s.cast(rows.at([row, feature]), threshold.dtype)
        bit = s.cast(comparisons.at([node]), DType.INT64) >> compare(value, threshold)
        side = s.where(s.equal(bit & 1, 1), s.constant(0, DType.INT64), 1)
        return (s.cast(children.at([node, side]), DType.INT64),)

    down = in_order((s.cast(roots.at([tree]), DType.INT64),), step)
    (leaf,) = maps.fold(down, s.cast(depths.at([tree]), DType.INT64), lambda i: (i,))
    return leaf - maps.dim(forest.inner)


def _better(name: str, value: Scalar, total: Scalar) -> Scalar:
    """Return the aggregate of ``total`` and ``value``: their minimum, maximum or sum."""
    if name == "MIN":
        return s.where(value < total, value, total)
    return s.where(value > total, value, total) if name == "MAX" else total + value


def _aggregate(name: str) -> Reduction:
    """Return the reduction of (value, whether it exists) to (total, whether any value exists)."""

    def take(totals: Values, elements: Values) -> Values:
        (total, has), (value, is_there) = totals, elements
        joined = s.where(has, _better(name, value, total), value)
        return s.where(is_there, joined, total), has | is_there

    return Reduction(lambda dtypes: (s.constant(0, dtypes[0]), s.constant(False, DType.BOOL)), take, take)


def _totals(
    ctx: Lowering,
    forest: Forest,
    x: Tensor,
    name: str,
    finish: Callable[[Scalar, Scalar, Scalar, Scalar], Scalar] = lambda total, has, base, count: total,
    base: Numbers | None = None,
) -> Tensor:
    """Return [rows, targets] of ``finish(total, whether any leaf has a weight, base value, number of trees)``.

    Each total adds the trees in model order.
    """
    rows, dtype = x.shape[0], forest.weights.dtype
    leaf_numbers: Tensor | None = None
    # With more leaf numbers, one thread per row already fills a GPU.
    if ctx.guard(le(rows * forest.trees, MAX_LEAF_NUMBERS)):
        leaf_numbers = gather_map(
            ctx, [rows, forest.trees], DType.INT32,
            lambda maps, c: s.cast(_walk(ctx, maps, forest, x, c[0], c[1]), DType.INT32),
        )  # fmt: skip
    real = Scalar(dtype, "leaf")
    out = finish(real, Scalar(DType.BOOL, "leaf"), real, real).dtype
    bases = None if base is None or not len(base) else ctx.constant(base)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, target = c
        weights = maps.source(ctx.initializer(forest.weights))
        targets = maps.source(ctx.initializer(forest.targets))
        reduction = _aggregate(name)

        def of_tree(tree: Scalar) -> Values:
            if leaf_numbers is None:
                leaf = _walk(ctx, maps, forest, x, row, tree)
            else:
                leaf = s.cast(maps.source(leaf_numbers).at([row, tree]), DType.INT64)
            if forest.starts is None:
                return weights.at([leaf * maps.dim(forest.num_targets) + target]), s.constant(True, DType.BOOL)
            starts = maps.source(ctx.initializer(forest.starts))
            start, end = (s.cast(starts.at([leaf + number]), DType.INT64) for number in (0, 1))

            def entry(i: Scalar) -> Values:
                return weights.at([start + i]), s.equal(s.cast(targets.at([start + i]), DType.INT64), target)

            return maps.fold(reduction, end - start, entry)

        total, has = maps.fold(reduction, maps.dim(forest.trees), of_tree)
        base = s.constant(0, dtype) if bases is None else maps.source(bases).at([target])
        return finish(total, has, base, s.cast(maps.dim(forest.trees), dtype))

    return gather_map(ctx, [rows, forest.num_targets], out, element)


def _regress(
    ctx: Lowering, x: Tensor, forest: Forest, aggregate: str, base: Numbers, transform: str, out: DType
) -> Tensor:
    require.one_of(_AGGREGATES, aggregate_function=aggregate)
    require.one_of(POST_TRANSFORMS, post_transform=transform)
    require.count((0, forest.num_targets), base_values=base)
    x = _rows(ctx, x, forest)
    dtype = forest.weights.dtype

    def finish(total: Scalar, has: Scalar, base: Scalar, count: Scalar) -> Scalar:
        score = (total / count if aggregate == "AVERAGE" else total) + base
        # As in ONNX Runtime, a target without weights in a row's leaves gets no base value, except a single target.
        return score if forest.num_targets == 1 else s.where(has, score, s.constant(0, dtype))

    scores = _totals(ctx, forest, x, aggregate, finish, base)
    return cast(ctx, regression_transform(ctx, scores, transform, forest.num_targets), to=out.onnx)


# ---- attributes of versions 1 to 3 ----


def _tree_lists(
    dtype: DType, treeids: IntList, nodeids: IntList, ids: IntList, weights: Numbers, num_targets: int, *,
    nodes_falsenodeids: tuple[int, ...] = (), nodes_featureids: tuple[int, ...] = (),
    nodes_hitrates: tuple[float, ...] = (), nodes_hitrates_as_tensor: Constant | None = None,
    nodes_missing_value_tracks_true: tuple[int, ...] = (), nodes_modes: tuple[str, ...] = (),
    nodes_nodeids: tuple[int, ...] = (), nodes_treeids: tuple[int, ...] = (), nodes_truenodeids: tuple[int, ...] = (),
    nodes_values: tuple[float, ...] = (), nodes_values_as_tensor: Constant | None = None,
) -> Forest:  # fmt: skip
    """Build trees whose nodes have a tree id and a node id; the first node of a tree is its root."""
    thresholds = _numbers(nodes_values, nodes_values_as_tensor, dtype, "nodes_values")
    count = equal_lengths(
        nodes_treeids=nodes_treeids, nodes_nodeids=nodes_nodeids, nodes_featureids=nodes_featureids,
        nodes_modes=nodes_modes, nodes_truenodeids=nodes_truenodeids, nodes_falsenodeids=nodes_falsenodeids,
        nodes_values=thresholds,
    )  # fmt: skip
    equal_lengths(treeids=treeids, nodeids=nodeids, ids=ids, weights=weights)
    require.that(count > 0, "the ensemble", "have at least one tree", "none")
    of_trees = np.array(nodes_treeids, np.int64)
    names = _Names(of_trees, np.array(nodes_nodeids, np.int64))
    kinds = {mode: number for number, mode in enumerate(sorted(set(nodes_modes)))}
    unknown = kinds.keys() - {*COMPARISONS, "LEAF"}
    if unknown:
        raise require.violation("nodes_modes", f"be among {sorted({*COMPARISONS, 'LEAF'})}", repr(min(unknown)))
    modes = np.fromiter(map(kinds.__getitem__, nodes_modes), np.int64, count)
    is_leaf = modes == kinds.get("LEAF", -1)
    index = np.where(is_leaf, np.cumsum(is_leaf) - 1 + int((~is_leaf).sum()), np.cumsum(~is_leaf) - 1)

    inner = np.flatnonzero(~is_leaf)
    children = [
        index[names.find(of_trees[inner], np.array(ids, np.int64)[inner], "that another node names as a child")]
        for ids in (nodes_truenodeids, nodes_falsenodeids)
    ]
    roots = np.flatnonzero(np.concatenate([[True], of_trees[1:] != of_trees[:-1]]))
    are_together = len(np.unique(of_trees[roots])) == len(roots)
    expected = "have all nodes of a tree before those of the next"
    require.that(are_together, "nodes_treeids", expected, "a tree whose nodes are apart")
    comparisons = np.array([COMPARISONS.get(mode, 0) for mode in kinds], np.int64)[modes]
    nodes = Nodes(
        np.array(nodes_featureids, np.int64)[inner],
        thresholds[inner],
        with_missing(comparisons, nodes_missing_value_tracks_true)[inner],
        np.stack(children, 1),
        index[roots],
        int(is_leaf.sum()),
    )
    weighted = names.find(np.array(treeids, np.int64), np.array(nodeids, np.int64), "to which a weight belongs")
    kept = np.flatnonzero(is_leaf[weighted])
    leaves = index[weighted[kept]] - len(inner)
    return make_forest(nodes, leaves, np.array(ids, np.int64)[kept], weights[kept], num_targets)


class _Names:
    """Finds the nodes of an ensemble by (tree id, node id)."""

    def __init__(self, trees: Ints, nodes: Ints) -> None:
        self._first = int(trees.min()), int(nodes.min())
        self._spans = int(trees.max()) - self._first[0] + 1, int(nodes.max()) - self._first[1] + 1
        if self._spans[0] * self._spans[1] >= 2**63:
            what, wanted = "the range of ids (maximum - minimum + 1)", "ranges with a product below 2**63"
            found = f"{self._spans[0]} in nodes_treeids and {self._spans[1]} in nodes_nodeids"
            raise require.unsupported("attribute", what, found, wanted)
        keys = self._key(trees, nodes)
        # Converters write sorted ids, which need no argsort.
        self._order = None if (np.diff(keys) >= 0).all() else np.argsort(keys)
        self._keys = keys if self._order is None else keys[self._order]
        require.that(not (np.diff(self._keys) == 0).any(), "nodes_nodeids", "be unique in each tree", "a duplicate")

    def _key(self, trees: Ints, nodes: Ints) -> Ints:
        return (trees - self._first[0]) * self._spans[1] + (nodes - self._first[1])

    def find(self, trees: Ints, nodes: Ints, what: str) -> Ints:
        """Return the indices of nodes. Raises InvalidModel for a missing node; ``what`` describes it."""
        is_there = np.ones(trees.shape, bool)
        for numbers, first, span in zip((trees, nodes), self._first, self._spans, strict=True):
            is_there &= (numbers >= first) & (numbers < first + span)
        keys = np.where(is_there, self._key(trees, nodes), 0)
        found = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_there &= self._keys[found] == keys
        if not is_there.all():
            first = int(np.argmin(is_there))
            raise require.violation(
                f"tree {trees[first]}", f"have each node {what}", f"node id {nodes[first]}, which does not exist"
            )
        return found if self._order is None else self._order[found]


@op("TreeEnsembleRegressor", domain=DOMAIN, since=1, types={"T": NUMBERS})
@attributes_of(_tree_lists)
def tree_ensemble_regressor(
    ctx: Lowering,
    x: T,
    *,
    aggregate_function: str = "SUM",
    base_values: tuple[float, ...] = (),
    base_values_as_tensor: Constant | None = None,
    n_targets: int = 1,
    post_transform: str = "NONE",
    target_ids: tuple[int, ...] = (),
    target_nodeids: tuple[int, ...] = (),
    target_treeids: tuple[int, ...] = (),
    target_weights: tuple[float, ...] = (),
    target_weights_as_tensor: Constant | None = None,
    **nodes: Any,
) -> Tensor:
    dtype = _compute_type(x)

    def make() -> Forest:
        weights = _numbers(target_weights, target_weights_as_tensor, dtype, "target_weights")
        return _tree_lists(dtype, target_treeids, target_nodeids, target_ids, weights, n_targets, **nodes)

    base = _numbers(base_values, base_values_as_tensor, dtype, "base_values")
    forest = _forest(ctx, dtype, make)
    return _regress(ctx, x, forest, aggregate_function, base, post_transform, DType.FLOAT32)


@op("TreeEnsembleClassifier", domain=DOMAIN, since=1, types={"T1": NUMBERS})
@attributes_of(_tree_lists)
def tree_ensemble_classifier(
    ctx: Lowering,
    x: T1,
    *,
    base_values: tuple[float, ...] = (),
    base_values_as_tensor: Constant | None = None,
    class_ids: tuple[int, ...] = (),
    class_nodeids: tuple[int, ...] = (),
    class_treeids: tuple[int, ...] = (),
    class_weights: tuple[float, ...] = (),
    class_weights_as_tensor: Constant | None = None,
    classlabels_int64s: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
    post_transform: str = "NONE",
    **nodes: Any,
) -> tuple[Tensor, ...]:
    require.supported(not classlabels_strings, "dtype", "classlabels_strings", "given", "classlabels_int64s")
    if len(classlabels_int64s) < 2:
        raise require.unsupported("attribute", "the number of classes", len(classlabels_int64s), "2 and more")
    dtype = _compute_type(x)

    def make() -> Forest:
        weights = _numbers(class_weights, class_weights_as_tensor, dtype, "class_weights")
        return _tree_lists(dtype, class_treeids, class_nodeids, class_ids, weights, len(classlabels_int64s), **nodes)

    base = _numbers(base_values, base_values_as_tensor, dtype, "base_values")
    forest = _forest(ctx, dtype, make)
    classify = _two_classes if len(classlabels_int64s) == 2 else _classes
    return classify(ctx, _rows(ctx, x, forest), forest, base, post_transform, classlabels_int64s)


def _has(ctx: Lowering, x: Tensor, forest: Forest, target: int) -> Tensor:
    """Return flags [rows], or one flag that holds for all rows: whether a row's leaves have a weight for ``target``."""
    if target in forest.always or target not in forest.used:
        return ctx.constant(np.array(target in forest.always))
    return column_of(ctx, _totals(ctx, forest, x, "SUM", lambda total, has, base, count: has), target)


def _classes(
    ctx: Lowering, x: Tensor, forest: Forest, base: Numbers, transform: str, labels: IntList
) -> tuple[Tensor, ...]:
    """Return the label of the largest score (the first of equal scores), and the scores."""
    expected = f"have 0 entries or {len(labels)}, one per class"
    require.that(len(base) in (0, len(labels)), "base_values", expected, f"{len(base)} entries")
    scores = _totals(ctx, forest, x, "SUM", lambda total, has, base, count: total + base, base)
    if len(base) or len(forest.always) == len(labels):
        candidates = scores
    else:
        lowest = s.constant(float("-inf"), scores.dtype)
        has = _totals(ctx, forest, x, "SUM", lambda total, has, base, count: has)
        candidates = elementwise(ctx, lambda score, has: s.where(has, score, lowest), scores, has)

    return label_of_best(ctx, candidates, labels), cast(ctx, post_transform(ctx, scores, transform), to=_FLOAT32)


def _two_classes(
    ctx: Lowering, x: Tensor, forest: Forest, base: Numbers, transform: str, labels: IntList
) -> tuple[Tensor, ...]:
    """Return label and scores of two classes as ONNX Runtime does; ONNX does not define trees with one class's weights.

    If only one class has weights, its score decides, with the threshold 0.5 if no weight is negative, else 0. If both
    have weights, the score of the second class decides, or that of the first for a row of x whose leaves have no weight
    for the second; the threshold is 0, and the labels are 0 and 1 instead of ``labels``.
    """
    require.that(len(base) <= 2, "base_values", "have at most 2 entries for two classes", len(base))
    scores = _totals(ctx, forest, x, "SUM")
    first, second = column_of(ctx, scores, 0), column_of(ctx, scores, 1)
    given = (first, second, _has(ctx, x, forest, 0), _has(ctx, x, forest, 1), *(ctx.constant(value) for value in base))
    zero = s.constant(0, scores.dtype)

    def both(
        first: Scalar, second: Scalar, has_first: Scalar, has_second: Scalar, *bases: Scalar
    ) -> tuple[Scalar, Scalar, Scalar]:
        """Return the scores of both classes, and the score that decides the label. A score without weights is 0."""
        one, two = first, s.where(has_second, second, zero)
        if len(bases) == 2:
            joined = bases[1] + first
            one, two = s.where(has_second, -joined, first + bases[0]), s.where(has_second, joined, zero)
        elif bases:
            one = first + bases[0]
        one = s.where(has_first, one, zero)
        return one, two, s.where(has_second, two, one)

    is_single = len(forest.used) == 1
    limit = ctx.constant(np.array(0.5 if is_single and forest.are_positive else 0.0, scores.dtype.numpy))
    answers = [ctx.constant(np.array(label, np.int64)) for label in (labels if is_single else (0, 1))]

    def label(limit: Scalar, no: Scalar, yes: Scalar, *given: Scalar) -> Scalar:
        return s.where(both(*given)[2] > limit, yes, no)

    def part(number: int) -> Tensor:
        return elementwise(ctx, lambda *given: both(*given)[number], *given)

    # Without weights for the second class, the first score determines both scores, unless there are two base values.
    spread = None
    if len(base) < 2 and 1 not in forest.always:
        spread = elementwise(ctx, lambda has: ~has, given[3])
    result = binary_scores(ctx, part(0), part(1), spread, transform, complement=is_single and forest.are_positive)
    return elementwise(ctx, label, limit, *answers, *given), cast(ctx, result, to=_FLOAT32)


# ---- attributes of version 5 ----


@op("TreeEnsemble", domain=DOMAIN, since=5, types={"T": frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16})})
def tree_ensemble(
    ctx: Lowering,
    x: T,
    *,
    aggregate_function: int = 1,
    leaf_targetids: tuple[int, ...],
    leaf_weights: Constant,
    membership_values: Constant | None = None,
    n_targets: int = 1,
    nodes_falseleafs: tuple[int, ...],
    nodes_falsenodeids: tuple[int, ...],
    nodes_featureids: tuple[int, ...],
    nodes_hitrates: Constant | None = None,
    nodes_missing_value_tracks_true: tuple[int, ...] = (),
    nodes_modes: Constant,
    nodes_splits: Constant,
    nodes_trueleafs: tuple[int, ...],
    nodes_truenodeids: tuple[int, ...],
    post_transform: int = 0,
    tree_roots: tuple[int, ...],
) -> Tensor:
    """Evaluate trees; nodes_trueleafs and nodes_falseleafs flag children that are indices of leaves."""
    require.within(0, len(_AGGREGATES) - 1, aggregate_function=aggregate_function)
    require.within(0, len(POST_TRANSFORMS) - 1, post_transform=post_transform)
    dtype = _compute_type(x)

    def numbers(name: str, tensor: Constant) -> Numbers:
        if tensor.dtype is not x.dtype:
            raise require.unsupported("dtype", f"the type of {name}", tensor.dtype.short, f"that of X, {x.dtype.short}")
        return tensor.array.reshape(-1).astype(dtype.numpy)

    def make() -> Forest:
        splits, weights = numbers("nodes_splits", nodes_splits), numbers("leaf_weights", leaf_weights)
        require.that(nodes_modes.dtype is DType.UINT8, "nodes_modes", "have the type u8", nodes_modes.dtype.short)
        modes = nodes_modes.array.reshape(-1).tolist()
        count = equal_lengths(
            nodes_featureids=nodes_featureids, nodes_modes=modes, nodes_splits=splits,
            nodes_truenodeids=nodes_truenodeids, nodes_falsenodeids=nodes_falsenodeids,
            nodes_trueleafs=nodes_trueleafs, nodes_falseleafs=nodes_falseleafs,
        )  # fmt: skip
        leaves = equal_lengths(leaf_targetids=leaf_targetids, leaf_weights=weights)
        require.that(count > 0 and len(tree_roots) > 0, "the ensemble", "have at least one tree", "none")
        for mode in modes:
            require.within(0, len(_MODES) - 1, nodes_modes=mode)
        children = np.array([nodes_truenodeids, nodes_falsenodeids], np.int64).T
        are_leaves = np.array([nodes_trueleafs, nodes_falseleafs], np.int64).T != 0
        limits = np.where(are_leaves, leaves, count)
        inside = (children >= 0) & (children < limits)
        expected = f"be the number of one of {count} nodes or {leaves} leaves"
        require.that(inside.all(), "each child", expected, children[~inside])
        names = [_MODES[mode] for mode in modes]
        comparisons = np.array([COMPARISONS.get(name, 1 << EQUAL) for name in names], np.int64)
        nodes = Nodes(
            np.array(nodes_featureids, np.int64),
            splits,
            with_missing(comparisons, nodes_missing_value_tracks_true),
            np.where(are_leaves, children + count, children),
            np.array(tree_roots, np.int64),
            leaves,
            _members(names, None if membership_values is None else numbers("membership_values", membership_values)),
        )
        return make_forest(nodes, np.arange(leaves), np.array(leaf_targetids, np.int64), weights, n_targets)

    forest = _forest(ctx, dtype, make)
    transform, aggregate = POST_TRANSFORMS[post_transform], _AGGREGATES[aggregate_function]
    return _regress(ctx, x, forest, aggregate, np.empty(0, dtype.numpy), transform, x.dtype)


def _members(names: Sequence[str], values: Numbers | None) -> tuple[Numbers | None, ...] | None:
    """Return the set of each BRANCH_MEMBER node, None for other nodes; None alone if no node has this mode.

    ``values`` holds the sets, each ended by a NaN; after the last set it may be missing.
    """
    wanted = names.count("BRANCH_MEMBER")
    if not wanted:
        return None
    values = require.given(values, "membership_values", "be given for nodes of the mode BRANCH_MEMBER")
    parts = [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)))]
    if len(values) and not np.isnan(values[-1]):
        parts.append(values[:0])
    require.count(wanted, membership_values=parts[:-1])
    remaining = iter(parts)
    return tuple(next(remaining) if name == "BRANCH_MEMBER" else None for name in names)
