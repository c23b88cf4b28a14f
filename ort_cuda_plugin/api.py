"""Registration, devices and sessions: the functions that an application calls, on top of ONNX Runtime's Python API."""

from __future__ import annotations

import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from .abi.result_table import Table
from .abi.tables import OLDEST_API
from .clusters.claims.claims import NodeVerdict
from .ep import boundary
from .ep.device.devices import METADATA_KEYS, DeviceInfo, cuda_devices, emulation_requested, no_such_device
from .ep.device.identity import VIRTUAL_SUFFIX, Identity, default_identity, identity_named, is_our_name
from .ep.factory import registrations, requesting
from .ep.options.options import parse
from .ep.provider import Provider, last_provider, last_verdicts
from .ep.session import current_session
from .plugin_library import ProviderName, get_ep_name, get_library_path
from .session_errors import NoProviderError, explained
from .sessions.observation import observe, outcome_of, refuse_fallback, restore_fallback
from .uninterrupted import imported

if TYPE_CHECKING:
    import onnxruntime as ort

    from .ep.options.option_types import ProviderOptions

Model: TypeAlias = "str | os.PathLike[str] | bytes"
"""The path of a model, or its bytes."""
GivenOptions: TypeAlias = "ProviderOptions | Mapping[str, object]"
"""Provider options, as `session` takes them."""

#: First ONNX Runtime 1.N in which a plugin may have the name of a built-in provider that the installed wheel lacks.
_NAMES_A_PLUGIN = 28

#: Held while ONNX Runtime's device objects are in use, because `unregister` on another thread frees them.
_registration = threading.RLock()
_registered: list[str] = []
_chosen: weakref.WeakKeyDictionary[Any, tuple[DeviceInfo, dict[str, str]]] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    """Replace the lock in a forked child: a thread that does not exist in the child may hold the copy of the lock.
    With the new lock, calls in the child raise errors instead of waiting forever.
    """
    global _registration
    _registration = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _onnxruntime() -> ModuleType:
    """Import ONNX Runtime, and check that its version can load this plugin.

    Raises:
        ImportError: ONNX Runtime is missing, broken, or too old; the message says what to install.
    """
    advice = (
        'Install exactly one of "ort-cuda-plugin[cpu]" and "ort-cuda-plugin[cuda]", which both bring onnxruntime, and '
        '"ort-cuda-plugin[gpu]", which brings onnxruntime-gpu'
    )
    try:
        onnxruntime = imported("onnxruntime")
    except ImportError as error:
        raise ImportError(f"ONNX Runtime cannot be imported ({error}). {advice}") from error
    if _api_version(onnxruntime) < OLDEST_API:
        raise ImportError(
            f"ort-cuda-plugin needs ONNX Runtime 1.{OLDEST_API} or newer and found "
            f"{getattr(onnxruntime, '__version__', '') or 'a broken installation'}. {advice}"
        )
    return onnxruntime


def _api_version(ort: ModuleType) -> int:
    """Return the N of ONNX Runtime 1.N.x; 0 for an unknown version."""
    match = re.match(r"1\.(\d+)", getattr(ort, "__version__", ""))
    return int(match[1]) if match else 0


def _ep_devices(onnxruntime: ModuleType, identity: Identity) -> list[ort.OrtEpDevice]:
    """Return the devices that this library offers under the provider name of the identity."""
    if not _factories(identity):
        return []
    return [
        device for device in onnxruntime.get_ep_devices() if device.ep_name == identity.ep_name and _is_ours(device)
    ]


def _is_ours(ep_device: ort.OrtEpDevice) -> bool:
    """Return whether the device belongs to this library; other libraries may use the same provider name."""
    return set(dict(ep_device.ep_metadata)) >= METADATA_KEYS


def described_by(ep_device: ort.OrtEpDevice) -> DeviceInfo:
    """Return the device that an ``OrtEpDevice`` describes.

    Raises:
        ValueError: the device belongs to another library.
    """
    if not _is_ours(ep_device):
        raise ValueError(
            f"device: expected a device that ort_cuda_plugin.register returns, got a device of {ep_device.ep_name} in "
            "another library"
        )
    return _info(ep_device)


def _info(ep_device: ort.OrtEpDevice) -> DeviceInfo:
    return DeviceInfo.from_metadata(dict(ep_device.ep_metadata))


def _factories(identity: Identity) -> list[str]:
    """Return the registration names under which the library offers its devices as the provider ``identity``."""
    return [known.name for known in registrations() if known.identity is identity]


def is_registered_as(identity: Identity) -> bool:
    """Return whether the library offers its devices under the provider name of ``identity``."""
    return bool(_factories(identity))


