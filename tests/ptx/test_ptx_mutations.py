"""Mutation tests: the checking mode reports faults that are put into PTX kernels, or their results are wrong."""

from __future__ import annotations

import pytest

from ptx_mutations import MUTATIONS, kernels, mutations, outcome

TEXTS = dict(kernels())
KERNELS = ("reverse_in_shared", "histogram", "sum_rows", "matmul_fp16")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_removed_barrier_is_noticed(kernel: str) -> None:
    found = [outcome(kernel, text) for kind, _, text in mutations(kernel, TEXTS[kernel]) if kind == "barrier removed"]
    assert found
    assert all(found)
    assert outcome(kernel, TEXTS[kernel]) == ""


def test_each_kind_of_mutation_has_examples() -> None:
    assert {kind for name, text in TEXTS.items() for kind, _, _ in mutations(name, text)} == MUTATIONS.keys()
