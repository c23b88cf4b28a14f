"""The site builds without a dead link and works without a network, and each page begins with what it is about."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ort_cuda_plugin
import site_hook
from browser import browser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
MOST_WORDS = 130
"""Largest number of words in the first paragraph of a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as a hosted workflow does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", "--site-dir"]
    environment = os.environ | {"GITHUB_REPOSITORY": "owner/name"}
    done = subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_the_page_of_the_package_has_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert "register" in page
    assert "Raises" in page


@pytest.mark.full
def test_a_page_has_the_version_and_the_repository(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert f"Version {ort_cuda_plugin.__version__}" in page
    assert "https://github.com/owner/name" in page


@pytest.mark.full
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]*src="?https?:|<link[^>]*rel="?stylesheet"?[^>]*https?:""")
    assert [str(page.relative_to(site)) for page in site.rglob("*.html") if loaded.search(page.read_text())] == []


@pytest.mark.full
@pytest.mark.parametrize("page", ["index.html", "recipes/docker.html"])
def test_search_works_in_a_site_that_is_opened_as_files(site: Path, page: str) -> None:
    with browser() as tab:
        tab.open(site / page, "?q=calibration")
        tab.until(
            "/[1-9][0-9]* matching document/.test(document.querySelector('.md-search-result__meta')?.textContent)"
        )
        # The theme asks GitHub for the repository's stars, which this browser cannot reach.
        assert [line for line in tab.console if "ERR_NAME_NOT_RESOLVED" not in line] == []


def test_the_hook_replaces_the_script_of_another_host() -> None:
    class Page:
        url = "recipes/docker.html"

    script = f'<script src="{site_hook.FOREIGN}"></script>'
    assert site_hook.on_post_page(script, Page(), {}) == '<script src="../site.js"></script>'
    assert site_hook.on_post_template(script, "404.html", {}) == '<script src="/site.js"></script>'


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_what_it_is_about(page: Path) -> None:
    title, _, rest = page.read_text().partition("\n")
    assert title.startswith("# ")
    first = re.split(r"^(?:#|\||```|- |1\. )", rest, maxsplit=1, flags=re.M)[0].strip()
    assert first, "the page needs a paragraph before its first heading, list, table or code block"
    assert len(first.split("\n\n")[0].split()) <= MOST_WORDS
