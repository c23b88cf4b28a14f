"""Show the contents of a compiled model: plans with their guards, kernels, and bytes by kind.

FILE is a compiled model or a context file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ort_cuda_plugin.cli.common import output_console, output_file
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.context.describe import counts_of, describe
from ort_cuda_plugin.context.storage.container import MAGIC, Container
from ort_cuda_plugin.context.storage.errors import ContextError
from ort_cuda_plugin.context.storage.files import ModelFolder, open_context
from ort_cuda_plugin.plan.format import version as plan_version
from ort_cuda_plugin.plugin_library import EP_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a compiled model, or the context file beside one")
    parser.add_argument("--html", type=output_file, metavar="PAGE", help="write the tables to this file, as a web page")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object with an entry for each context instead of tables"
    )


def execute(arguments: argparse.Namespace) -> int:
    found = contexts(arguments.file)
    if arguments.html is not None:
        from ort_cuda_plugin.cli.models.inspect_page import page

        arguments.html.write_text(page(f"compiled model {arguments.file.name}", found), encoding="utf-8")
    print_contexts(found, as_json=arguments.json)
    return ExitCode.OK


def contexts(path: Path) -> dict[str, dict[str, Any]]:
    """Return what `describe` says of each context in a file, by the context's subject.

    Raises UserError if the file is damaged, or not a compiled model.
    """
    try:
        found = {container.subject: describe(container) for container in _containers(path)}
    except ContextError as error:
        raise UserError(ExitCode.MODEL_FAILED, str(error)) from error
    if not found:
        raise UserError(
            ExitCode.USAGE,
            f"{path} has no EPContext node of {EP_NAME}. Give a model that `ort-cuda-plugin compile` wrote, or its "
            "context file",
        )
    return found


def print_contexts(found: Mapping[str, dict[str, Any]], as_json: bool) -> None:
    """Print the contents of contexts, by their subjects."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = output_console()
    for subject, context in found.items():
        _print(console, subject, context)


def _containers(path: Path) -> Iterator[Container]:
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(ExitCode.USAGE, f"{path} cannot be read: {error.strerror or error}") from error
    if start == MAGIC:
        yield Container(open_context(ModelFolder.of(path), path.name), f"context file {path.name!r}")
        return
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise UserError(ExitCode.USAGE, f"{path} is neither a context file nor an ONNX model: {error}") from error
    files = set()
    for node in model.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type != "EPContext" or "source" not in attributes or attributes["source"].s != EP_NAME.encode():
            continue
        payload = attributes["ep_cache_context"].s if "ep_cache_context" in attributes else b""
        if "embed_mode" not in attributes or attributes["embed_mode"].i == 1:
            yield Container(payload, f"the context in node {node.name!r}")
        elif payload not in files:
            files.add(payload)
            name = payload.decode(errors="replace")
            yield Container(open_context(ModelFolder.of(path), name), f"context file {name!r}")


def _print(console: Console, subject: str, context: dict[str, Any]) -> None:
    console.print(f"{subject}, made by version {context['made_by']}", soft_wrap=True)
    sizes = ", ".join(f"{kind} {count}" for kind, count in context["bytes"].items())
    console.print(f"bytes: {sizes}", soft_wrap=True)
    for partition in context["partitions"]:
        console.print(f"cluster {partition['name']}: {partition['nodes']} nodes", soft_wrap=True)
        for way in ("inputs", "outputs"):
            console.print(f"  {way}: {', '.join(partition[way])}", soft_wrap=True)
        for target in partition["targets"]:
            counts = counts_of(target)
            made_by = f", made by CUDA {target['toolkit']}" if target["toolkit"] else ""
            console.print(f"  {target['arch']}: {counts}{made_by}", soft_wrap=True)
            if target["plan_version"] != plan_version:
                console.print(
                    f"    plans of version {target['plan_version']}, which this plugin cannot run: it runs version "
                    f"{plan_version}. Compile the model again",
                    soft_wrap=True,
                )
            for number, plan in enumerate(target["plans"]):
                steps = ", ".join(f"{count} {kind}" for kind, count in plan["steps"].items()) or "nothing"
                console.print(
                    f"    plan {number}: {steps}; where {' and '.join(plan['guards']) or 'always'}",
                    soft_wrap=True,
                )
            if target["schedules"]:
                console.print(f"    schedules: {', '.join(target['schedules'])}", soft_wrap=True)
            for failure in target["failures"]:
                console.print(f"    no plan for {failure}", soft_wrap=True)
    table = Table("kernel", "architecture", "bytes", "registers", "shared bytes")
    for kernel in context["kernels"]:
        registers = "" if kernel["registers"] is None else str(kernel["registers"])
        table.add_row(kernel["name"], kernel["arch"], str(kernel["bytes"]), registers, str(kernel["shared_bytes"]))
    console.print(table)
