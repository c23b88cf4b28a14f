"""Session options of the execution provider.

They arrive as session entries ``ep.cudapluginexecutionprovider.<key>`` (from ``providers=[(name, {...})]`` or
``add_provider_for_devices``), as ``ep.cuda.<key>``, or from the environment's entries
``ep_factory.CudaPluginExecutionProvider.<key>``; the first of these that has a key decides. ``enable_cuda_graph`` is
also known as a session entry without a prefix, after the other two. Where the provider has another name
(``ep.identity``), that one stands in the entries.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import arena
from .identity import EP_NAME, Identity

ALIAS_PREFIX = "ep.cuda."
BARE_KEY = "enable_cuda_graph"

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


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
        fusion: what one operator computes for another goes through no memory where that is possible.
        prefer_nhwc: ONNX Runtime gives operators that have a channels-last form this form.
        program_folder: where the programs of compiled clusters are written as text; "" for nowhere.
        user_compute_stream: address of the ``cudaStream_t`` that all Runs use, 0 for the default stream; None: ORT gets
            a stream of our own for each thread.
        use_ep_level_unified_stream: one stream of our own for all threads of the session.
        device_arena: options of the arena of device memory, by their keys ``arena.*``.
        pinned_arena: of the arena of pinned host memory.
        automatic_cuda_graphs: a plan that has run a few times with the same sizes is replayed as a CUDA graph.
        enable_cuda_graph: ONNX Runtime captures whole runs; it excludes automatic graphs.
        min_num_runs_before_cuda_graph_capture: runs before a graph is made, of either kind; at least 1.
        cuda_graph_cache_size: automatic graphs that each compiled cluster keeps, with their memory.
    """

    device_id: int | None = None
    use_tf32: bool = True
    deterministic: bool = False
    user_compute_stream: int | None = None
    use_ep_level_unified_stream: bool = False
    device_arena: Mapping[str, str] = field(default_factory=dict)
    pinned_arena: Mapping[str, str] = field(default_factory=dict)
    automatic_cuda_graphs: bool = True
    enable_cuda_graph: bool = False
    min_num_runs_before_cuda_graph_capture: int = 2
    cuda_graph_cache_size: int = 16
    fusion: bool = True
    prefer_nhwc: bool = False
    program_folder: str = ""
    single_nodes: bool = False

    @property
    def max_automatic_graphs(self) -> int:
        """How many automatic graphs a cluster may keep; 0: none are made."""
        return self.cuda_graph_cache_size if self.automatic_cuda_graphs and not self.enable_cuda_graph else 0


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


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError("use a folder that exists")
    return os.path.abspath(text)


def _stream(text: str) -> int:
    try:
        address = int(text, 0)
    except ValueError:
        address = -1
    if not 0 <= address < 2**64:
        raise ValueError("use the address of a cudaStream_t as an integer; 0 is the default stream")
    if address == _PER_THREAD_STREAM:
        raise ValueError("each thread has a different per-thread default stream; create a stream")
    return address


def _one_of(*names: str) -> Callable[[str], str]:
    def parse_name(text: str) -> str:
        if text.strip() not in names:
            raise ValueError(f"use one of {', '.join(names)}")
        return text.strip()

    return parse_name


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse_count(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"use a number from {least} to {most}")
        return int(text)

    return parse_count


_ANY_COUNT = _count(0, 2**31 - 1)

#: How each key that decides something is read; docs/options.md says what they mean.
MEANINGFUL: dict[str, Callable[[str], Any]] = {
    "automatic_cuda_graphs": _flag,
    "cuda_graph_cache_size": _count(1, 1024),
    "deterministic": _flag,
    "device_id": _ordinal,
    "enable_cuda_graph": _flag,
    "fusion": _flag,
    "has_user_compute_stream": _flag,
    "min_num_runs_before_cuda_graph_capture": _count(1, 1000),
    "prefer_nhwc": _flag,
    "prefer_nhwc_layout": _flag,
    "program_folder": _folder,
    "single_nodes": _flag,
    "use_ep_level_unified_stream": _flag,
    "use_tf32": _flag,
    "user_compute_stream": _stream,
}

#: Keys of the CUDA execution provider that have no meaning here and decide how fast or in how much memory, not what is
#: computed: accepted, so that existing configurations work, and reported as without effect.
WITHOUT_EFFECT: dict[str, Callable[[str], Any]] = {
    "cudnn_conv1d_pad_to_nc1d": _flag,
    "cudnn_conv_algo_search": _one_of("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "cudnn_conv_use_max_workspace": _flag,
    "do_copy_in_default_stream": _flag,
    "enable_skip_layer_norm_strict_mode": _flag,
    "fuse_conv_bias": _flag,
    "sdpa_kernel": _ANY_COUNT,
    "tunable_op_enable": _flag,
    "tunable_op_max_tuning_duration_ms": _ANY_COUNT,
    "tunable_op_tuning_enable": _flag,
}


def collect(session: Mapping[str, str], environment: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """The options by bare key, out of all entries of a session and of the environment."""
    merged: dict[str, str] = {}
    for prefix, entries in (
        (identity.environment_prefix, environment),
        ("", {key: value for key, value in session.items() if key == BARE_KEY}),
        (ALIAS_PREFIX, session),
        (identity.session_prefix, session),
    ):
        merged |= {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
    return merged


def parse(values: Mapping[str, str]) -> tuple[Options, list[str]]:
    """The options, and the keys that were accepted without effect.

    Raises:
        OptionError: a key is unknown, or a value cannot be one of its key's.
    """
    known = MEANINGFUL | WITHOUT_EFFECT
    parsed: dict[str, Any] = _arena_options(values)
    for key, text in values.items():
        if key.startswith(arena.PREFIX) or key in arena.CUDA_PROVIDER_KEYS:
            continue
        if key not in known:
            close = difflib.get_close_matches(key, [*known, *arena.CUDA_PROVIDER_KEYS], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(MEANINGFUL))}"
            raise OptionError(f"{EP_NAME} has no option {key!r}{hint}")
        try:
            parsed[key] = known[key](text)
        except ValueError as error:
            raise OptionError(f"{EP_NAME} option {key}={text!r}: {error}") from None
    has_stream = parsed.pop("has_user_compute_stream", None)
    if has_stream and "user_compute_stream" not in parsed:
        raise OptionError(f"{EP_NAME} option has_user_compute_stream=1 needs user_compute_stream, the stream's address")
    if has_stream is False:
        parsed.pop("user_compute_stream", None)
    if (alias := parsed.pop("prefer_nhwc_layout", None)) is not None:
        parsed.setdefault("prefer_nhwc", alias)
    ignored = sorted(key for key in values if key in WITHOUT_EFFECT)
    return Options(**{key: value for key, value in parsed.items() if key not in WITHOUT_EFFECT}), ignored


def _arena_options(values: Mapping[str, str]) -> dict[str, Any]:
    own = {key: text for key, text in values.items() if key.startswith(arena.PREFIX)}
    if problem := arena.check_options(own):
        raise OptionError(problem)
    aliases: dict[str, str] = {}
    for key, ours in arena.CUDA_PROVIDER_KEYS.items():
        if key not in values:
            continue
        if problem := arena.check_options({ours: values[key]}):
            raise OptionError(problem.replace(ours, key))
        aliases[ours] = values[key]
    return {"device_arena": aliases | own, "pinned_arena": own}
