"""Observation of ONNX Runtime's ``InferenceSession``: logs each fallback to the CPU, and can replace it by an error.

ONNX Runtime creates a session on the CPU provider without an error in several cases: it does not know the provider that
the application names, no device of the provider fits the options, or the provider fails and ``InferenceSession``
recreates the session on the CPU, with only a line on stdout. No session option reports or prevents all of these cases.
So `observe` wraps the methods of the class that create a session.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

from ..abi.message_texts import one_line
from ..ep.device.devices import EMULATE_VARIABLE, cuda_devices, no_such_device
from ..ep.device.identity import Identity, identity_named, is_our_name
from ..ep.factory import registrations
from ..ep.session import current_session
from .outcome import Outcome

logger = logging.getLogger("ort_cuda_plugin").getChild("sessions")

_OBSERVED = "_ort_cuda_plugin_observes"
_PACKAGE = __name__.partition(".")[0]
_HOSTS = (_PACKAGE, "onnxruntime")
"""Packages whose frames are not the application's."""
_MOST_KEPT = 1000
"""Maximum number of outcomes in the history of a process."""

_without_fallback: set[Identity] = set()
_outcomes: weakref.WeakKeyDictionary[Any, Outcome] = weakref.WeakKeyDictionary()
_history: list[Outcome] | None = None
_registration_error = ""


def refuse_fallback(identity: Identity) -> None:
    """Make sessions that name the provider ``identity`` raise an error if they cannot be created.

    Other sessions still fall back, and so do sessions for which the application sets ``enable_fallback``.
    """
    _without_fallback.add(identity)


def restore_fallback() -> None:
    """Undo every `refuse_fallback`."""
    _without_fallback.clear()


def outcome_of(session: Any) -> Outcome | None:
    """Return the recorded outcome of a session; None if the session was created before `observe`."""
    return _outcomes.get(session)


def registration_failed(error: str) -> None:
    """Name this error as the reason why sessions do not have the plugin's provider."""
    global _registration_error
    _registration_error = error


def keep_history() -> list[Outcome]:
    """Return the list to which the outcome of each later session of the process is added, up to 1000 outcomes."""
    global _history
    if _history is None:
        _history = []
        os.register_at_fork(after_in_child=_history.clear)
    return _history


