"""Names under which ONNX Runtime may know the execution provider.

The plugin may also take the name of the built-in CUDA execution provider, in an ONNX Runtime without that provider.
Applications that ask for the CUDA execution provider then run on the plugin unchanged.

A registration's provider name is the argument ``as_`` of `register`, else the registration name if it is the name of a
provider, else ``ORT_CUDA_PLUGIN_AS``, else the plugin's own name.
"""

from __future__ import annotations

from enum import IntEnum
from typing import get_args

from ...abi.core import core, ffi, new_error
from ...plugin_library import ProviderName

#: Environment variable: the provider name of registrations that do not choose one.
AS_VARIABLE = "ORT_CUDA_PLUGIN_AS"

#: Suffix of registration names that offer only the emulated devices (ORT's convention for virtual devices).
VIRTUAL_SUFFIX = ".virtual"

_NAMES: tuple[str, ...] = get_args(ProviderName)


class Identity(IntEnum):
    """A provider name of the library, with the number of ``ocp_identity`` in ``csrc_shim/base/host.h``."""

    OWN = 0
    CUDA = 1

    @property
    def ep_name(self) -> str:
        """Return the name of the execution provider."""
        return _NAMES[self]

    @property
    def session_prefix(self) -> str:
        """Return the prefix of the session entries for the provider's options."""
        return f"ep.{self.ep_name.lower()}."

    @property
    def environment_prefix(self) -> str:
        """Return the prefix of the entries of ONNX Runtime's environment for the provider's options."""
        return f"ep_factory.{self.ep_name}."


def is_our_name(ep_name: str) -> bool:
    """Return whether the library may offer devices under this name."""
    return ep_name in _NAMES


def identity_named(ep_name: str, source: str) -> Identity:
    """Return the identity with that name. Errors name ``source`` as the origin of the name.

    Raises:
        ValueError: the library has no such name.
    """
    if ep_name not in _NAMES:
        raise ValueError(f"{source}={ep_name!r}: use {' or '.join(_NAMES)}")
    return Identity(_NAMES.index(ep_name))


def default_identity() -> Identity:
    """Return the identity that ``ORT_CUDA_PLUGIN_AS`` names, else the plugin's own.

    Raises:
        ValueError: the variable holds a name that is not a provider name of the library.
    """
    error = new_error()
    identity = core().default_identity(error)
    if error.code:
        raise ValueError(ffi.string(error.text).decode(errors="replace"))
    return Identity(identity)
