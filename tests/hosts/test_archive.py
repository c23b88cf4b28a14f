"""A package in an archive, as zipapp makes it, says that it must be in a folder."""

from __future__ import annotations

import zipfile
from pathlib import Path

from isolated import ROOT, python

IMPORT = """
import sys

sys.path.insert(0, sys.argv[1])
try:
    import ort_cuda_plugin
except ImportError as error:
    print(error)
"""


def test_a_package_in_an_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in (ROOT / "ort_cuda_plugin").rglob("*.py"):
            packed.write(path, path.relative_to(ROOT))
    message = python(IMPORT, str(archive)).stdout
    assert message.startswith(f"{archive}/ort_cuda_plugin: the package is in an archive")
    assert "Unpack the archive" in message
