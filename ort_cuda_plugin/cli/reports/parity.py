"""Compare the kernel registry with that of the built-in CUDA execution provider, or of another provider."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ort_cuda_plugin.cli.common import output_file
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

if TYPE_CHECKING:
    from ort_cuda_plugin.conformance.parity import Kernel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="FILE|EP",
        help='a JSON file with {"kernels": [...]}, or an execution provider that onnxruntime has; by default this '
        "package's list of the built-in CUDA provider",
    )
    parser.add_argument("--json", action="store_true", help="print the kernels that the plugin lacks as a JSON list")
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the report (Markdown) to a file")


def execute(arguments: argparse.Namespace) -> int:
    import ort_cuda_plugin
    from ort_cuda_plugin.conformance.parity import gaps, names_of_host, packaged_digest, registered, render
    from ort_cuda_plugin.ep.nodes.kernel_registry import definitions_of_host

    if arguments.write and (arguments.against or arguments.json):
        raise UserError(
            ExitCode.USAGE,
            "--write: the report compares with the packaged list of kernels. Leave out --against and --json",
        )
    ort_cuda_plugin.register(emulate=True)
    ours = registered(ort_cuda_plugin.get_ep_name())
    other, theirs = _other(arguments.against) if arguments.against else packaged_digest()
    if arguments.json:
        print(
            json.dumps([{**asdict(gap), "reason": gap.reason} for gap in gaps(theirs, ours, names_of_host())], indent=1)
        )
        return 0
    definitions, _ = definitions_of_host()
    host_memory = sorted({definition.in_host_memory for definition in definitions} - {""})
    text = render(other, theirs, ours, host_memory)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _other(name: str) -> tuple[str, list[Kernel]]:
    """Return a provider's name and kernels, from a list in the file ``name`` or from the provider's registry.

    Raises UserError if ``name`` is neither such a file nor a provider.
    """
    from ort_cuda_plugin.conformance.parity import read_digest, registered

    path = Path(name)
    try:
        if path.is_file():
            return path.name, read_digest(path.read_text(encoding="utf-8"))
        return name, registered(name)
    except (OSError, ValueError) as error:
        raise UserError(ExitCode.USAGE, f"--against {name}: {error}") from None
    except RuntimeError as error:
        reason = f"neither a file nor a provider of this onnxruntime: {error}"
        raise UserError(ExitCode.USAGE, f"--against {name}: {reason}") from None
