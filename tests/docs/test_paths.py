"""Files and names that documents mention exist, and the README and the chapters of the architecture stay short."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), ROOT / "bench" / "README.md"])
CHAPTERS = sorted((ROOT / "docs" / "architecture").glob("*.md"))
MOST_WORDS = 1200
PLACES = ("", "ort_cuda_plugin", "csrc_shim", "bench", "docs", "tests/harness")
"""Folders to which a path in a document may be relative."""
_path = re.compile(r"(?:[\w.-]+/)+(?:[\w-]+\.(?:py|pyi|c|h|md|json|yml|toml))?")


MOST_LINES = 130
"""Largest number of lines of the README."""
MAINTAINERS = [*CHAPTERS, *(ROOT / file for file in ("docs/architecture.md", "docs/invariants.md", "CONTRIBUTING.md"))]
SOURCES = {".py", ".c", ".h", ".json"}
OTHERS_NAMES = {"GetModelCompatibilityForEpDevices", "mlp_ctx"}
"""Identifiers that documents mention although no source has them: of ONNX Runtime's API, and of an example."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def named_paths(text: str) -> set[str]:
    """Return the paths in back quotes outside of code blocks: files with their folder, folders with a final slash."""
    text = without_code(text)
    return {found for found in re.findall(r"`([^`\n]+)`", text) if _path.fullmatch(found)}


def exists(path: str) -> bool:
    return any((ROOT / place / path).exists() for place in PLACES)


FROM_ELSEWHERE = {
    "docs/context_format.md": {"snapshots/", "blobs/"},  # folders in the cache of the Hugging Face hub
    "bench/README.md": {"docs/gpu/report.md"},  # a command writes it
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_each_path_that_a_document_names_exists(document: Path) -> None:
    missing = {path for path in named_paths(document.read_text()) if not exists(path)}
    assert missing <= FROM_ELSEWHERE.get(name(document), set())


def test_a_path_that_does_not_exist_is_found() -> None:
    paths = named_paths("`kernels/nothing.py` and `csrc_shim/run/executor.c`, `a/b`\n```\n`kernels/other.py`\n```")
    assert [path for path in sorted(paths) if not exists(path)] == ["kernels/nothing.py"]


@cache
def words_of_sources() -> frozenset[str]:
    """Return all words in the sources and the tests."""
    found: set[str] = set()
    for folder in ("ort_cuda_plugin", "csrc_shim", "tests", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SOURCES:
                found.update(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


def named_identifiers(text: str) -> set[str]:
    """Return the names in back quotes that look like identifiers: with an underscore, or with capitals inside."""
    codes = [code for code in re.findall(r"`([^`\n]+)`", without_code(text)) if not re.search(r"[/ ]", code)]
    names = {found for code in codes for found in re.findall(r"[A-Za-z_]\w+", code)}
    return {found for found in names if "_" in found.strip("_") or re.search("[a-z][A-Z]", found)}


@pytest.mark.parametrize("document", MAINTAINERS, ids=name)
def test_each_name_of_code_that_a_document_mentions_is_in_the_sources(document: Path) -> None:
    assert named_identifiers(document.read_text()) - words_of_sources() <= OTHERS_NAMES


def test_a_name_that_no_source_has_is_found() -> None:
    nowhere = "launch_" + "nothing"
    assert named_identifiers(f"`{nowhere}(ctx)` and `CompiledCluster`") - words_of_sources() == {nowhere}


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name)
def test_a_chapter_is_short_and_has_an_example_and_its_files(chapter: Path) -> None:
    text = chapter.read_text()
    assert len(without_code(text).split()) <= MOST_WORDS
    assert "\n## Worked example\n" in text
    assert "\n## Files\n" in text
    assert "\n|" in text or "\n```" in text


def test_each_chapter_is_in_the_site() -> None:
    site = (ROOT / ".mkdocs.yml").read_text()
    assert [name(chapter) for chapter in CHAPTERS if f"architecture/{chapter.name}" not in site] == []
