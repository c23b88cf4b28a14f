"""Applications in C#: the program of docs/hosts.md, .NET's layout of native libraries, garbage collection in Runs.

The runtimes are Mono and .NET Core 3.1. `csharp` says what they need.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from csharp import ASSEMBLY, Runtime, library_folder, older
from document_blocks import blocks, prepare
from environments import borrow_packages, environment_folder
from isolated import ROOT
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE, cache_folder

RUNTIMES = pytest.mark.parametrize("runtime", ["mono", "dotnet"], indirect=True)
LIBRARY = "libort_cuda_plugin.so"

COLLECTING = """
using Microsoft.ML.OnnxRuntime;
using System;
using System.Linq;
using System.Threading;

static class Program
{
    static volatile bool isDone;
    static volatile Exception failure;

    static float[] Run(InferenceSession session)
    {
        var x = OrtValue.CreateTensorValueFromMemory(Enumerable.Repeat(1f, 16).ToArray(), new long[] { 2, 8 });
        return session.Run(new RunOptions(), new[] { "x" }, new[] { x }, new[] { "y" })[0]
            .GetTensorDataAsSpan<float>().ToArray();
    }

    static void UseSessions(OrtEnv env, string model)
    {
        try
        {
            var devices = env.GetEpDevices().Where(d => d.EpName == "CudaPluginExecutionProvider").Take(1).ToList();
            for (int i = 0; i < 3; i++)
            {
                var options = new SessionOptions();
                options.AppendExecutionProvider(env, devices, null);
                var session = new InferenceSession(model, options);
                var first = Run(session);
                for (int j = 0; j < 50; j++)
                    if (!Run(session).SequenceEqual(first))
                        throw new Exception("two Runs gave different results");
            }
        }
        catch (Exception caught)
        {
            failure = caught;
        }
    }

    static int Main(string[] arguments)
    {
        var env = OrtEnv.Instance();
        env.RegisterExecutionProviderLibrary("cuda_plugin.virtual", arguments[0]);
        var collector = new Thread(() => { while (!isDone) GC.Collect(); });
        ThreadStart use = () => UseSessions(env, arguments[1]);
        var users = Enumerable.Range(0, 3).Select(i => new Thread(use, 262144)).ToList();
        collector.Start();
        users.ForEach(user => user.Start());
        users.ForEach(user => user.Join());
        isDone = true;
        collector.Join();
        try
        {
            Console.WriteLine(((string)null).Length);
        }
        catch (NullReferenceException)
        {
            Console.WriteLine(failure == null ? "ok" : failure.ToString());
        }
        return failure == null ? 0 : 1;
    }
}
"""
"""Three threads with stacks of 256 KiB run models while a fourth thread collects garbage. Each collection stops the
other threads, on Mono by signals. Nothing is disposed: finalizers release the sessions and values. Last, the runtime
turns SIGSEGV into an exception."""


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return Runtime(request.param, tmp_path_factory.mktemp(request.param))


def document_program() -> str:
    document = (ROOT / "docs" / "hosts.md").read_text()
    (program,) = (block.text for block in blocks(document) if block.language == "csharp")
    return program


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    prepare()
    return str(tmp_path / "model.onnx")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": str(library_folder(tmp_path / "native")),
        "ORT_CUDA_PLUGIN_PYTHON": sys.executable,
        CACHE_DIR_VARIABLE: str(cache_folder()),
    }


def require_results(output: str, model: str) -> None:
    """Check the lines of the document's program against ONNX Runtime in Python."""
    x = (15 - np.arange(16, dtype=np.float32)).reshape(2, 8)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y"], {"x": x})
    assert np.unique(expected).size > 4
    lines = dict(line.split(": ") for line in output.splitlines())
    assert set(lines) == {"plugin", "CPU"}
    for line in lines.values():
        np.testing.assert_allclose([float(number) for number in line.split()], expected.ravel(), rtol=1e-5)


