"""Collects all findings about this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial

from ..abi.core import PluginError, core
from ..abi.flags import flag_variable
from ..api import register
from ..compiler.cache import KernelCache
from ..compiler.library.isolation import import_compiler
from ..ep.device.devices import DeviceInfo, cuda_devices, emulated_devices, emulated_properties
from ..ep.device.identity import default_identity
from ..ep.device.libraries import library_places
from ..plugin_library import get_library_path
from ..uninterrupted import imported
from .cache import cache_findings
from .calibration import calibration_findings
from .driver import driver_findings, machine_findings
from .findings import DISTRIBUTION, Finding, Machine, Severity, ok, pip, problem
from .libraries import library_findings
from .packages import RUNTIMES, compiler_findings, runtime_findings
from .quarantine import quarantine_findings
from .requirements import requirement_findings
from .variables import FLAGS, VARIABLES, variable_findings


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    """Examine one subject after the other. A subject that cannot be examined is a finding itself."""
    machine = machine or Machine()
    yield from machine_findings(machine)
    version, why = _runtime()
    runtime = list(runtime_findings(machine, version, why))
    yield from runtime
    # If ONNX Runtime's package has to be replaced, the version of the old package does not matter.
    replaced = RUNTIMES if runtime[0].severity is Severity.PROBLEM else ()
    yield from requirement_findings(machine, besides=replaced)
    yield from variable_findings(machine)
    library = _library()
    yield library
    if library.severity is Severity.PROBLEM:  # nothing else can be examined without it
        return
    environment = list(_environment())
    yield from environment
    if not why and environment[0].severity is Severity.OK:
        yield _registration()
    devices, why = _cuda_devices()
    yield from driver_findings(machine, devices, why)
    yield from quarantine_findings([*devices, *(emulated_devices() if environment[0].severity is Severity.OK else [])])
    yield from calibration_findings(devices)
    yield from library_findings(machine, library_places(), bool(devices))
    yield from compiler_findings(machine, _compiler_problem())
    logging.getLogger("ort_cuda_plugin").addFilter(_nothing)
    try:
        yield from cache_findings(KernelCache())
    finally:
        logging.getLogger("ort_cuda_plugin").removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    """Drop the cache's log messages, which are reported as findings."""
    return False


def _runtime() -> tuple[str, str]:
    try:
        return str(getattr(imported("onnxruntime"), "__version__", "")), ""
    except Exception as error:  # wheels that have overwritten each other's files raise any exception
        return "", f"it cannot be imported: {type(error).__name__}: {error}"


def _compiler_problem() -> str:
    """Return why the compiler cannot be imported, or ""."""
    try:
        import_compiler()
    except ImportError as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    return ""


def _library() -> Finding:
    try:
        path = get_library_path()
        core()
    except (FileNotFoundError, PluginError, ImportError) as error:
        mend = pip("install", "--force-reinstall", "--no-deps", DISTRIBUTION)
        return problem("plugin library", str(error), mend, mend)
    return ok("plugin library", path)


def _registration() -> Finding:
    subject = "registration"
    try:
        offered = register(emulate=True)
    except Exception as error:  # a user's program would get the same exception
        return problem(subject, f"{type(error).__name__}: {error}", "follow the message and the findings above")
    devices = "1 device" if len(offered) == 1 else f"{len(offered)} devices"
    return ok(subject, f"ONNX Runtime loads the library and offers {devices}, including the emulated device")


def _cuda_devices() -> tuple[list[DeviceInfo], str]:
    try:
        return cuda_devices()
    except (PluginError, OSError) as error:
        return [], str(error)


def _environment() -> Iterator[Finding]:
    """Report invalid values of environment variables, with which registering would fail."""
    checks: list[Callable[[], object]] = [partial(flag_variable, name) for name in FLAGS]
    checks += [default_identity, emulated_properties, emulated_devices]
    found = False
    for check in checks:
        try:
            check()
        except ValueError as error:
            found = True
            named = re.split("[=:]", str(error), maxsplit=1)[0]
            mend = [f"unset {named}"] if named in VARIABLES else []
            yield problem("environment", str(error), "correct the variable, or unset it", *mend)
        except (PluginError, ImportError, RuntimeError) as error:
            found = True
            yield problem("environment", f"the emulated device cannot be used: {error}", "follow the message")
            break  # later findings need the emulated device as well
    if not found:
        yield ok("environment", "the plugin's environment variables have valid values")
