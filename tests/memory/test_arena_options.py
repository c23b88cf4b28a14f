"""The options of the arenas from sessions, and the functions of `ort_cuda_plugin` that tell of memory and change it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from c_programs import build_host
from isolated import add_model, python
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.abi.flags import flag_variable
from ort_cuda_plugin.doctor.variables import FLAGS
from ort_cuda_plugin.ep.contexts.context_session import allows_host_code
from ort_cuda_plugin.ep.device.devices import emulation_requested
from ort_cuda_plugin.ep.options.options import OptionError, parse
from ort_cuda_plugin.program.analysis.verify import CHECK_VARIABLE, is_wanted
from ort_cuda_plugin.progress.display import requested

START = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
plugin.register(emulate=True)
(VENDOR,) = {device.device.vendor_id for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name()}
x = np.ones((100, 100), np.float32)  # 40000 bytes, chunks of 40192
def session(**options):
    return plugin.session(model, emulate=True, provider_options={k.replace("__", "."): v for k, v in options.items()})
def run(session, *arguments):
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x}, *arguments)[0], x + x)
def refuse(session):
    try:
        run(session)
    except Exception:
        return
    raise AssertionError("more than the limit")
def stats(kind="device"):
    return plugin.memory_stats()[kind]
"""


def run(code: str, **environment: str) -> str:
    """Run START and the code in a new process; return its log."""
    model = add_model(dims=["n", "m"]).hex()
    return python(
        START + textwrap.dedent(code), model, env={"CUDA_VISIBLE_DEVICES": "", **environment}, preloaded=True
    ).stderr


def test_options_of_an_arena_are_checked_with_those_of_the_provider() -> None:
    options, ignored = parse(
        {"arena.max_mem": "1000", "gpu_mem_limit": "5", "arena_extend_strategy": "kSameAsRequested"}
    )
    assert ignored == {}
    assert options.device_arena == {"arena.max_mem": "1000", "arena.extend_strategy": "kSameAsRequested"}
    assert options.pinned_arena == {"arena.max_mem": "1000"}


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("on", True), (" 1 ", True), ("FALSE", False), ("no", False)]
)
def test_all_booleans_take_the_same_texts(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options, _ = parse({"arena.use_cuda_mempool": text, "use_tf32": text})
    assert options.device_arena == {"arena.use_cuda_mempool": text}
    assert options.use_tf32 is value
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    monkeypatch.setenv("ORT_CUDA_PLUGIN_PROGRESS", text)
    monkeypatch.setenv("ORT_CUDA_PLUGIN_VERIFY", text)
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EMULATE", text)
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE", text)
    assert requested() is value
    assert is_wanted() is value
    assert emulation_requested() is value
    assert allows_host_code() is value


def test_a_boolean_variable_with_another_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAGS:
        monkeypatch.setenv(name, "1x")
        with pytest.raises(ValueError, match=f"^{name}='1x': use 1 or 0$"):
            flag_variable(name)


def test_true_selects_the_pool() -> None:
    code = """
    run(session(arena__use_cuda_mempool=True))
    assert stats()["NumAllocs"] > 0 and stats()["NumArenaExtensions"] == 0, stats()
    """
    run(code)


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("arena.extend_strategy", "2", "0 (kNextPowerOfTwo) or 1 (kSameAsRequested)"),
        ("arena.max_mem", "1T", "a number of bytes"),
        ("arena.use_cuda_mempool", "maybe", "0 or 1"),
        ("arena.no_such_key", "1", "known: arena.extend_strategy"),
        ("gpu_mem_limit", "much", "a number of bytes"),
        ("arena_extend_strategy", "kWhatever", "kNextPowerOfTwo"),
    ],
)
def test_a_bad_option_names_its_key_and_what_it_takes(key: str, value: str, takes: str) -> None:
    with pytest.raises(OptionError) as error:
        parse({key: value})
    assert key in str(error.value)
    assert takes in str(error.value)


