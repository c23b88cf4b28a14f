"""Transpose cluster for a Scan along an axis other than the first."""

from __future__ import annotations

from ..model.ir import DType, Graph, Node, Value
from ..program.lowering.context import DeviceProperties, LoweringOptions
from .cluster import CompiledCluster


def transposition(
    permutation: tuple[int, ...], dtype: DType, device: DeviceProperties, options: LoweringOptions
) -> CompiledCluster:
    """Return a cluster with one Transpose, for all sizes."""
    any_shape = (None,) * len(permutation)
    source, result = Value("input", dtype, any_shape), Value("output", dtype, any_shape)
    node = Node("Transpose for Scan", "Transpose", "", 1, (source,), (result,), {"perm": permutation})
    return CompiledCluster(Graph("Scan", [node], [source], [result], {"": 1}), device, options)
