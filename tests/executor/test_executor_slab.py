"""Packing of buffers by lifetime."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_cuda_plugin.abi.core import core, ffi

ALIGNMENT = 256
Item = tuple[int, int, int]
"""Size of a buffer in bytes, and the first and the last step that use it."""


def pack(items: list[Item]) -> tuple[int, list[int]]:
    """Return the size of the slab in bytes and the offset of each item."""
    rows = ffi.new("ocp_slab_item[]", len(items))
    for row, (nbytes, first, last) in zip(rows, items, strict=True):
        row.bytes, row.first, row.last = nbytes, first, last
    total = core().slab_pack(rows, len(items))
    return total, [row.offset for row in rows]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lower_bound(items: list[Item]) -> int:
    """Return the largest number of bytes that are alive at the same step."""
    return max((sum(aligned(n) for n, a, b in items if a <= step <= b) for _, step, _ in items), default=0)


lifetimes = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)
sizes = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 40))
item_lists = st.lists(st.tuples(sizes, lifetimes).map(lambda pair: (pair[0], *pair[1])), max_size=40)


def check_packing(items: list[Item]) -> int:
    total, offsets = pack(items)
    placed = [(o, o + n, a, b) for o, (n, a, b) in zip(offsets, items, strict=True) if n]
    for i, (start, end, first, last) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert end <= total
        for other_start, other_end, other_first, other_last in placed[:i]:
            together = first <= other_last and other_first <= last
            assert not together or end <= other_start or other_end <= start
    return total


@given(item_lists)
def test_buffers_alive_together_never_overlap_and_the_block_is_near_the_lower_bound(items: list[Item]) -> None:
    total = check_packing(items)
    bound = lower_bound(items)
    assert bound <= total <= 2 * bound


@given(st.lists(st.integers(1, 1 << 20), min_size=2, max_size=60))
def test_a_chain_needs_no_more_than_its_largest_neighbors(chain: list[int]) -> None:
    items = [(nbytes, i, i + 1) for i, nbytes in enumerate(chain)]
    assert check_packing(items) == lower_bound(items)


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_networks_with_residual_connections_pack_within_a_few_percent(random: object) -> None:
    items: list[Item] = []
    step = 0
    for _ in range(30):
        width = 1 << random.randrange(10, 20)  # type: ignore[attr-defined]
        items += [(width, step, step + 4), (2 * width, step + 1, step + 2), (width, step + 2, step + 3)]
        step += 4
    assert check_packing(items) <= 1.06 * lower_bound(items)


def test_what_lives_forever_is_never_overwritten() -> None:
    forever = (1 << 32) - 1
    assert check_packing([(100, 0, forever), (300, 0, 1), (300, 2, 3)]) == 256 + 512


def test_empty_buffers_take_no_room() -> None:
    assert pack([(0, 0, 9), (0, 0, 9)]) == (0, [0, 0])
    assert pack([]) == (0, [])


@pytest.mark.parametrize("items", [[((1 << 64) - 1, 0, 0)], [(1 << 61, 0, 0), (1 << 61, 1, 1), (1 << 61, 2, 2)]])
def test_sizes_that_overflow_are_refused(items: list[Item]) -> None:
    assert pack(items)[0] == (1 << 64) - 1