@pytest.mark.full
@RUNTIMES
def test_the_program_of_the_document_computes_the_same_on_the_plugin_and_the_cpu(
    runtime: Runtime, model: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    program = runtime.build(document_program(), tmp_path)
    done = runtime.run(program, get_library_path(), model, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    require_results(done.stdout, model)


@pytest.mark.full
@RUNTIMES
def test_collections_of_garbage_do_not_disturb_runs(
    runtime: Runtime, model: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    program = runtime.build(COLLECTING, tmp_path)
    done = runtime.run(program, get_library_path(), model, **environment)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("runtime", ["dotnet"], indirect=True)
@pytest.mark.parametrize("native", ["runtimes/linux-x64/native", "."])
def test_a_copy_of_the_library_beside_onnxruntime_is_found_by_its_name(
    runtime: Runtime, model: str, tmp_path: Path, environment: dict[str, str], native: str
) -> None:
    """The folders are those of ``dotnet publish``, without and with a runtime identifier."""
    application = tmp_path / "application"
    (application / native).mkdir(parents=True)
    program = runtime.build(document_program(), application)
    shutil.copy(Path(environment.pop("LD_LIBRARY_PATH"), "libonnxruntime.so"), application / native)
    shutil.copy(get_library_path(), application / native)
    native_files = {f"{native}/libonnxruntime.so": {"rid": "linux-x64", "assetType": "native"}} if native != "." else {}
    api = {"runtime": {ASSEMBLY: {}}, "runtimeTargets": native_files}
    target = ".NETCoreApp,Version=v3.1"
    targets = {target: {"program/1.0.0": {"runtime": {"program.dll": {}}}, "onnxruntime/1.0.0": api}}
    libraries = {name: {"type": "project", "serviceable": False, "sha512": ""} for name in targets[target]}
    dependencies = {"runtimeTarget": {"name": target}, "targets": targets, "libraries": libraries}
    (application / "program.deps.json").write_text(json.dumps(dependencies))

    site = environment_folder(tmp_path / "environment")
    shutil.copytree(ROOT / "ort_cuda_plugin", site / "ort_cuda_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    borrow_packages(site)
    environment["ORT_CUDA_PLUGIN_PYTHON"] = str(tmp_path / "environment" / "bin" / "python3")
    done = runtime.run(program, LIBRARY, model, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    require_results(done.stdout, model)
    del environment["ORT_CUDA_PLUGIN_PYTHON"]
    done = runtime.run(program, LIBRARY, model, **environment)
    assert "OnnxRuntimeException" in done.stderr
    assert f"{(application / native).resolve()} is in no Python environment" in done.stderr


@pytest.mark.parametrize(
    ("newer", "expected"),
    [
        ("if (x is null || y is null)", "if (x == null || y == null)"),
        ("if (node.Value is not TensorBase)", "if (!(node.Value is TensorBase))"),
        ("list.Select(static item => item + 1)", "list.Select(item => item + 1)"),
        ("List<int> numbers = new(count);", "List<int> numbers = new List<int>(count);"),
        ("void f<T>() where T : unmanaged", "void f<T>() where T : struct"),
        ("sizes[0] = sizes[1] = size;", "sizes[0] = size; sizes[1] = size;"),
        ("Buffer.Span[i] = value;", "var span = Buffer.Span; span[i] = value;"),
        (
            "{ using var a = f(); if (a) { g(); } using var b = h(a); b.i(); } j();",
            "{ using (var a = f()) { if (a) { g(); } using (var b = h(a)) { b.i(); }}} j();",
        ),
    ],
)
def test_newer_syntax_gets_the_older_form(newer: str, expected: str) -> None:
    assert older(newer) == expected


def test_the_program_of_the_document_is_what_the_tests_compile() -> None:
    assert older(document_program()) == document_program()  # mcs compiles it without a rewriting
