"""Options of the arenas: ``csrc_shim/device/arena_options.c`` knows their keys and checks their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..abi.core import check, core, ffi, lib, new_error
from .devices import DeviceInfo

PREFIX = "arena."

#: Keys of the CUDA execution provider for its arena of device memory.
CUDA_PROVIDER_KEYS = {"gpu_mem_limit": "arena.max_mem", "arena_extend_strategy": "arena.extend_strategy"}


@cache
def keys() -> tuple[str, ...]:
    """All keys of an arena's options."""
    return tuple(re.findall(rf"{PREFIX}\w+", check_options({"": ""})))


def check_options(values: Mapping[str, str]) -> str:
    """What is wrong with options of an arena; "" when nothing is."""
    error, (keys, texts) = new_error(), _strings(values)
    core().arena_check(keys, texts, len(keys), error)
    return ffi.string(error.text).decode(errors="replace") if error.code else ""


def read_limit(text: str) -> int:
    """The bytes that ``text`` means as a limit, as 2147483648 or 2G; 2**63 - 1: no limit.

    Raises:
        ValueError: it means none; the message says what to use.
    """
    error, nbytes = new_error(), ffi.new("int64_t *")
    if core().arena_read_limit(text.encode(errors="replace"), nbytes, error):
        raise ValueError("use a number of bytes such as 2147483648 or 2G, and 0 for no limit")
    return int(nbytes[0])


def configure(info: DeviceInfo, memory: int, values: Mapping[str, str]) -> str:
    """Gives the arena of a device's memory these options; a warning where it lives with others, or "".

    Raises:
        PluginError: a key is unknown, or its value is not one that it takes.
    """
    warning, error, (keys, texts) = ffi.new("char[]", lib.OCP_ARENA_WARNING_BYTES), new_error(), _strings(values)
    core().arena_configure(info.emulated, info.ordinal, memory, keys, texts, len(keys), warning, error)
    check(error)
    return str(ffi.string(warning).decode(errors="replace"))


def set_limit(info: DeviceInfo, memory: int, nbytes: int) -> None:
    """The most bytes that the arena may hold from now on; 0: no limit.

    Raises:
        PluginError: there is no such device.
    """
    error = new_error()
    core().arena_set_limit(info.emulated, info.ordinal, memory, nbytes, error)
    check(error)


def _strings(values: Mapping[str, str]) -> tuple[list[Any], list[Any]]:
    """Keys and values as C strings, which live as long as the lists; cffi makes arrays of the lists."""
    return [ffi.new("char[]", key.encode()) for key in values], [ffi.new("char[]", v.encode()) for v in values.values()]
