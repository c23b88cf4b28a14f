"""Print the coverage table: each operator with its opset versions, types, and where it runs."""

from __future__ import annotations

import argparse

from ort_cuda_plugin.cli.common import output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write", type=output_file, metavar="FILE", help="write the table to this file instead of the standard output"
    )


def execute(arguments: argparse.Namespace) -> int:
    from ort_cuda_plugin.conformance.coverage import render

    if arguments.write:
        arguments.write.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
    return 0
