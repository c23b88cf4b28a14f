"""Print the provider options and the environment variables, with their values, defaults and meanings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="replace the tables between the comments <!-- table: NAME --> and <!-- end of table --> of a document",
    )


def execute(arguments: argparse.Namespace) -> int:
    if arguments.write is None:
        print("\n".join(tables().values()), end="")
        return 0
    try:
        arguments.write.write_text(filled(arguments.write.read_text(encoding="utf-8")), encoding="utf-8")
    except KeyError as error:
        raise UserError(
            ExitCode.USAGE,
            f"{arguments.write}: unknown table {error} in a <!-- table: NAME --> comment: use one of "
            f"{', '.join(tables())}",
        ) from error
    return 0


def tables() -> dict[str, str]:
    """Return the tables of options and variables. The keys are the names in ``<!-- table: NAME -->`` comments."""
    from ort_cuda_plugin.doctor.variables import variable_tables
    from ort_cuda_plugin.ep.options.option_documents import option_tables

    return option_tables() | variable_tables()


def filled(document: str) -> str:
    """Return the document with the tables as they are now. Raises KeyError for a table that does not exist."""
    known = tables()
    return re.sub(
        r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)",
        lambda match: f"{match[1]}\n{known[match[2]]}\n{match[3]}",
        document,
        flags=re.DOTALL,
    )
