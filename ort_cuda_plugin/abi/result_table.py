"""Result tables: lists of records that functions return, with columns for pandas and HTML for Jupyter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from html import escape
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")

_MOST_SHOWN = 500
"""Maximum number of rows of the HTML table."""


class Table(list[Row], Generic[Row]):
    """A list of dataclass instances, one for each row.

    A notebook shows it as a table, and ``pandas.DataFrame(table.to_dict())`` makes a data frame.

    Examples:
        >>> table = ort_cuda_plugin.explain("model.onnx")
        >>> table[0].op_type
        'MatMul'
        >>> table.to_dict()["supported"]
        [True, True]
    """

    def __init__(self, row_type: type[Row], rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self.row_type = row_type

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns: the fields of a row."""
        return tuple(each.name for each in fields(self.row_type))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the values of each column, by its name. A table without rows has the same columns."""
        return {name: [getattr(row, name) for row in self] for name in self.columns}

    def _repr_html_(self) -> str:
        return html_table(self.to_dict())


def html_table(columns: Mapping[str, list[Any]]) -> str:
    """Return an HTML table of at most 500 rows. All texts are escaped: names come from models."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = list(zip(*columns.values(), strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows[:_MOST_SHOWN]
    )
    rest = len(rows) - _MOST_SHOWN
    note = f"<p>and {rest} more rows</p>" if rest > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return str(value)
