"""Session options of the execution provider.

They arrive as session entries ``ep.cudapluginexecutionprovider.<key>`` (from ``providers=[(name, {...})]`` or
``add_provider_for_devices``), as ``ep.cuda.<key>``, or from the environment's entries
``ep_factory.CudaPluginExecutionProvider.<key>``; the first of these that has a key decides. The keys in `BARE_KEYS` are
also known as session entries without a prefix, after the other two. Where the provider has another name
(``ep.identity``), that one stands in the entries.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compiler.targets import Target
from . import arena
from . import option_values as values
from .identity import EP_NAME, Identity

ALIAS_PREFIX = "ep.cuda."
BARE_KEYS = frozenset({"enable_cuda_graph", "use_ep_level_unified_stream", "use_tf32", "user_compute_stream"})


class OptionError(ValueError):
    """An option is unknown or has a value that it cannot have."""

    ort_code = 2  # ORT_INVALID_ARGUMENT


@dataclass(frozen=True)
class Options:
    """What a session asked for.

    Attributes:
        device_id: CUDA ordinal (of the emulated devices, theirs); None: the device that ORT selected.
        use_tf32: float32 products, convolutions and attention may round inputs to TF32 on a GPU.
        deterministic: only algorithms that give the same bits in every run.
        fusion: what one operator computes for another goes through no memory where that is possible.
        prefer_nhwc: ONNX Runtime gives operators that have a channels-last form this form.
        program_folder: where the programs of compiled clusters are written as text; "" for nowhere.
        user_compute_stream: address of the ``cudaStream_t`` that all Runs use, 0 for the default stream; None: ORT gets
            a stream of our own for each thread.
        use_ep_level_unified_stream: one stream of our own for all threads of the session.
        device_arena: options of the arena of device memory, by their keys ``arena.*``.
        pinned_arena: of the arena of pinned host memory.
        autotune: kernels of products, convolutions and attention are chosen by measuring them on the device.
        automatic_cuda_graphs: a plan that has run a few times with the same sizes is replayed as a CUDA graph.
        enable_cuda_graph: ONNX Runtime captures whole runs; it excludes automatic graphs.
        min_num_runs_before_cuda_graph_capture: runs before a graph is made, of either kind; at least 1.
        cuda_graph_cache_size: automatic graphs that each compiled cluster keeps, with their memory.
        enable_cudnn: convolutions may be cuDNN's.
        cudnn_conv_algo_search: how cuDNN's engine is found: EXHAUSTIVE measures, HEURISTIC asks, DEFAULT asks briefly.
        cudnn_conv_use_max_workspace: cuDNN may use much scratch memory.
        cudnn_conv1d_pad_to_nc1d: a convolution of one dimension gets its second one before that.
        fuse_conv_bias: cuDNN adds a bias, and what follows it.
        sdpa_kernel: which kernels attention may have, as bits of ONNX Runtime's (`AttentionKernel`); 0: any.
        tunable_op_enable, tunable_op_tuning_enable: together they have cuBLASLt's algorithms measured.
        tunable_op_max_tuning_duration_ms: how long that may take for one product; not positive: any time.
        context_allow_host_code: code for this computer's CPU may come from a compiled model, for the emulated device.
        context_architectures: what a compiled model is for; empty: the session's device.
        context_refit: weights that a compiled model takes from its source may be new ones.
        context_shapes: shapes that a compiled model gets plans for beside those of its own choice.
        context_weightless: a compiled model leaves its weights in the model that it is made of.
        log_level: the least important lines that the session's provider writes; ONNX Runtime's level holds as well.
        claim_poor_islands: nodes run here also where copying to the device and back costs more than they gain.
    """

    device_id: int | None = None
    use_tf32: bool = True
    deterministic: bool = False
    user_compute_stream: int | None = None
    use_ep_level_unified_stream: bool = False
    device_arena: Mapping[str, str] = field(default_factory=dict)
    pinned_arena: Mapping[str, str] = field(default_factory=dict)
    autotune: bool = False
    automatic_cuda_graphs: bool = True
    enable_cuda_graph: bool = False
    min_num_runs_before_cuda_graph_capture: int = 2
    cuda_graph_cache_size: int = 16
    fusion: bool = True
    prefer_nhwc: bool = False
    program_folder: str = ""
    single_nodes: bool = False
    enable_cudnn: bool = True
    cudnn_conv_algo_search: str = "HEURISTIC"
    cudnn_conv_use_max_workspace: bool = False
    cudnn_conv1d_pad_to_nc1d: bool = True
    fuse_conv_bias: bool = True
    sdpa_kernel: int = 0
    tunable_op_enable: bool = False
    tunable_op_tuning_enable: bool = False
    tunable_op_max_tuning_duration_ms: int = 0
    context_allow_host_code: bool = False
    context_architectures: tuple[Target, ...] = ()
    context_refit: bool = False
    context_shapes: values.Shapes = ()
    context_weightless: bool = False
    log_level: str = "VERBOSE"
    claim_poor_islands: bool = False

    @property
    def max_automatic_graphs(self) -> int:
        """How many automatic graphs a cluster may keep; 0: none are made."""
        return self.cuda_graph_cache_size if self.automatic_cuda_graphs and not self.enable_cuda_graph else 0


_MOST_GRAPH_RUNS = 7
"""ONNX Runtime repeats a run that it wants to capture at most 8 times, the capture included."""

_ANY_COUNT = values.count(0, 2**31 - 1)

#: How each key that decides something is read; docs/options.md says what they mean.
MEANINGFUL: dict[str, Callable[[str], Any]] = {
    "automatic_cuda_graphs": values.flag,
    "autotune": values.flag,
    "claim_poor_islands": values.flag,
    "cuda_graph_cache_size": values.count(1, 1024),
    "context_allow_host_code": values.flag,
    "context_architectures": values.architectures,
    "context_refit": values.flag,
    "context_shapes": values.shapes,
    "context_weightless": values.flag,
    "cudnn_conv1d_pad_to_nc1d": values.flag,
    "cudnn_conv_algo_search": values.name_or_number(values.ALGORITHM_SEARCHES),
    "cudnn_conv_use_max_workspace": values.flag,
    "deterministic": values.flag,
    "device_id": values.ordinal,
    "enable_cuda_graph": values.flag,
    "enable_cudnn": values.flag,
    "fuse_conv_bias": values.flag,
    "fusion": values.flag,
    "has_user_compute_stream": values.flag,
    "log_level": values.name_or_number(values.LOG_LEVELS),
    "min_num_runs_before_cuda_graph_capture": values.count(1, 1000),
    "prefer_nhwc": values.flag,
    "program_folder": values.folder,
    "sdpa_kernel": _ANY_COUNT,
    "single_nodes": values.flag,
    "tunable_op_enable": values.flag,
    "tunable_op_max_tuning_duration_ms": values.count(-1, 2**31 - 1),
    "tunable_op_tuning_enable": values.flag,
    "use_ep_level_unified_stream": values.flag,
    "use_tf32": values.flag,
    "user_compute_stream": values.stream,
}

#: Other names of keys, as ONNX Runtime's own plugin and the CUDA execution provider have them.
ALIASES = {"cudnn_conv_algo": "cudnn_conv_algo_search", "prefer_nhwc_layout": "prefer_nhwc"}


@dataclass(frozen=True)
class WithoutEffect:
    """A key of the CUDA execution provider that decides nothing here, and why; it can change no result.

    ``usual`` is the value that asks for what happens anyway.
    """

    read: Callable[[str], Any]
    why: str
    usual: Any = None


class AttentionKernel(enum.IntFlag):
    """ONNX Runtime's bits of ``sdpa_kernel``."""

    FLASH = 1
    EFFICIENT = 2
    TRT_FUSED = 4
    CUDNN = 8
    MATH = 16
    TRT_FLASH = 32
    TRT_CROSS = 64
    TRT_CAUSAL = 128
    LEAN = 256


