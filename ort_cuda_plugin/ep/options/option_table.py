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

from ...clusters.stage_balance import Rule
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
    WEIGHTS = "weights"
    OUTPUT = "log and files"


@dataclass(frozen=True)
class Row:
    """A row of `ROWS`: all properties of an option except its name and default.

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
"""Maximum number of Runs before a capture: ONNX Runtime repeats a Run at most 8 times, so the eighth must capture."""

_CUDNN = "cuDNN"
_CUBLASLT = "cuBLASLt"
_EMULATED = "the emulated device"


@dataclass(frozen=True)
class CompiledModelOptions:
    """The options of compiled models, a part of `Options`."""

    context_architectures: tuple[Target, ...] = _option(
        (),
        values.ARCHITECTURES,
        Decides.COMPILED,
        "the architectures for which a compiled model has code. Default: the architecture of the session's device "
        "([context_format.md](context_format.md))",
    )
    context_shapes: tuple[values.InputShapes, ...] = _option(
        (),
        values.SHAPES,
        Decides.COMPILED,
        "further input shapes for which a compiled model gets plans. If the ranks of all inputs are known, it gets "
        "plans for five sample shapes in any case. In them the first dimension of an input, if symbolic, is 1, 2, 4 "
        "or 8, and other symbolic dimensions are 1, 8, 64 or 224. One plan may serve several of these shapes. Most "
        "plans hold for all sizes",
    )
    context_weightless: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: a compiled model stores no weights. A session that loads it reads the weights from the source model. ONNX "
        "Runtime's session entries `ep.enable_weightless` and `ep.enable_weightless_ep_context_nodes` mean the same. "
        "The plugin looks for the source model at the session entry `ep.context_source_model_path`, else beside the "
        "compiled model. The session entry `session.model_external_initializers_file_folder_path` names the folder of "
        "the source model's external data ([context_format.md](context_format.md))",
    )
    context_refit: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: the weights of the source model may have changed, but not their shapes. If a plan depends on the values of "
        "a changed weight, an error names this weight. 0: if weights have changed, an error names the first of them",
        needs="a compiled model without weights",
    )
    context_allow_host_code: bool = _option(
        False,
        values.FLAG,
        Decides.COMPILED,
        "1: the emulated device runs the machine code and plans that a compiled model holds. This code runs on the "
        "CPU, so set 1 only for your own compiled models. 0: the plugin compiles again from the graph in the compiled "
        "model. The environment variable `ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE=1` means 1 for all sessions of the "
        "process",
        needs=_EMULATED,
    )


@dataclass(frozen=True)
class Options(CompiledModelOptions):
    """The options of a session. ``device_arena`` and ``pinned_arena`` hold ``arena.*`` keys, which C reads."""

    device_id: int | None = _option(
        None,
        values.ORDINAL,
        Decides.DEVICE,
        "CUDA ordinal of the device. Default: the device that ONNX Runtime selected. Emulated devices have "
        "ordinals of their own",
    )
    device_ids: tuple[int, ...] = _option(
        (),
        values.ORDINALS,
        Decides.DEVICE,
        "CUDA ordinals of [several devices](several_devices.md), the session's device first. Default: the "
        "session's device alone",
    )
    device_of: tuple[Rule, ...] = _option(
        (),
        values.DEVICE_RULES,
        Decides.CLAIMS,
        "rules that give nodes to [several devices](several_devices.md). Default: the plugin balances them",
        needs="several devices",
    )
    user_compute_stream: int | None = _option(
        None,
        values.STREAM,
        Decides.STREAMS,
        "address of a `cudaStream_t` of the device's primary context. All Runs of the session enqueue their work on "
        "this stream, which must outlive the session; `0` is the default stream. Default: a stream for each thread",
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
        "1: when a plan has run `min_num_runs_before_cuda_graph_capture` times, the plugin makes a CUDA graph of it, "
        "which later Runs launch. 0: each Run launches its kernels one by one",
        changes=True,
    )
    cuda_graph_cache_size: int = _option(
        16,
        values.count(1, 1024),
        Decides.GRAPHS,
        "maximum number of automatic graphs that each fused node keeps. A graph keeps the memory of its intermediate "
        "tensors. If a fused node has more than one graph, their memory together is at most a quarter of the device's "
        "memory",
        needs="`automatic_cuda_graphs=1`",
        changes=True,
    )
    enable_cuda_graph: bool = _option(
        False,
        values.FLAG,
        Decides.GRAPHS,
        "1: ONNX Runtime captures whole Runs, and there are no automatic graphs. With a shared stream "
        "(`user_compute_stream`, `use_ep_level_unified_stream`), a Run that is captured and the other Runs of the "
        "session wait for each other. During the capture the application must not enqueue anything else on the stream. "
        "There is a graph for each `gpu_graph_id` and each thread that ran it. The plugin keeps the graph, and the "
        "memory of its Runs, until ONNX Runtime releases the graph, or until the thread or the session ends",
        bare=True,
    )
    min_num_runs_before_cuda_graph_capture: int = _option(
        2,
        values.count(1, 1000),
        Decides.GRAPHS,
        "number of Runs before the plugin makes an automatic graph of a plan, or ONNX Runtime captures a Run. With "
        "`enable_cuda_graph=1` at most 7, because ONNX Runtime repeats a Run at most 8 times until the plugin reports "
        "a captured graph",
    )
    use_tf32: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "1: float32 matrix products, convolutions and attention may round their inputs to TF32, in libraries and in "
        "the plugin's own kernels. The plugin's kernels store constant weights, and tensors between two such "
        "operations, as scaled float16, which has TF32's 10 mantissa bits. The emulated device never rounds to TF32",
        needs="a GPU from sm_80 on",
        bare=True,
    )
    deterministic: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1: the plugin uses only algorithms that give the same bits in every Run, and chooses nothing by measured "
        "times",
    )
    fusion: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "1: the plugin fuses operators, so that intermediate results stay in registers where possible. Fusion does not "
        "change the bits of results, with these exceptions. A multiplication and an addition may become one fused "
        "multiply-add. Fused attention adds in another order (always on a GPU; on the emulated device for at most 4 "
        "queries, or more than 1024 keys). If cuBLASLt or cuDNN computes several operators in one call, the result is "
        "rounded once; so is a LoRA layer that one kernel computes. On a GPU, split-K adds in another order, products "
        "of dequantized 8-bit codes are exact, and tensors between two TF32 products are stored as float16. 0: each "
        "operator stores its result",
    )
    device_loops: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "1: a Loop or Scan whose number of iterations is known only in a Run is compiled together with its body. The "
        "device counts the iterations, and in a CUDA graph the whole loop is a part of one launch "
        "([loops.md](loops.md)). The same holds for the tokens of a search such as BeamSearch. 0: ONNX Runtime runs "
        "the body once for each iteration, and the host reads a flag after each token of a search",
    )
    autotune: bool = _option(
        False,
        values.FLAG,
        Decides.TUNING,
        "1: when the session makes a plan, it measures several candidates for each matrix product, convolution and "
        "attention, and takes the fastest ([tuning.md](tuning.md)). Candidates are a call of cuBLASLt or cuDNN, the "
        "plugin's kernels with several tile sizes and split-K factors, attention as three kernels, and the tactics of "
        "[custom operators](custom_kernels.md). The session also measures the whole plan with and without each pass "
        "that can make a plan slower, such as the merging of matrix products, and keeps the faster plan. The folder "
        "`timings` of the kernel cache stores the times, so that a later session with the same problem measures "
        "nothing. Two cases are not measured: problems with sizes that a Run computes on the device, and compiled "
        "models. `explain --program --autotune` shows the times. The choices, and so the bits of results, may differ "
        "between machines",
        needs="`deterministic=0`",
    )
    sdpa_kernel: int = _option(
        0,
        values.COUNT,
        Decides.PLANS,
        "the sum of ONNX Runtime's flags for the attention kernels that may be used. 0: any kernel. 16 (MATH) alone: "
        "two matrix products and a softmax. 8 (CUDNN): cuDNN's attention; numbers above 0 without this flag exclude "
        "it. 1 (FLASH) and 2 (EFFICIENT): the plugin's own fused kernel. The plugin has no kernels for other flags, "
        "and logs a warning if one is set",
    )
    weight_budget: int | float | None = _option(
        None,
        values.BYTE_BUDGET,
        Decides.WEIGHTS,
        "bytes of device memory for weights, or a share of the device's memory such as `25%` or `0.25`. If the weights "
        "of the session are larger, some of them stay in pinned host memory, and each Run copies them to the device "
        "ahead of their use ([weight_streaming.md](weight_streaming.md)). Default, and 0: all weights stay in device "
        "memory",
    )
    prefer_nhwc: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1: ONNX Runtime converts operators to their channels-last form (the domain `com.ms.internal.nhwc` in "
        "[operators.md](operators.md)), and inserts transposes around these operators. The plugin turns the "
        "transposes into views, so results and launches are the same as with 0",
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
        "how the plugin finds cuDNN's engine for new sizes of a convolution. HEURISTIC asks cuDNN's heuristics. "
        "DEFAULT asks cuDNN's fast heuristics, and takes no engine that cuDNN would have to compile for SiLU or "
        "ReLU6. EXHAUSTIVE measures up to 8 engines, but with `deterministic=1` none",
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
        "1: cuDNN computes a 1-D convolution of `[N, C, D]` as a 2-D convolution of `[N, C, 1, D]`. 0: as a 2-D "
        "convolution of `[N, C, D, 1]`",
        needs=_CUDNN,
    )
    fuse_conv_bias: bool = _option(
        True,
        values.FLAG,
        Decides.PLANS,
        "1: cuDNN computes a convolution together with its epilogue: bias, residual and activation. 0: a kernel of "
        "the plugin computes the epilogue afterwards",
        needs=_CUDNN,
    )
    tunable_op_enable: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1, with `tunable_op_tuning_enable=1`: the plugin measures up to 8 algorithms of cuBLASLt for each new size "
        "of a matrix product",
        needs=_CUBLASLT,
    )
    tunable_op_tuning_enable: bool = _option(
        False,
        values.FLAG,
        Decides.PLANS,
        "1, with `tunable_op_enable=1`: see `tunable_op_enable`",
        needs=_CUBLASLT,
    )
    tunable_op_max_tuning_duration_ms: int = _option(
        0,
        values.count(-1, 2**31 - 1),
        Decides.PLANS,
        "milliseconds after which the plugin measures no further algorithm of a matrix product; 0 or -1: no limit",
        needs="`tunable_op_enable=1` and `tunable_op_tuning_enable=1`",
    )
    keep_float32: tuple[str, ...] = _option(
        (),
        values.NAMES,
        Decides.PLANS,
        "names of nodes and operator types. The plugin computes the float16 and bfloat16 nodes that the list names in "
        "float32. A value between two such nodes stays float32, and a value that another node reads is rounded to its "
        "own type, so intermediate values above 65504 do not become infinite. `auto` stands for the nodes whose "
        "results may exceed 65504 according to value range analysis ([float16.md](float16.md))",
    )
    claim_unprofitable_nodes: bool = _option(
        False,
        values.FLAG,
        Decides.CLAIMS,
        "0: the plugin declines nodes, with kind `cost`, if copying their inputs and results costs more time than "
        "running them on the device saves. Example: the nodes that compute the condition of a Loop, if it depends on "
        "nothing that the device computes. 1: the plugin takes these nodes too",
        former_keys=("claim_poor_islands",),
    )
    single_nodes: bool = _option(
        False,
        values.FLAG,
        Decides.CLAIMS,
        "1: the plugin fuses nothing, and ONNX Runtime runs each node as a separate kernel. This is slower. A session "
        "with `optimized_model_filepath` always runs so, because ONNX Runtime cannot write fused nodes to a model",
    )
    program_folder: str = _option(
        "",
        values.FOLDER,
        Decides.OUTPUT,
        "an existing folder, in which the plugin writes two files for each fused node. One has the program after each "
        "pass, as text. The other has a line of JSON for each plan that was built, with the bytes that each step moves",
    )
    progress: bool = _option(
        False,
        values.FLAG,
        Decides.OUTPUT,
        "1: while the session lives, the standard error shows the progress of compilation and autotuning: a bar on a "
        "terminal and in a notebook, lines elsewhere. `ORT_CUDA_PLUGIN_PROGRESS=0` overrides this option "
        "([profiling.md](profiling.md#progress-of-long-work))",
    )
    log_level: str = _option(
        "VERBOSE",
        values.name_or_number(values.LOG_LEVELS),
        Decides.OUTPUT,
        "lowest severity of the messages that the plugin writes to ONNX Runtime's log for this session. ONNX "
        "Runtime's own log level filters these messages as well",
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


#: The row of each option by its key, in the order of the fields of `Options`, which is also that of docs/options.md.
ROWS: dict[str, Row] = {each.name: each.metadata["row"] for each in fields(Options) if each.metadata}

#: The value of each option that a session does not set.
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Options) if each.name in ROWS}

#: The own key of each option by its other names: aliases and former keys.
OTHER_NAMES = {name: key for key, row in ROWS.items() for name in (*row.aliases, *row.former_keys)}

BARE_KEYS = frozenset(key for key, row in ROWS.items() if row.bare)


@dataclass(frozen=True)
class WithoutEffect:
    """A key of the CUDA execution provider that the plugin accepts and ignores, and the reason.

    ``usual`` is the value that requests what the plugin does anyway; the log warns of other values.
    """

    reader: values.Reader
    why: str
    usual: Any = None


SERVED_ATTENTION_KERNELS = (
    AttentionKernel.FLASH | AttentionKernel.EFFICIENT | AttentionKernel.CUDNN | AttentionKernel.MATH
)
"""Kernels of ``sdpa_kernel`` that the plugin has. FLASH and EFFICIENT both mean its own kernel, an online softmax."""

_NO_SUCH_KERNEL = "the plugin has no such kernel, and chooses among its own kernels for each size"
_OWN_ARENA = "device memory comes from the plugin's arena"

#: Keys that are accepted so that existing configurations work. The log names those that request a behavior that the
#: plugin lacks.
WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "do_copy_in_default_stream": WithoutEffect(
        values.FLAG, "the plugin orders each copy before or after the Runs that it belongs to", usual=True
    ),
    "enable_skip_layer_norm_strict_mode": WithoutEffect(
        values.FLAG, "normalizations always accumulate in float32", usual=True
    ),
    "fpa_intb_gemm": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
    "fpa_intb_profile_m": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
    "gpu_external_alloc": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "gpu_external_empty_cache": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "gpu_external_free": WithoutEffect(values.NO_FUNCTION, _OWN_ARENA),
    "qmoe_row_tile_size": WithoutEffect(values.COUNT, _NO_SUCH_KERNEL, usual=0),
}
