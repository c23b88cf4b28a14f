"""Session options of the execution provider.

They arrive as session entries ``ep.cudapluginexecutionprovider.<key>`` (from ``providers=[(name, {...})]`` or
``add_provider_for_devices``), as ``ep.cuda.<key>``, or from the environment's entries
``ep_factory.CudaPluginExecutionProvider.<key>``; the first of these that has a key decides.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

EP_NAME = "CudaPluginExecutionProvider"
SESSION_PREFIX = f"ep.{EP_NAME.lower()}."
ALIAS_PREFIX = "ep.cuda."
ENVIRONMENT_PREFIX = f"ep_factory.{EP_NAME}."


class OptionError(ValueError):
    """An option is unknown or has a value that it cannot have."""

    ort_code = 2  # ORT_INVALID_ARGUMENT


@dataclass(frozen=True)
class Options:
    """What a session asked for.

    Attributes:
        device_id: CUDA ordinal (of the emulated devices, theirs); None: the device that ORT selected.
        use_tf32: float32 matrix products and convolutions of libraries may round inputs to TF32.
        deterministic: only algorithms that give the same bits in every run.
    """

    device_id: int | None = None
    use_tf32: bool = True
    deterministic: bool = False


def _flag(text: str) -> bool:
    if text.strip().lower() in ("1", "true"):
        return True
    if text.strip().lower() in ("0", "false"):
        return False
    raise ValueError("use 1 or 0")


def _ordinal(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("use a CUDA ordinal: 0, 1, ...")
    return int(text)


def _off(text: str) -> None:
    if _flag(text):
        raise ValueError("not supported; only 0")


def _any(text: str) -> None:
    del text


_MEANINGFUL: dict[str, Callable[[str], Any]] = {"device_id": _ordinal, "use_tf32": _flag, "deterministic": _flag}

#: Keys of the CUDA execution provider that decide how fast or in how much memory, not what is computed: accepted, so
#: that nobody has to change a configuration, and reported as without effect.
_WITHOUT_EFFECT: dict[str, Callable[[str], Any]] = {
    "arena_extend_strategy": _any,
    "cudnn_conv1d_pad_to_nc1d": _flag,
    "cudnn_conv_algo_search": _any,
    "cudnn_conv_use_max_workspace": _flag,
    "do_copy_in_default_stream": _flag,
    "enable_cuda_graph": _flag,
    "enable_skip_layer_norm_strict_mode": _flag,
    "fuse_conv_bias": _flag,
    "gpu_mem_limit": _any,
    "min_num_runs_before_cuda_graph_capture": _any,
    "prefer_nhwc": _flag,
    "prefer_nhwc_layout": _flag,
    "sdpa_kernel": _any,
    "tunable_op_enable": _flag,
    "tunable_op_max_tuning_duration_ms": _any,
    "tunable_op_tuning_enable": _flag,
    "use_ep_level_unified_stream": _flag,
}

#: Keys that would change what the application may rely on: only their off value is accepted.
_REFUSED: dict[str, Callable[[str], Any]] = {"has_user_compute_stream": _off, "user_compute_stream": _any}


def collect(session: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The options by bare key, out of all entries of a session and of the environment."""
    merged: dict[str, str] = {}
    for prefix, entries in (
        (ENVIRONMENT_PREFIX, environment),
        (ALIAS_PREFIX, session),
        (SESSION_PREFIX, session),
    ):
        merged |= {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
    return merged


def parse(values: Mapping[str, str]) -> tuple[Options, list[str]]:
    """The options, and the keys that were accepted without effect.

    Raises:
        OptionError: a key is unknown, or a value cannot be one of its key's.
    """
    known = _MEANINGFUL | _WITHOUT_EFFECT | _REFUSED
    parsed: dict[str, Any] = {}
    for key, text in values.items():
        if key.startswith("arena."):
            continue
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(_MEANINGFUL))}"
            raise OptionError(f"{EP_NAME} has no option {key!r}{hint}")
        try:
            parsed[key] = known[key](text)
        except ValueError as error:
            raise OptionError(f"{EP_NAME} option {key}={text!r}: {error}") from None
    ignored = sorted(key for key in values if key in _WITHOUT_EFFECT or key.startswith("arena."))
    return Options(**{key: value for key, value in parsed.items() if key in _MEANINGFUL}), ignored