def register(
    name: str | None = None, emulate: bool | None = None, *, as_: ProviderName | None = None
) -> list[ort.OrtEpDevice]:
    """Register the library with ONNX Runtime, and return the ``OrtEpDevice`` objects that it offers.

    Safe to call again. An existing registration under the same provider name is used, whatever its registration name.
    If emulated devices are requested and that registration does not offer them, the library is registered again as
    ``<name>.virtual``.

    Args:
        name: the registration name. One that ends in ".virtual" offers emulated devices only.
        emulate: True offers the emulated devices, False does not, None follows ``ORT_CUDA_PLUGIN_EMULATE``.
        as_: the provider name. "CUDAExecutionProvider" offers the devices under the name of the built-in execution
            provider, so that an application that asks for that provider gets the plugin; None follows
            ``ORT_CUDA_PLUGIN_AS``. Both names may be in use. With ``as_``, a session that names the provider raises an
            error when it cannot be created, for example for a wrong option, instead of falling back to the CPU.

    Raises:
        ImportError: ONNX Runtime is missing or older than 1.26.
        FileNotFoundError: the library was not built.
        RuntimeError: the library is registered in another ONNX Runtime of this process.
        ValueError: ``ORT_CUDA_PLUGIN_EMULATE`` or ``ORT_CUDA_PLUGIN_AS`` has no valid value, ``as_`` is not a name that
            the library can have, or ONNX Runtime has an execution provider of that name.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> session = ort.InferenceSession("model.onnx", providers=["CudaPluginExecutionProvider"], enable_fallback=0)
    """
    onnxruntime = _onnxruntime()
    observe(onnxruntime)
    if emulate is None:
        emulation_requested()  # raises a clearer error than ONNX Runtime would
    identity = default_identity() if as_ is None else identity_named(as_, "as_")
    if name is None:
        name = "cuda_plugin" if identity is Identity.OWN else identity.ep_name
    with _registration:
        if not _factories(identity):
            _register(onnxruntime, name, emulate, identity)
        offered = _ep_devices(onnxruntime, identity)
        if not offered and any(known.devices for known in registrations() if known.identity is identity):
            raise RuntimeError(
                f"{get_ep_name()} is already registered in another ONNX Runtime of this process, such as that of "
                "onnxruntime-genai, and the plugin serves only one ONNX Runtime per process. Create sessions with that "
                "ONNX Runtime, or in another process"
            )
        virtual = name if name.endswith(VIRTUAL_SUFFIX) else name + VIRTUAL_SUFFIX
        if emulate and not any(_info(device).emulated for device in offered) and virtual not in _factories(identity):
            _register(onnxruntime, virtual, emulate, identity)
            offered = _ep_devices(onnxruntime, identity)
    if as_ is not None or identity is not Identity.OWN:
        refuse_fallback(identity)
    return offered


def _register(onnxruntime: ModuleType, name: str, emulate: bool | None, identity: Identity) -> None:
    if identity is not Identity.OWN and _api_version(onnxruntime) < _NAMES_A_PLUGIN:
        warnings.warn(
            f"{identity.ep_name}: in providers=[...] ONNX Runtime reserves this name for its own provider: got version "
            f"{onnxruntime.__version__}, expected 1.{_NAMES_A_PLUGIN} or newer. Upgrade onnxruntime, or pass the "
            "devices that register returns to add_provider_for_devices",
            RuntimeWarning,
            stacklevel=3,
        )
    offered = [device for device in onnxruntime.get_ep_devices() if device.ep_name == identity.ep_name]
    foreign = [device for device in offered if not _is_ours(device)] if _factories(identity) else offered
    if foreign and identity is not Identity.OWN:
        raise ValueError(
            f"{identity.ep_name}: another plugin library already offers devices under this provider name. Unregister "
            "that library with onnxruntime.unregister_execution_provider_library, or register this plugin without as_ "
            "and ORT_CUDA_PLUGIN_AS"
        )
    if foreign:
        place = dict(foreign[0].ep_metadata).get("library_path", "")
        warnings.warn(
            f"{identity.ep_name}: another plugin library{f' ({place})' if place else ''} also offers this provider: "
            f"providers=[{identity.ep_name!r}] may select that library instead of this plugin. Use "
            "ort_cuda_plugin.session, or pass the devices that register returns to add_provider_for_devices",
            RuntimeWarning,
            stacklevel=3,
        )
    path = get_library_path()
    boundary.attach_own()
    with requesting(emulate, identity):
        onnxruntime.register_execution_provider_library(name, path)
    _registered.append(name)


