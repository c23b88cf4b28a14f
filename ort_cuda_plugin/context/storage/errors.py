"""Errors of contexts."""

from __future__ import annotations

from ...abi.errors import Error

MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that code may raise if it reads malformed data or a contradictory graph."""


class ContextError(Error):
    """A context, or the node that names it, cannot be used. The message says what to do."""

    ort_code = 10  # ORT_INVALID_GRAPH


class MissingCompiler(ContextError):
    """A context must be compiled again, but the compiler is not installed."""


class UnforeseenShapes(Exception):
    """No stored plan accepts the inputs, and the compiler is not installed."""

    ort_code = 1  # ORT_FAIL
