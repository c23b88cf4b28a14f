"""The names under which ONNX Runtime may know the execution provider.

Beside its own name there is the built-in CUDA execution provider's, for hosts that lack that one: what an application
writes for it then runs here unchanged. A registration of the library has one name. It is the one that `register` was
asked for, else the name of the registration if that is a provider's, else ``ORT_CUDA_PLUGIN_AS``, else our own.
"""

from __future__ import annotations

from enum import IntEnum

from ..abi.core import core, ffi, new_error

#: The name under which a plain registration offers the devices.
AS_VARIABLE = "ORT_CUDA_PLUGIN_AS"

#: A registration name that ends so offers the emulated devices and no other (ORT's convention for virtual devices).
VIRTUAL_SUFFIX = ".virtual"

EP_NAME = "CudaPluginExecutionProvider"
_NAMES = (EP_NAME, "CUDAExecutionProvider")


class Identity(IntEnum):
    """``ocp_identity`` of ``csrc_shim/base/host.h``."""

    OWN = 0
    CUDA = 1

    @property
    def ep_name(self) -> str:
        """The name of the execution provider."""
        return _NAMES[self]

    @property
    def session_prefix(self) -> str:
        """How ORT begins the session entries of the provider's options."""
        return f"ep.{self.ep_name.lower()}."

    @property
    def environment_prefix(self) -> str:
        """How the environment's entries for the provider begin."""
        return f"ep_factory.{self.ep_name}."


def is_our_name(ep_name: str) -> bool:
    """Whether the library may offer devices under this name."""
    return ep_name in _NAMES


def identity_named(ep_name: str, source: str) -> Identity:
    """The identity of that name; ``source`` says in an error where the name is from.

    Raises:
        ValueError: the library has no such name.
    """
    if ep_name not in _NAMES:
        raise ValueError(f"{source}={ep_name!r}: use {' or '.join(_NAMES)}")
    return Identity(_NAMES.index(ep_name))


def default_identity() -> Identity:
    """What ``ORT_CUDA_PLUGIN_AS`` says, else our own.

    Raises:
        ValueError: the variable holds another name.
    """
    error = new_error()
    identity = core().default_identity(error)
    if error.code:
        raise ValueError(ffi.string(error.text).decode(errors="replace"))
    return Identity(identity)
