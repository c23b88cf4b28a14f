"""Recipes: reads the pages of docs/recipes, and makes the files that a reader has: models, pictures, recordings.

Each synthetic model has the inputs and outputs of the model that the page names, and a few operators that give a result
which a page can state.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import recipe_diffusion
import recipe_models
from document_blocks import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "recipes"
SECTIONS = ("Install", "Code", "What you should see", "If you see something else", "Limits", "What was run")
"""Headings of a recipe, in their order."""
MOST_LINES = 40
"""Largest number of lines of a code block of a recipe."""
NEEDS = re.compile(r"<!-- needs: (?P<modules>[\w., ]+) -->")
FILE = re.compile(r"# (?P<name>[\w.]+)\n")


@dataclass(frozen=True)
class Recipe:
    """A page of docs/recipes."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    def section(self, heading: str) -> str:
        """Return the text below a heading, up to the next one."""
        found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", self.text, re.M | re.S)
        return found[1] if found else ""

    @property
    def code(self) -> list[Block]:
        """Return the blocks that run: Python files and shell commands."""
        return [block for block in blocks(self.text) if block.language in ("python", "sh") and not block.reason]

    @property
    def output(self) -> str:
        """Return the output that the page shows."""
        return "".join(block.text for block in blocks(self.section("What you should see")) if not block.language)

    @property
    def missing(self) -> list[str]:
        """Return the modules that the recipe needs and this environment lacks."""
        named = [module for line in NEEDS.findall(self.text) for module in line.split(", ")]
        return [module for module in named if not is_installed(module)]

    def run(self, folder: Path, variables: Mapping[str, str]) -> str:
        """Write the Python blocks to files, run the shell blocks in their order, and return what they print.

        Raises AssertionError if a command fails, or if the first line of a Python block does not name its file.
        """
        if make := MADE.get(self.path.stem):
            make(folder)
        printed = []
        for block in self.code:
            where = f"{self.path.name}:{block.line}"
            if block.language == "python":
                named = FILE.match(block.text)
                assert named, f"{where}: the first line of the block must be the name of its file, such as # app.py"
                (folder / named["name"]).write_text(block.text)
                continue
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            environment = {**os.environ, **variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{where}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
        return "".join(printed)


def is_installed(module: str) -> bool:
    """Return whether Python finds a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def recipes() -> list[Recipe]:
    return [Recipe(path) for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"]


MADE: dict[str, Callable[[Path], None]] = {
    "background_removal": recipe_models.background_remover,
    "ci_without_gpu": recipe_models.small_model,
    "diffusers": recipe_diffusion.diffusion_pipeline,
    "docker": recipe_models.small_model,
    "face_detection": recipe_models.face_detector,
    "fastapi": recipe_models.small_model,
    "genai": recipe_models.language_model,
    "kserve": recipe_models.small_model,
    "livekit": recipe_models.recordings,
    "object_detection": recipe_models.object_detector,
    "operate": recipe_models.small_model,
    "silero_vad": recipe_models.recordings,
    "text_embeddings": recipe_models.text_encoder,
    "whisper": recipe_models.speech_recognizer,
}
"""For each page that needs files, the function that makes them in a folder."""
