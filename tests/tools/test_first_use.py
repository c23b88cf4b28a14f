"""First use: names, versions, errors with advice, and progress messages during compilation."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

import ort_cuda_plugin
from isolated import ROOT, add_model, python
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.common import output_console, waiting
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.models import kernel_report, kernels
from ort_cuda_plugin.cli.plain_text import aligned, styled
from ort_cuda_plugin.cli.runs import run
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device import libraries
from ort_cuda_plugin.progress.events import Task, is_watched, on_progress

# ---- the package ----


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ort-cuda-plugin {ort_cuda_plugin.__version__}\n"


def test_dir_and_type_checkers_see_the_public_names() -> None:
    public = set(ort_cuda_plugin.__all__)
    assert public <= set(dir(ort_cuda_plugin))
    assert all(getattr(ort_cuda_plugin, name).__name__ == name for name in public)
    tree = ast.parse(Path(ort_cuda_plugin.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    own = [node for node in (*tree.body, *block.body) if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.name for node in own for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert public == imported | {name for name in defined if not name.startswith("_")}


def test_errors_have_public_types() -> None:
    with pytest.raises(ort_cuda_plugin.OptionError, match="no_such_option"):
        ort_cuda_plugin.session(add_model(), emulate=True, provider_options={"no_such_option": 1})
    assert issubclass(ort_cuda_plugin.PluginError, RuntimeError)


def test_another_library_of_our_name_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_cuda_plugin import api

    theirs = SimpleNamespace(ep_name=ort_cuda_plugin.get_ep_name(), ep_metadata={"library_path": "/lib/libtheirs.so"})
    ours = onnxruntime.get_ep_devices
    ort_cuda_plugin.unregister()
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [theirs, *ours()])
    with pytest.warns(RuntimeWarning, match=r"another plugin library \(/lib/libtheirs\.so\) also offers"):
        offered = ort_cuda_plugin.register(emulate=True)
    assert theirs not in offered
    assert [api._info(device).emulated for device in offered][-1:] == [True]
    assert ort_cuda_plugin.devices()


# ---- the command line ----


def test_info_shows_the_libraries_and_how_to_get_those_that_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"cublaslt": libraries.LibraryPlace("/lib/blas.so"), "cudnn": libraries.LibraryPlace("", "not there")}
    monkeypatch.setattr(libraries, "library_places", lambda: places)
    assert main(["info"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "cublaslt: /lib/blas.so\n" in printed
    assert "cudnn: not found" in printed
    assert 'pip install "ort-cuda-plugin[libs]"' in printed


def test_a_gpu_without_libraries_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = {"cublaslt": libraries.LibraryPlace("/lib/blas.so"), "cudnn": libraries.LibraryPlace("", "not there")}
    monkeypatch.setattr(libraries, "library_places", lambda: places)
    assert libraries.load_libraries.__wrapped__() == {"cublaslt"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("cudnn is not used: not there.")
    assert 'pip install "ort-cuda-plugin[libs]"' in record.getMessage()


def test_kernels_needs_no_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KernelSpec("add_one", ("*f32",), "def kernel(x):\n    x[0] = x[0] + float32(1)\n")
    monkeypatch.delenv(kernel_library.MANIFEST_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "DEFAULT_MANIFEST", tmp_path / "none")
    monkeypatch.setattr(kernel_report, "sample_specs", lambda: [spec])
    monkeypatch.setattr(kernel_report, "ARCHITECTURES", [Target.cuda(9, 0)])
    assert main(["kernels", "--json"]) == ExitCode.OK
    assert [usage["arch"] for usage in json.loads(capsys.readouterr().out)] == ["sm_90"]


def test_a_table_is_whole_where_the_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("x" * 300)
    output_console().print(table)
    assert "x" * 300 in capsys.readouterr().out


def test_a_reader_that_goes_away_ends_the_command_without_a_traceback() -> None:
    command = [sys.executable, "-m", "ort_cuda_plugin", "info", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() == ExitCode.OUTPUT_CLOSED


def test_a_bad_environment_variable_is_an_error_of_the_user(tmp_path: Path) -> None:
    program = """
    import os, sys
    from ort_cuda_plugin.cli import main
    for variable in ("ORT_CUDA_PLUGIN_AS", "ORT_CUDA_PLUGIN_EMULATE_MEMORY"):
        os.environ[variable] = "lots"
        print(main(["explain", sys.argv[1], "--device", "emulated"]), main(["info"]))
        del os.environ[variable]
    """
    add_model(tmp_path / "add.onnx")
    done = python(program, str(tmp_path / "add.onnx"))
    assert [line for line in done.stdout.splitlines() if line[0].isdigit()] == ["3 3"] * 2
    for variable in ("AS", "EMULATE_MEMORY"):
        assert f"ORT_CUDA_PLUGIN_{variable}=" in done.stderr


def test_a_dimension_without_a_name_has_that_of_its_axis(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3, "n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path)
    arguments = Namespace(model=str(path), input=[], dim=["x.0=5", "n=2"], seed=0)
    assert run.load(path, arguments)[2]["x"].shape == (5, 3, 2)
    arguments.dim = ["x.1=5"]
    with pytest.raises(UserError, match=r"no symbolic dimension .x\.1.\. Its symbolic dimensions: n, x\.0"):
        run.load(path, arguments)
    arguments.dim = []
    assert run._guesses(path, arguments) == (["x.0", "n"], [])


# ---- while something compiles ----


@pytest.mark.parametrize("terminal", [False, True])
def test_who_waits_sees_what_is_compiled(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with waiting(console, "first run"):
        Task("compiling kernels", 1, 0.1, 0.1)
        task = Task("compiling kernels", 31, 8.0, 8.0)
        written = console.file.getvalue()  # type: ignore[attr-defined]
        if terminal:
            task.advance("softmax", 8.0)
            shown = console._live_stack[0].get_renderable().text.plain  # type: ignore[union-attr]
            assert shown == "first run  [--------------------] compiling kernels: 1 of 31, about 0 s left, softmax"
        else:
            assert written == "compiling kernels: 0 of 31, about 8 s left\n"
    assert not is_watched()


@pytest.mark.parametrize(
    ("seconds", "is_told", "level"),
    [(0.0, False, logging.WARNING), (0.0, True, logging.INFO), (99.0, False, logging.INFO)],
)
def test_a_long_compilation_is_in_the_log_unless_a_command_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    is_told: bool,
    level: int,
) -> None:
    monkeypatch.setattr(kernel_library, "seconds_to_mention", seconds)
    monkeypatch.setattr(kernel_library, "_unmentioned", kernel_library._Unmentioned())
    spec = KernelSpec("add_one", ("*f32",), "def kernel(x):\n    x[0] = x[0] + float32(1)\n")
    with caplog.at_level(logging.INFO, "ort_cuda_plugin"):
        library = kernel_library.KernelLibrary(KernelCache(tmp_path), lambda name, by: None)
        with on_progress(lambda event: None) if is_told else nullcontext():
            library.get(spec, Target.emulated())
    first, last = caplog.records
    assert (first.levelno, last.levelno) == (level, logging.INFO)
    assert first.getMessage() == (
        f"compiling 1 kernels, about 0 s on one core; they are stored in {tmp_path} for later processes"
    )
    assert last.getMessage().startswith("compiled 1 kernels in ")


def test_short_compilations_add_up_to_a_warning() -> None:
    unmentioned = kernel_library._Unmentioned()
    first, second, third = (unmentioned.mention(7, 0.4 * kernel_library.seconds_to_mention) for _ in range(3))
    assert [first, second] == [(False, ""), (False, ", after 7 kernels that took about 2 s")]
    assert third == (True, ", after 14 kernels that took about 3 s")
    assert unmentioned.mention(1, 0.0) == (False, "")


# ---- without the packages of an extra ----


def test_an_environment_that_has_only_a_cache_has_the_commands_about_itself() -> None:
    code = """
        import sys
        for name in ("rich", "onnx", "numba", "llvmlite", "numba_cuda"):
            sys.modules[name] = None
        from ort_cuda_plugin.cli import main
        assert main(["run", "light_squeezenet"]) == 3
        assert main(["info"]) == 0
        assert main(["doctor"]) in (0, 1)
        sys.exit(main(["with", "--device", "emulated", "--", sys.executable, "-c", "print('the program')"]))
    """
    done = python(code)
    assert "  onnxruntime" in done.stdout
    assert "ok       registration: " in done.stdout
    assert done.stdout.endswith("the program\n")
    assert "this command needs a package that is not installed" in done.stderr


def test_columns_stand_below_each_other() -> None:
    assert aligned("title", [("name", "id"), ("a device", "0")]) == "title\n  name      id\n  a device  0"


def test_only_a_terminal_gets_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styled("ok", "32") == "ok"
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert styled("ok", "32") == "\x1b[32mok\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("ok", "32") == "ok"


# ---- where output goes ----


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_full_disk_is_named() -> None:
    code = """
        import sys
        from ort_cuda_plugin.cli import main
        sys.stdout = open("/dev/full", "w", buffering=1)
        sys.exit(main(sys.argv[1:]))
    """
    done = python(code, "info", check=False)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "ort-cuda-plugin info: the output cannot be written: No space left on device\n"


def test_a_reader_that_has_seen_enough_is_an_exit_code() -> None:
    console = output_console()
    with pytest.raises(BrokenPipeError):
        console.on_broken_pipe()


def test_no_locale_and_no_closed_stream_ends_a_command(tmp_path: Path) -> None:
    model = onnx.load_from_string(add_model())
    model.graph.node[0].name = "grün ☃"
    onnx.save(model, tmp_path / "m.onnx")
    page = tmp_path / "page.html"
    code = """
        import sys
        from ort_cuda_plugin.cli import main
        assert main(sys.argv[1:]) == 0
        sys.stdout = None
        assert main(["info"]) == 0
    """
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["explain", str(tmp_path / "m.onnx"), "--html", str(page), "--device", "emulated"]
    done = python(code, *arguments, env=plain)
    assert "gr\\xfcn \\u2603" in done.stdout
    assert "grün ☃" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "ending", [UserError(ExitCode.MODEL_FAILED, "FAIL : KeyboardInterrupt"), RuntimeError("it"), None]
)
def test_ctrl_c_is_an_exit_code_whatever_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: Exception | None
) -> None:
    """After an interrupt in a callback, ONNX Runtime reports an error of its own or goes on without the provider."""
    from ort_cuda_plugin.cli.reports import doctor

    def execute(arguments: Namespace) -> int:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if ending is not None:
            raise ending
        return 0

    monkeypatch.setattr(doctor, "execute", execute)
    assert main(["doctor"]) == ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == ""


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {code.value} | {code.meaning} |" in text


def test_without_the_compilers_for_gpus_what_to_install_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The extra `cpu` installs no compiler for GPUs: `estimate` fails and `bench` omits its estimate."""
    import cuda.pathfinder

    load = cuda.pathfinder.load_nvidia_dynamic_lib

    def load_others(name: str) -> object:
        if name == "nvJitLink":
            raise cuda.pathfinder.DynamicLibNotFoundError("ensure the NVIDIA display driver is installed")
        return load(name)

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", load_others)
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    add_model(tmp_path / "m.onnx")
    said = 'nvJitLink is not installed; `pip install "ort-cuda-plugin[cuda]"` installs the compilers for GPUs'
    assert main(["estimate", str(tmp_path / "m.onnx")]) == ExitCode.MODEL_FAILED
    assert said in capsys.readouterr().err
    arguments = ["--runs", "1", "--warmup", "0", "--no-creation", "--device", "emulated"]
    assert main(["bench", str(tmp_path / "m.onnx"), *arguments]) == ExitCode.OK
    error = capsys.readouterr().err
    assert "no estimate for h100: " in error
    assert said in error