def test_onnx_runtime_gets_the_error_of_a_bad_option() -> None:
    code = """
    options = ort.SessionOptions()
    options.add_session_config_entry("ep.cudapluginexecutionprovider.arena.max_memory", "1")
    try:
        options.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == plugin.get_ep_name()], {})
        ort.InferenceSession(model, options, enable_fallback=0)
    except Exception as error:
        assert "arena.max_memory" in str(error) and "known: arena.extend_strategy" in str(error), error
    else:
        raise AssertionError("accepted")
    """
    run(code)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, 1 << 20),
        ({"arena__extend_strategy": "1"}, 3 * 40192),
        ({"arena_extend_strategy": "kSameAsRequested"}, 3 * 40192),
        ({"arena__initial_chunk_size_bytes": 1 << 16}, (1 << 16) + (1 << 17)),
        ({"arena__initial_chunk_size_bytes": 1 << 16, "arena__max_power_of_two_extend_bytes": 1 << 16}, 3 << 16),
        ({"arena__max_mem": 300_000}, 300_000 // 256 * 256),
        ({"gpu_mem_limit": 300_000}, 300_000 // 256 * 256),
        ({"gpu_mem_limit": "300k"}, 300 << 10),
    ],
)
def test_options_of_a_session_decide_how_the_arena_grows(options: dict[str, object], held: int) -> None:
    code = f"""
    run(session(**{options!r}))
    assert stats()["TotalAllocated"] == {held}, stats()
    """
    run(code)


def test_growth_after_a_shrink_begins_with_its_own_size() -> None:
    code = """
    first = session(arena__initial_growth_chunk_size_bytes=1 << 18)
    run(first)
    assert stats()["TotalAllocated"] == 1 << 20
    assert plugin.trim() == 1 << 20
    run(first)
    assert stats()["TotalAllocated"] == 1 << 18, stats()
    """
    run(code)


def test_dead_bytes_behind_a_chunk_are_bounded() -> None:
    code = """
    x = np.ones(240 * 1024, np.float32).reshape(240, 1024)  # 960 KiB of a region of 1 MiB
    first = session(arena__max_dead_bytes_per_chunk={limit})
    run(first)
    assert stats()["MaxAllocSize"] == {size}, stats()
    """
    run(code.format(limit=1 << 20, size=1 << 20))
    run(code.format(limit=1 << 14, size=960 << 10))


