"""What operators say where a model contradicts them: the input or attribute, what is expected, and what was found."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import DType, InvalidModel
from ort_cuda_plugin.ops import requirements as r

OPERATORS = Path(ort_cuda_plugin.__file__).parent / "ops"

#: Messages that no helper writes, by file: those of the table, whose subject is a missing input, and one that a Run
#: gives as well. May only shrink.
OTHERS = {"onnx/tensor/shape.py": 2, "registry.py": 4, "requirements.py": 1}


def test_messages_of_operators_are_written_by_the_helpers() -> None:
    others = {}
    for path in sorted(OPERATORS.rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        count = sum(isinstance(call.func, ast.Name) and call.func.id == "InvalidModel" for call in calls)
        if count:
            others[str(path.relative_to(OPERATORS))] = count
    assert others == OTHERS


def tensor(rank: int, dtype: DType = DType.FLOAT32) -> Any:
    return SimpleNamespace(rank=rank, dtype=dtype)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda: r.require(False, "pads", "have 4 entries", 3), "pads must have 4 entries, got 3"),
        (lambda: r.require_rank(2, router_probs=tensor(3)), "router_probs must have rank 2, got rank 3"),
        (lambda: r.require_rank((2, 3), x=tensor(2), y=tensor(4)), "y must have rank 2 or 3, got rank 4"),
        (lambda: r.require_least_rank(1, gate=tensor(0)), "gate must have at least rank 1, got rank 0"),
        (lambda: r.require_least(1, max_distance=0), "max_distance must be at least 1, got 0"),
        (lambda: r.require_range(0, 1, ratio=1.5), r"ratio must be in \[0, 1\], got 1.5"),
        (lambda: r.require_one_of(("a", "b"), mode="c"), "mode must be one of 'a', 'b', got 'c'"),
        (lambda: r.require_all_or_none(key=1, value=None), "key and value must be given together .*, got key alone"),
        (lambda: r.require_heads(6, 4), "num_heads must be a positive multiple of kv_num_heads, got 6 and 4"),
        (lambda: r.require_block(24), "block_size must be a power of two of at least 16, got 24"),
        (lambda: r.require_type({DType.UINT8}, zeros=tensor(1)), "zeros must have the type u8, got f32"),
        (lambda: r.require_count((0, 2), base_values=[1]), "base_values must have 0 or 2 entries, got 1"),
        (lambda: r.require_multiple(3, inputs=[1]), "inputs must have a positive multiple of 3 entries, got 1"),
    ],
)
def test_a_message_names_what_is_expected_and_what_was_found(broken: Callable[[], None], text: str) -> None:
    with pytest.raises(InvalidModel, match=f"^{text}$"):
        broken()


def test_what_fits_passes() -> None:
    r.require_rank(2, given=tensor(2), left_out=None)
    r.require_all_or_none(key=None, value=None)
    r.require_all_or_none(key=1, value=2)
    r.require_heads(6, 3)
    r.require_count(range(3), names=["a", "b"])
