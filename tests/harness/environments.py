"""Builds virtual environments without pip, for tests of programs that run in another environment."""

from __future__ import annotations

import sys
from pathlib import Path


def environment_folder(prefix: Path) -> Path:
    """Make a virtual environment of this interpreter without packages; return its site-packages folder."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    home = Path(sys.executable).resolve().parent
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    site = prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    return site


def borrow_packages(site: Path) -> None:
    """Make this environment's packages, .pth files included, importable in the environment of ``site``."""
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(lines))
