"""Checks custom operators in sessions for which ONNX Runtime's C API selects one of several devices automatically.

``main`` runs in a process of its own with more than one emulated device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onnx import helper

import ort_cuda_plugin
from custom_operators import DOMAIN, model, operator
from ort_cuda_plugin.abi import host
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.custom import registry

SET_EP_SELECTION_POLICY, PREFER_GPU = 305, 4
OTHER = "other.domain"


def session_options() -> Any:
    made = ffi.new("OrtSessionOptions **")
    host.check_status(host.api().CreateSessionOptions(made))
    return made[0]


def selecting() -> Any:
    """Return session options with a selection policy: ONNX Runtime chooses the device."""
    made = session_options()
    slot = ffi.cast("void **", host.api())[SET_EP_SELECTION_POLICY]
    host.check_status(ffi.cast("OrtStatus *(*)(OrtSessionOptions *, int)", slot)(made, PREFER_GPU))
    return made


def choosing(env: Any, device: Any) -> Any:
    """Return session options with this device."""
    made = session_options()
    append = host.api().SessionOptionsAppendExecutionProvider_V2
    host.check_status(append(made, env, ffi.new("const OrtEpDevice *[]", [device]), 1, ffi.NULL, ffi.NULL, 0))
    return made


def main() -> None:
    """Raise AssertionError if a session gets the custom operators twice, or not at all."""
    for domain in (DOMAIN, OTHER):
        registry.register(operator(domain=domain))
    ort_cuda_plugin.register(emulate=True)
    nodes = [helper.make_node("Double", ["x"], ["y"], domain=DOMAIN)]
    built, api = model(nodes, {"x": ["n"]}, ["y"]), host.api()
    env = ffi.new("OrtEnv **")
    host.check_status(api.CreateEnv(2, b"test", env))
    devices, count = ffi.new("const OrtEpDevice *const **"), ffi.new("size_t *")
    host.check_status(api.GetEpDevices(env[0], devices, count))
    name = ort_cuda_plugin.get_ep_name().encode()
    own = [devices[0][i] for i in range(count[0]) if ffi.string(api.EpDevice_EpName(devices[0][i])) == name]
    assert len(own) > 1

    def create(options: Any) -> None:
        made = ffi.new("OrtSession **")
        host.check_status(api.CreateSessionFromArray(env[0], built, len(built), options, made))
        api.ReleaseSession(made[0])
        api.ReleaseSessionOptions(options)

    for options in [choosing(env[0], own[1]), selecting(), choosing(env[0], own[1]), selecting()]:
        create(options)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(create, [selecting() for _ in range(6)]))
    print("created")
