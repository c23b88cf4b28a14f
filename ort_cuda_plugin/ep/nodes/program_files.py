"""Writes the files of the option ``program_folder``: programs of the plans of a fused node, as text and as JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

_LONGEST = 150
"""Maximum characters of a file's name, without the suffix."""


class ProgramFiles:
    """The files of one fused node. The node's name may contain a path, so it is cleaned."""

    def __init__(self, folder: Path, name: str) -> None:
        safe = quote(name, safe=" ()")
        if len(safe) > _LONGEST:
            safe = f"{safe[:_LONGEST]}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        self._name = name
        self._text, self._plans = folder / f"{safe}.txt", folder / f"{safe}.jsonl"
        self._text.write_text("", encoding="utf-8")
        self._plans.write_text("", encoding="utf-8")

    def append_program(self, text: str) -> None:
        """Append the text of a plan's steps after a pass to the text file."""
        _append(self._text, text)

    def append_plan(self, plan: dict[str, Any]) -> None:
        """Append a `plan_record` as a line of JSON, with the fused node's name."""
        _append(self._plans, json.dumps({"cluster": self._name, **plan}))


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
