"""The disk cache of kernels, and the kernel library, which finds kernels in it or compiles them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_launch import kernel
from ort_cuda_plugin.compiler import toolchain
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.compile import KernelCompileError
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.library.compile_worker import WorkerClient
from ort_cuda_plugin.compiler.library.isolation import import_compiler
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import kernel_key

emulated = Target.emulated()


def spec_number(number: int) -> KernelSpec:
    return kernel("numbered", ("*f32",), f"def kernel(x):\n    x[cuda.grid(1)] = float32({number})\n")


def library(folder: Path) -> tuple[KernelLibrary, Counter[str]]:
    counts: Counter[str] = Counter()
    return KernelLibrary(KernelCache(folder), lambda name, by: counts.update({name: by})), counts


def image(size: int) -> KernelImage:
    return KernelImage(os.urandom(size), "entry", emulated, {"fibers": 1}, b"ptx")


# ---- library ----


def test_a_kernel_is_compiled_once_and_then_found_in_memory_and_on_disk(tmp_path: Path) -> None:
    first, counts = library(tmp_path)
    images = first.get_many([spec_number(1), spec_number(2), spec_number(1)], emulated)
    assert counts == {"KERNELS_COMPILED": 2}
    assert images[0] is images[2]
    assert images[0].entry != images[1].entry
    first.get_many([spec_number(2)], emulated)
    assert counts == {"KERNELS_COMPILED": 2, "KERNEL_CACHE_HITS": 1}
    second, counts = library(tmp_path)
    assert second.get_many([spec_number(1), spec_number(2)], emulated) == images[:2]
    assert counts == {"KERNEL_CACHE_HITS": 2}


def test_a_warm_process_imports_neither_numba_nor_llvm(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from ort_cuda_plugin.compiler.cache import KernelCache
        from ort_cuda_plugin.compiler.kernel import KernelSpec
        from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
        from ort_cuda_plugin.compiler.targets import Target
        spec = KernelSpec("zero", ("*f32",), "def kernel(x):\\n    x[0] = float32(0)\\n")
        KernelLibrary(KernelCache(Path(sys.argv[1])), print).get(spec, Target.emulated())
        print(sorted({"numba", "llvmlite"} & set(sys.modules)))
        """
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)]))

    def process() -> list[str]:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()

    assert process() == ["KERNELS_COMPILED 1", "['llvmlite', 'numba']"]
    assert process() == ["KERNEL_CACHE_HITS 1", "[]"]


@pytest.mark.parametrize("workers", [0, 1])
def test_many_kernels_are_compiled_with_and_without_a_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(kernel_library, "worker_pays_seconds", 0.5)
    monkeypatch.setattr(kernel_library, "max_workers", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1 + workers)))
    used: list[WorkerClient] = []
    start = kernel_library.start_workers

    def record(seconds: float, cache: KernelCache) -> list[WorkerClient]:
        started = start(seconds, cache)
        used.extend(started)
        return started

    monkeypatch.setattr(kernel_library, "start_workers", record)
    target, counts = library(tmp_path)
    specs = [spec_number(i) for i in range(30)]
    assert [image.entry for image in target.get_many(specs, emulated)] == [spec.symbol for spec in specs]
    assert counts == {"KERNELS_COMPILED": 30}
    assert len(used) == workers
    assert all(worker.process.returncode is not None for worker in used)


def test_the_longest_kernels_come_first_and_targets_of_a_kernel_stay_together(tmp_path: Path) -> None:
    long = kernel("long", ("*f32",), spec_number(1).source + "    x[1] = float32(2)\n" * 50)
    jobs = [(spec, target) for target in (emulated, Target.cuda(9, 0)) for spec in (spec_number(1), long)]
    compilation = kernel_library.Compilation(jobs, lambda index, image, compiled: None, KernelCache(tmp_path))
    assert list(compilation.take()) == [1, 3, 0, 2]
    assert compilation.seconds == sum(kernel_library.expected_seconds(spec) for spec in (spec_number(1), long))


