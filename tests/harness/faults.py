"""Makes chosen calls fail: of the emulated device's driver, of stand-in libraries, and the plugin's calls of libc.

A process creates one `Faults`; `arm` says which call of which function fails, how and for how long. The implementation
is ``tests/c/faults.c``, which wraps these functions; the plugin has no code for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_plugin import SOURCES, all_headers, compiler
from ort_cuda_plugin.abi.core import LIBRARY_PATH, core, ffi

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "c" / "faults.c"
HOST_FUNCTIONS = ("malloc", "calloc", "realloc", "strdup", "mmap", "pthread_create", "pthread_setspecific")
TEXTS = {"GetErrorName", "GetErrorString"}
"""Driver functions without injected faults: they return the text of an error code."""

OUT_OF_MEMORY, LAUNCH_FAILED, UNKNOWN = 2, 719, 999
ERROR_NAMES = {
    OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    LAUNCH_FAILED: "CUDA_ERROR_LAUNCH_FAILED",
    UNKNOWN: "CUDA_ERROR_UNKNOWN",
}
MODES = {"once": 0, "on": 1, "end": 1, "lost": 2}
"""Duration of a fault: "once" is one call, "on" all calls until the application tries again, "end" all calls until the
sessions end; "lost" makes the device lost.
"""


@dataclass(frozen=True)
class Fault:
    """One fault: the ``at``-th call (from 1) of a function returns ``error``; see `MODES`.

    With ``effect`` the call does its work and still returns the error, as calls that report errors of earlier work do.
    """

    function: str
    at: int
    error: int
    mode: str
    effect: bool = False

    def __str__(self) -> str:
        return f"{self.function}:{self.at}:{self.error}:{self.mode}{':effect' if self.effect else ''}"

    @staticmethod
    def parse(text: str) -> Fault:
        function, at, error, mode, *effect = text.split(":")
        return Fault(function, int(at), int(error), mode, effect == ["effect"])


def driver_members() -> list[tuple[str, str]]:
    """Return name and parameters of each function in the plugin's table of driver functions, in the header's order."""
    text = re.sub(r"/\*.*?\*/", "", (SOURCES / "driver" / "driver.h").read_text(), flags=re.S)
    body = re.search(r"typedef struct ocp_driver \{(.*?)\} ocp_driver;", text, flags=re.S)
    assert body is not None
    return re.findall(r"CUresult \(\*(\w+)\)\(([^;]*)\);", body[1])


def library_functions() -> list[str]:
    """Return the functions of the fake vendor libraries that may fail."""
    texts = [path.read_text() for path in sorted(SOURCE.parent.glob("fake_cu*.c"))]
    return [name for text in texts for name in re.findall(r"^int (\w+)\([^{;]*\) \{\n  MAY_FAIL", text, flags=re.M)]


def driver_header() -> str:
    """Return the text of faults_driver.h: a number for each function, and wrappers of the driver functions that may
    fail.
    """
    members = driver_members()
    lines = ["enum {", *(f"  FAULT_{name}," for name in (*(name for name, _ in members), *HOST_FUNCTIONS)), "};"]
    for name, parameters in members:
        arguments = [] if parameters == "void" else [re.findall(r"\w+", p)[-1] for p in parameters.split(",")]
        call = f"real.{name}({', '.join(arguments)})"
        lines += [
            f"static CUresult faulty_{name}({parameters}) {{",
            f"  const int code = strikes(FAULT_{name});",
            "  if (!code)",
            f"    return {call};",
            "  if (has_effect())",
            f"    (void){call};",
            "  return code;",
            "}",
        ]
    lines += ["static const struct {", "  size_t offset;", "  void (*function)(void);", "} driver_functions[] = {"]
    lines += [f"    {{offsetof(ocp_driver, {name}), (void (*)(void))faulty_{name}}}," for name, _ in members]
    lines += ["};", "enum { NUM_DRIVER_FUNCTIONS = sizeof driver_functions / sizeof *driver_functions };"]
    first = len(members) + len(HOST_FUNCTIONS)
    names = library_functions()
    lines += [f"enum {{ FIRST_LIBRARY_FUNCTION = {first}, NUM_LIBRARY_FUNCTIONS = {len(names)} }};"]
    lines += ["static const char *const library_functions[] = {", *(f'    "{name}",' for name in names), "};", ""]
    return "\n".join(lines)


def build() -> Path:
    """Compile faults.c to a shared library, cached by its sources, the plugin's headers and the compiler."""
    header = driver_header()
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type", "-O1", "-g", "-fPIC", "-shared"]
    flags += ["-fvisibility=hidden", "-pthread"]
    parts = (compiler(), flags, SOURCE.read_bytes(), header, all_headers())
    folder = ROOT / "build" / "faults" / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    target = folder / "faults.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may build it at the same time
            partial = Path(own) / target.name
            (Path(own) / "faults_driver.h").write_text(header)
            subprocess.run([*compiler(), *flags, f"-I{own}", f"-I{SOURCES}", SOURCE, "-o", partial], check=True)
            partial.replace(target)
    return target


