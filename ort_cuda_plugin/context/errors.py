"""What can be wrong with a context."""

from __future__ import annotations

MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a value of another form raises, or work with a graph that contradicts itself."""


class ContextError(Exception):
    """A context, or the node that names it, cannot be used. The message says what to do."""

    ort_code = 10  # ORT_INVALID_GRAPH


class UnforeseenShapes(Exception):
    """What is stored cannot be used as it is, and nothing can be compiled here."""

    ort_code = 1  # ORT_FAIL
