"""`doctor --fix` prints commands and nothing else, and `doctor --report` writes a file without personal names."""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.reports import doctor
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE
from ort_cuda_plugin.doctor.cache import cache_findings
from ort_cuda_plugin.doctor.driver import driver_findings
from ort_cuda_plugin.doctor.findings import Finding, Machine, note, ok, problem, warning
from ort_cuda_plugin.doctor.redaction import Identity, identity_of
from ort_cuda_plugin.doctor.report import report
from ort_cuda_plugin.doctor.variables import variable_findings
from ort_cuda_plugin.ep.device.devices import DeviceInfo


def simulated(root: Path, **environment: str) -> Machine:
    return Machine(root, environment, "x86_64", {"onnxruntime": "1.31.1", "pytest": "9"}, [], root / "site")


def found_by_doctor(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    monkeypatch.setattr(doctor, "examine", lambda machine: iter(found))


# ---- --fix ----


@pytest.mark.parametrize("is_broken", [True, False])
def test_only_commands_are_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_broken: bool
) -> None:
    commands = ("pip uninstall -y a b", "pip install a")
    found_by_doctor(
        monkeypatch,
        ok("one", "good"),
        (problem if is_broken else warning)("two", "bad", "advice", *commands),
        warning("three", "bad", "advice", commands[1]),  # the same command again
        note("four", "not everyone's", "pip install four"),
        warning("five", "bad", "start the container otherwise"),
    )
    assert main(["doctor", "--fix"]) == (ExitCode.MISMATCH if is_broken else ExitCode.OK)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == list(commands)
    assert captured.err.splitlines() == [
        "no command mends this:",
        "warning  five: bad",
        "         -> start the container otherwise",
    ]


def test_a_command_that_cannot_be_one_line_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by_doctor(monkeypatch, warning("cache", "bad", "remove it", "rm -f '/tmp/a\nreboot'"))
    assert main(["doctor", "--fix"]) == ExitCode.OK
    captured = capsys.readouterr()
    assert (captured.out, "cache: bad" in captured.err) == ("", True)


def test_fix_mends_what_doctor_finds_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EMULATE_WORKER", "2")
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EMULATE_LOWERING", "sm_ninety")
    assert main(["doctor", "--fix"]) == ExitCode.MISMATCH
    assert {
        'export ORT_CUDA_PLUGIN_EMULATE_WORKERS="$ORT_CUDA_PLUGIN_EMULATE_WORKER"',
        "unset ORT_CUDA_PLUGIN_EMULATE_WORKER",
        "unset ORT_CUDA_PLUGIN_EMULATE_LOWERING",
    } <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("environment", "commands"),
    [
        (
            {"ORT_CUDA_PLUGIN_CACHEDIR": "/x"},
            ('export ORT_CUDA_PLUGIN_CACHE_DIR="$ORT_CUDA_PLUGIN_CACHEDIR"', "unset ORT_CUDA_PLUGIN_CACHEDIR"),
        ),
        (
            {"ORT_CUDA_PLUGIN_CACHEDIR": "/x", "ORT_CUDA_PLUGIN_CACHE_DIR": "/y"},
            ("unset ORT_CUDA_PLUGIN_CACHEDIR",),
        ),
        ({"ORT_CUDA_PLUGIN_QUANTUM_PORT": "1"}, ("unset ORT_CUDA_PLUGIN_QUANTUM_PORT",)),
        ({"ORT_CUDA_PLUGIN_EMULATE;reboot": "1"}, ()),
    ],
)
def test_commands_for_variables(tmp_path: Path, environment: dict[str, str], commands: tuple[str, ...]) -> None:
    (finding,) = variable_findings(simulated(tmp_path, **environment))
    assert finding.commands == commands


def test_commands_for_hidden_devices_and_for_a_cache_whose_path_a_shell_would_split(tmp_path: Path) -> None:
    *_, hidden = driver_findings(simulated(tmp_path, CUDA_VISIBLE_DEVICES="-1"), [], "no device")
    assert hidden.commands == ("unset CUDA_VISIBLE_DEVICES",)
    cache = KernelCache(tmp_path / "my; cache")
    cache.write("bad", b"body")
    with cache.path("bad").open("ab") as file:
        file.write(b"more")
    *_, damaged = cache_findings(cache)
    (command,) = damaged.commands
    assert shlex.split(command) == ["rm", "-f", str(cache.path("bad"))]


