"""Checks of recurrences: RNN, GRU and LSTM in both directions."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of recurrences."""
    for type_name in ("float",) if is_quick else ("float", "float16", "double"):
        for operator, gates in GATES.items():
            for hidden, steps, batch in ((16, 5, 3),) if is_quick else ((1, 1, 1), (16, 5, 3), (65, 9, 2)):
                rows = gates * hidden
                scaled = " ".join(f"{name} = Mul({name}0, factor)" for name in "wr")
                text = f"""({{T}}[{steps}, {batch}, 12] x) => ({{T}}[{steps}, 2, {batch}, {hidden}] y) {{
                    small = Constant<value_float = 0.125>() factor = CastLike(small, x) {scaled}
                    y = {operator}<direction = "bidirectional", hidden_size = {hidden}>(x, w, r) }}"""
                yield Case(
                    f"{operator} of {hidden}, {type_name}",
                    text,
                    type_name,
                    {"w0": (2, rows, 12), "r0": (2, rows, hidden)},
                    operators=(operator,),
                    is_exact=False,
                )