_SERVED = AttentionKernel.FLASH | AttentionKernel.EFFICIENT | AttentionKernel.CUDNN | AttentionKernel.MATH
"""FLASH and EFFICIENT both mean the plugin's own kernel, an online softmax over tiles of keys."""

_NO_SUCH_KERNEL = "the plugin has no such kernel: its own are chosen for each size"

#: Accepted so that existing configurations work. The log names them where they ask for something else than they get.
WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "do_copy_in_default_stream": WithoutEffect(
        values.flag, "copies always go to the stream of the Run, in its order", usual=True
    ),
    "enable_skip_layer_norm_strict_mode": WithoutEffect(
        values.flag, "sums of normalisations are always accumulated in float32", usual=True
    ),
    "fpa_intb_gemm": WithoutEffect(_ANY_COUNT, _NO_SUCH_KERNEL, usual=0),
    "fpa_intb_profile_m": WithoutEffect(_ANY_COUNT, _NO_SUCH_KERNEL, usual=0),
    "gpu_external_alloc": WithoutEffect(values.no_function, "memory comes from the plugin's arena"),
    "gpu_external_empty_cache": WithoutEffect(values.no_function, "memory comes from the plugin's arena"),
    "gpu_external_free": WithoutEffect(values.no_function, "memory comes from the plugin's arena"),
    "qmoe_row_tile_size": WithoutEffect(_ANY_COUNT, _NO_SUCH_KERNEL, usual=0),
}


