"""Booleans of options and environment variables: the C library's parser (``csrc_shim/base/number.h``)."""

from __future__ import annotations

import os

from .core import core


def parse_flag(text: str) -> bool:
    """Return the value of a boolean: 1, true, yes, on, or 0, false, no, off, in upper or lower case.

    Raises: ValueError: the text is not one of these; the message says what to use.
    """
    value = core().parse_flag(text.encode(errors="replace")) if "\0" not in text else -1
    if value < 0:
        raise ValueError("use 1 or 0")
    return bool(value)


def flag_variable(name: str) -> bool | None:
    """Return the value of an environment variable that is a boolean; None if it is empty or not set.

    Raises: ValueError: the variable has another value.
    """
    text = os.environ.get(name, "").strip()
    try:
        return parse_flag(text) if text else None
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None
