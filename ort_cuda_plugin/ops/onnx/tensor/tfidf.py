"""TfIdfVectorizer of integers: occurrence counts of the n-grams of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, Source, scatter_map
from ....model.ir import Array, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import reshape
from ... import requirements as require
from ...folds import lower_bound
from ...registry import INDICES, op
from .scatter import REDUCTIONS

MAX_GRAM_LENGTH = 16
"""Maximum length of an n-gram, elements, since kernels compare the elements in unrolled code."""


def _pool(pool: Sequence[int], starts: Sequence[int], columns: Sequence[int]) -> dict[int, dict[tuple[int, ...], int]]:
    """Return the n-grams and their result columns, by length; ``starts`` are the offsets of each length in ``pool``.

    Raises InvalidModel for inconsistent attributes.
    """
    ends = [*starts[1:], len(pool)]
    fits = starts and all(0 <= start <= end <= len(pool) for start, end in zip(starts, ends, strict=True))
    expected = f"be ascending offsets into the pool of {len(pool)} elements"
    require.that(bool(fits), "ngram_counts", expected, list(starts))
    remaining = iter(columns)
    result: dict[int, dict[tuple[int, ...], int]] = {}
    for length, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        grams = [tuple(pool[at : at + length]) for at in range(start, end - length + 1, length)]
        expected, found = f"hold whole n-grams of length {length}", f"{end - start} elements"
        require.that(len(grams) * length == end - start, "pool_int64s", expected, found)
        taken = [next(remaining, None) for _ in grams]
        require.that(None not in taken, "ngram_indexes", "have an entry for each n-gram of the pool", len(columns))
        # The last of equal n-grams wins.
        result[length] = {gram: column for gram, column in zip(grams, taken, strict=True) if column is not None}
    return result


def _before(table: Source, row: Scalar, gram: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
    """Return whether a row of ``table`` precedes ``gram`` lexicographically, and whether they are equal."""
    less, equal = s.constant(False, DType.BOOL), s.constant(True, DType.BOOL)
    for j, value in enumerate(gram):
        element = table.at([row, s.constant(j, DType.INT64)])
        less = less | (equal & (element < value))
        equal = equal & s.equal(element, value)
    return less, equal


def _count(ctx: Lowering, counts: Tensor, x: Tensor, grams: dict[tuple[int, ...], int], skips: int) -> None:
    """Add to int32 ``counts`` [rows, columns] the occurrences in x [rows, n] with up to ``skips`` elements skipped.

    A thread per start looks its n-gram up in the sorted pool.
    """
    ordered = sorted(grams)
    length = len(ordered[0])
    pool = ctx.constant(np.array(ordered, np.int64))
    columns = ctx.constant(np.array([grams[gram] for gram in ordered], np.int64))

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        row, skip, start = c
        source, table = maps.source(x), maps.source(pool)
        step = skip + 1
        fits = start + step * (length - 1) < source.dim(1)
        gram = [s.cast(source.at([row, start + step * j], fits), DType.INT64) for j in range(length)]
        found = lower_bound(maps, len(ordered), lambda at: _before(table, at, gram)[0])
        _, equal = _before(table, found, gram)
        inside = fits & equal
        return [row, maps.source(columns).at([found], inside)], s.constant(1, DType.INT32), inside

    scatter_map(ctx, [x.shape[0], skips + 1, x.shape[1]], counts, move, REDUCTIONS["add"])


@op("TfIdfVectorizer", since=9, types={"T": INDICES})
def tf_idf_vectorizer(
    ctx: Lowering,
    x: Tensor,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: tuple[int, ...],
    ngram_indexes: tuple[int, ...],
    pool_int64s: tuple[int, ...] | None = None,
    pool_strings: tuple[str, ...] | None = None,
    weights: tuple[float, ...] | None = None,
) -> Tensor:
    if pool_strings is not None or pool_int64s is None:
        found = "a list of strings" if pool_strings is not None else "omitted"
        raise require.unsupported("dtype", "the pool of n-grams", found, "integers, in pool_int64s")
    require.rank((0, 1, 2), X=x)
    require.one_of(("TF", "IDF", "TFIDF"), mode=mode)
    require.within(1, max_gram_length, min_gram_length=min_gram_length)
    require.least(0, max_skip_count=max_skip_count)
    least, expected = min(ngram_indexes, default=-1), "be one or more non-negative indices"
    require.that(least >= 0, "ngram_indexes", expected, list(ngram_indexes))
    columns = max(ngram_indexes) + 1
    enough = not weights or len(weights) >= columns
    require.that(enough, "weights", f"have at least {columns} entries", weights and len(weights))
    rows = x if x.rank == 2 else reshape(ctx, x, [1, x.size])
    counts = ctx.empty([rows.shape[0], columns], DType.INT32)
    ctx.memset(counts, 0)
    for length, grams in _pool(pool_int64s, ngram_counts, ngram_indexes).items():
        if grams and min_gram_length <= length <= max_gram_length:
            if length > MAX_GRAM_LENGTH:
                raise require.unsupported("attribute", "the length of an n-gram", length, f"up to {MAX_GRAM_LENGTH}")
            _count(ctx, counts, rows, grams, max_skip_count if length > 1 else 0)
    result = _weighted(ctx, counts, mode, None if not weights else np.array(weights[:columns], np.float32))
    return result if x.rank == 2 else ctx.view(result, (columns,))


def _weighted(ctx: Lowering, counts: Tensor, mode: str, weights: Array | None) -> Tensor:
    def weigh(count: Scalar, weight: Scalar) -> Scalar:
        if mode == "IDF":
            return s.where(count > 0, weight, s.constant(0, DType.FLOAT32))
        return s.cast(count, DType.FLOAT32) * weight

    if weights is None or mode == "TF":
        return elementwise(ctx, lambda count: weigh(count, s.constant(1, DType.FLOAT32)), counts)
    return elementwise(ctx, weigh, counts, ctx.constant(weights))
