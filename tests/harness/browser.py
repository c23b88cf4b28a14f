"""Headless Chromium for tests of HTML pages, which must work without a network; and a parser of pages.

Chromium is controlled by the DevTools protocol over two pipes, so that no package is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ort_cuda_plugin.pages.packed import unpacked

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_VOID = ("meta", "br", "hr", "img", "input", "link")
_PATIENCE = 90.0
"""Seconds to wait for an answer of Chromium, which is long because a machine may be busy."""
_KEYS = {"Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, ""), "Escape": ("Escape", 27, ""), " ": ("Space", 32, " "),
         "ArrowDown": ("ArrowDown", 40, ""), "ArrowUp": ("ArrowUp", 38, "")}  # fmt: skip


class Tab:
    """A page in Chromium. ``console`` has the errors and warnings of the console, and uncaught exceptions."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._session = ""
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"Chromium did not answer within {_PATIENCE:.0f} s")
            if not (more := os.read(self._from, 1 << 20)):
                raise EOFError("Chromium ended before it answered")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.console.append(" ".join(str(each.get("value")) for each in given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.console.append(given["entry"]["text"])

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page, and wait until its script has drawn everything. Other pages end with their load event."""
        # Otherwise, a page that is already loaded would only scroll to the new fragment.
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=page.as_uri() + fragment)
        deadline = time.monotonic() + _PATIENCE
        script = """
            location.href !== 'about:blank' && document.readyState === 'complete' && document.documentElement
            && (!document.getElementById('packed') || document.documentElement.dataset.ready === '1')
        """
        while not self.evaluate(script):
            if self.console and time.monotonic() > deadline - _PATIENCE + 2:
                return  # the script has failed: the test reads the console
            assert time.monotonic() < deadline, f"{page} is not ready: {self.console}"
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, of JSON's types."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"not true after {_PATIENCE:.0f} s: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key: a letter or a name such as Enter."""
        code, number, text = _KEYS[key] if key in _KEYS else (f"Key{key.upper()}", ord(key.upper()), key)
        shared = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def resize(self, width: int, height: int, *, is_mobile: bool = False) -> None:
        """Set the size of the window in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_mobile}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """Set the color scheme that the user prefers: "light" or "dark"."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write the window's contents to a PNG file."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    @property
    def dom(self) -> str:
        """Return the document as HTML, after scripts have run."""
        return str(self.evaluate("document.documentElement.outerHTML"))


@contextmanager
def browser() -> Iterator[Tab]:
    """Start a Chromium that can resolve no host name. Skip the test if Chromium is not installed."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian's package is `chromium`)")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += ["--no-first-run", "--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    to_browser, from_browser = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    launcher = "import fcntl, os, sys; a, b = (fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]); "
    launcher += "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
    ends = [str(to_browser[0]), str(from_browser[1])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = subprocess.Popen(
            [sys.executable, "-c", launcher, *ends, program, *options, f"--user-data-dir={folder}"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])


def whole_text(page: str) -> str:
    """Return a page with the texts that its script unpacks."""
    return "\n".join([page, *(unpacked(page) or {"texts": []})["texts"]])


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
