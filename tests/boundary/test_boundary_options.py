"""Options: where they come from, which values they take, and which device they select."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from isolated import ROOT, add_model, python
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.reports.options import filled
from ort_cuda_plugin.ep.device.identity import Identity
from ort_cuda_plugin.ep.options import arena
from ort_cuda_plugin.ep.options.dynamic_options import KEYS
from ort_cuda_plugin.ep.options.option_documents import option_tables
from ort_cuda_plugin.ep.options.option_table import DEFAULTS, OTHER_NAMES, ROWS, WITHOUT_EFFECT, Decides
from ort_cuda_plugin.ep.options.options import OptionError, Options, collect, known_keys, parse
from ort_cuda_plugin.program.lowering.context import LoweringOptions

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
    wanted = {"sdpa_kernel": f"the plugin has no attention kernel for {why}; it chooses its own"}
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
        {"enable_cuda_graph": "maybe"},
    ],
)
def test_what_cannot_be_understood_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        parse(values)


def test_a_user_compute_stream_is_an_address_that_its_flag_can_turn_off() -> None:
    assert parse({"user_compute_stream": "0"})[0].user_compute_stream == 0
    assert parse({"user_compute_stream": "0x7f00", "has_user_compute_stream": "1"})[0].user_compute_stream == 0x7F00
    assert parse({"user_compute_stream": "5", "has_user_compute_stream": "0"}) == (Options(), {})
    with pytest.raises(OptionError, match="needs the option user_compute_stream"):
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
    with pytest.raises(OptionError, match=f"{key}='140000': the plugin calls no allocation function of the app"):
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
    for key in (*ROWS, *WITHOUT_EFFECT, *OTHER_NAMES, *arena.CUDA_PROVIDER_KEYS, "arena.max_mem"):
        assert key in str(error.value)


OPTIONS = (ROOT / "docs" / "options.md").read_text()


def test_every_key_is_in_the_documentation() -> None:
    rows = [line.split("|")[1] for table in option_tables().values() for line in table.splitlines()[2:]]
    documented = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    assert set(known_keys()) - documented == {"claim_poor_islands"}  # documented as another key's former name
    assert documented <= set(known_keys())


@pytest.mark.parametrize("name", ["options", "environment"])
def test_the_tables_of_documents_are_those_of_the_code(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert filled(text) == text, f"docs/{name}.md is stale: ort-cuda-plugin options --write docs/{name}.md"
    assert text.count("<!-- table: ") == {"options": 3, "environment": 2}[name]


def test_the_text_around_the_tables_names_the_options_that_it_is_about() -> None:
    without_prefix = OPTIONS.split("(for ")[1].split("also the key without a prefix")[0]
    assert set(re.findall(r"`(\w+)`", without_prefix)) == {key for key, row in ROWS.items() if row.bare}
    that_change = OPTIONS.split("## Options that change while a session lives")[1].split("##")[0]
    assert [key for key in KEYS if f"`{key}`" not in that_change] == []


def test_the_command_prints_and_writes_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    printed = capsys.readouterr().out
    assert "| `use_tf32` |" in printed
    assert "| `ORT_CUDA_PLUGIN_EMULATE_SEED` |" in printed
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- table: arena options -->\nstale\n<!-- end of table -->\nb\n")
    assert main(["options", "--write", str(document)]) == 0
    written = document.read_text()
    assert "stale" not in written
    assert "| `arena.max_mem` |" in written
    assert written.startswith("a\n")
    assert written.endswith("\nb\n")
    document.write_text("<!-- table: nothing -->\n<!-- end of table -->")
    assert main(["options", "--write", str(document)]) == ExitCode.USAGE
    assert "unknown table 'nothing' in a" in capsys.readouterr().err


def test_lowering_has_the_options_that_decide_plans_with_their_defaults() -> None:
    fields = {field.name for field in dataclasses.fields(LoweringOptions)} - {"wide_indices"}
    assert fields == {key for key, row in ROWS.items() if row.decides is Decides.PLANS}
    assert Options().lowering == LoweringOptions()


def test_the_default_of_an_arena_option_is_that_of_c() -> None:
    text = (ROOT / "csrc_shim" / "device" / "arena_options.c").read_text()
    constants = {"OCP_EXTEND_NEXT_POWER_OF_TWO": 0, "INT64_MAX": 0}  # 0 means no limit
    of_c = {
        f"arena.{name}": str(eval(initial, constants))
        for name, initial in re.findall(r"KEY\((\w+), [^,]+, [^,]+, ([^,]+),", text)[1:]
    }
    ours = {row.key: row.default for row in arena.ROWS if row.key not in arena.CUDA_PROVIDER_KEYS}
    assert list(ours.items()) == list(of_c.items())
    assert set(ours) == set(arena.keys())


def test_a_former_key_means_the_option_and_must_not_contradict_it() -> None:
    assert parse({"claim_poor_islands": "1"}) == (Options(claim_unprofitable_nodes=True), {})
    both = {"claim_unprofitable_nodes": "1", "claim_poor_islands": "true"}
    assert parse(both) == (Options(claim_unprofitable_nodes=True), {})
    with pytest.raises(
        OptionError, match="claim_unprofitable_nodes='1': its former name has another value: claim_poor"
    ):
        parse(both | {"claim_poor_islands": "0"})
    with pytest.raises(OptionError, match="claim_poor_islands='maybe': use 1 or 0"):
        parse(both | {"claim_poor_islands": "maybe"})


@pytest.mark.parametrize(
    ("weak", "strong"),
    [("claim_poor_islands", "claim_unprofitable_nodes"), ("prefer_nhwc", "prefer_nhwc_layout")],
)
def test_the_session_overrides_the_environment_under_each_name_of_an_option(weak: str, strong: str) -> None:
    for below, above in ((weak, strong), (strong, weak)):
        found = collect({SESSION + above: "0"}, {ENVIRONMENT + below: "1"}, Identity.OWN)
        assert found == {above: "0"}
        assert parse(found) == (Options(), {})


def test_a_default_is_a_value_of_its_option() -> None:
    for key, default in DEFAULTS.items():
        if default not in (None, (), ""):
            assert ROWS[key].reader(str(default)) == default


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
    python(
        SELECT + code,
        add_model().hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )


def test_onnx_runtime_does_not_warn_of_a_device_id() -> None:
    code = """
session = plugin.session(model, emulate=True, provider_options={"device_id": 1, "use_tf32": 0})
assert used() == 1
(provider,) = boundary.PROVIDERS.values()
assert provider.options.use_tf32 is False
"""
    done = python(
        SELECT + code,
        add_model().hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )
    assert "already exists" not in done.stderr, done.stderr


def test_the_alias_of_the_cuda_provider_reaches_the_provider() -> None:
    code = """
options = ort.SessionOptions()
options.add_session_config_entry("ep.cuda.use_tf32", "0")
session = plugin.session(model, emulate=True, sess_options=options)
(provider,) = boundary.PROVIDERS.values()
assert provider.options.use_tf32 is False
"""
    python(
        SELECT + code,
        add_model().hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )


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
    python(
        SELECT + code,
        add_model().hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )
