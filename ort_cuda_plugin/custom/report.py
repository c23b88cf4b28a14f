"""Reports faults in an author's code to ONNX Runtime's log."""

from __future__ import annotations

import logging
import traceback

from ..abi import host
from ..abi.core import PluginError, core, ffi

logger = logging.getLogger("ort_cuda_plugin").getChild("custom")


def report(text: str, where: str = "ort_cuda_plugin", level: str = "ERROR") -> None:
    """Write a message to ONNX Runtime's log, or to Python's log if ONNX Runtime's is not available."""
    try:
        has_log = core().host_logger() != ffi.NULL
    except PluginError:
        has_log = False
    if has_log:
        host.log(level, text, where=where)
    else:
        logger.log(logging.getLevelNamesMapping()[level], "%s", text)


def report_failure(where: str, error: BaseException) -> None:
    """Report an exception in the author's code ``where``, with its traceback, as `report` does."""
    report(f"{where}:\n{''.join(traceback.format_exception(error))}", where)
