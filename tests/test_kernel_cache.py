"""The disk cache of kernels and the library that hands them out."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from kernel_launch import kernel
from ort_cuda_plugin.runtime import cache as cache_module
from ort_cuda_plugin.runtime import kernel_library
from ort_cuda_plugin.runtime.cache import KernelCache, cache_folder, kernel_key
from ort_cuda_plugin.runtime.compile import KernelCompileError
from ort_cuda_plugin.runtime.kernel import KernelSpec
from ort_cuda_plugin.runtime.kernel_library import KernelLibrary, read_manifest
from ort_cuda_plugin.runtime.targets import KernelImage, Target

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
        from ort_cuda_plugin.runtime.cache import KernelCache
        from ort_cuda_plugin.runtime.kernel import KernelSpec
        from ort_cuda_plugin.runtime.kernel_library import KernelLibrary
        from ort_cuda_plugin.runtime.targets import Target
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
    monkeypatch.setattr(kernel_library, "worker_pays_seconds", 1.0)
    monkeypatch.setattr(kernel_library.os, "sched_getaffinity", lambda _: set(range(1 + workers)))
    used = []
    start = kernel_library.start_workers

    def record(seconds: float, cache: KernelCache) -> list[object]:
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


def test_the_longest_kernels_come_first_and_targets_of_a_kernel_stay_together() -> None:
    long = kernel("long", ("*f32",), spec_number(1).source + "    x[1] = float32(2)\n" * 50)
    jobs = [(spec, target) for target in (emulated, Target.cuda(9, 0)) for spec in (spec_number(1), long)]
    compilation = kernel_library.Compilation(jobs, lambda index, image: None, KernelCache())
    assert list(compilation.take()) == [1, 3, 0, 2]
    assert compilation.seconds > 0.3


@pytest.mark.parametrize("executable", [None, "", "/opt/app/bin/server"])
def test_a_program_that_embeds_python_is_not_started_as_helper(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    from ort_cuda_plugin.runtime.compile_worker import WorkerClient

    monkeypatch.setattr(sys, "executable", executable)
    assert WorkerClient.start(KernelCache()) is None


def test_ir_is_kept_for_all_targets_so_that_numba_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_cuda_plugin.runtime import compile as pipeline

    ran = []
    front_end = pipeline.kernel_ir
    monkeypatch.setattr(pipeline, "kernel_ir", lambda spec: ran.append(spec) or front_end(spec))
    source = "def kernel(x):\n    x[0] = f16_to_f32(f32_to_f16(x[1]))\n"
    specs = [spec_number(7), kernel("with_device_functions", ("*f32",), source)]
    targets = (emulated, Target.emulated(check=True), Target.cuda(9, 0))
    kept = [library(tmp_path)[0].get(spec, target) for target in targets for spec in specs]
    assert ran == specs
    assert kept == [pipeline.compile_kernel(spec, target) for target in targets for spec in specs]


def test_damaged_ir_is_made_again(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store_ir("key", ["name", "module"])
    assert cache.load_ir("key") == ["name", "module"]
    data = bytearray(cache.path("key").read_bytes())
    data[-1] ^= 1
    cache.path("key").write_bytes(data)
    assert cache.load_ir("key") is None


def test_a_helper_gives_the_same_image_and_no_error_hides_in_it(tmp_path: Path) -> None:
    from ort_cuda_plugin.runtime.compile import compile_kernel
    from ort_cuda_plugin.runtime.compile_worker import WorkerClient

    worker = WorkerClient.start(KernelCache(tmp_path))
    assert worker is not None
    worker.wait_ready()
    assert worker.compile(kernel("wrong", ("*f32",), "def kernel(x):\n    nothing()\n"), emulated) is None
    assert worker.compile(spec_number(3), emulated) == compile_kernel(spec_number(3), emulated)
    worker.process.kill()
    worker.process.wait()
    assert worker.compile(spec_number(3), emulated) is None
    worker.close()


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
    cache_module.toolchain_digest.cache_clear()
    cache_module.front_end_digest.cache_clear()
    monkeypatch.setattr(cache_module.importlib.metadata, "version", lambda tool: "0.0")
    assert kernel_key(spec, emulated) != keys[0]
    monkeypatch.undo()
    cache_module.toolchain_digest.cache_clear()
    cache_module.front_end_digest.cache_clear()
    monkeypatch.setattr(cache_module, "host_cpu", lambda: "another")
    assert kernel_key(spec, emulated) != keys[0]
    assert kernel_key(spec, Target.cuda(9, 0)) == keys[2]
    cache_module.toolchain_digest.cache_clear()
    cache_module.front_end_digest.cache_clear()


def test_keys_depend_on_every_module_that_the_compiler_imports() -> None:
    program = "import sys, ort_cuda_plugin.runtime.compile\nprint(*(m.__file__ for m in list(sys.modules.values())"
    program += " if m.__name__.startswith('ort_cuda_plugin.') and m.__file__.endswith('.py')))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    imported = {"/".join(path.split("/")[-2:]) for path in output.split() if not path.endswith("/__init__.py")}
    sources = {*cache_module.front_end_sources, *cache_module.back_end_sources}
    assert imported == sources | {"runtime/cache.py"}


# ---- folder and entries ----


def test_the_folder_is_private_and_moves_with_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ORT_CUDA_PLUGIN_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "ort-cuda-plugin"
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CACHE_DIR", str(tmp_path / "moved"))
    cache = KernelCache()
    assert cache.folder == tmp_path / "moved"
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    cache.store("key", image(10))
    assert [path.stat().st_mode & 0o777 for path in cache.folder.iterdir()] == [0o600]


def test_a_user_without_a_home_folder_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "ORT_CUDA_PLUGIN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache = KernelCache()
        cache.store("key", image(10))
    assert cache.load("key", emulated) is None
    assert [record.getMessage().split(". ")[0] for record in caplog.records] == [
        "kernel cache ~/.cache/ort-cuda-plugin is not used: this user has no home folder"
    ]
    assert not list(tmp_path.iterdir())


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    cache, stored = KernelCache(tmp_path), image(1000)
    cache.store("key", stored)
    assert cache.load("key", emulated) == stored
    assert cache.load("other", emulated) is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "other version"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, damage: str) -> None:
    target, counts = library(tmp_path)
    target.get(spec_number(1), emulated)
    path = target.cache.path(kernel_key(spec_number(1), emulated))
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "truncated": good[:-7],
            "empty": b"",
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "other version": b"OCPK\x00" + good[5:],
        }[damage]
    )
    again, counts = library(tmp_path)
    again.get(spec_number(1), emulated)
    assert counts == {"KERNELS_COMPILED": 1}
    assert path.read_bytes() == good


def writable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


def under_a_file(folder: Path) -> None:
    folder.parent.rmdir()
    folder.parent.write_text("")


def a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (writable_by_others, "other users can write to it (mode 0770)"),
        (foreign, "it belongs to user 12345"),
        (under_a_file, "it cannot be made"),
        (a_file, "it cannot be made"),
    ],
)
def test_a_folder_that_cannot_be_trusted_or_written_is_named_once_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prepare: object, reason: str
) -> None:
    folder = tmp_path / "parent" / "cache"
    folder.parent.mkdir()
    prepare(folder)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        target, counts = library(folder)
        target.get(spec_number(1), emulated)
        target.get(spec_number(2), emulated)
    assert counts == {"KERNELS_COMPILED": 2}
    (record,) = caplog.records
    assert str(folder) in record.getMessage()
    assert reason in record.getMessage()
    assert "ORT_CUDA_PLUGIN_CACHE_DIR" in record.getMessage()
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_folder_that_goes_away_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with caplog.at_level(logging.WARNING):
        cache.store("a", image(1))
        cache.store("b", image(1))
    assert len(caplog.records) == 1
    assert "writing failed" in caplog.text


def test_the_least_recently_used_entries_go_when_the_bound_is_passed(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=10_000)
    for age, key in enumerate(["new", "used", "old", "oldest"]):
        cache.store(key, image(3000))
        os.utime(cache.path(key), (1e9 - age * 1e5, 1e9 - age * 1e5))
    os.utime(cache.path("used"))
    abandoned = tmp_path / "crashed.part"
    abandoned.write_bytes(b"x")
    os.utime(abandoned, (1e9, 1e9))
    cache.trim()
    assert {path.name for path in tmp_path.iterdir()} == {"new.kernel", "used.kernel"}


def test_using_an_entry_makes_it_recent(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store("key", image(10))
    os.utime(cache.path("key"), (1e9, 1e9))
    cache.load("key", emulated)
    assert cache.path("key").stat().st_mtime > 1.5e9


# ---- manifest ----


def test_asked_for_kernels_are_recorded_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    monkeypatch.setenv("ORT_CUDA_PLUGIN_KERNEL_MANIFEST", str(path))
    monkeypatch.setattr(kernel_library, "recorded", set())
    bounded = kernel("bounded", ("*f32", "i32"), "def kernel(x, n):\n    x[n] = float32(0)\n", launch_bounds=64)
    kernel_library.record_specs([spec_number(1), bounded])
    kernel_library.record_specs([bounded, spec_number(2)])
    assert len(path.read_text().splitlines()) == 3
    assert set(read_manifest(path)) == {spec_number(1), spec_number(2), bounded}


def test_a_manifest_that_holds_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"name": "x"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_manifest(path)
