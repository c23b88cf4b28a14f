"""Hook of MkDocs: adds the package's version and, in a hosted build, the link of the repository to the site.

It also replaces the one script of another host that Material for MkDocs loads, for search in a site that is opened as
files, by ``docs/site.js``.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "ort_cuda_plugin" / "__init__.py"
FOREIGN = "https://unpkg.com/iframe-worker/shim"
OWN = "site.js"


def version() -> str:
    """Return the version of the package, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', PACKAGE.read_text(), re.M)
    assert found, f"{PACKAGE}: no line with __version__"
    return found[1]


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Set the copyright line to the version. Set the repository's address to that of the hosted workflow, if any."""
    config["copyright"] = f"Version {version()}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config["repo_name"] = repository
        config["repo_url"] = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    return config


def on_post_page(output: str, page: Any, config: MutableMapping[str, Any]) -> str:
    """Replace the address of the other host's script by that of our own, relative to the page."""
    return output.replace(FOREIGN, "../" * page.url.count("/") + OWN)


def on_post_template(output_content: str, template_name: str, config: MutableMapping[str, Any]) -> str:
    """Replace the script's address in the page that a server shows for addresses that do not exist."""
    return output_content.replace(FOREIGN, f"/{OWN}")