def test_json_has_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found_by_doctor(monkeypatch, warning("one", "bad", "advice", "pip install a"))
    assert main(["doctor", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)[0]["commands"] == ["pip install a"]


# ---- --report ----


def planted(monkeypatch: pytest.MonkeyPatch, root: Path) -> Sequence[str]:
    """Plant names in the environment and in paths, and return what no report may contain."""
    home = root / "homes" / "annabel"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "annabel")
    monkeypatch.setenv("LOGNAME", "annabel")
    monkeypatch.setenv("HOSTNAME", "wintermute.acme.example")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(home / "cache"))
    monkeypatch.setenv("ORT_CUDA_PLUGIN_KERNEL_MANIFEST", str(root / "secret project" / "kernels.json"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{home}/lib:/mnt/annabel_files/lib:/usr/lib/wsl/lib")
    monkeypatch.setenv("ORT_CUDA_PLUGIN_TOKEN", "hunter2")
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-0000")
    return (str(root), "annabel", "wintermute", "acme.example", "/mnt/", "secret", "project", "hunter2", "nvapi")


def test_a_report_has_everything_but_personal_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    forbidden = planted(monkeypatch, tmp_path)
    file = tmp_path / "report.txt"
    assert main(["doctor", "--report", str(file)]) == ExitCode.OK
    printed = capsys.readouterr().out
    text = file.read_text()
    assert [name for name in (*forbidden, sys.prefix) if name in text] == []
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    for title in ("findings", "versions", "platform", "CPU", "driver and devices", "variables"):
        assert f"\n## {title}\n\n" in text
    subjects = [line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")]
    assert subjects
    assert [subject for subject in subjects if f"{subject}:" not in text] == []
    assert f"numpy {sys.modules['numpy'].__version__}\n" in text
    assert "\nemulated device 0: " in text
    assert f"\n{CACHE_DIR_VARIABLE}='~/cache'\n" in text
    assert "\nLD_LIBRARY_PATH='~/lib:<path>:/usr/lib/wsl/lib'\n" in text
    assert "\nORT_CUDA_PLUGIN_KERNEL_MANIFEST='<path>'\n" in text
    assert "\nORT_CUDA_PLUGIN_TOKEN: the plugin does not read it\n" in text


def test_a_report_on_standard_output_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by_doctor(monkeypatch, problem("one", "bad \x1b[1m", "advice"))
    assert main(["doctor", "--report", "-"]) == ExitCode.MISMATCH
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "# ort-cuda-plugin doctor --report",
        "",
        "## findings",
        "",
        "problem  one: bad \\x1b[1m",
        "         -> advice",
    ]


def test_a_file_that_cannot_be_written_and_options_that_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found_by_doctor(monkeypatch, ok("one", "good"))
    assert main(["doctor", "--report", str(tmp_path / "missing" / "report.txt")]) == ExitCode.USAGE
    assert "report.txt: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--fix", "--json"])
    assert caught.value.code == ExitCode.USAGE


def test_devices_that_cannot_be_listed_are_a_line_of_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing() -> list[DeviceInfo]:
        raise PluginError("expected a number")

    monkeypatch.setattr("ort_cuda_plugin.doctor.report.emulated_devices", failing)
    assert "\nemulated device: PluginError: expected a number\n" in report(simulated(tmp_path), [])


IDENTITY = Identity(("/data/home/jo",), ("jo", "Jo Doe"), ("box", "box.lan"), ("/mnt/my models",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in /data/home/jo/x/y.onnx, and", "in ~/x/y.onnx, and"),
        ("/data/home/jo: bad", "~: bad"),
        ("/data/home/joanna/x", "<path>"),
        ("by Jo Doe <jo@box.lan>", "by <user> <<user>@<host>>"),
        ("jo_cache BOX-1 joke boxes", "<user>_cache <host>-1 joke boxes"),
        ("'/mnt/my models/a b'", "'<path> b'"),
        ("/srv/acme/libcudnn.so.9 is another copy", "<path>/libcudnn.so.9 is another copy"),
        ("/srv/v/lib/python3/site-packages/a/libx.so.1", "<path>/site-packages/a/libx.so.1"),
        ("/usr/lib/x:/proc/driver:/libel/x", "/usr/lib/x:/proc/driver:<path>"),
        ("https://onnxruntime.ai/docs, 1.0 MiB/s, ~/x, n/a", "https://onnxruntime.ai/docs, 1.0 MiB/s, ~/x, n/a"),
    ],
)
def test_replacements(text: str, expected: str) -> None:
    assert IDENTITY.redacted(text) == expected


def test_an_identity_comes_from_the_environment_and_from_the_tables_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = pwd.struct_passwd(("kim", "x", 1000, 1000, "Kim Lee,,,", "/home/kimberly", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hostname").write_text("big.lan\n")
    identity = identity_of(simulated(tmp_path, HOME="/", SUDO_USER="lou", USER="root"))
    assert {"kim", "Kim Lee", "kimberly", "lou"} <= set(identity.users)
    assert "root" not in identity.users
    assert {"big", "big.lan"} <= set(identity.hosts)
    assert "/home/kimberly" in identity.homes
    assert "" not in (*identity.homes, *identity.users, *identity.hosts, *identity.paths)

    def without_entry(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", without_entry)
    assert os.path.realpath("/var/lou") in identity_of(simulated(tmp_path, HOME="/var/lou")).homes
