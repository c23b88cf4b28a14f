"""Types of the provider options, for type checkers and editors. A test compares them with `option_table`."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

Flag: TypeAlias = "bool | Literal[0, 1, '0', '1']"
Count: TypeAlias = "int | str"
ConvolutionSearch: TypeAlias = Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT", 0, 1, 2]
LogLevel: TypeAlias = Literal["VERBOSE", "INFO", "WARNING", "ERROR", "FATAL", 0, 1, 2, 3, 4]
ExtendStrategy: TypeAlias = Literal["kNextPowerOfTwo", "kSameAsRequested", 0, 1, "0", "1"]

ProviderOptions = TypedDict(
    "ProviderOptions",
    {
        "device_id": Count,
        "device_ids": str,
        "device_of": str,
        "user_compute_stream": Count,
        "has_user_compute_stream": Flag,
        "use_ep_level_unified_stream": Flag,
        "automatic_cuda_graphs": Flag,
        "cuda_graph_cache_size": Count,
        "enable_cuda_graph": Flag,
        "min_num_runs_before_cuda_graph_capture": Count,
        "use_tf32": Flag,
        "deterministic": Flag,
        "fusion": Flag,
        "device_loops": Flag,
        "autotune": Flag,
        "sdpa_kernel": Count,
        "weight_budget": "int | float | str",
        "prefer_nhwc": Flag,
        "prefer_nhwc_layout": Flag,
        "enable_cudnn": Flag,
        "cudnn_conv_algo_search": ConvolutionSearch,
        "cudnn_conv_algo": ConvolutionSearch,
        "cudnn_conv_use_max_workspace": Flag,
        "cudnn_conv1d_pad_to_nc1d": Flag,
        "fuse_conv_bias": Flag,
        "tunable_op_enable": Flag,
        "tunable_op_tuning_enable": Flag,
        "tunable_op_max_tuning_duration_ms": Count,
        "keep_float32": str,
        "claim_unprofitable_nodes": Flag,
        "claim_poor_islands": Flag,
        "single_nodes": Flag,
        "context_architectures": str,
        "context_shapes": str,
        "context_weightless": Flag,
        "context_refit": Flag,
        "context_allow_host_code": Flag,
        "program_folder": str,
        "progress": Flag,
        "log_level": LogLevel,
        "do_copy_in_default_stream": Flag,
        "enable_skip_layer_norm_strict_mode": Flag,
        "fpa_intb_gemm": Count,
        "fpa_intb_profile_m": Count,
        "gpu_external_alloc": Literal[0, "0"],
        "gpu_external_empty_cache": Literal[0, "0"],
        "gpu_external_free": Literal[0, "0"],
        "qmoe_row_tile_size": Count,
        "gpu_mem_limit": Count,
        "arena_extend_strategy": ExtendStrategy,
        "arena.extend_strategy": ExtendStrategy,
        "arena.initial_chunk_size_bytes": Count,
        "arena.max_dead_bytes_per_chunk": Count,
        "arena.initial_growth_chunk_size_bytes": Count,
        "arena.max_power_of_two_extend_bytes": Count,
        "arena.max_mem": Count,
        "arena.use_cuda_mempool": Flag,
        "arena.cuda_mempool_release_threshold": Count,
        "arena.cuda_mempool_bytes_to_keep_on_shrink": Count,
    },
    total=False,
)
ProviderOptions.__doc__ = """The provider options, with the types of their values.

The page of options has their meaning. `session` takes any other mapping of keys to texts as well.

Examples:
    >>> options: ort_cuda_plugin.ProviderOptions = {"use_tf32": False, "arena.max_mem": "4G"}
    >>> session = ort_cuda_plugin.session("model.onnx", provider_options=options)
"""