def observe(onnxruntime: ModuleType) -> None:
    """Observe the sessions that the process creates from now on. Safe to call again."""
    sessions = onnxruntime.InferenceSession
    init, set_providers = sessions.__init__, sessions.set_providers
    if hasattr(init, _OBSERVED):
        return

    @functools.wraps(init)
    def observed_init(
        self: Any,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        names = _names(providers)
        if any(is_our_name(name) and identity_named(name, "providers") in _without_fallback for name in names):
            kwargs.setdefault("enable_fallback", 0)
        with current_session.created():
            try:
                init(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            except Exception as error:
                _record_failure(_described(path_or_bytes), names, str(error))
                raise
            _record(self, _described(path_or_bytes), names, _device_ids(providers, provider_options), "")

    @functools.wraps(set_providers)
    def observed_set_providers(self: Any, providers: Any = None, provider_options: Any = None) -> None:
        error = sys.exc_info()[1]  # if a Run failed, ONNX Runtime falls back in the handler of the error
        with current_session.created():
            set_providers(self, providers, provider_options)
            before = _outcomes.get(self)
            names = before.asked if before is not None and error is not None else _names(providers)
            model = "the model" if before is None else before.model
            _record(self, model, names, _device_ids(providers, provider_options), "" if error is None else str(error))

    setattr(observed_init, _OBSERVED, True)
    sessions.__init__, sessions.set_providers = observed_init, observed_set_providers
    if hasattr(onnxruntime, "ModelPackageComponentContext"):  # since 1.32
        _observe_packages(onnxruntime.ModelPackageComponentContext)


def _observe_packages(component: Any) -> None:
    """Observe sessions that components of model packages create, which do not call ``InferenceSession.__init__``."""
    create_session = component.create_session

    @functools.wraps(create_session)
    def observed_create_session(self: Any, sess_options: Any = None) -> Any:
        model = f"variant {self.get_selected_variant_name()!r} of {self.get_selected_variant_folder_path()}"
        with current_session.created():
            try:
                session = create_session(self, sess_options)
            except Exception as error:
                _record_failure(model, (), str(error))
                raise
            _record(session, model, (), {}, "")
            return session

    component.create_session = observed_create_session


def _record(session: Any, model: str, asked: tuple[str, ...], device_ids: dict[str, str], error: str) -> None:
    """Record where a new session runs, and log a fallback. An error here must not end the application."""
    try:
        caller, is_own_call = _caller()
        outcome = _outcome(tuple(session.get_providers()), model, caller, asked, device_ids, error)
        _outcomes[session] = outcome
        if _history is not None and len(_history) < _MOST_KEPT:
            _history.append(outcome)
        if outcome.is_fallback and not is_own_call:  # functions of the package report it themselves
            logger.warning("%s", one_line(fallback_text(outcome)))
    except Exception as failure:
        logger.debug("%s: cannot record where the nodes of the session run", model, exc_info=failure)


def _record_failure(model: str, asked: tuple[str, ...], error: str) -> None:
    """Add a session that could not be created to the history."""
    if _history is not None and len(_history) < _MOST_KEPT:
        _history.append(Outcome(model, _caller()[0], asked, (), "", (), error))


def _outcome(
    providers: tuple[str, ...],
    model: str,
    caller: str,
    asked: tuple[str, ...],
    device_ids: dict[str, str],
    error: str,
) -> Outcome:
    provider, record = current_session.provider(), current_session.record()
    own = "" if provider is None else provider.session.identity.ep_name
    if own in providers:
        devices = tuple(dict.fromkeys(device.info.name for device in provider.session.devices.all))
        return Outcome(model, caller, asked, providers, own, record.verdicts, provider.failure, devices)
    wanted = [name for name in asked if is_our_name(name)]
    failure = ""
    if not any(name in providers for name in wanted):  # onnxruntime-gpu has a CUDAExecutionProvider of its own
        failure = current_session.failure() or (wanted and (error or _why_missing(wanted[0], device_ids))) or ""
    return Outcome(model, caller, asked, providers, "", (), failure)


def fallback_text(outcome: Outcome) -> str:
    """Return the line of the log about a session that does not run on the plugin."""
    wanted = ", ".join(name for name in outcome.asked if is_our_name(name)) or "the plugin's device"
    if outcome.own:
        return f"{outcome.subject}: no node of the session runs on {outcome.own}: {outcome.why()}"
    return (
        f"{outcome.subject}: the session asked for {wanted} and runs on {', '.join(outcome.providers)}: "
        f"{outcome.why()}. ort_cuda_plugin.require(session) raises an error in this case"
    )


def _why_missing(name: str, device_ids: dict[str, str]) -> str:
    """Explain why a session that names the provider ``name`` does not have it."""
    identity = identity_named(name, "providers")
    known = [each for each in registrations() if each.identity is identity]
    if not known and _registration_error:
        return f"the plugin could not be registered: {_registration_error}"
    if not known:
        argument = "" if identity is Identity.OWN else f"as_={name!r}"
        return f"no provider {name!r} is available. Call ort_cuda_plugin.register({argument}) first"
    devices = [device for each in known for device in each.devices]
    if not devices:
        _, why = cuda_devices()
        return (
            f"no CUDA device: {why or 'ONNX Runtime lists none'}. To use the emulated device set {EMULATE_VARIABLE}=1"
        )
    if (given := device_ids.get(name, "0")) not in [str(device.ordinal) for device in devices]:
        return f"device_id: {no_such_device(given, devices)}"
    return "ONNX Runtime did not create the provider. The standard output or ONNX Runtime's log has its error"


def _names(providers: Any) -> tuple[str, ...]:
    """Return the provider names in the ``providers`` argument of an application. ONNX Runtime checks them later."""
    entries = list(providers) if isinstance(providers, Sequence) else []
    first = [entry[0] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return tuple(name for name in first if isinstance(name, str))


def _device_ids(providers: Any, provider_options: Any) -> dict[str, str]:
    """Return the option ``device_id`` of each named provider that has one."""
    entries = list(providers) if isinstance(providers, Sequence) else []
    separate = list(provider_options) if isinstance(provider_options, Sequence) else []
    found: dict[str, str] = {}
    for index, entry in enumerate(entries):
        name, options = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if options is None and index < len(separate):
            options = separate[index]
        if isinstance(name, str) and isinstance(options, dict) and "device_id" in options:
            found[name] = str(options["device_id"]).strip()
    return found


def _described(model: Any) -> str:
    if isinstance(model, bytes):
        return f"model of {len(model)} bytes"
    return os.fspath(model) if isinstance(model, str | os.PathLike) else "model"


def _caller() -> tuple[str, bool]:
    """Return file and line of the application's call, and whether a function of this package made the session."""
    frame: FrameType | None = sys._getframe()
    own, here = False, True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _HOSTS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", own
        here = here and module == __name__
        own = own or (not here and module.partition(".")[0] == _PACKAGE)
        frame = frame.f_back
    return "", own
