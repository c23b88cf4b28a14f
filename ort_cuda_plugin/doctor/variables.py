"""Environment variables of the plugin that nothing reads, such as misspelled ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from .findings import Finding, Machine, warning

PREFIX = "ORT_CUDA_PLUGIN_"
VARIABLES = (
    "ORT_CUDA_PLUGIN_AS",
    "ORT_CUDA_PLUGIN_CACHE_DIR",
    "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE",
    "ORT_CUDA_PLUGIN_EMULATE",
    "ORT_CUDA_PLUGIN_EMULATE_CHECK",
    "ORT_CUDA_PLUGIN_EMULATE_DEVICES",
    "ORT_CUDA_PLUGIN_EMULATE_LOWERING",
    "ORT_CUDA_PLUGIN_EMULATE_MEMORY",
    "ORT_CUDA_PLUGIN_EMULATE_PROFILE",
    "ORT_CUDA_PLUGIN_EMULATE_SEED",
    "ORT_CUDA_PLUGIN_EMULATE_STREAMS",
    "ORT_CUDA_PLUGIN_EMULATE_WORKERS",
    "ORT_CUDA_PLUGIN_KERNEL_MANIFEST",
    "ORT_CUDA_PLUGIN_PYTHON",
    "ORT_CUDA_PLUGIN_VERIFY",
)
"""Those that the plugin reads."""


def variable_findings(machine: Machine) -> Iterator[Finding]:
    """A warning for each variable that begins like the plugin's and is none of them."""
    for name in sorted(machine.environment):
        if name.upper().startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.8)
            advice = f"did you mean {close[0]}?" if close else f"unset it; the variables are {', '.join(VARIABLES)}"
            yield warning("environment", f"{name}: the plugin has no such variable, and ignores it", advice)
