"""Findings about the versions of installed packages: whether they are in the ranges of the package's own metadata.

`packaging`, which reads versions and markers, is a dependency of every wheel of ONNX Runtime and of numba-cuda.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ..uninterrupted import imported
from .findings import DISTRIBUTION, Finding, Machine, note, ok, pip, problem, warning

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

_SUBJECT = "versions"
EXTRAS = ("cpu", "cuda", "gpu", "libs", "nvrtc", "compiler", "cubins", "profiling", "estimate", "genai")
"""Extras whose packages the plugin imports or loads. The other extras are for developers of the plugin."""


def requirement_findings(machine: Machine, besides: Collection[str] = ()) -> Iterator[Finding]:
    """Compare installed versions with the requirements. Packages in ``besides`` are not examined.

    The requirements of ort-cuda-plugin itself have to be met. A requirement of an extra counts if its package is
    installed. If ort-cuda-plugin itself requires this package too, such as NumPy, the requirement of the extra counts
    only if all packages of the extra are installed.
    """
    if machine.requirements is None:
        text = f"{DISTRIBUTION} has no metadata here, so the versions of its dependencies are not checked"
        yield note(_SUBJECT, text, f"install it with pip: {pip('install', '.')} in a source tree")
        return
    try:
        by_extra = _by_extra(machine.requirements)
    except ModuleNotFoundError:
        text = "the package packaging is missing, so the versions of dependencies are not checked"
        yield note(_SUBJECT, text, pip("install", "packaging"))
        return
    except ValueError as error:
        mend = pip("install", "--force-reinstall", "--no-deps", DISTRIBUTION)
        yield problem(_SUBJECT, f"the metadata of {DISTRIBUTION} is damaged: {error}", mend, mend)
        return
    applying = _applying(machine, by_extra)
    met = []
    for name in sorted(applying.keys() - set(besides)):
        version = machine.packages.get(name)
        specifier = applying[name]
        if version is not None and _contains(specifier, version):
            met.append(f"{name} {version}")
        elif version is not None or name in by_extra[""]:
            yield _mismatch(name, version, specifier, [extra for extra, wanted in by_extra.items() if name in wanted])
    if met:
        yield ok(_SUBJECT, f"{', '.join(met)} are in the ranges that {DISTRIBUTION} requires")


def _by_extra(lines: Sequence[str]) -> dict[str, dict[str, SpecifierSet]]:
    """Return the required versions by extra and package; the extra "" has the package's own requirements."""
    requirements = imported("packaging.requirements")
    parsed: list[Requirement] = [requirements.Requirement(line) for line in lines]
    found: dict[str, dict[str, SpecifierSet]] = {extra: {} for extra in ("", *EXTRAS)}
    for requirement in parsed:
        name = requirement.name.lower().replace("_", "-")
        applies = [e for e in found if requirement.marker is None or requirement.marker.evaluate({"extra": e})]
        for extra in [""] if "" in applies else applies:
            if name != DISTRIBUTION:  # an extra that includes other extras
                found[extra][name] = found[extra].get(name, requirement.specifier) & requirement.specifier
    return found


def _applying(machine: Machine, by_extra: dict[str, dict[str, SpecifierSet]]) -> dict[str, SpecifierSet]:
    """Return the allowed versions of each package: those of the requirements that count on ``machine``."""
    found = dict(by_extra[""])
    for wanted in by_extra.values():
        is_installed = all(name in machine.packages for name in wanted)
        for name, specifier in wanted.items():
            if is_installed or (name in machine.packages and name not in by_extra[""]):
                found[name] = found.get(name, specifier) & specifier
    return found


def _contains(specifier: SpecifierSet, version: str) -> bool:
    try:
        return specifier.contains(version, prereleases=True)
    except ValueError:  # InvalidVersion: the installed metadata is damaged
        return False


def _mismatch(name: str, version: str | None, specifier: SpecifierSet, extras: Sequence[str]) -> Finding:
    wanted = ",".join(sorted({str(each) for each in specifier}, reverse=True))
    found = "not installed" if version is None else f"{version} is installed"
    by = f"[{','.join(extras)}]" if "" not in extras else ""
    text = f"{found}; {DISTRIBUTION}{by} requires {name}{wanted}"
    mend = pip("install", f"{name}{wanted}")
    return (problem if "" in extras else warning)(name, text, mend, mend)