@pytest.mark.parametrize("mode", [[], ["bad"]], ids=["good", "bad"])
def test_environment_and_shared_allocators_configure_the_arena(mode: list[str], tmp_path: Path) -> None:
    host = build_host("arena_host", tmp_path)
    environment = {"ORT_CUDA_PLUGIN_PYTHON": sys.executable}
    done = subprocess.run(
        [host, get_library_path(), *mode], env=environment, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_second_session_with_other_options_gets_one_warning_that_names_the_keys() -> None:
    code = """
    first = session(arena__max_mem=1_000_000, arena__extend_strategy=1)
    second = session(arena__max_mem=2_000_000, arena__extend_strategy=1)
    run(first)
    run(second)
    assert stats()["Limit"] == 1_000_000
    """
    log = run(code)
    assert log.count("with other values of arena.max_mem and keeps its values") == 1


def test_options_end_with_the_registration() -> None:
    code = """
    run(session(arena__max_mem=1_000_000))
    plugin.unregister()
    plugin.register(emulate=True)
    run(session())
    assert stats()["Limit"] == 2**63 - 1
    """
    assert "WARN" not in run(code)


def test_the_statistics_are_those_of_the_allocator() -> None:
    code = """
    assert set(stats()) == {"Limit", "InUse", "TotalAllocated", "MaxInUse", "NumAllocs", "NumReserves",
        "NumArenaExtensions", "NumArenaShrinkages", "MaxAllocSize", "Weights"}
    first = session()
    run(first)
    now = stats()
    assert (now["NumAllocs"], now["InUse"], now["MaxInUse"]) == (3, 0, 3 * 40192), now
    assert now["NumArenaExtensions"] == 1 and now["MaxAllocSize"] == 40192
    value = ort.OrtValue.ortvalue_from_numpy(x, "gpu", 0, VENDOR)
    assert stats()["InUse"] == 40192 == plugin.counters()["device_bytes_in_use"]
    del value
    assert stats()["InUse"] == 0 and plugin.memory_stats(plugin.devices()[0]) == plugin.memory_stats(0)
    try:
        plugin.memory_stats(7)
    except ValueError as error:
        assert "device: there is no device 7. Known devices: 0 (" in str(error), error
    """
    run(code)


def test_the_run_option_of_onnx_runtime_shrinks_the_arena() -> None:
    code = """
    first = session()
    run(first)
    assert stats()["TotalAllocated"] == 1 << 20
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
    run(first, options)
    assert stats()["TotalAllocated"] == 0 and stats()["NumArenaShrinkages"] == 1, stats()
    run(first)
    """
    run(code)


def test_without_synchronization_at_the_end_the_arena_does_not_grow() -> None:
    code = """
    first = session()
    run(first)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    binding = first.io_binding()
    for name in "ab":
        value = ort.OrtValue.ortvalue_from_numpy(x, "gpu", 0, VENDOR)
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("c", "cpu")
    for _ in range(200):
        first.run_with_iobinding(binding, options)
    assert stats()["TotalAllocated"] == 1 << 20, stats()
    """
    run(code, ORT_CUDA_PLUGIN_EMULATE_STREAMS="adversarial")


def test_a_limit_can_be_set_and_taken_away() -> None:
    code = """
    first = session()
    plugin.set_limit(0, 50_000)
    refuse(first)
    assert stats()["TotalAllocated"] <= 50_000
    plugin.set_limit(0, None)
    run(first)
    for bad in (-1, 2**64):
        try:
            plugin.set_limit(0, bad)
        except ValueError as error:
            assert str(bad) in str(error)
        else:
            raise AssertionError(bad)
    """
    assert "40000 bytes wanted; this process uses" in run(code)


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_a_mempool_serves_sessions_and_threads(streams: str) -> None:
    code = """
    import threading
    def work(session, seed):
        random = np.random.default_rng(seed)
        for _ in range(15):
            a = random.random((random.integers(1, 90), 50), np.float32)
            np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], a + a)
    sessions = [session(arena__use_cuda_mempool=1) for _ in range(2)]
    threads = [threading.Thread(target=work, args=(s, i)) for i, s in enumerate(sessions * 2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    now = stats()
    assert now["NumAllocs"] >= 180 and now["NumArenaExtensions"] == 0 and now["InUse"] == 0, now
    del sessions, threads
    plugin.unregister()
    assert plugin.counters()["device_bytes_in_use"] == 0
    """
    assert "ERROR" not in run(code, ORT_CUDA_PLUGIN_EMULATE_STREAMS=streams)


@pytest.mark.parametrize("by_trim", [False, True])
@pytest.mark.parametrize(
    ("options", "after_run", "after_shrink"),
    [
        ({}, 0, 0),
        ({"arena__cuda_mempool_release_threshold": 1 << 20}, 3 * 40192, 0),
        ({"arena__cuda_mempool_release_threshold": 50_000}, 40192, 0),
        (
            {"arena__cuda_mempool_release_threshold": 1 << 20, "arena__cuda_mempool_bytes_to_keep_on_shrink": 90_000},
            3 * 40192,
            2 * 40192,
        ),
    ],
)
def test_options_of_the_mempool_decide_what_it_keeps(
    options: dict[str, object], after_run: int, after_shrink: int, by_trim: bool
) -> None:
    code = f"""
    first = session(arena__use_cuda_mempool=1, **{options!r})
    run(first)
    value = ort.OrtValue.ortvalue_from_numpy(np.ones(1, np.float32), "gpu", 0, VENDOR)  # 256 bytes; waits
    del value
    assert stats()["TotalAllocated"] - {after_run} in (0, 256), stats()
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
    if {by_trim}:
        run(first)
        plugin.trim()
    else:
        run(first, options)
    assert stats()["TotalAllocated"] - {after_shrink} in (0, 256), stats()
    """
    run(code)


def test_a_mempool_obeys_the_limit() -> None:
    code = """
    first = session(arena__use_cuda_mempool=1, arena__max_mem=100_000)
    refuse(first)
    plugin.set_limit(0, None)
    run(first)
    """
    assert "bytes that it holds, limit 100000" in run(code)


def test_weights_and_a_mempool_have_one_limit_and_one_maximum() -> None:
    code = """
    import onnx
    weighted = onnx.load_from_string(model)
    weighted.graph.initializer.append(onnx.numpy_helper.from_array(x, "b"))
    del weighted.graph.input[1]
    options = {"arena.use_cuda_mempool": 1}
    weighted = plugin.session(weighted.SerializeToString(), emulate=True, provider_options=options)
    assert stats()["InUse"] == stats()["MaxInUse"] == stats()["Weights"] == 40192, stats()
    first = session(arena__use_cuda_mempool=1)
    plugin.set_limit(0, 4 * 40192 - 1)
    refuse(first)
    plugin.set_limit(0, 4 * 40192)
    before = stats()["MaxInUse"]
    del weighted
    run(first)
    assert stats()["MaxInUse"] == before == 3 * 40192, stats()
    """
    assert "this process uses 120576 (peak 120576, weights 40192)" in run(code)
