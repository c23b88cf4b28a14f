"""The command `doctor`: each defect is found on a simulated machine that has it, with advice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from isolated import ROOT, python
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE
from ort_cuda_plugin.doctor.cache import cache_findings
from ort_cuda_plugin.doctor.driver import driver_findings, machine_findings
from ort_cuda_plugin.doctor.examine import examine
from ort_cuda_plugin.doctor.findings import Finding, Machine, Severity
from ort_cuda_plugin.doctor.libraries import library_findings
from ort_cuda_plugin.doctor.packages import COMPILER, compiler_findings, runtime_findings
from ort_cuda_plugin.doctor.requirements import EXTRAS, requirement_findings
from ort_cuda_plugin.doctor.variables import VARIABLES, variable_findings
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE, DeviceInfo
from ort_cuda_plugin.ep.device.libraries import LibraryPlace
from ort_cuda_plugin.program.analysis.verify import VERIFY_VARIABLE

GPU = DeviceInfo(0, False, "A GPU", (9, 0), 1 << 36, "13.0", "0000:65:00.0", 132, 1 << 17)
NOWHERE = {"cublaslt": LibraryPlace("", "no file"), "cudnn": LibraryPlace("", "no file")}


def machine(root: Path, files: Iterable[str] = (), **fields: object) -> Machine:
    """Return a simulated machine with these files, written as ``path`` or ``path=text``."""
    for entry in files:
        name, _, text = entry.partition("=")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = {"environment": {}, "architecture": "x86_64", "packages": {}, "requirements": []}
    return Machine(root, **{**given, "site_packages": root / "site", **fields})  # type: ignore[arg-type]


def severities(found: Iterable[Finding]) -> list[str]:
    return [finding.severity.value for finding in found]


def test_every_finding_but_a_good_one_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    assert main(["doctor", "--json"]) == ExitCode.OK
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {
        "architecture",
        "ONNX Runtime",
        "plugin library",
        "registration",
        "CUDA driver",
        "kernel cache",
    } <= found.keys()
    assert all(finding["advice"] for finding in found.values() if finding["severity"] != "ok")
    assert found["registration"]["severity"] == "ok"
    assert main(["doctor"]) == ExitCode.OK
    assert str(tmp_path) in capsys.readouterr().out


def test_a_problem_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_ninety")
    monkeypatch.setenv(VERIFY_VARIABLE, "perhaps")
    assert main(["doctor"]) == ExitCode.MISMATCH
    said = capsys.readouterr().out
    assert "problem  environment: ORT_CUDA_PLUGIN_EMULATE_LOWERING: expected a GPU" in said
    assert "problem  environment: ORT_CUDA_PLUGIN_VERIFY='perhaps': use 1 or 0" in said


@pytest.mark.parametrize(
    ("packages", "version", "why", "severity", "named"),
    [
        ({"onnxruntime": "1.31.1"}, "1.31.1", "", "ok", "onnxruntime 1.31.1"),
        ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}, "1.31.0", "", "problem", "overwritten"),
        ({"onnxruntime": "1.31.1"}, "1.28.0", "", "problem", "imports onnxruntime 1.28.0"),
        ({"onnxruntime-gpu": "1.20.0"}, "1.20.0", "", "problem", "too old"),
        ({}, "", "it cannot be imported: no module", "problem", "no module"),
    ],
)
def test_wheels_of_onnx_runtime(
    tmp_path: Path, packages: dict[str, str], version: str, why: str, severity: str, named: str
) -> None:
    (finding,) = runtime_findings(machine(tmp_path, packages=packages), version, why)
    assert finding.severity.value == severity
    assert named in finding.text


def test_the_wheel_with_cuda_keeps_the_name_of_its_provider(tmp_path: Path) -> None:
    found, name = runtime_findings(machine(tmp_path, packages={"onnxruntime-gpu": "1.31.0"}), "1.31.0", "")
    assert (found.severity.value, name.severity.value) == ("ok", "note")
    assert "`ort-cuda-plugin exec`" in name.text


def test_without_a_driver_the_extra_is_that_of_the_emulated_device(tmp_path: Path) -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}
    with_driver = [".dockerenv", "proc/driver/nvidia/version=580"]
    for number, (files, extra) in enumerate((([], "cpu"), (with_driver, "cuda,libs"))):
        root = tmp_path / str(number)
        (two,) = runtime_findings(machine(root, files, packages=both), "1.31.0", "")
        (none,) = runtime_findings(machine(root, files), "", "it cannot be imported: no module")
        install = f"pip install 'ort-cuda-plugin[{extra}]'"
        assert two.commands == ("pip uninstall -y onnxruntime onnxruntime-gpu", install)
        assert none.commands == (install,)
        assert install in two.advice
        assert install in none.advice
        assert ("no GPU driver" in two.advice, "no GPU driver" in none.advice) == (extra == "cpu",) * 2


def test_a_command_replaces_the_wheel_that_is_installed_and_not_another_one(tmp_path: Path) -> None:
    there = machine(tmp_path, packages={"onnxruntime-gpu": "1.20.0"})
    (old,) = runtime_findings(there, "1.20.0", "")
    (broken,) = runtime_findings(there, "", "it cannot be imported: ImportError")
    assert old.commands == ("pip install 'onnxruntime-gpu>=1.26'",)
    assert broken.commands == ("pip install --force-reinstall --no-deps onnxruntime-gpu==1.20.0",)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ORT_CUDA_PLUGIN_CACHEDIR", "did you mean 'ORT_CUDA_PLUGIN_CACHE_DIR'?"),
        ("ORT_CUDA_PLUGIN_EMULATED", "did you mean 'ORT_CUDA_PLUGIN_EMULATE'?"),
        ("ort_cuda_plugin_emulate", "did you mean 'ORT_CUDA_PLUGIN_EMULATE'?"),
        ("ORT_CUDA_PLUGIN_EMULATE_WORKER", "did you mean 'ORT_CUDA_PLUGIN_EMULATE_WORKERS'?"),
        ("ORT_CUDA_PLUGIN_QUANTUM_ANNEALER_PORT", "unset it; the variables are ORT_CUDA_PLUGIN_AS, "),
    ],
)
def test_a_variable_that_nothing_reads_is_named(tmp_path: Path, name: str, advice: str) -> None:
    environment = {name: "1", "ORT_CUDA_PLUGIN_EMULATE": "1", "ORT_CUDA": "1"}
    (finding,) = variable_findings(machine(tmp_path, environment=environment))
    assert finding.severity is Severity.WARNING
    assert finding.text.startswith(f"{name}: the plugin reads no variable of this name")
    assert finding.advice.startswith(advice)


def test_the_variables_are_those_that_the_sources_read() -> None:
    sources = [path for path in (ROOT / "ort_cuda_plugin").rglob("*.py") if path.name != "variables.py"]
    sources += (ROOT / "csrc_shim").rglob("*.[ch]")
    text = "".join(path.read_text() for path in sources).replace('ENVIRONMENT "_', '"ORT_CUDA_PLUGIN_EMULATE_')
    assert sorted(set(re.findall(r'"(ORT_CUDA_PLUGIN_[A-Z_]*[A-Z])(?=[":])', text))) == list(VARIABLES)


def test_a_misspelled_variable_does_not_keep_the_registration_from_being_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EMULATED", "1")
    assert main(["doctor"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "ORT_CUDA_PLUGIN_EMULATED: the plugin reads no variable of this name, and ignores it\n" in out
    assert "-> did you mean 'ORT_CUDA_PLUGIN_EMULATE'?\n" in out
    assert "registration: ONNX Runtime loads the library" in out


# ---- versions ----

REQUIREMENTS = [
    "cffi>=2",
    "numpy>=2",
    'old; python_version < "3"',
    'ort-cuda-plugin[compiler]; extra == "cpu"',
    'onnxruntime<1.33,>=1.26; extra == "cpu"',
    'onnxruntime<1.33,>=1.26; extra == "cuda"',
    'numba>=0.62; extra == "compiler"',
    'numpy<2.5,>=2; extra == "compiler"',
    'pytest<10,>=9; extra == "test"',
]
BASE = {"cffi": "2.0", "numpy": "2.1"}


@pytest.mark.parametrize(
    ("packages", "severity", "text", "command"),
    [
        (
            {"numpy": "1.26.4"},
            "problem",
            "numpy: 1.26.4 is installed; ort-cuda-plugin requires numpy>=2",
            "pip install 'numpy>=2'",
        ),
        (
            {"numpy": "2.5.1", "numba": "0.62.1"},  # only Numba has the upper bound
            "problem",
            "numpy: 2.5.1 is installed; ort-cuda-plugin requires numpy>=2,<2.5",
            "pip install 'numpy>=2,<2.5'",
        ),
        (
            {"numba": "0.61"},
            "warning",
            "numba: 0.61 is installed; ort-cuda-plugin[compiler] requires numba>=0.62",
            "pip install 'numba>=0.62'",
        ),
        (
            {"onnxruntime": "1.33.0"},
            "warning",
            "onnxruntime: 1.33.0 is installed; ort-cuda-plugin[cpu,cuda] requires onnxruntime>=1.26,<1.33",
            "pip install 'onnxruntime>=1.26,<1.33'",
        ),
        (
            {"cffi": None},
            "problem",
            "cffi: not installed; ort-cuda-plugin requires cffi>=2",
            "pip install 'cffi>=2'",
        ),
        (
            {"cffi": "two"},
            "problem",
            "cffi: two is installed; ort-cuda-plugin requires cffi>=2",
            "pip install 'cffi>=2'",
        ),
    ],
)
def test_a_version_out_of_range_is_named_with_the_range_and_the_command(
    tmp_path: Path, packages: dict[str, str | None], severity: str, text: str, command: str
) -> None:
    installed = {name: version for name, version in {**BASE, **packages}.items() if version}
    there = machine(tmp_path, packages=installed, requirements=REQUIREMENTS)
    (finding,) = (found for found in requirement_findings(there) if found.severity is not Severity.OK)
    assert finding.severity.value == severity
    assert f"{finding.subject}: {finding.text}" == text
    assert (finding.advice, finding.commands) == (command, (command,))


@pytest.mark.parametrize(
    "packages",
    [
        {},
        {"numpy": "2.6"},
        {"numpy": "2.4", "numba": "0.63"},
        {"pytest": "8"},
        {"numpy": "2.5.0rc1"},
        {"onnxruntime": "1.26.0"},
    ],
)
def test_versions_in_range_and_packages_of_extras_that_are_not_used(tmp_path: Path, packages: dict[str, str]) -> None:
    there = machine(tmp_path, packages=BASE | packages, requirements=REQUIREMENTS)
    (finding,) = requirement_findings(there)
    assert finding.severity is Severity.OK
    assert "cffi 2.0" in finding.text


def test_without_the_library_versions_and_variables_are_examined_and_a_wheel_has_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError("no library")

    monkeypatch.setattr("ort_cuda_plugin.doctor.examine.get_library_path", missing)
    packages = {"numpy": "1.26", "onnxruntime": "1.20.0"}  # Python imports another version of onnxruntime
    environment = {"ORT_CUDA_PLUGIN_EMULATED": "1"}
    found = list(examine(machine(tmp_path, packages=packages, environment=environment, requirements=REQUIREMENTS)))
    subjects = ["architecture", "ONNX Runtime", "cffi", "numpy", "environment", "plugin library"]
    assert [finding.subject for finding in found] == subjects
    assert severities(found) == ["ok", "problem", "problem", "problem", "warning", "problem"]


def test_versions_that_cannot_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (uninstalled,) = requirement_findings(machine(tmp_path, requirements=None))
    assert (uninstalled.severity, "no metadata" in uninstalled.text) == (Severity.NOTE, True)
    (damaged,) = requirement_findings(machine(tmp_path, requirements=["numpy >= two >"]))
    assert (damaged.severity, "is damaged" in damaged.text) == (Severity.PROBLEM, True)
    monkeypatch.setitem(sys.modules, "packaging", None)
    monkeypatch.delitem(sys.modules, "packaging.requirements", raising=False)
    (unread,) = requirement_findings(machine(tmp_path, requirements=REQUIREMENTS))
    assert (unread.severity, unread.advice) == (Severity.NOTE, "pip install packaging")


def test_the_extras_are_those_of_the_package_that_are_not_for_its_development() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(EXTRAS) == sorted(extras.keys() - {"docs", "exports", "serve", "test", "wheels"})


COMPILE = """
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target

