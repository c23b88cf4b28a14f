"""Compile a model ahead of time, for one or several architectures; no GPU is needed.

Writes a model and a context file next to it. A session on a GPU of one of these architectures loads the model without
compiling. Models that share weights, such as prefill and decoding of one decoder, are compiled together into one
context file.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console

import ort_cuda_plugin
from ort_cuda_plugin.cli.common import add_operators_argument, model_path, output_file, waiting
from ort_cuda_plugin.cli.devices import find_device, unavailable_as_user_error
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.models.inspect_context import contexts, print_contexts
from ort_cuda_plugin.session_errors import explained

_NOTHING_COMPILED = "Unable to compile any nodes"
_HINT = (
    " `ort-cuda-plugin explain` says where each node runs. ONNX Runtime itself runs an If, Loop or Scan that the plugin"
    " does not compile together with its bodies"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="path of an ONNX file, or the name of a model in the onnx wheel")
    add_operators_argument(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=output_file, help="path of the compiled model; default: MODEL_ctx.onnx"
    )
    parser.add_argument(
        "--arch",
        metavar="LIST",
        help="architectures to compile for, such as sm_80,sm_90,emulated; default: that of the GPU, else emulated",
    )
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="NAME=1x3x224x224[,...]",
        help="input shapes to compile for, in addition to those that the plugin chooses (repeatable)",
    )
    parser.add_argument(
        "--weightless",
        action="store_true",
        help="store no weights in OUT; sessions read them from MODEL in the folder of OUT, or from the model "
        "that the session entry ep.context_source_model_path names",
    )
    parser.add_argument(
        "--share-with",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="further models for the same context file, which stores equal weights once; their compiled models are "
        "written next to OUT, as NAME_ctx.onnx",
    )
    parser.add_argument("--embed", action="store_true", help="store everything in OUT, without a separate context file")


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    output = arguments.output or output_file(str(Path(path.name).with_name(f"{path.stem}_ctx.onnx")))
    others = [model_path(name) for name in arguments.share_with]
    jobs = [(path, output), *((other, output.with_name(f"{other.stem}_ctx.onnx")) for other in others)]
    for _, target in jobs:
        if target.exists():
            raise UserError(ExitCode.USAGE, f"{target} exists already. Remove it, or choose another file by --output")
    counts = Counter(target.name for _, target in jobs)
    if repeated := [name for name, number in counts.items() if number > 1]:
        names = ", ".join(repeated)
        raise UserError(
            ExitCode.USAGE,
            f"--share-with: several models would be compiled to files of the same name: {names}. Rename the models",
        )
    if others and arguments.embed:
        raise UserError(ExitCode.USAGE, "--share-with and --embed exclude each other: give one of them")
    emulate = find_device("auto")
    with unavailable_as_user_error():
        import onnxruntime as ort

        from ort_cuda_plugin.lora import restore_default_inputs

        devices = ort_cuda_plugin.register(emulate=emulate)
    options = {
        "context_architectures": arguments.arch,
        "context_shapes": ";".join(arguments.shapes),
        "context_weightless": "1" if arguments.weightless else "",
    }
    for number, (model, target) in enumerate(jobs, 1):
        position = f" ({number} of {len(jobs)})" if len(jobs) > 1 else ""
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.add_provider_for_devices(devices[:1], {key: value for key, value in options.items() if value})
        if others:
            settings.add_session_config_entry("ep.share_ep_contexts", "1")
            settings.add_session_config_entry("ep.stop_share_ep_contexts", str(int(target == jobs[-1][1])))
        try:
            with waiting(Console(stderr=True), f"compiling {model.name}{position}"):
                ort.ModelCompiler(
                    settings,
                    str(model),
                    embed_compiled_data_into_model=arguments.embed,
                    flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
                ).compile_to_file(str(target))
            restore_default_inputs(target, model)
        except Exception as error:
            hint = _HINT if _NOTHING_COMPILED in str(error) else ""
            raise UserError(ExitCode.MODEL_FAILED, f"{model}: {explained(error, str(model), [])}{hint}") from error
    print_contexts(contexts(output), as_json=False)
    return ExitCode.OK
