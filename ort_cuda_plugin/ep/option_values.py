"""How the values of options are read. Each function takes the text and raises ValueError with what to use instead."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from ..compiler.targets import Target
from ..compiler.toolchain import OF_EVERY_TOOLKIT

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD

LOG_LEVELS = ("VERBOSE", "INFO", "WARNING", "ERROR", "FATAL")
ALGORITHM_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")  # in the order of ORT's numbers


def flag(text: str) -> bool:
    if text.strip().lower() in ("1", "true"):
        return True
    if text.strip().lower() in ("0", "false"):
        return False
    raise ValueError("use 1 or 0")


def architectures(text: str) -> tuple[Target, ...]:
    targets = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        match = re.fullmatch(r"sm_(\d+)(\d)", name)
        if match is None and name != "emulated":
            raise ValueError("use names such as sm_90, and emulated, with commas between them")
        if match and (int(match[1]), int(match[2])) < OF_EVERY_TOOLKIT[0]:
            oldest = "sm_{}{}".format(*OF_EVERY_TOOLKIT[0])
            raise ValueError(f"CUDA 13 does not compile for {name}: use {oldest} or a newer one")
        targets.append(Target.cuda(int(match[1]), int(match[2])) if match else Target.emulated())
    return tuple(targets)


Shapes = tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
"""Alternatives, each of which has shapes of some inputs by name."""


def shapes(text: str) -> Shapes:
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


def ordinal(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("use a CUDA ordinal: 0, 1, ...")
    return int(text)


def folder(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError("use a folder that exists")
    return os.path.abspath(text)


def stream(text: str) -> int:
    try:
        address = int(text, 0)
    except ValueError:
        address = -1
    if not 0 <= address < 2**64:
        raise ValueError("use the address of a cudaStream_t as an integer; 0 is the default stream")
    if address == _PER_THREAD_STREAM:
        raise ValueError("each thread has a different per-thread default stream; create a stream")
    return address


def name_or_number(names: tuple[str, ...]) -> Callable[[str], str]:
    """One of ``names`` in any case, or its place among them."""

    def parse_name(text: str) -> str:
        wanted = text.strip().upper()
        if wanted.isdecimal() and int(wanted) < len(names):
            return names[int(wanted)]
        if wanted not in names:
            choices = ", ".join(f"{name} ({number})" for number, name in enumerate(names))
            raise ValueError(f"use one of {choices}")
        return wanted

    return parse_name


def count(least: int, most: int) -> Callable[[str], int]:
    def parse_count(text: str) -> int:
        digits = text.strip()
        if not digits.removeprefix("-").isdecimal() or not least <= int(digits) <= most:
            raise ValueError(f"use a number from {least} to {most}")
        return int(digits)

    return parse_count


def no_function(text: str) -> None:
    """The address of a function of the application's, of which none can be used."""
    if text.strip() not in ("", "0"):
        raise ValueError(
            "device memory comes from the plugin's arena only; leave it out or use 0 (arena.use_cuda_mempool=1 takes "
            "memory from CUDA's pool instead, gpu_mem_limit limits it)"
        )
