"""Provider options as one table: `Options` has a field for each, whose row is in the field's metadata.

The accepted keys, the errors, the table of ``docs/options.md`` and `LoweringOptions` are generated from the rows.

To add an option, add a field with its row, read it in the code that uses it, add its effect to the table in
``tests/boundary/test_option_effects.py``, and write the document again:
``ort-cuda-plugin options --write docs/options.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from ...compiler.targets import Target
from ...program.device import AttentionKernel, LoweringOptions
from . import option_values as values


class Decides(Enum):
    """The part of the plugin that an option changes. Each option of PLANS is a field of `LoweringOptions`."""

    DEVICE = "device"
    CLAIMS = "claims"
    PLANS = "plans"
    STREAMS = "streams"
    TUNING = "autotuning"
    GRAPHS = "CUDA graphs"
    COMPILED = "compiled models"
    OUTPUT = "log and files"


@dataclass(frozen=True)
class Row:
    """A row of the table: all properties of an option except its name and default.

    Attributes:
        reader: parses the option's text, and describes the allowed values.
        decides: the part of the plugin that the option changes.
        text: the meaning of the option, in Markdown.
        needs: the condition under which the option has an effect; "": always.
        aliases: names of the option in ONNX Runtime's providers; the option's own key has priority.
        former_keys: earlier names of the option; two names with different values are an error.
        bare: whether a session entry without a prefix sets the option as well.
        changes: whether the option can change while a session lives.
    """

    reader: values.Reader
    decides: Decides
    text: str
    needs: str = ""
    aliases: tuple[str, ...] = ()
    former_keys: tuple[str, ...] = ()
    bare: bool = False
    changes: bool = False


def _option(default: Any, reader: values.Reader, decides: Decides, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"row": Row(reader, decides, text, **more)})


MOST_GRAPH_RUNS = 7
"""Maximum number of Runs before a capture: ONNX Runtime repeats a Run at most 8 times until it is captured."""

_CUDNN = "cuDNN"
_CUBLASLT = "cuBLASLt"
_EMULATED = "the emulated device"


@dataclass(frozen=True)
class Options:
    """The options of a session. ``device_arena`` and ``pinned_arena`` hold ``arena.*`` keys, which C reads."""

    device_id: int | None = _option(
        None,
        values.ORDINAL,
        Decides.DEVICE,
        "CUDA ordinal of the device. Default: the device that ONNX Runtime selected. Emulated devices have "
        "ordinals of their own",
    )
    user_compute_stream: int | None = _option(
        None,
        values.STREAM,
        Decides.STREAMS,
        "address of a `cudaStream_t` of the device's primary context, on which all Runs of the session "
        "enqueue their work; `0` is the default stream. It must outlive the session. Default: a stream for "
        "each thread",
        bare=True,
    )
    has_user_compute_stream: bool | None = _option(
        None,
        values.FLAG,
        Decides.STREAMS,
        "0: `user_compute_stream` is ignored. 1: it is an error to leave `user_compute_stream` out",
    )
    use_ep_level_unified_stream: bool = _option(
        False,
        values.FLAG,
        Decides.STREAMS,
        "1: all threads of the session share one stream, instead of one stream for each thread",
        bare=True,
    )
    automatic_cuda_graphs: bool = _option(
        True,
        values.FLAG,
        Decides.GRAPHS,
        "a plan that has run `min_num_runs_before_cuda_graph_capture` times is replayed as a CUDA graph. 0: "
        "each Run launches its kernels one by one",
        changes=True,
    )
    cuda_graph_cache_size: int = _option(
        16,
        values.count(1, 1024),
        Decides.GRAPHS,
        "number of automatic graphs that each compiled cluster keeps. A graph keeps the memory of its "
        "intermediate tensors. If a cluster has more than one graph, their memory together is at most a "
        "quarter of the device's",
        needs="`automatic_cuda_graphs=1`",
        changes=True,
    )
    enable_cuda_graph: bool = _option(
        False,
        values.FLAG,
        Decides.GRAPHS,
        "1: ONNX Runtime captures whole Runs, and there are no automatic graphs. With a shared stream "
        "(`user_compute_stream`, `use_ep_level_unified_stream`), a Run that captures and the other Runs of "
        "the session wait for each other; the application must not enqueue anything else on the stream "
        "meanwhile. Each `gpu_graph_id` keeps a graph and the memory of its Runs, on each thread that ran "
        "it, until ONNX Runtime releases the graph, or the thread or the session ends. The application "
        "chooses how many there are",
        bare=True,
    )
    min_num_runs_before_cuda_graph_capture: int = _option(
        2,
        values.count(1, 1000),
        Decides.GRAPHS,
        "number of Runs before a graph is made, automatic or captured by ONNX Runtime. With "
        "`enable_cuda_graph` at most 7, since ONNX Runtime repeats a Run at most 8 times until it is "
        "captured",
    )
    use_tf32: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "float32 matrix products, convolutions and attention may round their inputs to TF32, in libraries "
        "and in the plugin's own kernels. The plugin's kernels store constant weights, and tensors between "
        "two such products, as scaled float16, which has TF32's 10 mantissa bits. The emulated device never "
        "rounds to TF32",
        needs="a GPU from sm_80 on",
        bare=True,
    )
    deterministic: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1: only algorithms that give the same bits in every Run, and no choice by measured times",
    )
    fusion: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "operators are fused: what one computes for the next stays in registers where that is possible. "
        "Results keep their bits, with three exceptions. A multiplication and an addition may become one "
        "fused operation. Fused attention adds in another order (on a GPU; on the emulated device for at "
        "most 4 queries, or more than 1024 keys). cuBLASLt and cuDNN round once where they compute several "
        "operators. 0: each operator stores its result",
    )
    autotune: bool = _option(
        False,
        values.FLAG,
        Decides.TUNING,
        "1: the session measures, when it makes a plan, the ways to compute each matrix product, "
        "convolution and attention, and takes the fastest ([tuning.md](tuning.md)). Candidates are a call "
        "of cuBLASLt or cuDNN, the plugin's kernels with several tile sizes and split-K factors, attention "
        "as three kernels, and the tactics of [custom operators](custom_kernels.md). The folder `timings` "
        "of the kernel cache stores the times, so that a later session with the same problem measures "
        "nothing. Sizes that a Run computes on the device and compiled models are not measured. `explain "
        "--program --autotune` shows the times. The choice, and so the bits, may differ between machines",
        needs="`deterministic=0`",
    )
    sdpa_kernel: int = _option(
        0,
        values.COUNT,
        Decides.PLANS,
        "ONNX Runtime's bits of attention kernels. 0: any kernel. 16 (MATH) alone: two matrix products and "
        "a softmax. A value without 8 (CUDNN): no kernel of cuDNN. 1 (FLASH) and 2 (EFFICIENT) mean the "
        "plugin's own kernel. The log warns of other bits: the plugin has no such kernel",
    )
    prefer_nhwc: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1: ONNX Runtime converts the operators that have a channels-last form (the domain "
        "`com.ms.internal.nhwc` in [operators.md](operators.md)), and inserts transposes around them. The "
        "plugin turns these transposes into views: results and launches are those of ONNX's layout",
        aliases=("prefer_nhwc_layout",),
    )
    enable_cudnn: bool = _option(
        True,
        values.FLAG,
        Decides.DEVICE,
        "0: the plugin's own kernels compute convolutions and attention also where cuDNN is installed",
        needs=_CUDNN,
    )
    cudnn_conv_algo_search: str = _option(
        "HEURISTIC",
        values.name_or_number(values.ALGORITHM_SEARCHES),
        Decides.PLANS,
        "how cuDNN's engine for new sizes of a convolution is found. HEURISTIC asks cuDNN's heuristics. "
        "DEFAULT asks the fast heuristics, and takes no engine that cuDNN would have to compile for SiLU or "
        "ReLU6. EXHAUSTIVE measures up to 8 engines; with `deterministic=1` it measures nothing",
        needs=_CUDNN,
        aliases=("cudnn_conv_algo",),
    )
    cudnn_conv_use_max_workspace: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1: a convolution of cuDNN may use 256 MiB of workspace instead of 32 MiB",
        needs=_CUDNN,
    )
    cudnn_conv1d_pad_to_nc1d: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "cuDNN computes a 1-D convolution of `[N, C, D]` as one of `[N, C, 1, D]`. 0: as one of `[N, C, D, 1]`",
        needs=_CUDNN,
    )
    fuse_conv_bias: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "cuDNN computes the epilogue of a convolution: bias, residual and activation. 0: a kernel of the "
        "plugin computes it afterwards",
        needs=_CUDNN,
    )
    tunable_op_enable: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1, with `tunable_op_tuning_enable=1`: up to 8 algorithms of cuBLASLt are measured for each new "
        "size of a matrix product",
        needs=_CUBLASLT,
    )
    tunable_op_tuning_enable: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1, with `tunable_op_enable=1`: see there",
        needs=_CUBLASLT,
    )
    tunable_op_max_tuning_duration_ms: int = _option(
        0,
        values.count(-1, 2**31 - 1),
        Decides.PLANS,
        "milliseconds after which no further algorithm of a product is measured; 0 or -1: no limit",
        needs="both options above",
    )
    claim_unprofitable_nodes: bool = _option(
        False,
        values.FLAG,
        Decides.CLAIMS,
        "1: nodes run here also where copying their inputs and results costs more than they gain (kind "
        "`cost` of a declined node), such as the condition of a Loop that depends on nothing computed on "
        "the device",
        former_keys=("claim_poor_islands",),
    )
    single_nodes: bool = _option(
        False,
        values.FLAG,
        Decides.CLAIMS,
        "1: ONNX Runtime runs every node by a kernel of its own, and nothing is fused. This is slower. A "
        "session with `optimized_model_filepath` does so without the option, because ONNX Runtime cannot "
        "write fused nodes",
    )
    context_architectures: tuple[Target, ...] = _option(
        (),
        values.ARCHITECTURES,
        Decides.COMPILED,
        "the architectures that a compiled model is for. Default: the session's device "
        "([context_format.md](context_format.md))",
    )
    context_shapes: tuple[values.InputShapes, ...] = _option(
        (),
        values.SHAPES,
        Decides.COMPILED,
        "input shapes that a compiled model gets plans for. Default: plans for sizes of one and of several, "
        "small and large; most of them hold for all sizes",
    )
    context_weightless: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: a compiled model stores no weights, and reads them from its source model when it is loaded. "
        "ONNX Runtime's session entries `ep.enable_weightless` and `ep.enable_weightless_ep_context_nodes` "
        "mean the same. The source model is looked for at the session entry `ep.context_source_model_path`, "
        "else beside the compiled model; `session.model_external_initializers_file_folder_path` says where "
        "its external data are ([context_format.md](context_format.md))",
    )
    context_refit: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: the source model may have new weights of the same shapes; where plans depend on one that has "
        "changed, the error names it. 0: other weights are an error that names the first",
        needs="a compiled model without weights",
    )
    context_allow_host_code: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: machine code and plans of a compiled model are used as they are stored. They run on the CPU, so "
        "allow it for your own compiled models only. 0: the model is compiled again from the graph that it "
        "holds. The environment variable `ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE=1` allows it for the "
        "process",
        needs=_EMULATED,
    )
    program_folder: str = _option(
        "",
        values.FOLDER,
        Decides.OUTPUT,
        "an existing folder that gets two files for each compiled cluster: its program after each pass, as "
        "text, and a line of JSON for each plan that was built, with the bytes of its steps",
    )
    log_level: str = _option(
        "VERBOSE",
        values.name_or_number(values.LOG_LEVELS),
        Decides.OUTPUT,
        "lowest severity that the session's provider writes to ONNX Runtime's log. ONNX Runtime's own level "
        "holds as well",
        changes=True,
    )
    device_arena: Mapping[str, str] = field(default_factory=dict)
    pinned_arena: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_automatic_graphs(self) -> int:
        """Return the maximum number of automatic graphs of a cluster; 0: no graphs are made."""
        return self.cuda_graph_cache_size if self.automatic_cuda_graphs and not self.enable_cuda_graph else 0

    @property
    def lowering(self) -> LoweringOptions:
        """Return the options that lowering reads."""
        return LoweringOptions(**{key: getattr(self, key) for key, row in ROWS.items() if row.decides is Decides.PLANS})


#: The row of each option by its key, in the order of the documents.
ROWS: dict[str, Row] = {each.name: each.metadata["row"] for each in fields(Options) if each.metadata}

#: The value of each option that a session does not set.
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Options) if each.name in ROWS}

#: The option of each name that is not an option's own key.
OTHER_NAMES = {name: key for key, row in ROWS.items() for name in (*row.aliases, *row.former_keys)}

BARE_KEYS = frozenset(key for key, row in ROWS.items() if row.bare)


@dataclass(frozen=True)
class WithoutEffect:
    """A key of the CUDA execution provider that the plugin accepts and ignores, and the reason.

    ``usual`` is the value that requests the plugin's behaviour; the log warns of others.
    """

    reader: values.Reader
    why: str
    usual: Any = None


SERVED_ATTENTION_KERNELS = (
    AttentionKernel.FLASH | AttentionKernel.EFFICIENT | AttentionKernel.CUDNN | AttentionKernel.MATH
)
"""FLASH and EFFICIENT both mean the plugin's own kernel, an online softmax over tiles of keys."""

_NO_SUCH_KERNEL = "the plugin has no such kernel: it chooses its own for each size"
_OWN_ARENA = "device memory comes from the plugin's arena"

#: Accepted so that existing configurations work. The log names the keys whose requested behaviour the plugin lacks.
WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "do_copy_in_default_stream": WithoutEffect(
        values.FLAG, "copies always go to the stream of the Run, in its order", usual=True
    ),
    "enable_skip_layer_norm_strict_mode": WithoutEffect(
        values.FLAG, "normalisations always accumulate in float32", usual=True
    ),
    "fpa_intb_gemm": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
    "fpa_intb_profile_m": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
    "gpu_external_alloc": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "gpu_external_empty_cache": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "gpu_external_free": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "qmoe_row_tile_size": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
}
