"""HTML of the plugin's web pages: the document with filter and links, tables, bars, sections that open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .kinds import KINDS
from .packed import packed

Block = tuple[float, str, str, str]
"""A block in the bar of a Run: amount, kind of kernel ("" for a gap), anchor, tooltip."""


@dataclass
class Page:
    """A page that is being composed. Long texts, bars and the graph are packed; the script unpacks and draws them."""

    title: str
    lines: Sequence[str] = ()
    graph: Mapping[str, Any] | None = None
    _parts: list[str] = field(default_factory=list)
    _sections: list[tuple[str, str]] = field(default_factory=list)
    _texts: dict[str, int] = field(default_factory=dict)
    _strips: list[list[Block]] = field(default_factory=list)

    def section(self, title: str, body: str, identity: str) -> None:
        """Append a section. The bar at the top of the page has a link to it."""
        self._sections.append((title, f"section-{identity}"))
        self._parts.append(f'<section id="section-{escape(identity)}"><h2>{escape(title)}</h2>{body}</section>')

    def append(self, body: str) -> None:
        """Append HTML that has no heading."""
        self._parts.append(body)

    def text_block(self, text: str) -> str:
        """Return preformatted text, which keeps its line breaks."""
        return f'<pre data-text="{self._text(text)}"></pre>'

    def difference(self, text: str) -> str:
        """Return a unified diff with removed and added lines in colors."""
        return f'<pre class="diff" data-text="{self._text(text)}"></pre>'

    def opened(self, summary: str, inside: str, *, identity: str = "", kind: str = "", is_open: bool = False) -> str:
        """Return HTML of the line ``summary``, which opens to show the HTML ``inside``, packed.

        ``identity`` is an anchor. ``kind`` is a kind of kernel; a square of its color precedes the summary.
        """
        attributes = (f' id="{escape(identity)}"' if identity else "") + (" open" if is_open else "")
        sign = f'<span class="swatch k-{kind}"></span>' if kind else ""
        number = self._text(inside)
        return f'<details data-html="{number}"{attributes}><summary>{sign}{escape(summary)}</summary></details>'

    def name(self, text: str, inside: str) -> Name:
        """Return a cell that opens to show ``inside``, a packed text."""
        return Name(text, packed=self._text(inside))

    def strip(self, blocks: Iterable[Block]) -> str:
        """Return a bar with a block for each step of a Run; each block leads to its anchor."""
        self._strips.append([(round(amount, 4), kind, anchor, hint) for amount, kind, anchor, hint in blocks])
        return f'<div class="strip" data-strip="{len(self._strips) - 1}"></div>'

    def graph_view(self) -> str:
        """Return the element in which the page's graph is drawn."""
        return '<div class="graph"></div>' if self.graph is not None else ""

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def document(self) -> str:
        """Return the page as HTML."""
        data: dict[str, Any] = {"texts": list(self._texts), "strips": self._strips, "kinds": KINDS}
        if self.graph is not None:
            data["graph"] = self.graph
        links = " ".join(f'<a href="#{identity}">{escape(title)}</a>' for title, identity in self._sections)
        has_filter = self.graph is not None or "filtered" in "".join(self._parts)
        tools = f'<nav class="tools">{_FILTER if has_filter else ""}<div>{links}</div></nav>'
        return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(self.title)}</title><style>{_file("page.css")}</style></head><body>
<header><h1>{escape(self.title)}</h1>{paragraphs(self.lines)}</header>{tools}
<main>{"".join(self._parts)}</main>
<noscript><p>Graphs, bars and texts that open need JavaScript.</p></noscript>
{packed(data)}<script>{_file("page.js")}</script></body></html>
"""


_FILTER = (
    '<input id="filter" type="search" placeholder="filter (press /)" aria-label="filter nodes and rows">'
    '<span class="count" role="status"></span>'
)


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()


def paragraphs(lines: Iterable[str]) -> str:
    """Return a paragraph for each line of text."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


@dataclass(frozen=True)
class Name:
    """A cell with truncated text; it opens to show ``inside`` unless that is empty.

    The text links to the anchor ``target``; "": no link.
    ``packed`` is the number of a packed text in place of ``inside``, see `Page.name`.
    """

    text: str
    inside: str = ""
    target: str = ""
    packed: int = -1


@dataclass(frozen=True)
class Link:
    """A cell with a number that is a link to an anchor of the page."""

    text: str
    target: str


@dataclass(frozen=True)
class Bar:
    """A cell with a bar over ``fraction`` of the cell's width, in the color of a kind of kernel, with a tooltip."""

    fraction: float
    kind: str = ""
    hint: str = ""


Cell = str | Name | Bar | Link


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    identity: str = "",
    anchors: Sequence[str] | None = None,
    is_filtered: bool = True,
) -> str:
    """Return a table that the reader can sort. Each column has one type of cell, which the first row determines.

    ``anchors`` has an anchor for each row. The page's filter hides rows unless ``is_filtered`` is false.
    """
    lines = [list(row) for row in rows]
    is_right = [bool(lines) and isinstance(lines[0][i], str | Link) for i in range(len(heads))]
    starts = ['<th class="r">' if right else "<th>" for right in is_right]
    head = "".join(
        f"{start}<button>{escape(text)}</button></th>" if text else "<th></th>"
        for start, text in zip(starts, heads, strict=True)
    )
    marks = [f' id="{escape(anchor)}"' for anchor in anchors] if anchors is not None else [""] * len(lines)
    body = "\n".join(f"<tr{mark}>{''.join(map(_cell, row))}</tr>" for mark, row in zip(marks, lines, strict=True))
    classes = "sortable filtered" if is_filtered else "sortable"
    name = f' id="{escape(identity)}"' if identity else ""
    return (
        f'<div class="wide"><table{name} class="{classes}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    match cell:
        case Bar(fraction, kind, hint):
            color = f' class="k-{kind}"' if kind else ""
            title = f' title="{escape(hint)}"' if hint else ""
            return f'<td class="bar"><div{color} style="width:{100 * fraction:.1f}%"{title}></div></td>'
        case Link(text, target):
            return f'<td class="r">{link(text, target)}</td>'
        case Name(text, inside, target, number):
            shown = link(text, target) if target else escape(text)
            if number >= 0:
                shown = f'<details><summary>{shown}</summary><pre data-text="{number}"></pre></details>'
            elif inside:
                shown = f"<details><summary>{shown}</summary><pre>{escape(inside)}</pre></details>"
            return f"<td>{shown}</td>"
        case str():
            return f'<td class="r">{escape(cell)}</td>'


def link(text: str, target: str) -> str:
    """Return a link to an anchor of the page."""
    return f'<a href="#{quote(target, safe="")}">{escape(text)}</a>'


def legend(kinds: Iterable[tuple[str, float]]) -> str:
    """Return a legend of kinds of kernels with their shares; a click shows only the nodes of the kind."""
    items = "".join(
        f'<li><button data-kind="{kind}" aria-pressed="false"><span class="swatch k-{kind}"></span>'
        f"{escape(KINDS[kind])} {share:.0%}</button></li>"
        for kind, share in kinds
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def signs(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend of the frames and lines in a graph, by class of the style sheet and meaning."""
    shown = "".join(f'<li><span class="sign {sign}"></span>{escape(text)}</li>' for sign, text in items)
    return f'<ul class="legend">{shown}</ul>'
