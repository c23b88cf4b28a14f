"""Operators of an installed package: in Python, in a C host, and in a compiled model that needs no package."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from c_programs import COUNTED, build_host
from contexts import compile_model
from custom_operators import DOMAIN, kept_registry
from environments import borrow_packages, environment_folder
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.ep.contexts.context_session import ALLOW_VARIABLE

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sum-operators"
version = "1.5"
[project.entry-points."ort_cuda_plugin.ops"]
sums = "sum_operators"
[tool.setuptools]
py-modules = ["sum_operators"]
"""
MODULE = """
from numba import cuda
from ort_cuda_plugin.custom import Lowering, T, ceildiv, launch, numba_kernel, op


@numba_kernel
def add(a, b, c, size):
    i = cuda.grid(1)
    if i < size:
        c[i] = a[i] + b[i]


@op("my.domain::Sum")
def sum(ctx: Lowering, a: T, b: T) -> T:
    c = ctx.empty(a.shape, a.dtype)
    launch(ctx, add, ceildiv(c.size, 64), 64, [ctx.contiguous(a), ctx.contiguous(b), c, c.size], writes=[c])
    return c
"""
FIND = """
import sys, ort_cuda_plugin
(verdict,) = ort_cuda_plugin.explain(sys.argv[1], emulate=True)
print(verdict.note)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the C host, and beside it the model c = a + b with the package's operator; return the model's path."""
    folder = tmp_path_factory.mktemp("packages")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in "abc"]
    node = helper.make_node("Sum", ["a", "b"], ["c"], name="sum", domain=DOMAIN)
    graph = helper.make_graph([node], "sum", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    path = folder / "sum.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    build_host("host", folder)
    return path


@pytest.fixture(scope="module")
def environment(model: Path) -> Path:
    """Create an environment with the package and return its interpreter."""
    project = model.parent / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "sum_operators.py").write_text(MODULE)
    site = environment_folder(model.parent / "env")
    borrow_packages(site)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(project)]
    subprocess.run(command, check=True)
    return model.parent / "env" / "bin" / "python3"


def run_host(model: Path, python: str | Path, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    variables = COUNTED | {"ORT_CUDA_PLUGIN_PYTHON": str(python), "ORT_CUDA_PLUGIN_CACHE_DIR": str(cache), **more}
    command = [str(model.parent / "host"), get_library_path(), str(model)]
    return subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, timeout=600)


def test_an_installed_package_is_found(model: Path, environment: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([environment, "-c", FIND, str(model)], env=variables, capture_output=True, text=True)
    assert done.stdout == "run by my.domain::Sum-1 of package sum-operators 1.5\n", done.stderr


def test_a_c_host_runs_a_model_with_its_operators(model: Path, environment: Path, tmp_path: Path) -> None:
    done = run_host(model, environment, tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_host_without_the_package_says_what_is_missing(model: Path, tmp_path: Path) -> None:
    done = run_host(model, sys.executable, tmp_path)
    assert done.returncode == 1
    assert "my.domain:Sum(-1) is not a registered function/op" in done.stderr


def test_a_compiled_model_needs_no_package(
    model: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.exists()
    monkeypatch.syspath_prepend(model.parent / "project")
    with kept_registry():
        importlib.import_module("sum_operators")
        compile_model(str(model), model.parent / "compiled.onnx", context_architectures="emulated")
    monkeypatch.delitem(sys.modules, "sum_operators")
    done = run_host(model.parent / "compiled.onnx", sys.executable, tmp_path / "cache", **{ALLOW_VARIABLE: "1"})
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert not list((tmp_path / "cache").glob("*.kernel"))  # no kernel was compiled
