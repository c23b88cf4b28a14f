"""The table of environment variables, and warnings about variables that nothing reads, such as misspelled ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..abi.message_texts import did_you_mean, similar
from ..ep.options.option_documents import markdown_table
from .findings import Finding, Machine, warning

PREFIX = "ORT_CUDA_PLUGIN_"
_CUTOFF = 0.8
"""Least similarity of a suggested variable. It exceeds `did_you_mean`'s default, because all names share `PREFIX`."""


@dataclass(frozen=True)
class Variable:
    """An environment variable: ``takes`` describes its allowed values, ``default`` its value if it is not set."""

    name: str
    takes: str
    default: str
    text: str


GENERAL = (
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE",
        "0, 1",
        "0",
        "1: each registration of the plugin library offers the emulated device besides the GPUs",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_AS",
        "`CudaPluginExecutionProvider`, `CUDAExecutionProvider`",
        "`CudaPluginExecutionProvider`",
        "the execution provider name under which the plugin offers its devices to ONNX Runtime",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_CACHE_DIR",
        "an absolute path",
        "`ort-cuda-plugin` in the user's cache folder",
        "the folder of the kernel cache. It holds compiled kernels, their LLVM IR, measured times and cuDNN's "
        "execution plans. Only you and root may have permission to write to the folder or to replace it",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE",
        "0, 1",
        "0",
        "1: in every session of the process, the emulated device runs the machine code that [compiled "
        "models](compiled_models.md) hold",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_PYTHON",
        "an absolute path",
        "",
        "the Python interpreter that the plugin starts in an application in C, C++, C# or Java, if it finds none in "
        "the environment that contains the plugin library ([hosts.md](hosts.md))",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_PROGRESS",
        "0, 1",
        "",
        "0: neither commands nor sessions show the progress of long work. 1: all sessions of the process show it, as "
        "with the option `progress=1`. Not set: commands show it, and sessions with this option "
        "([profiling.md](profiling.md#progress-of-long-work))",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_KERNEL_MANIFEST",
        "a file",
        "",
        "the plugin appends a line of JSON to this file for each kernel that a session needs. `ort-cuda-plugin kernels "
        "--manifest FILE` compiles these kernels, also on another machine",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_VERIFY",
        "0, 1",
        "0",
        "1: the plugin verifies the program of each fused node after each compiler pass "
        "([invariants.md](invariants.md)). If an invariant does not hold, an error names the pass and the step",
    ),
)
"""Variables of every device."""

FLAGS = tuple(row.name for row in GENERAL if row.takes == "0, 1")
"""The variables of every device that are booleans."""

EMULATED = (
    Variable("ORT_CUDA_PLUGIN_EMULATE_DEVICES", "1 to 8", "1", "number of emulated devices"),
    Variable("ORT_CUDA_PLUGIN_EMULATE_MEMORY", "bytes, such as 512M or 16G", "16G", "memory of each device"),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_WORKERS",
        "0 to 1024",
        "0",
        "number of host threads that execute thread blocks of kernels. 0: one thread for each CPU that the process may "
        "use",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS",
        "`inline`, `adversarial`",
        "`inline`",
        "`inline` runs a kernel or copy at once when it is enqueued. `adversarial` defers the work of all "
        "streams until the host waits for a stream, and then interleaves the streams in a random order",
    ),
    Variable("ORT_CUDA_PLUGIN_EMULATE_SEED", "a number", "0", "seed of the random order of `adversarial` streams"),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_SEMAPHORE_SECONDS",
        "1 to 86400",
        "60",
        "longest wait for an external semaphore or another process's event, in seconds; then the emulated device is "
        "lost ([external_resources.md](external_resources.md))",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_CHECK",
        "0, 1",
        "0",
        "1: kernels run in checking mode, which reports wrong accesses to memory, wrong barriers and missing waits. "
        "The plugin also verifies programs as with `ORT_CUDA_PLUGIN_VERIFY=1`",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_LOWERING",
        "an architecture such as `sm_90`; `sm_90:114` with the number of multiprocessors; or `sm_90:ptx`",
        "",
        "the emulated device runs the kernels that the plugin generates for a GPU of this architecture without "
        "cuBLASLt and cuDNN. There is one difference: where the GPU rounds operands to TF32, they stay float32. With "
        "`:ptx` the emulated device executes the PTX of these kernels",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_PROFILE",
        "a file",
        "",
        "the emulated device appends a line to this file for each kernel launch: kernel, grid, block, nanoseconds",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_LIBRARIES",
        "a folder",
        "",
        "for tests: the emulated device offers the stand-ins of cuBLASLt and cuDNN in this folder, `libcublaslt.so` "
        "and `libcudnn.so`, which are compiled from `tests/c`",
    ),
    Variable(
        "ORT_CUDA_PLUGIN_EMULATE_FAULTS",
        "settings, separated by semicolons",
        "",
        "for tests of the plugin's checks: faults of the emulated device. `kernel=matmul_*`: after each launch of a "
        "kernel whose name matches this shell pattern, one element of each result is wrong. `idle=matmul_*`: a launch "
        "of a kernel whose name matches does nothing. `unsupported=MemPoolCreate,GraphInstantiate`: these driver calls "
        "return CUDA_ERROR_NOT_SUPPORTED. `exclusive=1`: another process has the device. `capability=7.5`, "
        "`driver=12.8`, `multiprocessors=16` and `name=TEXT` set properties of the device. A warning on the standard "
        "error lists the faults",
    ),
)
"""Variables of the emulated device."""

VARIABLES = tuple(sorted(variable.name for variable in (*GENERAL, *EMULATED)))
"""Names of all variables that the plugin reads."""


def variable_tables() -> dict[str, str]:
    """Return the tables of environment variables in Markdown, by their names in documents."""
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
            question = did_you_mean(name.upper(), VARIABLES, cutoff=_CUTOFF)
            advice = question or f"unset it; the variables are {', '.join(VARIABLES)}"
            text = f"{name}: the plugin reads no variable of this name, and ignores it"
            close = similar(name.upper(), VARIABLES, cutoff=_CUTOFF)
            yield warning("environment", text, advice, *_renamed(machine, name, close[0] if close else ""))


def _renamed(machine: Machine, name: str, close: str) -> Iterator[str]:
    """Yield commands that move the value to the variable ``close``, if that is not set, and unset ``name``."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):  # a shell cannot name it, and would run parts of it
        return
    if close and close not in machine.environment:
        yield f'export {close}="${name}"'
    yield f"unset {name}"
