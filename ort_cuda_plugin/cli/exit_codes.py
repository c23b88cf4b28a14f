"""Exit codes of the process, and the error that ends a command."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every command. argparse also exits with 2 for wrong arguments."""

    OK = 0
    MISMATCH = 1
    USAGE = 2
    UNAVAILABLE = 3
    MODEL_FAILED = 4
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141

    @property
    def meaning(self) -> str:
        return {
            ExitCode.OK: "success",
            ExitCode.MISMATCH: "the command ran, but a check failed (a wrong result, a register spill)",
            ExitCode.USAGE: "wrong arguments or input files",
            ExitCode.UNAVAILABLE: "no device, or onnxruntime missing or too old",
            ExitCode.MODEL_FAILED: "the model could not be loaded or run",
            ExitCode.INTERRUPTED: "interrupted",
            ExitCode.OUTPUT_CLOSED: "the program that reads the output has closed it",
        }[self]


class UserError(Exception):
    """A failure whose message is all that the user needs; ends the command with `code`."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
