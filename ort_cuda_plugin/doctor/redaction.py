"""Redaction of a report: the user's name, the host's name and the user's paths are replaced.

A report is meant to be published. ``~`` stands for the home folder, ``<user>`` and ``<host>`` for the names, and
``<path>`` for the folders of any other absolute path that is not the system's.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .findings import Machine

_SYSTEM = re.compile(r"/(usr|lib(32|64|x32)?|proc|sys|dev|etc|s?bin)(/|$)")
_START = r"(?<![\w~>./-])"  # not within a relative path, a URL or a replacement
_IN_PATH = r"[^\s:;,'\"`()\[\]{}<>|]"
_PATH = re.compile(rf"{_START}/(?!/){_IN_PATH}+")
_KEPT = re.compile(r".*?/((?:site|dist)-packages/.*|lib[\w+-]+\.so[.\d]*)")
"""Pattern of a path. Its group is the end of the path, which a package has chosen and not the user."""

COMMON_NAMES = frozenset(
    ("cuda", "docker", "gpu", "home", "host", "linux", "localhost", "nvidia", "onnx", "ort", "python", "root", "test")
    + ("ubuntu", "user")
)
"""Common names of users and hosts, which identify no person. They stay, because they are also words of the report."""


@dataclass(frozen=True)
class Identity:
    """What a report must not contain: the home folder under each of its paths, names, and absolute paths with spaces
    and other characters that can also end a path in a text.
    """

    homes: tuple[str, ...]
    users: tuple[str, ...]
    hosts: tuple[str, ...]
    paths: tuple[str, ...] = ()

    def redacted(self, text: str) -> str:
        """Return the text with replacements."""
        for home in _longest_first(self.homes):
            text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
        for path in _longest_first(self.paths):
            text = re.sub(rf"{_START}{re.escape(path)}{_IN_PATH}*", lambda found: _shortened(found[0]), text)
        text = _PATH.sub(lambda found: _shortened(found[0]), text)
        for names, replacement in ((self.hosts, "<host>"), (self.users, "<user>")):
            for name in _longest_first(names):
                pattern = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"  # an underscore ends a name
                text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
        return text


def identity_of(machine: Machine) -> Identity:
    """Return the identity of the user and the host, from environment, user database, kernel and /etc/hostname."""
    environment = machine.environment
    homes = [environment.get("HOME", ""), os.path.expanduser("~")]
    users: list[str] = []
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:  # a user that only the kernel knows, as in some containers
        pass
    else:
        homes.append(entry.pw_dir)
        users += [entry.pw_name, entry.pw_gecos.partition(",")[0]]
    homes = [home.rstrip("/") for home in homes if home.startswith("/") and not _SYSTEM.match(home)]
    homes += [os.path.realpath(home) for home in homes if home]
    users += [environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")]
    users += [Path(home).name for home in homes if Path(home).parent.name in ("home", "Users")]
    hosts = [environment.get(name, "") for name in ("HOSTNAME", "HOST")]
    hosts += [platform.node(), machine.text("etc/hostname")]
    hosts += [host.partition(".")[0] for host in hosts]
    return Identity(tuple(filter(None, homes)), _personal(users), _personal(hosts), tuple(_paths(machine)))


def _personal(names: Iterable[str]) -> tuple[str, ...]:
    return tuple({name for name in names if name and name.lower() not in COMMON_NAMES})


def _paths(machine: Machine) -> Iterator[str]:
    """Yield this process's paths, and those in environment variables, that `_PATH` does not match as a whole."""
    known = [sys.prefix, sys.base_prefix, sys.executable, str(machine.site_packages), *sys.path]
    for value in (*known, *machine.environment.values()):
        for path in value.split(":"):
            if path.startswith("/") and path.strip("/") and not _PATH.fullmatch(path):
                yield path.rstrip("/")


def _shortened(path: str) -> str:
    """Return a path without the folders that the user has chosen."""
    if _SYSTEM.match(path):
        return path
    kept = _KEPT.fullmatch(path)
    return f"<path>/{kept[1]}" if kept else "<path>"


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts), key=len, reverse=True)
