"""Show each node of a model, where it runs, and the reason."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ort_cuda_plugin
from ort_cuda_plugin import get_ep_name
from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.api import placement
from ort_cuda_plugin.cli.common import (
    add_model_arguments,
    check_types,
    model_path,
    named_values,
    output_console,
    output_file,
    provider_options,
    read_model,
    shape,
    usual_sizes,
    waiting,
)
from ort_cuda_plugin.cli.devices import select_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.models.explain_page import page, place
from ort_cuda_plugin.cli.models.kernel_texts import checked_accesses, checked_run, ptx_of, specs_of
from ort_cuda_plugin.cli.models.program_page import KernelTexts
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.ep.nodes.plan_history import PlanVariant, built_after
from ort_cuda_plugin.ep.provider import last_provider
from ort_cuda_plugin.gpus import Gpu
from ort_cuda_plugin.model.ir import Array
from ort_cuda_plugin.models import random_inputs, with_input_shapes
from ort_cuda_plugin.plan.placement import StreamingSchedule
from ort_cuda_plugin.program.analysis.plan_record import read_plans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--program",
        action="store_true",
        help="print the program of each compiled cluster, and what each compiler pass changed, instead of the table of"
        " nodes",
    )
    what.add_argument(
        "--plans",
        action="store_true",
        help="run the model with each of --shapes, and print which plans (compiled programs) the plugin "
        "builds, and why",
    )
    what.add_argument(
        "--weight-budget",
        metavar="BYTES",
        help="print which weights each Run copies to the device if the option weight_budget has this value, such as 8G"
        " or 25%%, and the time that the copies take",
    )
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="NAME=1x3x224x224[,...]",
        help="with --plans or --program: shapes of the inputs of a Run (repeatable: one Run each); with --check: shapes"
        " of the checked Run. Dimensions without a given size are 1",
    )
    what.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="write a web page to this file: the graph with clusters and copies, what each pass changed, and each step"
        " with its kernel",
    )
    parser.add_argument(
        "--ptx",
        metavar="SM",
        help="print the PTX of each kernel for this GPU architecture, such as sm_90; with --html: show it on the page",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="with --html: run the model with random inputs on the emulated device, check each access to memory, and"
        " show the accesses and the findings of each kernel",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a provider option, such as device_ids=0,1"
    )
    parser.add_argument("--declined", action="store_true", help="print only nodes that the plugin does not run")
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="with --program: measure candidate kernels of matrix products, convolutions and attention, and tactics of"
        " custom operators. If sizes are unknown before a Run, add --shapes",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    _refuse_what_says_nothing(arguments)
    emulate = select_device(arguments.device)
    options = provider_options(arguments.option)
    if arguments.program:
        options |= {"autotune": "1"} if arguments.autotune else {}
        return _print_programs(arguments.model, path, emulate, options, arguments.shapes)
    if arguments.weight_budget is not None:
        budget = {"weight_budget": arguments.weight_budget}
        return _print_streaming(arguments.model, path, emulate, {**options, **budget})
    if arguments.plans:
        return _print_plans(arguments.model, path, emulate, arguments.shapes, options)
    try:
        with tempfile.TemporaryDirectory() as folder, waiting(Console(stderr=True), "creating the session"):
            has_kernels = arguments.html is not None or arguments.ptx is not None
            settings = {**options, "program_folder": folder} if has_kernels else options
            found = placement(path, emulate=emulate, provider_options=settings)
            plans = read_plans(Path(folder))
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {error}") from error
    verdicts = found.verdicts
    line = f"{sum(verdict.supported for verdict in verdicts)} of {len(verdicts)} nodes run on {get_ep_name()}"
    if arguments.html is not None:
        texts = _kernel_texts(arguments, path, emulate, list(plans.values()))
        lines = [line, *([f"checked Run: {texts.sizes}"] if texts.sizes else [])]
        text = page(f"{path.stem}: where its nodes run", found, plans, lines, texts)
        arguments.html.write_text(text, encoding="utf-8")
        for each in lines[1:]:
            print(printable(each), file=sys.stderr)
    elif arguments.ptx is not None:
        return _print_ptx(specs_of(plans.values()), arguments.ptx)
    shown = [verdict for verdict in verdicts if not (arguments.declined and verdict.supported)]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in shown], indent=2))
        return ExitCode.OK
    table = Table("node", "operator", "runs on", "reason")
    for verdict in shown:
        operator = f"{verdict.domain or 'ai.onnx'}.{verdict.op_type}-{verdict.since_version}"
        name = f"{verdict.label} in {verdict.body_of}" if verdict.body_of else verdict.label
        table.add_row(name, operator, place(verdict), verdict.reason or verdict.note)
    console = output_console()
    console.print(table)
    console.print(line)
    return ExitCode.OK


def _kernel_texts(
    arguments: argparse.Namespace, path: Path, emulate: bool, plans: Sequence[Mapping[str, Any]]
) -> KernelTexts:
    """Return what --ptx and --check add to the page: the PTX of kernels, and their checked memory accesses."""
    specs = specs_of(plans)
    with waiting(Console(stderr=True), "compiling for the page"):
        ptx = ptx_of(specs, arguments.ptx) if arguments.ptx else {}
        accesses = checked_accesses(specs) if arguments.check else {}
    if not arguments.check:
        return KernelTexts(arguments.ptx or "", ptx)
    if not emulate:
        raise UserError(ExitCode.USAGE, "--check needs the emulated device: use --device emulated")
    given = _feeds(arguments.model, path, arguments.shapes) if arguments.shapes else []
    with waiting(Console(stderr=True), "running in the checking mode"):
        finding = checked_run(path, arguments.operators or (), given[0] if given else {})
    sizes = (
        _shown(given[0]) if given else "random inputs; sizes that the model leaves open are 1 (--shapes changes them)"
    )
    return KernelTexts(arguments.ptx or "", ptx, accesses, is_checked=True, finding=finding, sizes=sizes)


def _print_ptx(specs: Sequence[KernelSpec], architecture: str) -> int:
    """Print the PTX of kernels that GPUs run."""
    with waiting(Console(stderr=True), "compiling"):
        texts = ptx_of(specs, architecture)
    for spec in specs:
        said = texts.get(spec, f"// no PTX for {architecture}: a kernel of the emulated device only")
        print(printable(f"// {spec.symbol}({', '.join(spec.signature)})"))
        print(printable(said))
    if not specs:
        print("No kernels: the plugin builds the plans of this model in its first Run. Give its inputs static shapes.")
    return ExitCode.OK


def _refuse_what_says_nothing(arguments: argparse.Namespace) -> None:
    if arguments.shapes and not (arguments.plans or arguments.program or arguments.check):
        raise UserError(
            ExitCode.USAGE,
            "--shapes: only --plans, --program and --check use these shapes. Add one of them, or leave out --shapes",
        )
    if arguments.check and arguments.html is None:
        raise UserError(ExitCode.USAGE, "--check adds sections to the web page of --html. Add --html FILE")
    if arguments.check and len(arguments.shapes) > 1:
        raise UserError(
            ExitCode.USAGE,
            f"--check: got {len(arguments.shapes)} times --shapes, expected one Run: name all inputs in one --shapes, "
            "as in --shapes x=2x3,y=4",
        )
    if arguments.autotune and not arguments.program:
        raise UserError(ExitCode.USAGE, "--autotune: only --program shows its effect. Add --program")
    is_table = not (arguments.program or arguments.plans or arguments.weight_budget)
    if not is_table and (arguments.json or arguments.declined):
        raise UserError(
            ExitCode.USAGE,
            "--json and --declined change the table of nodes, which --program, --plans and --weight-budget do not "
            "print. Leave out --json and --declined, or print the table",
        )
    if arguments.ptx and (not is_table or (arguments.html is None and arguments.json)):
        raise UserError(
            ExitCode.USAGE,
            "--ptx prints PTX instead of the table of nodes, or adds PTX to the page of --html. Leave out --program, "
            "--plans and --weight-budget, and use --json only with --html",
        )


def _print_programs(model: str, path: Path, emulate: bool, options: Mapping[str, str], texts: list[str]) -> int:
    """Print the programs that exist when the session is created, or those that Runs with the shapes ``texts`` build.

    Without Runs, sizes that the model leaves open are guesses.
    """
    feeds = _feeds(model, path, texts) if texts else []
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "program_folder": folder}
        printed: dict[Path, int] = {}
        try:
            with waiting(Console(stderr=True), "creating the session"):
                session = ort_cuda_plugin.session(path, emulate=emulate, provider_options=options)
            _print_new_programs(Path(folder), printed)
            for values in feeds:
                with waiting(Console(stderr=True), "running"):
                    session.run(None, values)
                print(printable(f"a Run with {_shown(values)}"))
                if not _print_new_programs(Path(folder), printed):
                    print("built no program: a plan that existed serves these sizes\n")
        except Exception as error:
            raise UserError(ExitCode.MODEL_FAILED, f"{model}: {error}") from error
    return ExitCode.OK


def _print_new_programs(folder: Path, printed: dict[Path, int]) -> bool:
    """Print the text that program files gained after their first ``printed`` characters; return whether any did."""
    is_new = False
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        if file not in printed or len(text) > printed[file]:
            print(f"cluster {printable(file.stem)}")
            print(printable(text[printed.get(file, 0) :]))
            printed[file] = len(text)
            is_new = True
    return is_new


def _feeds(model: str, path: Path, texts: list[str]) -> list[dict[str, Array]]:
    """Return the random inputs of one Run for each argument ``--shapes``, or of one Run without such an argument.

    A dimension without a given size has its default size in a network of this package, else the size 1.
    """
    wanted = [{name: shape(name, text) for name, text in named_values("--shapes", [one])} for one in texts] or [{}]
    graph = read_model(path, model)
    check_types(graph)
    try:
        return [random_inputs(with_input_shapes(graph, shapes), dims=usual_sizes(model)) for shapes in wanted]
    except ValueError as error:
        raise UserError(ExitCode.USAGE, str(error)) from error


def _shown(values: Mapping[str, Array]) -> str:
    return ", ".join(f"{name}{list(array.shape)}" for name, array in values.items())


def _print_plans(model: str, path: Path, emulate: bool, texts: list[str], options: Mapping[str, str]) -> int:
    """Print the plans that each Run built."""
    feeds = _feeds(model, path, texts)
    try:
        before = ort_cuda_plugin.plan_variants()
        with waiting(Console(stderr=True), "creating the session"):
            session = ort_cuda_plugin.session(path, emulate=emulate, provider_options=options)
        _print_built("the session", built_after(before))
        for values in feeds:
            before = ort_cuda_plugin.plan_variants()
            with waiting(Console(stderr=True), "running"):
                session.run(None, values)
            _print_built(f"a Run with {_shown(values)}", built_after(before))
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{model}: {error}") from error
    return ExitCode.OK


def _print_streaming(model: str, path: Path, emulate: bool, options: dict[str, str]) -> int:
    """Print the weights that Runs copy. A dimension that the model leaves open has its default size, or the size 1."""
    try:
        with waiting(Console(stderr=True), "creating the session"):
            session = ort_cuda_plugin.session(path, emulate=emulate, provider_options=options)
            provider = last_provider()
            assert provider is not None
            if not any(fused.streaming for fused in provider.fused_nodes):  # the first Run may build the plans
                session.run(None, random_inputs(read_model(path, model), dims=usual_sizes(model)))
            schedules = [schedule for fused in provider.fused_nodes for schedule in fused.streaming]
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{model}: {error}") from error
    if not schedules:
        print("All weights stay in device memory: they fit into the budget.")
    for schedule in schedules:
        print("\n".join(map(printable, _streaming_lines(schedule, provider.device.described))))
    return ExitCode.OK


def _streaming_lines(schedule: StreamingSchedule, gpu: Gpu) -> list[str]:
    seconds = schedule.nbytes / gpu.copied_per_second
    lines = [
        f"{schedule.cluster}: budget {schedule.budget} bytes, {schedule.resident} bytes of resident weights, ring of "
        f"{schedule.ring} bytes",
        f"a Run copies {schedule.nbytes} bytes of {len(schedule.weights)} weights, {seconds * 1e3:.2f} ms on the link "
        f"of {gpu.name} at {gpu.copied_per_second / 1e9:.1f} GB/s",
    ]
    lines += [
        f"  before step {weight.issue}: {weight.name}, {weight.nbytes} bytes, for step {weight.step}: {weight.node}"
        for weight in schedule.weights
    ]
    return lines


def _print_built(occasion: str, built: Sequence[PlanVariant]) -> None:
    print(f"{printable(occasion)}: plans built: {len(built)}")
    for variant in built:
        print(printable(f"  {variant}"))
