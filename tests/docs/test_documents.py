"""Code blocks of documents run, or give a reason not to; the site builds, and no link is dead."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from document_blocks import RUN, blocks
from ort_cuda_plugin import cli
from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE, cache_folder
from ort_cuda_plugin.ep.options import arena
from ort_cuda_plugin.ep.options.option_table import ROWS, WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "harness"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
HAS_ITS_OWN_TEST = {"docs/custom_kernels.md": ROOT / "tests" / "custom" / "test_documentation.py"}
RECIPES = ROOT / "docs" / "recipes"
"""Folder of documents that tests/docs/test_recipes.py runs."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def has_code(path: Path) -> bool:
    return any(block.language in RUN and not block.reason for block in blocks(path.read_text()))


def has_its_own_test(path: Path) -> bool:
    return name(path) in HAS_ITS_OWN_TEST or path.parent == RECIPES


WITH_CODE = [path for path in DOCUMENTS if has_code(path) and not has_its_own_test(path)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_each_block_is_run_or_says_why_not(document: Path) -> None:
    for block in blocks(document.read_text()):
        assert not block.language or block.language in RUN or block.reason, (
            f"{name(document)}:{block.line} is {block.language}, which nothing runs; put before it a line "
            "<!-- not run: the reason -->"
        )


@pytest.mark.parametrize("document", WITH_CODE, ids=name)
def test_the_blocks_of_a_document_run_in_their_order(document: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "ORT_CUDA_PLUGIN_EMULATE": "1",
        CACHE_DIR_VARIABLE: str(cache_folder()),
        "PYTHONPATH": os.pathsep.join([str(HARNESS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, str(HARNESS / "document_blocks.py"), str(document)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


COMMAND_LINES = sorted(
    {found for path in DOCUMENTS for found in re.findall(r"`ort-cuda-plugin ([^`\n]+)`", path.read_text())}
)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_in_the_text_has_the_arguments_that_it_takes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the arguments are parsed: each command's `execute` is replaced, as its work has tests of its own."""
    words = shlex.split(line)
    assert words[0] in cli.COMMANDS
    if len(words) > 1:
        module = importlib.import_module(f"{cli.__name__}.{cli.COMMANDS[words[0]]}")
        monkeypatch.setattr(module, "execute", lambda arguments: 0)
        assert cli.main(words) == 0


def test_documents_with_a_test_of_their_own_have_it() -> None:
    assert all((ROOT / document).exists() and test.exists() for document, test in HAS_ITS_OWN_TEST.items())


def test_links_of_documents_outside_of_the_site_lead_somewhere() -> None:
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_migration_names_every_key_of_the_cuda_provider() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    aliases = [alias for row in ROWS.values() for alias in row.aliases]
    keys = [*WITHOUT_EFFECT, *aliases, *arena.CUDA_PROVIDER_KEYS]
    assert not [key for key in keys if f"`{key}`" not in text]
