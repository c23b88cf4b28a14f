"""Decision trees as arrays: validation and memory layout, on the host.

An inner node compares a feature of a row with its threshold and names two children. Leaves have the highest indices and
are their own children, so that any number of steps ends in a leaf. A comparison is a mask of five bits, the results for
a feature that is smaller, equal or larger than the threshold, for a NaN feature, and for a NaN threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...model.ir import Constant
from .. import requirements as require

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.floating]

LESS, EQUAL, GREATER, NAN, UNORDERED = range(5)
"""Bit numbers of a comparison mask."""
COMPARISONS: Final[Mapping[str, int]] = {
    "BRANCH_LEQ": 1 << LESS | 1 << EQUAL,
    "BRANCH_LT": 1 << LESS,
    "BRANCH_GTE": 1 << GREATER | 1 << EQUAL,
    "BRANCH_GT": 1 << GREATER,
    "BRANCH_EQ": 1 << EQUAL,
    "BRANCH_NEQ": 1 << LESS | 1 << GREATER | 1 << NAN | 1 << UNORDERED,
}
MAX_DEPTH = 4096
"""Maximum comparisons from root to leaf. A thread makes as many as the tree's depth, some dozens in trained trees."""
_MAX_NODES = 2**31 - 1


@dataclass(frozen=True)
class Nodes:
    """Inner nodes of trees.

    ``children`` [nodes, 2] holds the child for true and for false; indices from ``count`` on are leaves. ``members``
    holds the set of each BRANCH_MEMBER node, None for other nodes.
    """

    features: Ints
    thresholds: Numbers
    comparisons: Ints
    children: Ints
    roots: Ints
    leaves: int
    members: tuple[Numbers | None, ...] | None = None

    @property
    def count(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class Forest:
    """A tree ensemble as flat arrays for kernels.

    ``features``, ``thresholds``, ``comparisons`` and ``children`` [nodes, 2] have a row for each node, ``roots`` and
    ``depths`` an entry for each tree. Leaf l adds ``weights[i]`` to ``targets[i]`` for i in [starts[l], starts[l + 1]);
    if ``starts`` is None, each leaf has one weight for each target. ``used`` are the targets with weights, ``always``
    the targets with a weight in each leaf.
    """

    features: Constant
    thresholds: Constant
    comparisons: Constant
    children: Constant
    roots: Constant
    depths: Constant
    starts: Constant | None
    targets: Constant
    weights: Constant
    trees: int
    inner: int
    num_targets: int
    max_feature: int
    used: frozenset[int]
    always: frozenset[int]
    are_positive: bool


def make_forest(nodes: Nodes, leaves: Ints, targets: Ints, weights: Numbers, num_targets: int) -> Forest:
    """Build the forest; ``leaves``, ``targets`` and ``weights`` are parallel lists, in any order.

    Raises InvalidModel for inconsistent trees, Unsupported for trees that are too deep or have too many
    nodes.
    """
    require.that(0 < num_targets <= _MAX_NODES, "n_targets", f"be in [1, {_MAX_NODES}]", num_targets)
    _check_range("a feature", nodes.features, _MAX_NODES)
    _check_range("a target", targets, num_targets)
    _check_range("a leaf", leaves, nodes.leaves)
    _check_range("a child", nodes.children, nodes.count + nodes.leaves)
    _check_range("a root", nodes.roots, nodes.count + nodes.leaves)
    depths = _depths(nodes)
    nodes = _without_members(nodes)
    if nodes.count + nodes.leaves > _MAX_NODES:
        what = "the number of comparisons and leaves of all trees"
        raise require.unsupported("shape", what, nodes.count + nodes.leaves, f"up to {_MAX_NODES}")
    own = np.arange(nodes.count, nodes.count + nodes.leaves)
    no = np.zeros(nodes.leaves, np.int64)
    order = np.argsort(leaves, kind="stable")
    leaves, targets, weights = leaves[order], targets[order], weights[order]
    starts = np.searchsorted(leaves, np.arange(nodes.leaves + 1))
    pairs = np.sort(leaves * num_targets + targets)
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    by_target = np.bincount(pairs % num_targets)
    used = np.flatnonzero(by_target)
    are_complete = len(pairs) == len(leaves) == nodes.leaves * num_targets
    if are_complete:
        order = np.argsort(leaves * num_targets + targets)
        targets, weights = targets[order], weights[order]

    def constant(array: npt.NDArray[np.generic]) -> Constant:
        return Constant.of(np.ascontiguousarray(array))

    return Forest(
        constant(np.concatenate([nodes.features, no]).astype(np.int32)),
        constant(np.concatenate([nodes.thresholds, no]).astype(nodes.thresholds.dtype)),
        constant(np.concatenate([nodes.comparisons, no]).astype(np.uint8)),
        constant(np.concatenate([nodes.children, np.stack([own, own], 1)]).astype(np.int32)),
        constant(nodes.roots.astype(np.int32)),
        constant(depths.astype(np.int32)),
        None if are_complete else constant(starts.astype(np.int32)),
        constant(targets.astype(np.int32)),
        constant(weights),
        len(nodes.roots),
        nodes.count,
        num_targets,
        int(nodes.features.max(initial=0)),
        frozenset(used.tolist()),
        frozenset(used[by_target[used] == nodes.leaves].tolist()),
        bool((weights >= 0).all()),
    )


def _check_range(what: str, values: Ints, limit: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < limit:
        wrong = values[(values < 0) | (values >= limit)].reshape(-1)[0]
        raise require.violation(f"the index of {what} in a tree", f"be in [0, {limit})", wrong)


def _steps(nodes: Nodes) -> Ints:
    """Return, for each node, the number of one-threshold comparisons into which `_without_members` splits it."""
    if nodes.members is None:
        return np.ones(nodes.count, np.int64)
    return np.array([1 if found is None else max(len(found), 1) for found in nodes.members], np.int64)


def _depths(nodes: Nodes) -> Ints:
    """Return the maximum steps from each root to a leaf.

    Raises InvalidModel for a node with several parents, Unsupported for a tree deeper than `MAX_DEPTH`.
    """
    inner = nodes.children[nodes.children < nodes.count]
    ways = np.bincount(np.concatenate([inner, nodes.roots[nodes.roots < nodes.count]]), minlength=nodes.count)
    if (ways > 1).any():
        found = f"{ways.max()} references to the node at index {ways.argmax()}"
        raise require.violation("each node of a tree", "be a root or the child of one other node", found)
    steps = _steps(nodes)
    depths = np.zeros(len(nodes.roots), np.int64)
    trees, reached, so_far = np.arange(len(nodes.roots)), nodes.roots, depths.copy()
    while reached.size:
        np.maximum.at(depths, trees, so_far)
        deepest = int(depths.max())
        if deepest > MAX_DEPTH:
            raise require.unsupported(
                "shape", "the depth of a tree", f"at least {deepest}", f"up to {MAX_DEPTH} comparisons"
            )
        is_inner = reached < nodes.count
        trees, reached, so_far = trees[is_inner], reached[is_inner], so_far[is_inner]
        trees, so_far = np.repeat(trees, 2), np.repeat(so_far + steps[reached], 2)
        reached = nodes.children[reached].reshape(-1)
    return depths


def _without_members(nodes: Nodes) -> Nodes:
    """Split each BRANCH_MEMBER node into a chain of comparisons with one element each."""
    if nodes.members is None:
        return nodes
    steps = _steps(nodes)
    first = np.concatenate([[0], np.cumsum(steps)])
    total = int(first[-1])
    old = np.repeat(np.arange(nodes.count), steps)
    new_number = np.concatenate([first[:-1], np.arange(total, total + nodes.leaves)])
    children = new_number[nodes.children[old]]
    is_last = np.arange(total) == first[old + 1] - 1
    children[:, 1] = np.where(is_last, children[:, 1], np.arange(total) + 1)
    thresholds = nodes.thresholds[old].copy()
    for number, found in enumerate(nodes.members):
        if found is not None:
            at = int(first[number])
            thresholds[at : at + int(steps[number])] = found if len(found) else np.nan
    return Nodes(
        nodes.features[old], thresholds, nodes.comparisons[old], children, new_number[nodes.roots], nodes.leaves
    )


def with_missing(comparisons: Ints, tracks: Sequence[int] | None) -> Ints:
    """Return the comparisons, true for NaN where ``tracks`` is 1.

    Raises InvalidModel if ``tracks`` is given without an entry for each node.
    """
    if not tracks:
        return comparisons
    require.count(len(comparisons), nodes_missing_value_tracks_true=tracks)
    return np.where(np.array(tracks, np.int64) == 1, comparisons | 1 << NAN, comparisons)


def equal_lengths(**lists: Sized) -> int:
    """Return the length that all lists have. Raises InvalidModel if lengths differ."""
    lengths = {name: len(values) for name, values in lists.items()}
    require.that(len(set(lengths.values())) <= 1, " and ".join(lengths), "have the same length", [*lengths.values()])
    return next(iter(lengths.values()))
