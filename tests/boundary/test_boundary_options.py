"""Options: where they come from, which values they take, and which device they select."""

from __future__ import annotations

import re

import pytest

from isolated import ROOT, add_model, python
from ort_cuda_plugin.ep import arena
from ort_cuda_plugin.ep.identity import Identity
from ort_cuda_plugin.ep.options import ALIASES, MEANINGFUL, WITHOUT_EFFECT, OptionError, Options, collect, parse

SESSION = "ep.cudapluginexecutionprovider."
ENVIRONMENT = "ep_factory.CudaPluginExecutionProvider."


def test_the_session_goes_before_its_alias_and_that_before_the_environment() -> None:
    environment = {ENVIRONMENT + "a": "env", ENVIRONMENT + "b": "env", ENVIRONMENT + "c": "env", "other.a": "x"}
    session = {"ep.cuda.a": "alias", "ep.cuda.b": "alias", SESSION + "a": "session", "session.other": "x"}
    assert collect(session, environment, Identity.OWN) == {"a": "session", "b": "alias", "c": "env"}


def test_some_keys_need_no_prefix() -> None:
    bare = {"enable_cuda_graph": "1", "use_tf32": "0", "user_compute_stream": "5", "use_ep_level_unified_stream": "1"}
    assert collect(bare | {"deterministic": "1"}, {}, Identity.OWN) == bare
    assert collect(bare | {"ep.cuda.use_tf32": "1"}, {}, Identity.OWN) == bare | {"use_tf32": "1"}


def test_under_the_other_name_the_entries_have_that_name() -> None:
    session = {"ep.cudaexecutionprovider.a": "session", SESSION + "b": "other name", "ep.cuda.c": "alias"}
    environment = {"ep_factory.CUDAExecutionProvider.d": "env", ENVIRONMENT + "e": "other name"}
    assert collect(session, environment, Identity.CUDA) == {"a": "session", "c": "alias", "d": "env"}


def test_the_kind_of_graphs_follows_from_the_options() -> None:
    assert parse({})[0].max_automatic_graphs == 16
    assert parse({"automatic_cuda_graphs": "0"})[0].max_automatic_graphs == 0
    assert parse({"enable_cuda_graph": "1", "cuda_graph_cache_size": "3"})[0].max_automatic_graphs == 0
    options, ignored = parse({"cuda_graph_cache_size": "3", "min_num_runs_before_cuda_graph_capture": "7"})
    assert (options.max_automatic_graphs, options.min_num_runs_before_cuda_graph_capture, ignored) == (3, 7, {})


@pytest.mark.parametrize(
    ("bits", "why"),
    [
        (0, ""),
        (1, ""),
        (27, ""),
        (4, "TRT_FUSED"),
        (8 | 32 | 256, "TRT_FLASH, LEAN"),
        (1024, "bit 10"),
    ],
)
def test_kernels_of_attention_that_the_plugin_lacks_are_named(bits: int, why: str) -> None:
    options, ignored = parse({"sdpa_kernel": str(bits)})
    assert options.sdpa_kernel == bits
    wanted = {"sdpa_kernel": f"the plugin has no kernel of attention for {why}; it takes its own"}
    assert ignored == (wanted if why else {})


def test_values_are_parsed() -> None:
    assert parse({}) == (Options(), {})
    given = {"device_id": "3", "use_tf32": "0", "deterministic": "true", "do_copy_in_default_stream": "0"}
    options, ignored = parse(given)
    assert options == Options(device_id=3, use_tf32=False, deterministic=True)
    assert ignored == {"do_copy_in_default_stream": WITHOUT_EFFECT["do_copy_in_default_stream"].why}
    for values, preferred in (
        ({"prefer_nhwc": "1"}, True),
        ({"prefer_nhwc_layout": "1"}, True),
        ({"prefer_nhwc": "0", "prefer_nhwc_layout": "1"}, False),
    ):
        assert parse(values) == (Options(prefer_nhwc=preferred), {})


@pytest.mark.parametrize(
    "values",
    [
        {"nothing_like_it": "1"},
        {"device_id": "x"},
        {"prefer_nhwc": "maybe"},
        {"cuda_graph_cache_size": "0"},
        {"min_num_runs_before_cuda_graph_capture": "0"},
        {"enable_cuda_graph": "yes"},
    ],
)
def test_what_cannot_be_understood_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        parse(values)


def test_a_user_compute_stream_is_an_address_that_its_flag_can_turn_off() -> None:
    assert parse({"user_compute_stream": "0"})[0].user_compute_stream == 0
    assert parse({"user_compute_stream": "0x7f00", "has_user_compute_stream": "1"})[0].user_compute_stream == 0x7F00
    assert parse({"user_compute_stream": "5", "has_user_compute_stream": "0"}) == (Options(), {})
    with pytest.raises(OptionError, match="needs user_compute_stream"):
        parse({"has_user_compute_stream": "1"})
    for value in ("2", "-1", "stream", "0x1ffffffffffffffff"):
        with pytest.raises(OptionError, match=f"user_compute_stream='{value}'"):
            parse({"user_compute_stream": value})


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_keys_without_a_meaning_are_checked_and_reported_where_they_ask_for_something(key: str) -> None:
    entry = WITHOUT_EFFECT[key]
    if entry.usual is not None:
        usual, other = ("1", "0") if entry.usual else ("0", "1")
        assert parse({key: usual}) == (Options(), {})
        assert parse({key: other}) == (Options(), {key: entry.why})
    with pytest.raises(OptionError, match=f"{key}='nonsense': "):
        parse({key: "nonsense"})