def unregister() -> None:
    """Undo every `register` of this process; no session on the provider may exist. Safe to call again.

    Examples:
        >>> ort_cuda_plugin.unregister()
        >>> "CudaPluginExecutionProvider" in [device.ep_name for device in ort.get_ep_devices()]
        False
    """
    with _registration:
        restore_fallback()
        while _registered:
            name = _registered.pop()
            if any(name in _factories(identity) for identity in Identity):
                _onnxruntime().unregister_execution_provider_library(name)


def devices() -> Table[DeviceInfo]:
    """Return the devices that the registrations offer: GPUs, and emulated devices if they were requested.

    Raises: as `register`, which this function calls if the application has not.

    Examples:
        >>> [device.name for device in ort_cuda_plugin.devices() if device.emulated]
        ['Emulated CUDA device']
    """
    _onnxruntime()
    if not registrations():
        register()
    by_name = sorted(registrations(), key=lambda known: known.identity)
    return Table(DeviceInfo, dict.fromkeys(device for known in by_name for device in known.devices))


def session(
    model: Model,
    *,
    emulate: bool | None = None,
    provider_options: GivenOptions | None = None,
    sess_options: ort.SessionOptions | None = None,
) -> ort.InferenceSession:
    """Return an ``onnxruntime.InferenceSession`` on the plugin; the CPU provider runs nodes that the plugin declines.

    Args:
        model: path, or the bytes of a model.
        emulate: True for the emulated device, False for a GPU; None: a GPU if the machine has one, else the emulated
            device if ``ORT_CUDA_PLUGIN_EMULATE`` requests it.
        provider_options: options of the provider, for example ``{"device_id": 1}``.
        sess_options: ``onnxruntime.SessionOptions``; gets the provider and an entry that records node placement.

    Raises:
        ImportError: ONNX Runtime is missing or too old.
        RuntimeError: no such device exists, no node of the model runs on the provider, a node runs on no provider, or
            ONNX Runtime cannot read a model of this version; the message says why.
        ValueError: an option is unknown or has no valid value; ``sess_options`` were used for another device before.

    Examples:
        >>> session = ort_cuda_plugin.session("model.onnx", emulate=True, provider_options={"use_tf32": False})
        >>> (y,) = session.run(None, {"x": array})
        >>> y.shape
        (2, 4)
    """
    return _own_session(model, emulate, provider_options, sess_options)[0]


def placed_session(
    model: Model,
    *,
    emulate: bool | None = None,
    provider_options: GivenOptions | None = None,
    sess_options: ort.SessionOptions | None = None,
) -> tuple[ort.InferenceSession, Placement]:
    """Return a session and the placement of its nodes. Arguments and errors are those of `session`."""
    created, provider = _own_session(model, emulate, provider_options, sess_options)
    return created, Placement(_with_providers(provider.verdicts, created), provider.values)


def _own_session(
    model: Model,
    emulate: bool | None,
    provider_options: GivenOptions | None,
    sess_options: ort.SessionOptions | None,
) -> tuple[ort.InferenceSession, Provider]:
    created, provider = create_session(model, emulate, provider_options, sess_options)
    if not provider.fused_nodes:  # ONNX Runtime records no placement for models in its own format
        found = outcome_of(created)
        why = provider.failure if found is None else found.why()
        raise RuntimeError(f"no node of the model runs on {get_ep_name()}: {why}")
    return created, provider


def explain(
    model: Model,
    *,
    emulate: bool | None = None,
    provider_options: GivenOptions | None = None,
    sess_options: ort.SessionOptions | None = None,
) -> Table[NodeVerdict]:
    """Return a verdict for each node of the model, after ONNX Runtime's optimizations: claimed, or why not.

    Verdicts of nodes in bodies of control flow follow those of the main graph's nodes, and name the node that has
    the body.

    Arguments and errors are those of `session`. A model without claimed nodes is not an error, and a node that no
    provider runs gets a reason that says so.

    Examples:
        >>> for verdict in ort_cuda_plugin.explain("model.onnx", emulate=True):
        ...     print(verdict)
        product (MatMul): CudaPluginExecutionProvider
        relu (Relu): CudaPluginExecutionProvider
    """
    found = placement(model, emulate=emulate, provider_options=provider_options, sess_options=sess_options)
    return Table(NodeVerdict, found.verdicts)


@dataclass(frozen=True)
class Placement:
    """Where each node of a model runs. ``values`` maps the name of a value to its type and shape, as text."""

    verdicts: list[NodeVerdict]
    values: Mapping[str, str]