source = "def kernel(x):\\n    x[cuda.grid(1)] = math.sqrt(x[0])\\n"
compile_kernel(KernelSpec("root", ("*f32",), source=source), Target.emulated())
print(open("/proc/self/maps").read())
"""
"""Compiles a kernel for the emulated device, and prints which files the process has mapped."""


def test_the_extra_compiler_has_the_libraries_that_the_compiler_loads() -> None:
    """A machine with a CUDA toolkit would hide that one is missing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in extras["compiler"]]
    installed = {file.name for name in names for file in importlib.metadata.files(name) or ()}
    loaded = set(re.findall(r"/(lib(?:cudart|cublas|nvrtc|nvvm|nvJitLink)[\w.-]*)$", python(COMPILE).stdout, re.M))
    assert loaded
    assert loaded <= installed


def test_the_installed_metadata_is_read() -> None:
    names = {re.match(r"[\w.-]+", line)[0] for line in Machine().requirements or ()}  # type: ignore[index]
    assert {"cffi", "numpy", "onnxruntime", "numba"} <= names


# ---- driver, architecture, libraries, compiler ----


@pytest.mark.parametrize(
    ("files", "environment", "severity", "advice"),
    [
        ([], {}, "note", "install a driver"),
        ([".dockerenv"], {}, "note", "docker run --gpus all"),
        ([".dockerenv", "proc/driver/nvidia/version=580"], {}, "problem", "--gpus all"),
        (["dev/nvidiactl"], {"KUBERNETES_SERVICE_HOST": "x"}, "problem", "nvidia.com/gpu"),
        (
            [".dockerenv", "dev/nvidiactl"],
            {"NVIDIA_DRIVER_CAPABILITIES": "graphics,utility"},
            "problem",
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        (["proc/driver/nvidia/version=580"], {}, "problem", "libraries of the same version"),
        (["dev/dxg"], {}, "problem", "/usr/lib/wsl/lib"),
    ],
)
def test_a_missing_driver(
    tmp_path: Path, files: list[str], environment: dict[str, str], severity: str, advice: str
) -> None:
    (finding,) = driver_findings(machine(tmp_path, files, environment=environment), [], "no libcuda")
    assert (finding.severity.value, "no libcuda" in finding.text) == (severity, True)
    assert advice in finding.advice


def test_devices_that_are_hidden_or_old(tmp_path: Path) -> None:
    hidden = machine(tmp_path, environment={"CUDA_VISIBLE_DEVICES": "-1", "NVIDIA_VISIBLE_DEVICES": "all"})
    assert severities(driver_findings(hidden, [], "no device")) == ["note", "warning"]
    (old,) = driver_findings(machine(tmp_path), [], "GPU 0 (Old) has compute capability 7.5, expected 8.0 or newer")
    assert (old.severity.value, "Ampere" in old.advice) == ("problem", True)
    (driver, device, old) = driver_findings(machine(tmp_path), [GPU], "GPU 1 (Old) has compute capability 7.5")
    assert [found.severity.value for found in (driver, device, old)] == ["ok", "ok", "warning"]
    assert old.text == "not used: GPU 1 (Old) has compute capability 7.5"
    contained = machine(tmp_path, [".dockerenv"])
    assert severities(driver_findings(contained, [GPU], "")) == ["ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("architecture", "files", "severity", "advice"),
    [
        ("x86_64", [], "ok", ""),
        ("aarch64", [], "note", "no onnxruntime-gpu for aarch64"),
        ("aarch64", ["proc/device-tree/model=NVIDIA Jetson AGX Orin\0"], "note", "JetPack 7"),
        ("riscv64", [], "problem", "x86_64 or aarch64"),
    ],
)
def test_architectures(tmp_path: Path, architecture: str, files: list[str], severity: str, advice: str) -> None:
    (finding,) = machine_findings(machine(tmp_path, files, architecture=architecture))
    assert finding.severity.value == severity
    assert advice in finding.advice


def test_libraries_say_where_they_are_and_which_other_copies_there_are(tmp_path: Path) -> None:
    own, torch = "site/nvidia/cu13/lib/libcublasLt.so.13", "site/torch/lib/libcudnn.so.9"
    packages = {"nvidia-cublas": "13.1", "torch": "2.9"}
    there = machine(tmp_path, [own, torch], packages=packages)
    places = {"cublaslt": LibraryPlace(str(tmp_path / own)), "cudnn": NOWHERE["cudnn"]}
    lt, cudnn, of_torch = library_findings(there, places, has_gpu=True)
    assert lt.severity is Severity.OK
    assert "nvidia-cublas 13.1" in lt.text
    assert (cudnn.severity, "pip install nvidia-cudnn-cu13" in cudnn.advice) == (Severity.WARNING, True)
    assert (of_torch.severity, str(tmp_path / torch) in of_torch.text) == (Severity.WARNING, True)
    assert severities(library_findings(machine(tmp_path / "empty"), NOWHERE, has_gpu=False)) == ["note", "note"]
    both = machine(tmp_path / "b", packages={"nvidia-cudnn-cu12": "9.1", "nvidia-cudnn-cu13": "9.2"})
    assert severities(library_findings(both, NOWHERE, has_gpu=False)) == ["note", "note", "problem"]


def test_a_compiler_that_is_missing_in_part(tmp_path: Path) -> None:
    packages = dict.fromkeys(COMPILER, "1")
    assert severities(compiler_findings(machine(tmp_path, packages=packages))) == ["ok"]
    del packages["nvidia-nvvm"]
    (finding,) = compiler_findings(machine(tmp_path, packages=packages))
    assert "nvidia-nvvm cannot be found: kernels for a GPU cannot be compiled" in finding.text
    assert (finding.severity, finding.commands) == (Severity.NOTE, ())
    (finding,) = compiler_findings(machine(tmp_path))
    assert ": kernels cannot be compiled" in finding.text
    assert (finding.severity, finding.commands) == (Severity.WARNING, ("pip install 'ort-cuda-plugin[cpu]'",))
    (finding,) = compiler_findings(machine(tmp_path, packages={"onnxruntime-gpu": "1.31.1"}))
    # The extra cpu would install the wheel onnxruntime beside onnxruntime-gpu.
    assert finding.commands == ("pip install 'ort-cuda-plugin[compiler]'",)
    (finding,) = compiler_findings(machine(tmp_path / "gpu", ["dev/nvidiactl"], packages=packages))
    assert (finding.severity, finding.commands) == (Severity.WARNING, ("pip install 'ort-cuda-plugin[cuda]'",))


def test_a_compiler_that_cannot_be_imported(tmp_path: Path) -> None:
    packages = dict.fromkeys(COMPILER, "1")
    (finding,) = compiler_findings(machine(tmp_path, packages=packages), "RuntimeError: no libcudart")
    assert finding.text == "its packages are installed, but cannot be imported: RuntimeError: no libcudart"
    assert (finding.severity, finding.commands) == (Severity.PROBLEM, ("pip install 'ort-cuda-plugin[cpu]'",))
    (finding,) = compiler_findings(machine(tmp_path), "ModuleNotFoundError: No module named 'numba'")
    assert ": kernels cannot be compiled" in finding.text


def test_doctor_imports_the_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ort_cuda_plugin.compiler.compile", None)
    assert main(["doctor"]) == ExitCode.MISMATCH
    assert (
        "compiler: its packages are installed, but cannot be imported: ModuleNotFoundError" in capsys.readouterr().out
    )


def test_a_cache_with_damaged_entries_one_that_nobody_can_trust_and_a_good_one(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    cache.write("good", b"body")
    os.utime(cache.path("good"), (1, 1))
    assert severities(cache_findings(cache)) == ["ok"]
    assert cache.path("good").stat().st_mtime == 1  # a check does not count as a use, which would delay eviction
    cache.write("bad", b"body")
    with cache.path("bad").open("ab") as file:
        file.write(b"more")
    used, damaged = cache_findings(cache)
    assert "2 entries" in used.text
    assert (damaged.severity, "1 of 2 are damaged" in damaged.text) == (Severity.PROBLEM, True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (finding,) = cache_findings(KernelCache(tmp_path / "open"))
    assert finding.severity is Severity.PROBLEM
    assert CACHE_DIR_VARIABLE in finding.advice
