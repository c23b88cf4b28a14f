"""The table of environment variables, and warnings about variables that nothing reads, such as misspelled ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from ..ep.options.option_documents import markdown_table
from .findings import Finding, Machine, warning

PREFIX = "ORT_CUDA_PLUGIN_"


@dataclass(frozen=True)
class Variable:
    """A row of the table: ``takes`` describes the allowed values, ``default`` the value if the variable is not set."""

    name: str
    takes: str
    default: str
    text: str


GENERAL = (
    Variable("ORT_CUDA_PLUGIN_EMULATE", "0, 1", "0", "1: a plain registration offers the emulated device as well"),
    Variable(
        "ORT_CUDA_PLUGIN_AS",
        "`CudaPluginExecutionProvider`, `CUDAExecutionProvider`",
        "`CudaPluginExecutionProvider`",
        "name of the execution provider under which registrations offer the devices",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_CACHE_DIR",
        "an absolute path",
        "`ort-cuda-plugin` in the user's cache folder",
        "folder of compiled kernels, their IR, measured times and cuDNN's plans. Other users must not be able to write "
        "to it or replace it",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE",
        "0, 1",
        "0",
        "1: the emulated device runs machine code of [compiled models](compiled_models.md), in every session of the "
        "process",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_PYTHON",
        "an absolute path",
        "found from the library's path",
        "Python interpreter for hosts without Python ([hosts.md](hosts.md))",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_KERNEL_MANIFEST",
        "a file",
        "",
        "gets a line of JSON for each kernel that is requested, from which a cache can be filled elsewhere",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_VERIFY",
        "0, 1",
        "0",
        "1: programs are verified after each pass of the compiler ([invariants.md](invariants.md)); an error names the "
        "pass and the step",
    ),
)
"""Variables of every device."""

EMULATED = (
    Variable("ORT_CUDA_PLUGIN_EMULATE_DEVICES", "1 to 8", "1", "number of emulated devices"),
    Variable("ORT_CUDA_PLUGIN_EMULATE_MEMORY", "bytes, such as 512M or 16G", "16G", "memory of each device"),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_WORKERS",
        "0 to 1024",
        "0",
        "threads that run blocks; 0: one for each CPU of the process",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS",
        "`inline`, `adversarial`",
        "`inline`",
        "`inline` runs work when it is enqueued. `adversarial` defers it until the program waits, and interleaves the "
        "streams by the seed",
    ),
    Variable("ORT_CUDA_PLUGIN_EMULATE_SEED", "a number", "0", "seed of `adversarial` streams"),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_CHECK",
        "0, 1",
        "0",
        "1: kernels check every access, barrier and missing wait, and programs are verified",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_LOWERING",
        "`sm_90`, `sm_90:114` with a number of multiprocessors, or `sm_90:ptx`",
        "",
        "the emulated device runs the kernels that such a GPU without cuBLASLt and cuDNN would get, but keeps float32 "
        "where the GPU rounds to TF32; with `:ptx` it executes their PTX",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_PROFILE",
        "a file",
        "",
        "each kernel launch appends a line: kernel, grid, block, nanoseconds",
    ),
)
"""Variables of the emulated device."""

VARIABLES = tuple(sorted(variable.name for variable in (*GENERAL, *EMULATED)))
"""Names of all variables that the plugin reads."""


def variable_tables() -> dict[str, str]:
    """Return the tables in Markdown, by their names in documents."""
    return {
        title: markdown_table(
            ("variable", "takes", "default", "meaning"),
            ((f"`{each.name}`", each.takes, each.default, each.text) for each in rows),
        )
        for title, rows in (("environment variables", GENERAL), ("variables of the emulated device", EMULATED))
    }


def variable_findings(machine: Machine) -> Iterator[Finding]:
    """Warn about each variable with the plugin's prefix that the plugin does not know."""
    for name in sorted(machine.environment):
        if name.upper().startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.8)
            advice = f"did you mean {close[0]}?" if close else f"unset it; the variables are {', '.join(VARIABLES)}"
            yield warning("environment", f"{name}: the plugin has no such variable, and ignores it", advice)
