"""The lock file has a version of each requirement of pyproject.toml, and within its range."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import noxfile

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras: str) -> Iterator[Requirement]:
    """Yield the requirements of extras, including those of other extras that they require."""
    for extra in extras:
        for line in PROJECT["project"]["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == PROJECT["project"]["name"]:
                yield from requirements(*requirement.extras)
            else:
                yield requirement


def locked() -> dict[str, list[str]]:
    """Return the versions of each package; a package has several where they depend on the interpreter."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^ \n]+)", (ROOT / noxfile.LOCK).read_text(), flags=re.M):
        versions.setdefault(canonicalize_name(name), []).append(version)
    return versions


WANTED = [
    *requirements(*noxfile.LOCKED_EXTRAS),
    *map(Requirement, PROJECT["project"]["dependencies"]),
    *map(Requirement, PROJECT["build-system"]["requires"]),
]


@pytest.mark.parametrize("requirement", sorted(set(WANTED), key=str), ids=str)
def test_the_lock_has_a_version_within_the_range_of_each_requirement(requirement: Requirement) -> None:
    versions = locked().get(canonicalize_name(requirement.name), [])
    assert versions, f"{noxfile.LOCK}: no version of {requirement.name}. Run nox -s lock"
    outside = [version for version in versions if version not in requirement.specifier]
    assert not outside, f"{noxfile.LOCK}: {requirement} excludes {outside}. Run nox -s lock"


@pytest.mark.parametrize("tool", ["check-jsonschema", "clang-format", "mypy", "ruff", "zizmor"])
def test_a_checker_has_an_upper_bound(tool: str) -> None:
    """Without a bound, a new release that reports more would fail unrelated changes."""
    (requirement,) = {each for each in WANTED if each.name == tool}
    assert "9999" not in requirement.specifier