@dataclass(frozen=True)
class Usage:
    """Live resources of an emulated device: its objects, bytes of its memory, blocks of the library's host memory."""

    objects: int
    device_bytes: int
    host_blocks: int


class Faults:
    """Injects faults into this process. Create only one object in a process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))
        self.functions = [*(name for name, _ in driver_members()), *HOST_FUNCTIONS, *library_functions()]
        self._library.faults_calls.restype = ctypes.c_long
        self._library.faults_fired.restype = ctypes.c_long
        self._library.faults_locks.restype = ctypes.c_long
        table = int(ffi.cast("uintptr_t", core().driver_emulator()))
        if self._library.faults_install(ctypes.c_void_p(table)):
            raise RuntimeError("the driver's table cannot be exchanged")

    def arm(self, fault: Fault | None) -> None:
        """Start counting calls; the call that ``fault`` describes fails."""
        if fault is None:
            self._library.faults_arm(-1, ctypes.c_long(0), 0, 0, 0)
            return
        self._library.faults_arm(
            self.functions.index(fault.function),
            ctypes.c_long(fault.at),
            fault.error,
            MODES[fault.mode],
            int(fault.effect),
        )

    def disarm(self) -> None:
        """Stop injecting; keep the counts."""
        self._library.faults_disarm()

    def calls(self) -> dict[str, int]:
        """Return how often each function was called since `arm`, without zeros."""
        counts = {name: self._library.faults_calls(index) for index, name in enumerate(self.functions)}
        return {name: count for name, count in counts.items() if count and name not in TEXTS}

    def may_fail(self, library: ctypes.CDLL) -> None:
        """Make the calls of a stand-in library fail as `arm` says, from now on."""
        asks = ctypes.cast(self._library.faults_library_fails, ctypes.c_void_p)
        ctypes.c_void_p.in_dll(library, "fake_fails").value = asks.value

    @property
    def fired(self) -> int:
        """Return how many calls failed since `arm`."""
        return int(self._library.faults_fired())

    @property
    def locks(self) -> int:
        """Return how many mutexes the library locked since `arm`."""
        return int(self._library.faults_locks())

    def frames(self) -> list[int]:
        """Return the stack of the first failed call, as offsets in the plugin's library, the innermost first."""
        offsets = (ctypes.c_uint64 * 16)()
        count = self._library.faults_callers(offsets, len(offsets))
        return list(offsets[:count])

    @staticmethod
    def places(frames: Sequence[int]) -> list[str]:
        """Return function and source line of each of `frames`."""
        addresses = [hex(offset) for offset in frames]
        if not addresses:
            return []
        command = ["addr2line", "-f", "-e", str(LIBRARY_PATH), *addresses]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        places = [place.removeprefix(f"{SOURCES}/") for place in lines[1::2]]
        return [f"{name} ({place})" for name, place in zip(lines[::2], places, strict=True)]

    def usage(self, device: object) -> Usage:
        """Return the usage of an ``ocp_device *``."""
        values = (ctypes.c_int64 * 3)()
        self._library.faults_usage(_pointer(device), values)
        return Usage(*values)

    def is_lost(self, device: object) -> bool:
        """Return whether the driver reports the device as lost."""
        return bool(self._library.faults_device_lost(_pointer(device)))

    def heal(self, device: object) -> None:
        """Make a lost device work again. Outside of tests only a new process can do that."""
        self._library.faults_heal(_pointer(device))


def _pointer(device: object) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", device)))