def test_ir_is_kept_for_all_targets_and_names_so_that_numba_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ort_cuda_plugin.compiler import compile as pipeline

    ran: list[KernelSpec] = []
    front_end = pipeline.kernel_ir

    def recording(spec: KernelSpec) -> Any:
        ran.append(spec)
        return front_end(spec)

    monkeypatch.setattr(pipeline, "kernel_ir", recording)
    source = "def kernel(x):\n    x[0] = f16_to_f32(f32_to_f16(x[1]))\n"
    specs = [spec_number(7), kernel("with_device_functions", ("*f32",), source)]
    targets = (emulated, Target.emulated(check=True), Target.cuda(9, 0))
    kept = [library(tmp_path)[0].get(spec, target) for target in targets for spec in specs]
    assert ran == specs
    assert kept == [pipeline.compile_kernel(spec, target) for target in targets for spec in specs]
    renamed = dataclasses.replace(specs[0], name="of_another_node")
    image = library(tmp_path)[0].get(renamed, emulated)
    assert ran[2:] == specs * 3  # only the direct `compile_kernel` calls ran the front end
    assert image == pipeline.compile_kernel(renamed, emulated)
    assert image.entry == renamed.symbol


def test_damaged_ir_is_made_again(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store_ir("key", ["name", "module"])
    assert cache.load_ir("key") == ["name", "module"]
    data = bytearray(cache.path("key").read_bytes())
    data[-1] ^= 1
    cache.path("key").write_bytes(data)
    assert cache.load_ir("key") is None


def test_a_helper_gives_the_same_image_and_no_error_hides_in_it(tmp_path: Path) -> None:
    from ort_cuda_plugin.compiler.compile import compile_kernel
    from ort_cuda_plugin.compiler.library.compile_worker import WorkerClient

    (worker,) = WorkerClient.start(KernelCache(tmp_path))
    assert worker.wait_ready()
    assert os.getpgid(worker.process.pid) != os.getpgid(0)  # Ctrl-C at a terminal does not reach it
    assert worker.compile(kernel("wrong", ("*f32",), "def kernel(x):\n    nothing()\n"), emulated) is None
    assert worker.compile(spec_number(3), emulated) == compile_kernel(spec_number(3), emulated)
    worker.process.kill()
    worker.process.wait()
    assert worker.compile(spec_number(3), emulated) is None
    worker.close()


def test_one_helper_imports_the_compiler_for_all_and_this_process_does_not(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
import psutil
os.sched_getaffinity = lambda _: range(3)
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.targets import Target
kernel_library.worker_pays_seconds = 0.01
kinds = set()
finish = kernel_library.Compilation.finish
def noted(compilation, *of_kernel):
    (first,) = psutil.Process().children()
    kinds.add((len(compilation.workers), len(first.children())))
    finish(compilation, *of_kernel)
kernel_library.Compilation.finish = noted
library = kernel_library.KernelLibrary(KernelCache(Path(sys.argv[1])), lambda name, by: None)
specs = [KernelSpec(f"k{i}", ("*f32",), f"def kernel(x):\\n    x[0] = float32({i})\\n") for i in range(6)]
library.get_many(specs, Target.emulated())
assert not psutil.Process().children()
print(kinds, "numba" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "{(3, 2)} False"


def test_an_interrupt_ends_the_helpers_and_keeps_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "worker_pays_seconds", 0.3)
    monkeypatch.setattr(kernel_library, "max_workers", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    target, counts = library(tmp_path)
    specs = [spec_number(i) for i in range(20)]
    compilations = []
    others = psutil.Process().children()  # such as the fork server of other tests
    run = kernel_library.Compilation.run

    def noted(compilation: kernel_library.Compilation) -> None:
        compilations.append(threading.current_thread())
        run(compilation)

    def interrupt(done: int) -> None:
        if sum(counts.values()) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def ring(number: int, frame: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(kernel_library.Compilation, "run", noted)
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(InterruptedError):
            target.get_jobs([(spec, emulated) for spec in specs], interrupt)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (compilation,) = compilations
    compilation.join(600)
    assert not compilation.is_alive()
    assert psutil.Process().children() == others
    compiled = counts["KERNELS_COMPILED"]
    assert 1 <= compiled < len(specs)
    assert [image.entry for image in target.get_many(specs, emulated)] == [spec.symbol for spec in specs]
    assert counts == {"KERNELS_COMPILED": len(specs), "KERNEL_CACHE_HITS": compiled}


def test_a_helper_with_other_tools_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_cuda_plugin.compiler.library import compile_worker

    monkeypatch.setattr(compile_worker, "tools", lambda: "others")
    (started,) = WorkerClient.start(KernelCache(tmp_path))
    monkeypatch.setattr(kernel_library, "start_workers", lambda seconds, cache: [started])
    target, counts = library(tmp_path)
    target.get_many([spec_number(1), spec_number(2)], emulated)
    assert counts == {"KERNELS_COMPILED": 2}
    assert not started.is_ready


def test_the_work_of_a_helper_that_does_not_answer_is_done_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (started,) = WorkerClient.start(KernelCache(tmp_path))
    stopped = threading.Event()
    compile_kernel = started.compile

    def stop(spec: KernelSpec, target: Target) -> KernelImage | None:
        os.kill(started.process.pid, signal.SIGSTOP)
        stopped.set()
        return compile_kernel(spec, target)

    def run_here(compilation: kernel_library.Compilation) -> None:
        stopped.wait(600)
        here(compilation)

    here = kernel_library.Compilation.run_here
    monkeypatch.setattr(started, "compile", stop)
    monkeypatch.setattr(kernel_library.Compilation, "run_here", run_here)
    monkeypatch.setattr(kernel_library, "start_workers", lambda seconds, cache: [started])
    monkeypatch.setattr(kernel_library, "least_patience_seconds", 0.0)
    target, counts = library(tmp_path / "kept")
    images = target.get_many([spec_number(1), spec_number(2)], emulated)
    assert [image.entry for image in images] == [spec_number(1).symbol, spec_number(2).symbol]
    assert counts == {"KERNELS_COMPILED": 2}
    assert "does not answer" in caplog.text
    assert started.process.returncode == -signal.SIGKILL


def test_a_kernel_that_does_not_compile_raises_and_the_others_survive(tmp_path: Path) -> None:
    target, _ = library(tmp_path)
    wrong = kernel("wrong", ("*f32",), "def kernel(x):\n    x[0] = nothing\n")
    with pytest.raises(KernelCompileError, match="kernel 'wrong'"):
        target.get_many([spec_number(1), wrong], emulated)
    assert target.get(spec_number(1), emulated).entry == spec_number(1).symbol


# ---- keys ----


def test_a_key_depends_on_spec_target_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_number(1)
    variants = [
        (spec, emulated),
        (spec, Target.emulated(check=True)),
        (spec, Target.cuda(9, 0)),
        (spec, Target.cuda(10, 0)),
        (spec_number(2), emulated),
        (kernel("numbered", ("*f64",), spec.source), emulated),
        (kernel("numbered", ("*f32",), spec.source, launch_bounds=64), emulated),
    ]
    keys = [kernel_key(*variant) for variant in variants]
    assert len(set(keys)) == len(keys)
    assert keys == [kernel_key(*variant) for variant in variants]
    tools = toolchain.installed_tools(True)
    for index, (name, version) in enumerate(tools):
        changed = (*tools[:index], (name, f"{version}.1"), *tools[index + 1 :])
        assert kernel_key(spec, emulated, changed) != keys[0]
    toolchain.toolchain_digest.cache_clear()
    monkeypatch.setattr(toolchain, "host_cpu", lambda: "another")
    assert kernel_key(spec, emulated) != keys[0]
    assert kernel_key(spec, Target.cuda(9, 0)) == keys[2]
    toolchain.toolchain_digest.cache_clear()


def test_a_key_does_not_depend_on_the_patch_version_of_python() -> None:
    assert toolchain.installed_tools(True)[0] == ("python", f"{sys.version_info.major}.{sys.version_info.minor}")


def test_a_process_without_compilers_takes_what_others_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiled,) = library(tmp_path)[0].get_many([spec_number(1)], emulated)
    none = (("python", "3.99"), ("numba", toolchain.ABSENT))
    monkeypatch.setattr("ort_cuda_plugin.compiler.cache.installed_tools", lambda emulated: none)
    monkeypatch.setattr(toolchain, "installed_tools", lambda emulated: none)
    for damage in (b"", b"[1]", b'[["python", 3]]', b'[["python", "3.0"]]'):
        (tmp_path / f"tools-emulated-{len(damage)}.json").write_bytes(damage)
        (tmp_path / f"tools-emulated-{len(damage)}.json").chmod(0o600)
    target, counts = library(tmp_path)
    assert target.get(spec_number(1), emulated) == compiled
    assert counts == {"KERNEL_CACHE_HITS": 1}


def test_a_toolkit_compiles_for_what_its_nvrtc_says() -> None:
    from numba.cuda.cudadrv import nvrtc

    assert toolchain.supported_capabilities() == sorted(nvrtc.get_supported_ccs())
    assert toolchain.supported_capabilities("") == sorted(toolchain.OF_EVERY_TOOLKIT)
    for capability in [(7, 5), (8, 5), (9, 0), (12, 1), (13, 0)]:
        assert "compute_{}{}".format(*toolchain.closest_capability(capability)) == nvrtc.get_arch_option(*capability)
    with pytest.raises(ValueError, match="sm_70"):
        toolchain.closest_capability((7, 0))


# ---- several processes ----


def test_two_processes_compile_a_kernel_once(tmp_path: Path) -> None:
    """Two libraries stand for the processes: while ``first`` locks a kernel, ``second`` compiles only the other."""
    specs = [spec_number(1), spec_number(2)]
    first, _ = library(tmp_path)
    second, counts = library(tmp_path)
    waiting = threading.Thread(target=second.get_many, args=(specs, emulated))
    with first.cache.lock(kernel_key(specs[0], emulated)) as held:
        assert held
        waiting.start()
        while not counts and waiting.is_alive():  # until `second` has compiled the second kernel
            waiting.join(0.01)
        assert waiting.is_alive()
        assert second.cache.load_made(specs[0], emulated) is None
        made = import_compiler().compile_kernel(specs[0], emulated)
        first.cache.store(kernel_key(specs[0], emulated), made)
    waiting.join()
    assert counts == {"KERNELS_COMPILED": 1, "KERNEL_CACHE_HITS": 1}
    assert second.get(specs[0], emulated) == made
    assert not list(tmp_path.glob("*.lock"))


def test_a_process_that_imports_the_compiler_first_gets_the_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine importing the compiler may take many times as long as compiling a small kernel."""
    monkeypatch.setattr(kernel_library, "expected_seconds", lambda spec: 0.0)
    spec = spec_number(1)
    first, _ = library(tmp_path)
    second, counts = library(tmp_path)
    waiting = threading.Thread(target=second.get_many, args=([spec], emulated))
    made = import_compiler().compile_kernel(spec, emulated)
    with first.cache.lock(kernel_key(spec, emulated)):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        first.cache.store(kernel_key(spec, emulated), made)
    waiting.join()
    assert counts == {"KERNEL_CACHE_HITS": 1}


def test_a_kernel_is_compiled_where_the_process_that_has_its_lock_gives_up(tmp_path: Path) -> None:
    first, _ = library(tmp_path)
    second, counts = library(tmp_path)
    waiting = threading.Thread(target=second.get_many, args=([spec_number(1)], emulated))
    with first.cache.lock(kernel_key(spec_number(1), emulated)):
        waiting.start()
    waiting.join()
    assert counts == {"KERNELS_COMPILED": 1}


def test_keys_depend_on_every_module_that_the_compiler_imports() -> None:
    program = "import sys, ort_cuda_plugin.compiler.compile\nprint(*(m.__file__ for m in list(sys.modules.values())"
    program += " if m.__name__.startswith('ort_cuda_plugin.') and m.__file__.endswith('.py')))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    files = [path for path in output.split() if Path(path).read_text().count("\n") > 1]  # else only a docstring
    imported = {path.rpartition("/ort_cuda_plugin/")[2] for path in files}
    sources = {*toolchain.front_end_sources, *toolchain.back_end_sources, *toolchain.ptx_sources()}
    # The first of these has only a docstring, and only `emulator.load` imports the second.
    sources -= {"compiler/ptx/__init__.py", "compiler/ptx/linking.py"}
    others = {
        f"compiler/{name}.py"
        for name in ("cache", "caches/cache_folder", "caches/trusted_files", "foreign", "nvidia_packages", "toolchain")
    }
    assert imported == sources | others | {"abi/errors.py", "plugin_library.py", "uninterrupted.py"}
