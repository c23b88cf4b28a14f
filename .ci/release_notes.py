"""Prints the changelog's section of a release, for the text of the release.

It fails unless the tag, the version of the package and a section of CHANGELOG.md agree, so that a tag that was set too
early publishes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ReleaseError(Exception):
    """The tag cannot be released; the message says what to do."""


def package_version(source: str) -> str:
    """Return the version that the package's opening module states."""
    match = re.search(r'^__version__ = "(.+)"$', source, flags=re.M)
    assert match is not None
    return match[1]


def section(changelog: str, version: str) -> str:
    """Return the text below the heading ``## [version] - date``.

    Raises:
        ReleaseError: there is no such heading, or no text below it.
    """
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    match = re.search(heading + r"(.*?)(?=^## \[|\Z)", changelog, flags=re.M | re.S)
    if match is None:
        raise ReleaseError(f"CHANGELOG.md: no section '## [{version}] - YYYY-MM-DD'. Rename [Unreleased] to it")
    if not match[1].strip():
        raise ReleaseError(f"CHANGELOG.md: the section [{version}] is empty. Say what users notice")
    return match[1].strip() + "\n"


def notes(tag: str, source: str, changelog: str) -> str:
    """Return the notes of the release ``tag``.

    Raises:
        ReleaseError: tag, version and changelog do not agree.
    """
    version = package_version(source)
    if tag != f"v{version}":
        raise ReleaseError(f"tag: not the package's version: got {tag}, expected v{version}. Move the tag")
    return section(changelog, version)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tag", help="such as v1.2.0")
    parser.add_argument("--output", type=Path, help="file to write instead of printing")
    arguments = parser.parse_args(argv)
    source = (ROOT / "ort_cuda_plugin" / "__init__.py").read_text()
    try:
        text = notes(arguments.tag, source, (ROOT / "CHANGELOG.md").read_text())
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
