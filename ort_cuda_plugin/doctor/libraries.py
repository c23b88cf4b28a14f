"""Findings about cuBLASLt and cuDNN: location, version, and other copies that a process may load instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ep.device.libraries import LIBRARIES, Library, LibraryPlace
from .findings import Finding, Machine, note, ok, pip, problem, warning

#: Pairs of packages that install their files into one folder, so that one overwrites the other.
_EXCLUDING = (("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"), ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12"))


@dataclass(frozen=True)
class Copy:
    """A file of a library; ``owner`` is the package or folder that it belongs to."""

    path: Path
    owner: str


def library_findings(machine: Machine, places: Mapping[str, LibraryPlace], has_gpu: bool) -> Iterator[Finding]:
    """Examine the libraries. ``places`` are those of `ep.device.libraries.library_places`."""
    for library in LIBRARIES:
        place = places[library.name]
        version = machine.packages.get(library.package, "")
        if place.path:
            of_package = f" (package {library.package} {version})" if version else ""
            yield ok(library.name, f"{place.path}{of_package}")
        else:
            mend = pip("install", library.package)
            text = f"not found: {place.why}"
            advice = f"{mend}; without it the plugin's own kernels are used"
            yield warning(library.name, text, advice, mend) if has_gpu else note(library.name, text, advice)
        yield from _others(machine, library, place)
    for pair in _EXCLUDING:
        if all(name in machine.packages for name in pair):
            yield problem(
                "packages of libraries",
                f"{' and '.join(pair)} are installed together, and write to one folder",
                f"pip uninstall -y {' '.join(pair)}; pip install {pair[1]}",
                pip("uninstall", "-y", *pair),
                pip("install", pair[1]),
            )


def _others(machine: Machine, library: Library, place: LibraryPlace) -> Iterator[Finding]:
    """Report other copies of the library: all code of a process gets the copy that is loaded first."""
    used = Path(place.path) if "/" in place.path else None
    others = [copy for copy in copies(machine, library) if used is None or not _same(copy.path, used)]
    if not others:
        return
    torch = machine.packages.get("torch", "")
    for copy in others:
        if copy.owner == "torch" or (torch and copy.owner == "pip"):
            yield warning(
                f"{library.name} of torch {torch}".strip(),
                f"{copy.path} is another copy; the plugin uses {place.path or 'none'}",
                "if one process uses both, install a torch for CUDA 13, so that both use the same package; or import"
                " ort_cuda_plugin and make a session before torch",
            )
        else:
            yield note(
                f"{library.name} of {copy.owner}",
                f"{copy.path} is another copy, which the plugin does not use",
                "remove its folder from LD_LIBRARY_PATH if a process fails because of mixed versions",
            )


def copies(machine: Machine, library: Library) -> list[Copy]:
    """Find files of the library in PyTorch's folder, in pip's packages, and on LD_LIBRARY_PATH."""
    stem = library.files[0].split(".so")[0]
    folders = [("torch", machine.site_packages / "torch" / "lib")]
    folders += [("pip", folder) for folder in sorted(machine.site_packages.glob("nvidia/*/lib"))]
    search = machine.environment.get("LD_LIBRARY_PATH", "").split(":")
    folders += [("LD_LIBRARY_PATH", Path(entry)) for entry in search if entry]
    found: dict[Path, Copy] = {}
    for owner, folder in folders:
        try:
            files = sorted(folder.glob(f"{stem}*.so*"))
        except OSError:
            continue
        for file in files:
            if re.fullmatch(rf"{re.escape(stem)}(-[0-9a-f]+)?\.so(\.\d+)?", file.name):
                found.setdefault(file.resolve(), Copy(file, owner))
    return list(found.values())


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
