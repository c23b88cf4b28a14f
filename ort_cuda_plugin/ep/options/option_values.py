"""Readers of option values: each turns text into a value, or raises ValueError with what to use instead."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...abi.flags import parse_flag
from ...clusters.stage_balance import Rule
from ...compiler.targets import Target
from ...compiler.toolchain import OF_EVERY_TOOLKIT
from . import arena

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD

LOG_LEVELS = ("VERBOSE", "INFO", "WARNING", "ERROR", "FATAL")
ALGORITHM_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")  # in the order of ORT's numbers


@dataclass(frozen=True)
class Reader:
    """A function that reads a value, and a description of the allowed values in Markdown, for documents."""

    read: Callable[[str], Any]
    takes: str

    def __call__(self, text: str) -> Any:
        """Return the value of ``text``. Raises ValueError for invalid text; the message says what to use instead."""
        return self.read(text)


def _architectures(text: str) -> tuple[Target, ...]:
    targets = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        match = re.fullmatch(r"sm_(\d+)(\d)", name)
        if match is None and name != "emulated":
            raise ValueError("use architectures such as sm_90, or emulated, with commas between them")
        if match and (int(match[1]), int(match[2])) < OF_EVERY_TOOLKIT[0]:
            oldest = "sm_{}{}".format(*OF_EVERY_TOOLKIT[0])
            raise ValueError(f"CUDA 13 does not compile for {name}: use {oldest} or a newer one")
        targets.append(Target.cuda(int(match[1]), int(match[2])) if match else Target.emulated())
    return tuple(targets)


InputShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of inputs, each with its shape."""


def _shapes(text: str) -> tuple[InputShapes, ...]:
    alternatives = []
    for alternative in text.split(";"):
        found = []
        for given in alternative.split(","):
            name, _, dims = given.strip().rpartition("=")
            if not name or not re.fullmatch(r"\d{1,12}(x\d{1,12})*|", dims):
                raise ValueError("use NAME=1x3x224x224, a comma before the next input, a semicolon before other shapes")
            found.append((name, tuple(int(dim) for dim in dims.split("x") if dim)))
        alternatives.append(tuple(found))
    return tuple(alternatives)


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError("use names of nodes and operator types such as Pow, with a comma between two of them")
    return tuple(dict.fromkeys(names))


def _ordinal(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("use a CUDA ordinal: 0, 1, ...")
    return int(text)


def _ordinals(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError("use CUDA ordinals with a comma between two of them: 0,1")
    ordinals = [int(part) for part in parts]
    twice = next((ordinal for ordinal in ordinals if ordinals.count(ordinal) > 1), None)
    if twice is not None:
        raise ValueError(f"device {twice} is named twice; name each device once")
    return tuple(ordinals)


def _rules(text: str) -> tuple[Rule, ...]:
    rules = []
    for part in text.split(","):
        pattern, _, ordinal = part.strip().rpartition(":")
        if not pattern.strip() or not ordinal.strip().isdecimal():
            raise ValueError(
                "use rules PATTERN:ORDINAL with a comma between two of them: /encoder/*:0,/decoder/*:1. A pattern is a "
                "name of nodes, in which * stands for any text"
            )
        rules.append(Rule(pattern.strip(), int(ordinal)))
    return tuple(rules)


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError("use a folder that exists")
    return os.path.abspath(text)


def _stream(text: str) -> int:
    try:
        address = int(text, 0)
    except ValueError:
        address = -1
    if not 0 <= address < 2**64:
        raise ValueError("use the address of a cudaStream_t as an integer; 0 is the default stream")
    if address == _PER_THREAD_STREAM:
        raise ValueError("each thread has a different per-thread default stream; use the address of a new stream")
    return address


def _byte_budget(text: str) -> int | float | None:
    """Return a number of bytes as int, a share of a device's memory as float; None for 0, which means no limit."""
    given = text.strip()
    if match := re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%|(\d?\.\d+)", given):
        share = float(match[1]) / 100 if match[1] else float(match[2])
        if 0 < share <= 1:
            return share
    elif not given.startswith("-"):
        with contextlib.suppress(ValueError):
            nbytes = arena.read_limit(given)
            return None if nbytes == 2**63 - 1 else nbytes
    raise ValueError("use a number of bytes such as 2147483648 or 2G, a share of the device's memory such as 25%, or 0")


def name_or_number(names: tuple[str, ...]) -> Reader:
    """Return a reader of one of ``names``, in any case, or of its index among them."""
    choices = ", ".join(f"{name} ({number})" for number, name in enumerate(names))

    def parse_name(text: str) -> str:
        wanted = text.strip().upper()
        if wanted.isdecimal() and int(wanted) < len(names):
            return names[int(wanted)]
        if wanted not in names:
            raise ValueError(f"use one of {choices}")
        return wanted

    return Reader(parse_name, choices)


def count(least: int, most: int) -> Reader:
    """Return a reader of an integer from ``least`` to ``most``."""

    def parse_count(text: str) -> int:
        digits = text.strip()
        if not digits.removeprefix("-").isdecimal() or not least <= int(digits) <= most:
            raise ValueError(f"use a number from {least} to {most}")
        return int(digits)

    return Reader(parse_count, f"{least} to {most}" if most < 2**31 - 1 else f"a number from {least}")


def _no_function(text: str) -> None:
    """Read the address of an allocation function of the application, which must be 0."""
    if text.strip() not in ("", "0"):
        raise ValueError(
            "the plugin calls no allocation function of the application; leave the option out or use 0 "
            "(arena.use_cuda_mempool=1 takes device memory from CUDA's pool, gpu_mem_limit limits device memory)"
        )


BYTE_BUDGET = Reader(_byte_budget, "bytes such as `2G`, a share such as `25%`, or 0")
FLAG = Reader(parse_flag, "0, 1")
ORDINAL = Reader(_ordinal, "0, 1, ...")
ORDINALS = Reader(_ordinals, "`0,1`")
DEVICE_RULES = Reader(_rules, "`/encoder/*:0,/decoder/*:1`")
COUNT = count(0, 2**31 - 1)
STREAM = Reader(_stream, "an address")
FOLDER = Reader(_folder, "a folder")
ARCHITECTURES = Reader(_architectures, "`sm_80,sm_90,emulated`")
SHAPES = Reader(_shapes, "`x=1x3x224x224,y=8`, and `;` before further shapes")
NAMES = Reader(_names, "`auto,Pow,com.microsoft.Gelu,/layer.3/Add`")
NO_FUNCTION = Reader(_no_function, "0")
