"""Options: where they come from, which values they take, and which device they select."""

from __future__ import annotations

import re

import pytest

from isolated import ROOT, add_model, python
from ort_cuda_plugin.ep import arena
from ort_cuda_plugin.ep.identity import Identity
from ort_cuda_plugin.ep.options import MEANINGFUL, WITHOUT_EFFECT, OptionError, Options, collect, parse

SESSION = "ep.cudapluginexecutionprovider."
ENVIRONMENT = "ep_factory.CudaPluginExecutionProvider."


def test_the_session_goes_before_its_alias_and_that_before_the_environment() -> None:
    environment = {ENVIRONMENT + "a": "env", ENVIRONMENT + "b": "env", ENVIRONMENT + "c": "env", "other.a": "x"}
    session = {"ep.cuda.a": "alias", "ep.cuda.b": "alias", SESSION + "a": "session", "session.other": "x"}
    assert collect(session, environment, Identity.OWN) == {"a": "session", "b": "alias", "c": "env"}


def test_cuda_graphs_are_enabled_by_the_bare_key_too() -> None:
    bare = {"enable_cuda_graph": "1", "use_tf32": "0"}
    assert collect(bare, {}, Identity.OWN) == {"enable_cuda_graph": "1"}
    assert collect(bare | {"ep.cuda.enable_cuda_graph": "0"}, {}, Identity.OWN) == {"enable_cuda_graph": "0"}


def test_the_kind_of_graphs_follows_from_the_options() -> None:
    assert parse({})[0].max_automatic_graphs == 16
    assert parse({"automatic_cuda_graphs": "0"})[0].max_automatic_graphs == 0
    assert parse({"enable_cuda_graph": "1", "cuda_graph_cache_size": "3"})[0].max_automatic_graphs == 0
    options, ignored = parse({"cuda_graph_cache_size": "3", "min_num_runs_before_cuda_graph_capture": "7"})
    assert (options.max_automatic_graphs, options.min_num_runs_before_cuda_graph_capture, ignored) == (3, 7, [])


def test_values_are_parsed() -> None:
    assert parse({}) == (Options(), [])
    options, ignored = parse({"device_id": "3", "use_tf32": "0", "deterministic": "true", "sdpa_kernel": "1"})
    assert options == Options(device_id=3, use_tf32=False, deterministic=True)
    assert ignored == ["sdpa_kernel"]
    for values, preferred in (
        ({"prefer_nhwc": "1"}, True),
        ({"prefer_nhwc_layout": "1"}, True),
        ({"prefer_nhwc": "0", "prefer_nhwc_layout": "1"}, False),
    ):
        assert parse(values) == (Options(prefer_nhwc=preferred), [])


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
    assert parse({"user_compute_stream": "5", "has_user_compute_stream": "0"}) == (Options(), [])
    with pytest.raises(OptionError, match="needs user_compute_stream"):
        parse({"has_user_compute_stream": "1"})
    for value in ("2", "-1", "stream", "0x1ffffffffffffffff"):
        with pytest.raises(OptionError, match=f"user_compute_stream='{value}'"):
            parse({"user_compute_stream": value})


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_keys_of_the_cuda_provider_without_a_meaning_are_checked_and_reported(key: str) -> None:
    value = "HEURISTIC" if key == "cudnn_conv_algo_search" else "1"
    assert parse({key: value}) == (Options(), [key])
    with pytest.raises(OptionError, match=f"{key}='nonsense': use"):
        parse({key: "nonsense"})


def test_every_key_has_a_row_in_the_documentation() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "options.md").read_text().splitlines() if "| `" in line]
    documented = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    with pytest.raises(OptionError) as error:
        parse({"arena.no_such_key": "1"})
    of_arenas = set(re.findall(r"arena\.\w+", str(error.value))) - {"arena.no_such_key"}
    assert sorted(documented) == sorted({*MEANINGFUL, *WITHOUT_EFFECT, *of_arenas, *arena.CUDA_PROVIDER_KEYS})


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
