"""A finding, and the machine that findings are about."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

DISTRIBUTION = "ort-cuda-plugin"


class Severity(Enum):
    """Severity of a finding, from harmless to a defect."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """A result of the examination.

    Attributes:
        advice: what to do; "" if the user need do nothing.
        commands: lines for a POSIX shell that repair the defect, in order; empty if commands alone cannot.
    """

    subject: str
    severity: Severity
    text: str
    advice: str = ""
    commands: tuple[str, ...] = ()


def ok(subject: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(subject, Severity.OK, text)


def note(subject: str, text: str, advice: str) -> Finding:
    """Return a finding about something missing that not everyone needs."""
    return Finding(subject, Severity.NOTE, text, advice)


def warning(subject: str, text: str, advice: str, *commands: str) -> Finding:
    """Return a finding about something that works, but slower or not for all uses."""
    return Finding(subject, Severity.WARNING, text, advice, commands)


def problem(subject: str, text: str, advice: str, *commands: str) -> Finding:
    """Return a finding that something does not work."""
    return Finding(subject, Severity.PROBLEM, text, advice, commands)


def pip(*arguments: str) -> str:
    """Return a pip command as a line for a POSIX shell."""
    return shlex.join(["pip", *arguments])


@dataclass(frozen=True)
class Machine:
    """The machine that is examined.

    Attributes:
        packages: versions of the installed distributions, by name.
        requirements: lines of the metadata of the installed ort-cuda-plugin (PEP 508); None if there is no metadata.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    architecture: str = field(default_factory=platform.machine)
    packages: Mapping[str, str] = field(default_factory=lambda: installed_packages())
    requirements: Sequence[str] | None = field(default_factory=lambda: installed_requirements())
    site_packages: Path = field(default_factory=lambda: Path(sysconfig.get_paths()["purelib"]))

    def has(self, path: str) -> bool:
        """Return whether there is a file or folder of that path below the root."""
        return (self.root / path).exists()

    def text(self, path: str) -> str:
        """Return the contents of a file; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip("\0\n ")
        except OSError:
            return ""

    @property
    def has_gpu_driver(self) -> bool:
        """Whether files show NVIDIA's kernel driver, WSL with a GPU, or a Tegra board. The process may lack access."""
        marks = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg", "etc/nv_tegra_release")
        return any(self.has(mark) for mark in marks)

    @property
    def is_container(self) -> bool:
        """Whether the machine is a container, by marks that Docker, Podman, Kubernetes and others leave."""
        marks = ("KUBERNETES_SERVICE_HOST", "container")
        return self.has(".dockerenv") or self.has("run/.containerenv") or any(m in self.environment for m in marks)


def installed_packages() -> dict[str, str]:
    """Return the versions of the installed packages by name (lower case, hyphens). If a package is installed twice, the
    version is that of the copy that Python imports.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(str(name).lower().replace("_", "-"), distribution.version)
    return found


def installed_requirements() -> list[str] | None:
    """Return the requirements in the metadata of the installed ort-cuda-plugin; None if it is not installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