@pytest.mark.parametrize("key", ["gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache"])
def test_functions_of_the_application_that_allocate_are_refused(key: str) -> None:
    assert parse({key: "0"}) == parse({key: ""}) == (Options(), {})
    with pytest.raises(OptionError, match=f"{key}='140000': device memory comes from the plugin's arena only"):
        parse({key: "140000"})


def test_a_search_is_named_in_any_case_or_by_its_number() -> None:
    for text, search in [
        ("heuristic", "HEURISTIC"),
        ("2", "DEFAULT"),
        ("0", "EXHAUSTIVE"),
    ]:
        for key in ("cudnn_conv_algo_search", "cudnn_conv_algo"):
            assert parse({key: text})[0].cudnn_conv_algo_search == search
    assert parse({"cudnn_conv_algo": "0", "cudnn_conv_algo_search": "2"})[0].cudnn_conv_algo_search == "DEFAULT"
    for text in ("3", "-1", "FAST"):
        with pytest.raises(OptionError, match=r"use one of EXHAUSTIVE \(0\), HEURISTIC \(1\), DEFAULT \(2\)"):
            parse({"cudnn_conv_algo": text})


def test_tuning_may_take_any_time() -> None:
    for text in ("-1", "0", "30"):
        assert parse({"tunable_op_max_tuning_duration_ms": text})[0].tunable_op_max_tuning_duration_ms == int(text)
    with pytest.raises(OptionError, match="use a number from -1"):
        parse({"tunable_op_max_tuning_duration_ms": "-2"})


def test_onnx_runtime_repeats_a_run_only_so_often_to_capture_it() -> None:
    key = "min_num_runs_before_cuda_graph_capture"
    assert parse({key: "1000"})[0].min_num_runs_before_cuda_graph_capture == 1000
    assert parse({key: "7", "enable_cuda_graph": "1"})[0].min_num_runs_before_cuda_graph_capture == 7
    with pytest.raises(OptionError, match=rf"{key}=8: with enable_cuda_graph=1 use a number from 1 to 7"):
        parse({key: "8", "enable_cuda_graph": "1"})


def test_an_unknown_key_is_told_all_that_are_known() -> None:
    with pytest.raises(OptionError) as error:
        parse({"gpu_memory_limit": "1"})
    assert "did you mean 'gpu_mem_limit'?" in str(error.value)
    for key in (*MEANINGFUL, *WITHOUT_EFFECT, *ALIASES, *arena.CUDA_PROVIDER_KEYS, "arena.max_mem"):
        assert key in str(error.value)


def test_every_key_has_a_row_in_the_documentation() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "options.md").read_text().splitlines() if "| `" in line]
    documented = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    with pytest.raises(OptionError) as error:
        parse({"arena.no_such_key": "1"})
    of_arenas = set(re.findall(r"arena\.\w+", str(error.value))) - {"arena.no_such_key"}
    assert sorted(documented) == sorted({*MEANINGFUL, *WITHOUT_EFFECT, *ALIASES, *of_arenas, *arena.CUDA_PROVIDER_KEYS})


SELECT = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from ort_cuda_plugin.ep import boundary
model = bytes.fromhex(sys.argv[1])
name = plugin.get_ep_name()
devices = plugin.register(emulate=True)
assert len(devices) == 2
def used():
    (provider,) = boundary.PROVIDERS.values()
    return provider.device.info.ordinal
x = np.ones(8, np.float32)
"""


def test_device_id_selects_the_device_in_every_way_to_make_a_session() -> None:
    code = """
def by_name(ordinal):
    return ort.InferenceSession(model, providers=[(name, {"device_id": ordinal})])
def by_device(ordinal):
    options = ort.SessionOptions()
    options.add_provider_for_devices([devices[ordinal]], {})
    return ort.InferenceSession(model, sess_options=options)
def by_helper(ordinal):
    return plugin.session(model, emulate=True, provider_options={"device_id": ordinal})
for make in (by_name, by_device, by_helper):
    for ordinal in (0, 1):
        session = make(ordinal)
        assert used() == ordinal, (make, ordinal)
        np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
        del session
session = ort.InferenceSession(model, providers=[name])
assert used() == 0
"""
    python(SELECT + code, add_model().hex(), env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""})


def test_the_alias_of_the_cuda_provider_reaches_the_provider() -> None:
    code = """
options = ort.SessionOptions()
options.add_session_config_entry("ep.cuda.use_tf32", "0")
session = plugin.session(model, emulate=True, sess_options=options)
(provider,) = boundary.PROVIDERS.values()
assert provider.options.use_tf32 is False
"""
    python(SELECT + code, add_model().hex(), env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""})


def test_session_options_serve_several_sessions_on_one_device() -> None:
    code = """
options = ort.SessionOptions()
first = plugin.session(model, emulate=True, sess_options=options)
second = plugin.session(model, emulate=True, sess_options=options)
try:
    plugin.session(model, emulate=True, sess_options=options, provider_options={"device_id": 1})
except ValueError as error:
    assert "another device" in str(error), error
else:
    raise AssertionError("accepted")
for session in (first, second):
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
"""
    python(SELECT + code, add_model().hex(), env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""})
