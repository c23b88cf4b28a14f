"""Arena options. ``csrc_shim/device/arena_options.c`` has the keys and checks the values.

The plugin generates the table of arena options in docs/options.md from `ROWS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...abi.core import check, core, ffi, lib, new_error
from ..device.devices import DeviceInfo

PREFIX = "arena."


@dataclass(frozen=True)
class ArenaRow:
    """A row of the table of arena options in docs/options.md. The C code checks the values."""

    key: str
    default: str
    text: str


ROWS = (
    ArenaRow(
        "arena.extend_strategy",
        "0",
        "size of a new region of the arena. 0: twice that of the region before. 1: what the request needs",
    ),
    ArenaRow("arena.initial_chunk_size_bytes", "1048576", "bytes of the first region"),
    ArenaRow(
        "arena.max_dead_bytes_per_chunk",
        "134217728",
        "if the unused end of a chunk has at least this number of bytes, or more than an eighth of the requested "
        "bytes, the arena splits the end off as a free chunk",
    ),
    ArenaRow("arena.initial_growth_chunk_size_bytes", "2097152", "bytes of the first region after a shrink"),
    ArenaRow(
        "arena.max_power_of_two_extend_bytes",
        "1073741824",
        "maximum bytes of a region whose size comes from doubling. This maximum is also at most a 16th of the "
        "device's memory. A larger request gets a region of its own size",
    ),
    ArenaRow("arena.max_mem", "0", "bytes that the arena may hold, including weights. 0: no limit"),
    ArenaRow("arena.use_cuda_mempool", "0", "1: CUDA's stream-ordered pool serves device memory instead of the arena"),
    ArenaRow(
        "arena.cuda_mempool_release_threshold",
        "0",
        "unused bytes that the pool keeps when a stream is synchronized (CUDA's release threshold). Needs "
        "`arena.use_cuda_mempool=1`",
    ),
    ArenaRow(
        "arena.cuda_mempool_bytes_to_keep_on_shrink",
        "0",
        "unused bytes that the pool keeps when the run option `memory.enable_memory_arena_shrinkage` or "
        "`ort_cuda_plugin.trim` shrinks it. Needs `arena.use_cuda_mempool=1`",
    ),
    ArenaRow("gpu_mem_limit", "0", "CUDAExecutionProvider's name for `arena.max_mem` of device memory"),
    ArenaRow("arena_extend_strategy", "0", "CUDAExecutionProvider's name for `arena.extend_strategy` of device memory"),
)
"""The options of an arena, in the order of C's table, and their names in the CUDA execution provider."""

#: Keys of the CUDA execution provider for its arena of device memory.
CUDA_PROVIDER_KEYS = {"gpu_mem_limit": "arena.max_mem", "arena_extend_strategy": "arena.extend_strategy"}


@cache
def keys() -> tuple[str, ...]:
    """Return all keys of an arena's options."""
    return tuple(re.findall(rf"{PREFIX}\w+", check_options({"": ""})))


def check_options(values: Mapping[str, str]) -> str:
    """Return the error that C finds in options of an arena, "" if they are valid."""
    error, (keys, texts) = new_error(), _strings(values)
    core().arena_check(keys, texts, len(keys), error)
    return ffi.string(error.text).decode(errors="replace") if error.code else ""


def takes(key: str) -> str:
    """Return the values that a key takes, in the words of C's error."""
    return check_options({CUDA_PROVIDER_KEYS.get(key, key): "?"}).partition(": it takes ")[2]


def read_limit(text: str) -> int:
    """Parse a limit such as 2147483648 or 2G into bytes. For 0, which means no limit, return 2**63 - 1.

    Raises: ValueError: the text is not a limit; the message says what to use.
    """
    error, nbytes = new_error(), ffi.new("int64_t *")
    if core().arena_read_limit(text.encode(errors="replace"), nbytes, error):
        raise ValueError("use a number of bytes such as 2147483648 or 2G, and 0 for no limit")
    return int(nbytes[0])


def configure(info: DeviceInfo, memory: int, values: Mapping[str, str]) -> str:
    """Apply options to the arena of ``memory``, one of the kinds in `ep.factory`, on a device. Return a warning if the
    arena exists with other options, else "".

    Raises:
        PluginError: a key is unknown, or a value is invalid.
    """
    warning, error, (keys, texts) = ffi.new("char[]", lib.OCP_ARENA_WARNING_BYTES), new_error(), _strings(values)
    core().arena_configure(info.emulated, info.ordinal, memory, keys, texts, len(keys), warning, error)
    check(error)
    return str(ffi.string(warning).decode(errors="replace"))


def set_limit(info: DeviceInfo, memory: int, nbytes: int) -> None:
    """Set the maximum bytes that the arena of ``memory`` may hold from now on; 0: no limit.

    Raises:
        PluginError: there is no such device.
    """
    error = new_error()
    core().arena_set_limit(info.emulated, info.ordinal, memory, nbytes, error)
    check(error)


def _strings(values: Mapping[str, str]) -> tuple[list[Any], list[Any]]:
    """Return keys and values as lists of C strings, which cffi converts to arrays. The strings live as long as the
    lists.
    """
    return [ffi.new("char[]", key.encode()) for key in values], [ffi.new("char[]", v.encode()) for v in values.values()]
