"""Recipes have the same sections, and their code prints what their pages say."""

from __future__ import annotations

import doctest
import os
import re
from pathlib import Path

import pytest

import recipes
from document_blocks import blocks
from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE, cache_folder
from recipes import MOST_LINES, SECTIONS, Recipe

ALL = recipes.recipes()
WITH_CODE = [recipe for recipe in ALL if recipe.code]
FIRST_TIER = "docker"
"""Page that the first tier runs: its code needs no further package, and takes the least time."""


def stem(recipe: Recipe) -> str:
    return recipe.path.stem


@pytest.mark.parametrize("recipe", ALL, ids=stem)
def test_a_recipe_has_a_goal_and_all_sections(recipe: Recipe) -> None:
    title, _, rest = recipe.text.partition("\n")
    assert title.startswith("# ")
    assert rest.partition("\n## ")[0].strip(), "the goal"
    assert tuple(re.findall(r"^## (.*)$", recipe.text, re.M)) == SECTIONS
    assert all(recipe.section(heading).strip() for heading in SECTIONS)


@pytest.mark.parametrize("recipe", ALL, ids=stem)
def test_the_code_of_a_recipe_is_short(recipe: Recipe) -> None:
    for block in blocks(recipe.text):
        assert len(block.text.splitlines()) <= MOST_LINES, f"{recipe.path.name}:{block.line}"


def test_the_index_and_the_site_have_each_recipe() -> None:
    index, site = (recipes.FOLDER / "index.md").read_text(), (recipes.ROOT / ".mkdocs.yml").read_text()
    assert [stem(recipe) for recipe in ALL if f"({recipe.path.name})" not in index] == []
    assert [stem(recipe) for recipe in ALL if f"recipes/{recipe.path.name}" not in site] == []


def test_made_files_belong_to_a_recipe() -> None:
    assert set(recipes.MADE) <= {stem(recipe) for recipe in WITH_CODE}


def matches(expected: str, got: str) -> bool:
    """Return whether a program printed what a page shows; ``...`` in the page stands for any text."""
    return doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(each, marks=() if stem(each) == FIRST_TIER else pytest.mark.full) for each in WITH_CODE],
    ids=stem,
)
def test_a_recipe_prints_what_its_page_says(recipe: Recipe, tmp_path: Path) -> None:
    if recipe.missing:
        pytest.skip(f"{', '.join(recipe.missing)} not installed; nox -s recipes serving installs what recipes need")
    assert recipe.output, "the page shows no output"
    path = os.pathsep.join([str(recipes.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"ORT_CUDA_PLUGIN_EMULATE": "1", CACHE_DIR_VARIABLE: str(cache_folder()), "PYTHONPATH": path}
    printed = recipe.run(tmp_path, variables)
    assert matches(recipe.output, printed), f"printed:\n{printed}\nexpected:\n{recipe.output}"


def test_other_output_is_found() -> None:
    assert matches("3 passed in ...\n", "3 passed in 0.1s\n")
    assert not matches("3 passed in ...\n", "2 passed in 0.1s\n")
