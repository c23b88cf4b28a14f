"""Registration, devices and sessions as an application sees them."""

from __future__ import annotations

import pytest

import ort_cuda_plugin
from isolated import add_model, python

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE": "0"}
START = "import onnxruntime as ort, ort_cuda_plugin as plugin\n"


def test_the_names_are_the_documented_ones() -> None:
    assert ort_cuda_plugin.get_ep_name() == "CudaPluginExecutionProvider"
    assert ort_cuda_plugin.get_ep_names() == ["CudaPluginExecutionProvider"]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ort_cuda_plugin.no_such_name


def test_importing_the_package_imports_no_heavy_module() -> None:
    python("import sys, ort_cuda_plugin; assert not {'onnxruntime', 'numba', 'llvmlite', 'numpy'} & set(sys.modules)")


def test_registering_twice_is_registering_once() -> None:
    python(
        START
        + """
first = plugin.register(emulate=True)
again = plugin.register(emulate=True)
assert len(first) == len(again) == len([d for d in ort.get_ep_devices() if d.ep_name == plugin.get_ep_name()])
plugin.unregister(); plugin.unregister()
assert not [d for d in ort.get_ep_devices() if d.ep_name == plugin.get_ep_name()]
assert plugin.register("other", emulate=True)
""",
        env=NO_GPU,
        preloaded=True,
    )


def test_threads_may_register_at_once() -> None:
    python(
        START
        + """
import threading
found = []
threads = [threading.Thread(target=lambda: found.append(len(plugin.register(emulate=True)))) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [1] * 8, found
""",
        env=NO_GPU,
        preloaded=True,
    )


def test_a_registration_under_another_name_is_used() -> None:
    python(
        START
        + """
ort.register_execution_provider_library("mine.virtual", plugin.get_library_path())
assert len(plugin.register(emulate=True)) == 1
plugin.unregister()  # not ours to undo
assert len(plugin.devices()) == 1
ort.unregister_execution_provider_library("mine.virtual")
""",
        env=NO_GPU,
        preloaded=True,
    )


def test_emulated_devices_come_only_when_asked_for() -> None:
    code = START + "import sys; print(len([d for d in plugin.register(emulate=eval(sys.argv[1])) ]))"
    for emulate, variable, expected in [("None", "0", 0), ("None", "1", 1), ("False", "1", 0), ("True", "0", 1)]:
        done = python(code, emulate, env={**NO_GPU, "ORT_CUDA_PLUGIN_EMULATE": variable}, preloaded=True)
        assert int(done.stdout) == expected, (emulate, variable)


def test_an_unclear_wish_for_emulation_is_an_error() -> None:
    done = python(
        START + "plugin.register()", env={**NO_GPU, "ORT_CUDA_PLUGIN_EMULATE": "perhaps"}, check=False, preloaded=True
    )
    assert done.returncode != 0
    assert "ValueError: ORT_CUDA_PLUGIN_EMULATE='perhaps': use 1 or 0" in done.stderr


def test_devices_carry_what_applications_select_by() -> None:
    python(
        START
        + """
offered = plugin.register(emulate=True)
assert [d.ep_options["device_id"] for d in offered] == ["0", "1"]
for device, info in zip(offered, plugin.devices(), strict=True):
    data = device.ep_metadata
    assert data["cuda_device_id"] == str(info.ordinal) and data["emulated"] == "1"
    assert data["name"] == info.name and data["compute_capability"] == "%d.%d" % info.compute_capability
    assert int(data["memory_bytes"]) == info.memory_bytes > 0 and data["driver_version"]
""",
        env={**NO_GPU, "ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"},
        preloaded=True,
    )


def test_a_session_without_any_device_says_why_and_what_to_do() -> None:
    done = python(START + "plugin.session(b'')", env=NO_GPU, check=False, preloaded=True)
    assert "no CUDA device: " in done.stderr
    assert "emulate=True" in done.stderr


def test_a_session_on_a_device_that_does_not_exist_lists_the_others() -> None:
    code = START + "plugin.session(b'', emulate=True, provider_options={'device_id': 7})"
    done = python(code, env=NO_GPU, check=False, preloaded=True)
    assert "device_id: there is no device 7. Choose one of 0 (" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{'use_tf_32': 1}", "has no option 'use_tf_32'; did you mean 'use_tf32'?"),
        ("{'use_tf32': 'perhaps'}", "use_tf32='perhaps': use 1 or 0"),
        ("{'device_id': -1}", "device_id='-1': use a CUDA ordinal"),
        ("{'has_user_compute_stream': 1}", "has_user_compute_stream=1 needs the option user_compute_stream"),
    ],
)
def test_a_wrong_option_is_an_error(options: str, message: str) -> None:
    done = python(
        START + f"plugin.session(b'', emulate=True, provider_options={options})",
        env=NO_GPU,
        check=False,
        preloaded=True,
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_a_wrong_option_is_an_error_of_onnxruntime_too() -> None:
    code = (
        START
        + """
plugin.register(emulate=True)
model = bytes.fromhex(sys.argv[1])
try:
    ort.InferenceSession(model, providers=[(plugin.get_ep_name(), {"no_such_key": "1"})], enable_fallback=0)
except Exception as error:
    assert "has no option 'no_such_key'" in str(error), error
else:
    raise AssertionError("accepted")
"""
    )
    python("import sys\n" + code, add_model().hex(), env=NO_GPU, preloaded=True)


FAKE_ORT = "import sys, types; fake = types.ModuleType('onnxruntime'); sys.modules['onnxruntime'] = fake\n"


def test_an_onnxruntime_that_is_too_old_is_named() -> None:
    code = FAKE_ORT + "fake.__version__ = '1.25.1'\nimport ort_cuda_plugin; ort_cuda_plugin.register()"
    done = python(code, check=False)
    assert "ImportError: ort-cuda-plugin needs ONNX Runtime 1.26 or newer and found 1.25.1" in done.stderr
    assert "ort-cuda-plugin[cpu]" in done.stderr


def test_a_missing_onnxruntime_is_named() -> None:
    done = python(
        "import sys; sys.modules['onnxruntime'] = None\nimport ort_cuda_plugin; ort_cuda_plugin.register()",
        check=False,
    )
    assert "ImportError: ONNX Runtime cannot be imported" in done.stderr
    assert 'exactly one of "ort-cuda-plugin[cpu]"' in done.stderr
