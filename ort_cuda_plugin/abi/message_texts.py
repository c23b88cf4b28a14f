"""Message texts: suggestions for misspelled names, and text without control characters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
"""Least similarity of a suggested name, from 0 (nothing in common) to 1 (equal)."""


def similar(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = _CUTOFF) -> list[str]:
    """Return the names in ``known`` that ``name`` was probably meant to be, the most similar first.

    They are at most ``most`` names, whose similarity is at least ``cutoff``.
    """
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = _CUTOFF) -> str:
    """Return the question ``did you mean 'run'?``, "" if no known name is similar."""
    found = similar(name, known, cutoff=cutoff)
    return f"did you mean {found[0]!r}?" if found else ""


def printable(text: str) -> str:
    """Return the text without control characters; line breaks and tabs stay."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text)


def one_line(text: str) -> str:
    """Return the text without control characters and line breaks, which could forge a line of a log."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
