"""Markdown tables of the options, for docs/options.md and the command ``options``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import arena
from .option_table import DEFAULTS, ROWS, WITHOUT_EFFECT


def option_tables() -> dict[str, str]:
    """Return the tables of options by their names in documents."""
    return {
        "options": markdown_table(("key", "takes", "default", "decides", "meaning"), _options()),
        "arena options": markdown_table(
            ("key", "takes", "default", "meaning"),
            ((_code(row.key), arena.takes(row.key), row.default, row.text) for row in arena.ROWS),
        ),
        "keys without effect": markdown_table(
            ("key", "takes", "why"),
            ((_code(key), entry.reader.takes, entry.why) for key, entry in WITHOUT_EFFECT.items()),
        ),
    }


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, which ends with a line break."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def _options() -> Iterable[tuple[str, str, str, str, str]]:
    for key, row in ROWS.items():
        more = f". Needs {row.needs}" if row.needs else ""
        more += "".join(f". Former key: {_code(former)}" for former in row.former_keys)
        decides = f"{row.decides.value}; can change" if row.changes else row.decides.value
        yield _code(key), row.reader.takes, _as_text(DEFAULTS[key]), decides, row.text + more
        for alias in row.aliases:
            yield (
                _code(alias),
                row.reader.takes,
                "",
                decides,
                f"ONNX Runtime's other name of {_code(key)}. If a session sets both, {_code(key)} decides",
            )


def _code(text: str) -> str:
    return f"`{text}`"


def _as_text(value: Any) -> str:
    """Return a default as an application would write it."""
    if value is None or value == ():
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
