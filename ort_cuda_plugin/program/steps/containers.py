"""Sequences and optional values of tensors: lists that exist only while a plan is made.

A plan contains their tensors only, so a sequence costs nothing, and it cannot cross the border of a cluster.
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
    """``content`` is None for an empty value; ``dtype`` is undefined then."""

    dtype: DType
    content: Tensor | TensorSequence | None


Operand: TypeAlias = Tensor | TensorSequence | TensorOptional