def known_keys() -> list[str]:
    """All keys that an option may have, by name."""
    return sorted({*MEANINGFUL, *WITHOUT_EFFECT, *ALIASES, *arena.CUDA_PROVIDER_KEYS, *arena.keys()})


def collect(session: Mapping[str, str], environment: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """The options by bare key, out of all entries of a session and of the environment."""
    merged: dict[str, str] = {}
    for prefix, entries in (
        (identity.environment_prefix, environment),
        ("", {key: value for key, value in session.items() if key in BARE_KEYS}),
        (ALIAS_PREFIX, session),
        (identity.session_prefix, session),
    ):
        merged |= {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
    return merged


def parse(given: Mapping[str, str]) -> tuple[Options, dict[str, str]]:
    """The options, and the keys that ask for something that they do not get, each with the reason.

    Raises:
        OptionError: a key is unknown, or a value cannot be one of its key's.
    """
    parsed: dict[str, Any] = _arena_options(given)
    ignored: dict[str, str] = {}
    for key, text in given.items():
        if key.startswith(arena.PREFIX) or key in arena.CUDA_PROVIDER_KEYS:
            continue
        meant = ALIASES.get(key, key)
        if meant in MEANINGFUL:
            if meant == key or meant not in given:
                parsed[meant] = parse_value(key, text, MEANINGFUL[meant])
        elif key in WITHOUT_EFFECT:
            entry = WITHOUT_EFFECT[key]
            if parse_value(key, text, entry.read) != entry.usual:
                ignored[key] = entry.why
        else:
            close = difflib.get_close_matches(key, known_keys(), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"{EP_NAME} has no option {key!r}; {hint}known: {', '.join(known_keys())}")
    has_stream = parsed.pop("has_user_compute_stream", None)
    if has_stream and "user_compute_stream" not in parsed:
        raise OptionError(f"{EP_NAME} option has_user_compute_stream=1 needs user_compute_stream, the stream's address")
    if has_stream is False:
        parsed.pop("user_compute_stream", None)
    options = Options(**parsed)
    if lacking := options.sdpa_kernel & ~int(_SERVED):
        names = [str(bit.name) for bit in AttentionKernel if bit & lacking]
        names += [f"bit {bit}" for bit in range(lacking.bit_length()) if lacking >> bit & 1 and 1 << bit > 256]
        ignored["sdpa_kernel"] = f"the plugin has no kernel of attention for {', '.join(names)}; it takes its own"
    if options.enable_cuda_graph and options.min_num_runs_before_cuda_graph_capture > _MOST_GRAPH_RUNS:
        raise OptionError(
            f"{EP_NAME} option min_num_runs_before_cuda_graph_capture={options.min_num_runs_before_cuda_graph_capture}:"
            f" with enable_cuda_graph=1 use a number from 1 to {_MOST_GRAPH_RUNS}, since ONNX Runtime repeats a run "
            f"at most {_MOST_GRAPH_RUNS + 1} times until it is captured"
        )
    return options, dict(sorted(ignored.items()))


def parse_value(key: str, text: str, read: Callable[[str], Any]) -> Any:
    """What ``read`` makes of an option's text.

    Raises:
        OptionError: it can make nothing of it.
    """
    try:
        return read(text)
    except ValueError as error:
        raise OptionError(f"{EP_NAME} option {key}={text!r}: {error}") from None


def _arena_options(given: Mapping[str, str]) -> dict[str, Any]:
    own = {key: text for key, text in given.items() if key.startswith(arena.PREFIX)}
    if problem := arena.check_options(own):
        raise OptionError(problem)
    aliases: dict[str, str] = {}
    for key, ours in arena.CUDA_PROVIDER_KEYS.items():
        if key not in given:
            continue
        if problem := arena.check_options({ours: given[key]}):
            raise OptionError(problem.replace(ours, key))
        aliases[ours] = given[key]
    return {"device_arena": aliases | own, "pinned_arena": own}