def placement(
    model: Model,
    *,
    emulate: bool | None = None,
    provider_options: GivenOptions | None = None,
    sess_options: ort.SessionOptions | None = None,
) -> Placement:
    """Return the verdicts of `explain`, and the types and shapes of values (none if a node runs on no provider).

    Arguments and errors are those of `explain`.
    """
    try:
        session, provider = create_session(model, emulate, provider_options, sess_options)
    except NoProviderError as error:
        return Placement(error.verdicts, {})
    if provider.failure:
        raise RuntimeError(f"{get_ep_name()} could not analyze the model: {provider.failure}")
    return Placement(_with_providers(provider.verdicts, session), provider.values)


def _with_providers(verdicts: list[NodeVerdict], session: ort.InferenceSession) -> list[NodeVerdict]:
    """Add to each verdict the provider that runs the node, as ONNX Runtime reports it.

    ONNX Runtime does not list a node that another provider has fused: such a node gets the name of the only other
    provider, or "" if several other providers run nodes, or none does.
    """
    names: dict[tuple[str, str], set[str]] = {}
    own = ""
    others: set[str] = set()
    for part in session.get_provider_graph_assignment_info():
        if is_our_name(part.ep_name):
            own = part.ep_name
            continue
        others.add(part.ep_name)
        for node in part.get_nodes():
            names.setdefault((node.name, node.op_type), set()).add(part.ep_name)

    def runs(verdict: NodeVerdict) -> str:
        if verdict.supported:
            return own or get_ep_name()
        found = names.get((verdict.name, verdict.op_type), others)
        return next(iter(found)) if len(found) == 1 else ""

    return [replace(verdict, provider=runs(verdict)) for verdict in verdicts]


def create_session(
    model: Model,
    emulate: bool | None,
    provider_options: GivenOptions | None,
    sess_options: ort.SessionOptions | None,
) -> tuple[ort.InferenceSession, Provider]:
    onnxruntime = _onnxruntime()
    options = {key: str(value) for key, value in (provider_options or {}).items()}
    sess_options = onnxruntime.SessionOptions() if sess_options is None else sess_options
    with _registration:
        _add_provider(sess_options, chosen_device(emulate, options), options)
    source = model if isinstance(model, bytes) else os.fspath(model)
    current_session.forget()
    try:
        # Without enable_fallback=0, ONNX Runtime would fall back to the CPU after an error of the provider.
        created = onnxruntime.InferenceSession(source, sess_options=sess_options, enable_fallback=0)
    except Exception as error:
        better = explained(error, source, last_verdicts())
        try:
            if better is not error:
                raise better from error
            raise
        finally:
            del better  # the error's traceback refers to this frame, which would keep the session alive
    provider = last_provider()
    assert provider is not None, "ONNX Runtime created a session without creating the plugin's execution provider"
    return created, provider


def _add_provider(sess_options: ort.SessionOptions, ep_device: ort.OrtEpDevice, options: dict[str, str]) -> None:
    """Add the provider, unless an earlier session did: ONNX Runtime refuses to add it twice.

    Raises:
        ValueError: the earlier session chose another device or other options.
    """
    choice = (_info(ep_device), options)
    if sess_options not in _chosen:
        sess_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # ONNX Runtime first sets the device's own options, and warns of each that it gets again.
        own = ep_device.ep_options
        given = {key: value for key, value in options.items() if own.get(key) != value}
        sess_options.add_provider_for_devices([ep_device], given)
        _chosen[sess_options] = choice
    elif _chosen[sess_options] != choice:
        raise ValueError(
            "sess_options: these SessionOptions were used before with another device or other provider options. Create "
            "new SessionOptions"
        )


def chosen_device(emulate: bool | None, options: Mapping[str, str]) -> ort.OrtEpDevice:
    """Return the ``OrtEpDevice`` on which a session with these arguments runs. Raises the same errors as `session`."""
    parsed, _ = parse(dict(options))
    device_id = parsed.device_ids[0] if parsed.device_id is None and parsed.device_ids else parsed.device_id
    return _select(register(emulate=emulate), emulate, device_id)


def _select(ep_devices: Iterable[ort.OrtEpDevice], emulate: bool | None, device_id: int | None) -> ort.OrtEpDevice:
    """Return the first device that fits ``emulate`` and ``device_id``.

    Raises:
        RuntimeError: there is none.
    """
    infos = [(_info(device), device) for device in ep_devices]
    candidates = [(info, device) for info, device in infos if emulate is None or info.emulated == emulate]
    for info, device in candidates:
        if device_id is None or info.ordinal == device_id:
            return device
    if device_id is not None and candidates:
        raise RuntimeError(f"device_id: {no_such_device(device_id, [info for info, _ in candidates])}")
    _, why = cuda_devices()
    raise RuntimeError(
        f"no CUDA device: {why or 'ONNX Runtime lists none'}. To run on the emulated device pass emulate=True or set "
        "ORT_CUDA_PLUGIN_EMULATE=1"
    )
