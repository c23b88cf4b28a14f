"""Common parts of all pages: the document, its style, sortable tables, bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; width: 100% }
td, th { padding: 1px 8px; text-align: right; white-space: nowrap }
th.sorted { text-decoration: underline }
td.name, th.name { text-align: left; max-width: 26em; overflow: hidden; text-overflow: ellipsis }
td.bar { width: 40%; text-align: left } td.bar div { height: 14px; min-width: 1px }
tr:hover { background: #f2f2f2 }
summary { cursor: pointer; list-style: none } details[open] { white-space: normal }
pre { margin: 2px 0; white-space: pre-wrap; text-align: left }
pre.diff { overflow-x: auto; white-space: pre; background: #fafafa; border: 1px solid #ddd; padding: 4px }
.diff .gone { background: #fbe0dd } .diff .new { background: #ddf3d9 } .diff .place { color: #777 }
details:target > summary { background: #fff3b0 }
.key span { display: inline-block; padding: 0 6px; margin: 2px; color: #fff }
"""
_SORT = """
for (const head of document.querySelectorAll("table.sortable th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex, up = head.classList.toggle("sorted");
  const key = row => { const text = row.cells[column].textContent, n = parseFloat(text);
                       return isNaN(n) ? text : n; };
  const rows = Array.from(body.rows).slice(1);
  rows.sort((a, b) => { const x = key(a), y = key(b); return (x > y) - (x < y); });
  if (up) rows.reverse();
  body.append(...rows);
});
"""


def document(title: str, body: str, style: str = "", script: str = "") -> str:
    """Return a page. ``title`` is text, ``body`` HTML; ``style`` and ``script`` are added to those of all pages."""
    code = f"<script>{_SORT}{script}</script>" if script or "sortable" in body else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>
<h1>{escape(title)}</h1>{body}{code}</body></html>
"""


def paragraphs(lines: Iterable[str]) -> str:
    """Return a paragraph for each line of text."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


@dataclass(frozen=True)
class Name:
    """A cell with truncated text; it opens to show ``inside`` unless that is empty. ``identity`` is an anchor."""

    text: str
    inside: str = ""
    identity: str = ""


@dataclass(frozen=True)
class Link:
    """A cell that leads to an anchor of the page."""

    text: str
    target: str


@dataclass(frozen=True)
class Bar:
    """A cell with a bar over ``fraction`` of the cell's width, and the tooltip ``hint``."""

    fraction: float
    colour: str
    hint: str = ""


Cell = str | Name | Bar | Link


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, identity: str = "", sortable: bool = True) -> str:
    """Return a table. Each column has one type of cell, which the first row determines."""
    lines = [list(row) for row in rows]
    names = [bool(lines) and isinstance(lines[0][i], Name) for i in range(len(heads))]
    starts = ['<th class="name">' if is_name else "<th>" for is_name in names]
    head = "".join(f"{start}{escape(text)}</th>" for start, text in zip(starts, heads, strict=True))
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in lines)
    attributes = (f' id="{identity}"' if identity else "") + (' class="sortable"' if sortable else "")
    return f"<table{attributes}><tr>{head}</tr>\n{body}\n</table>"


def _cell(cell: Cell) -> str:
    match cell:
        case Bar(fraction, colour, hint):
            width = f"width:{100 * fraction:.2f}%;background:{colour}"
            return f'<td class="bar"><div style="{width}" title="{escape(hint)}"></div></td>'
        case Link(text, target):
            return f"<td>{link(text, target)}</td>"
        case Name(text, inside, identity):
            shown = escape(text)
            if inside:
                shown = f"<details><summary>{shown}</summary><pre>{escape(inside)}</pre></details>"
            anchor = f' id="{escape(identity)}"' if identity else ""
            return f'<td class="name"{anchor}>{shown}</td>'
        case str():
            return f"<td>{escape(cell)}</td>"


def link(text: str, target: str) -> str:
    """Return a link to an anchor of the page."""
    return f'<a href="#{escape(target)}">{escape(text)}</a>'


def opened(summary: str, inside: str, *, identity: str = "", is_open: bool = False) -> str:
    """Return HTML with the line ``summary``, under which ``inside`` opens."""
    attributes = (f' id="{escape(identity)}"' if identity else "") + (" open" if is_open else "")
    return f"<details{attributes}><summary>{escape(summary)}</summary>{inside}</details>"


def text_block(text: str) -> str:
    """Return preformatted text, which keeps its line breaks."""
    return f"<pre>{escape(text)}</pre>"


def difference(text: str) -> str:
    """Return a unified diff with removed and added lines in colours."""
    kinds = {"-": "gone", "+": "new", "@": "place"}
    lines = [f'<span class="{kinds.get(line[:1], "same")}">{escape(line)}</span>' for line in text.splitlines()]
    return '<pre class="diff">' + "\n".join(lines) + "</pre>"


def key(colours: Iterable[tuple[str, str]]) -> str:
    """Return a legend of the colours."""
    spans = "".join(f'<span style="background:{colour}">{escape(text)}</span>' for text, colour in colours)
    return f'<p class="key">{spans}</p>'
