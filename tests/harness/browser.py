"""Loads HTML pages in headless Chromium, and parses them, for tests of pages that must work without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_VOID = ("meta", "br", "hr", "img", "input", "link")


@dataclass(frozen=True)
class Loaded:
    """A page after its scripts have run: the DOM as text, and the lines of the console, errors included."""

    dom: str
    console: list[str]


def load_offline(page: Path, query: str = "", seconds: int = 0) -> Loaded:
    """Open a file in a Chromium that can resolve no host name, with a query such as ``q=word``.

    ``seconds`` is how long the page's timers may run. Skip the test if Chromium is not installed.
    """
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian's package is `chromium`)")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'browser'}"]
    options += [f"--virtual-time-budget={1000 * seconds}"] if seconds else []
    address = f"{page.as_uri()}?{query}" if query else page.as_uri()
    done = subprocess.run(
        [program, *options, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )
    return Loaded(done.stdout, re.findall(r":CONSOLE[:(].*", done.stderr))


class Page(HTMLParser):
    """A parsed page. ``faults`` lists unclosed tags and references to anything outside of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> stays open" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.faults.append(f"<{tag} {name}={value!r}>")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def values(self, attribute: str) -> list[str]:
        """Return the values of an attribute of all tags of the page."""
        return [value for _, attributes in self.tags if (value := attributes.get(attribute)) is not None]
