"""Checks of inputs and attributes, with one form of error message.

Every message reads ``<input or attribute> must <what is expected>, got <what was found>``. The node's name and operator
stand before it, see `NodeError`. Sizes that only a Run knows are `Lowering.require`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized

import numpy as np

from ort_cuda_plugin.model.ir import DType, InvalidModel
from ort_cuda_plugin.program.lowering.context import Tensor


def violation(subject: str, expected: str, got: object) -> InvalidModel:
    """Return the error for an input or attribute that is not as expected ("have rank 2")."""
    return InvalidModel(f"{subject} must {expected}, got {got}")


def require(condition: bool | np.bool, subject: str, expected: str, got: object) -> None:
    """Raise InvalidModel unless the condition holds; the other arguments are those of `violation`."""
    if not condition:
        raise violation(subject, expected, got)


def require_rank(rank: int | Sequence[int], **inputs: Tensor | None) -> None:
    """Raise InvalidModel where an input has another rank than ``rank``, or than each of several that are allowed."""
    ranks = (rank,) if isinstance(rank, int) else rank
    for name, x in inputs.items():
        if x is not None and x.rank not in ranks:
            raise violation(name, f"have rank {' or '.join(map(str, ranks))}", f"rank {x.rank}")


def require_least_rank(rank: int, **inputs: Tensor | None) -> None:
    """Raise InvalidModel where an input has a lower rank."""
    for name, x in inputs.items():
        if x is not None and x.rank < rank:
            raise violation(name, f"have at least rank {rank}", f"rank {x.rank}")


def require_least(minimum: float, **attributes: float) -> None:
    """Raise InvalidModel where an attribute is below the minimum."""
    for name, value in attributes.items():
        if value < minimum:
            raise violation(name, f"be at least {minimum}", value)


def require_one_of(choices: Collection[object], **attributes: object) -> None:
    """Raise InvalidModel where an attribute is none of the choices; None is an attribute that is left out."""
    for name, value in attributes.items():
        if value is not None and value not in choices:
            raise violation(name, f"be one of {', '.join(map(repr, choices))}", repr(value))


def require_all_or_none(**inputs: object) -> None:
    """Raise InvalidModel where some of the inputs are given and others are left out."""
    given = [name for name, x in inputs.items() if x is not None]
    if len(given) not in (0, len(inputs)):
        raise violation(" and ".join(inputs), "be given together or left out together", f"{' and '.join(given)} alone")


def require_heads(num_heads: int, kv_num_heads: int) -> None:
    """Raise InvalidModel unless each head of keys and values serves the same positive number of query heads."""
    if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
        raise violation("num_heads", "be a positive multiple of kv_num_heads", f"{num_heads} and {kv_num_heads}")


def require_block(block_size: int) -> None:
    """Raise InvalidModel unless quantization blocks have a power of two of at least 16 elements."""
    if block_size < 16 or block_size & (block_size - 1):
        raise violation("block_size", "be a power of two of at least 16", block_size)


def require_type(types: Collection[DType], **inputs: Tensor) -> None:
    """Raise InvalidModel where an input has another element type."""
    for name, x in inputs.items():
        if x.dtype not in types:
            raise violation(name, f"have the type {' or '.join(sorted(t.short for t in types))}", x.dtype.short)


def require_count(count: int | Collection[int], **attributes: Sized) -> None:
    """Raise InvalidModel where an attribute has another number of entries, or none of several that are allowed."""
    counts = (count,) if isinstance(count, int) else count
    for name, values in attributes.items():
        if len(values) not in counts:
            raise violation(name, f"have {' or '.join(map(str, counts))} entries", len(values))


def require_multiple(divisor: int, **attributes: Sized) -> None:
    """Raise InvalidModel unless the number of entries is a positive multiple of the divisor."""
    for name, values in attributes.items():
        if not values or len(values) % divisor:
            raise violation(name, f"have a positive multiple of {divisor} entries", len(values))


def require_range(least: float, most: float, **attributes: float) -> None:
    """Raise InvalidModel where an attribute is below ``least`` or above ``most``."""
    for name, value in attributes.items():
        if not least <= value <= most:
            raise violation(name, f"be in [{least}, {most}]", value)
