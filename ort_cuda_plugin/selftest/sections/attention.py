"""Checks of attention: each engine and tile, element types, numbers of queries and keys, masks, shared heads."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

SIZES = {
    "1 query": (2, 1, 300, 64),
    "odd": (3, 7, 13, 24),
    "below a tile": (2, 63, 65, 32),
    "above a tile": (1, 66, 130, 64),
    "wide heads": (1, 33, 40, 160),
}
"""Heads, queries, keys and size of a head."""

WITH_BIAS = """({T}[2, 63, 32] q, {T}[2, 65, 32] k, {T}[2, 65, 32] v, {T}[2, 1, 65] b) => ({T}[2, 63, 32] y) {
    scale = Constant<value_float = 0.125>() factor = CastLike(scale, q) scaled = Mul(q, factor)
    t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(scaled, t) m = Add(s, b) p = Softmax<axis = -1>(m)
    y = MatMul(p, v) }"""
"""An additive bias for each key, as in a padding mask."""

SHARED_KEYS = """({T}[1, 8, 5, 64] q, {T}[1, 2, 36, 64] k, {T}[1, 2, 36, 64] v, {T}[1, 2, 4, 64] past_k,
    {T}[1, 2, 4, 64] past_v) => ({T}[1, 8, 5, 64] y, {T}[1, 2, 40, 64] all_k, {T}[1, 2, 40, 64] all_v) {
    y, all_k, all_v = Attention<is_causal = 1>(q, k, v, , past_k, past_v) }"""
"""Four query heads share each head of keys. The first query sees the cached keys too, so that its result depends on the
scores: with one visible key, softmax gives 1 for any score."""


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of attention."""
    for type_name in ("float", "float16") if is_quick else ("float", "float16", "bfloat16", "double"):
        for name in ("1 query", "below a tile") if is_quick else SIZES:
            heads, rows, keys, size = SIZES[name]
            text = f"""({{T}}[{heads}, {rows}, {size}] q, {{T}}[{heads}, {keys}, {size}] k,
                {{T}}[{heads}, {keys}, {size}] v) => ({{T}}[{heads}, {rows}, {size}] y) {{
                scale = Constant<value_float = 0.125>() factor = CastLike(scale, q) scaled = Mul(q, factor)
                t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(scaled, t) p = Softmax<axis = -1>(s)
                y = MatMul(p, v) }}"""
            yield _case(f"attention, {name}, {type_name}", text, type_name, ("MatMul", "Softmax"))
        if type_name == "double":
            continue
        yield _case(f"causal attention with shared keys, {type_name}", SHARED_KEYS, type_name, ("Attention",))
        yield _case(f"attention with a bias, {type_name}", WITH_BIAS, type_name, ("MatMul", "Add", "Softmax"))
    text = """({T}[2, 6, 64] q, {T}[2, 6, 64] k, {T}[2, 6, 64] v) => ({T}[2, 6, 64] y)
        { y = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v) }"""
    yield _case("attention of packed heads", text, "float", ("com.microsoft::MultiHeadAttention",))


def _case(name: str, text: str, type_name: str, operators: tuple[str, ...]) -> Case:
    return Case(name, text, type_name, operators=operators, is_exact=False, each_schedule=True)
