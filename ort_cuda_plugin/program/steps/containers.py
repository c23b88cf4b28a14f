"""Sequences and optional values of tensors as operators see them: lists that exist while a plan is made, and no longer.

A plan knows their tensors only. So a sequence costs nothing, and it cannot cross the border of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...model.ir import DType
from .tensor import Tensor


@dataclass(frozen=True)
class TensorSequence:
    """Tensors of one element type, of any shapes and ranks."""

    dtype: DType
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorOptional:
    """``content`` is None where there is none; ``dtype`` then means nothing."""

    dtype: DType
    content: Tensor | TensorSequence | None


Operand: TypeAlias = Tensor | TensorSequence | TensorOptional
