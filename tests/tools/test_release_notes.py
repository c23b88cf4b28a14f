"""A tag is released only with the package's version and a section of the changelog."""

from __future__ import annotations

import pytest

import release_notes
from release_notes import ReleaseError

SOURCE = '__version__ = "1.2.0"\n'
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2030-01-02

### Added

- One thing.

## [1.1.0] - 2029-01-02

- Another thing.
"""


def test_the_notes_are_the_section_of_the_tag() -> None:
    assert release_notes.notes("v1.2.0", SOURCE, CHANGELOG) == "### Added\n\n- One thing.\n"
    assert release_notes.notes("v1.1.0", SOURCE.replace("1.2", "1.1"), CHANGELOG) == "- Another thing.\n"


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v1.3.0", "1.2.0", r"tag: not the package's version: got v1\.3\.0, expected v1\.2\.0"),
        ("1.2.0", "1.2.0", r"got 1\.2\.0, expected v1\.2\.0"),
        ("v1.3.0", "1.3.0", r"CHANGELOG\.md: no section '## \[1\.3\.0\]"),
        ("v1x2.0", "1x2.0", r"no section"),
    ],
)
def test_a_tag_that_does_not_agree_is_an_error(tag: str, version: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        release_notes.notes(tag, f'__version__ = "{version}"\n', CHANGELOG)


def test_an_empty_section_is_an_error() -> None:
    with pytest.raises(ReleaseError, match="the section \\[1\\.2\\.0\\] is empty"):
        release_notes.section(CHANGELOG.replace("### Added\n\n- One thing.\n", ""), "1.2.0")


def test_the_package_states_its_version_where_the_notes_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_notes.main(["v0"]) == 1
    assert "expected v" in capsys.readouterr().err
