"""Which folders and entries the disk cache of kernels trusts, by owner and mode; and the manifest of kernels."""

from __future__ import annotations

import grp
import json
import logging
import os
import pwd
import stat
import struct
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isolated import python
from kernel_launch import kernel
from ort_cuda_plugin.compiler.cache import KernelCache, decode, decode_texts
from ort_cuda_plugin.compiler.caches.cache_folder import cache_folder
from ort_cuda_plugin.compiler.caches.quarantine_cache import QuarantineCache
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.library.kernel_library import read_manifest
from ort_cuda_plugin.compiler.toolchain import kernel_key
from test_kernel_cache import emulated, image, library, spec_number

folder_mode, file_mode = (0o700, 0o600) if os.geteuid() else (0o755, 0o644)


def test_the_folder_is_private_unless_it_is_roots_and_moves_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ORT_CUDA_PLUGIN_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "ort-cuda-plugin"
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CACHE_DIR", str(tmp_path / "moved"))
    cache = KernelCache()
    assert cache.folder == tmp_path / "moved"
    assert cache.folder.stat().st_mode & 0o777 == folder_mode
    cache.store("key", image(10))
    assert [path.stat().st_mode & 0o777 for path in cache.folder.iterdir()] == [file_mode]


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
        cache, quarantine = KernelCache(), QuarantineCache()
        assert not quarantine.load("a device", "kernels")  # no warning: without a folder there is no entry
        assert not caplog.records
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


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
stranger = 12345


def writable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(folder, stranger, stranger)


def under_a_folder_that_others_write_to(folder: Path) -> None:
    folder.parent.chmod(0o777)


def under_somebody_elses(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(folder.parent, stranger, stranger)


def behind_somebody_elses_link(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a link away")
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    os.chown(folder, stranger, stranger, follow_symlinks=False)


def behind_a_link_through_a_folder_that_others_write_to(folder: Path) -> None:
    shared = folder.parent / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    folder.symlink_to(Path("shared", "cache"))


def in_a_circle(folder: Path) -> None:
    folder.symlink_to(folder)


def under_a_file(folder: Path) -> None:
    folder.parent.rmdir()
    folder.parent.write_text("")


def a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (writable_by_others, "(mode 0770)"),
        (foreign, "belongs to user 12345, expected this user or root, who may supply machine code"),
        (under_a_folder_that_others_write_to, "can write to"),
        (under_somebody_elses, "belongs to user 12345"),
        (behind_somebody_elses_link, "the link"),
        (behind_a_link_through_a_folder_that_others_write_to, "/parent/shared (mode 0777)"),
        (in_a_circle, "symbolic links, so they probably form a cycle"),
        (under_a_file, "the folder cannot be opened or created"),
        (a_file, "the folder cannot be opened or created"),
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


def test_a_relative_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = KernelCache(Path("cache"))
    cache.store("key", image(10))
    assert "kernel cache cache is not used: the path is not absolute" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_behind_links_of_the_user_is_used(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True, mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/deep/../deep")
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "sticky" / "link").symlink_to("../relative")
    cache = KernelCache(tmp_path / "sticky" / "link")
    cache.store("key", image(10))
    assert os.listdir(tmp_path / "real" / "deep") == ["key.kernel"]


def test_a_folder_that_is_exchanged_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("first")
    cache, kept = KernelCache(tmp_path / "link"), image(10)
    cache.store("key", kept)
    KernelCache(tmp_path / "second").store("key", image(10))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("second")
    assert cache.load("key", emulated) == kept
    cache.store("other", kept)
    cache.max_bytes = 0
    cache.trim()
    assert (os.listdir(tmp_path / "first"), os.listdir(tmp_path / "second")) == ([], ["key.kernel"])


def test_a_folder_that_its_users_group_may_write_to_is_on_the_way_where_the_group_is_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent").chmod(0o775)
    user = pwd.getpwuid(os.geteuid())
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, [user.pw_name]))
    monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    assert KernelCache(tmp_path / "parent" / "cache").usable
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, ["somebody"]))
    assert not KernelCache(tmp_path / "parent" / "cache").usable
    group = grp.struct_group(("staff", "x", user.pw_gid, []))
    assert not KernelCache(tmp_path / "parent" / "cache").usable


def owned_by_another(entry: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(entry, stranger, stranger)


def of_mode_0666(entry: Path) -> None:
    entry.chmod(0o666)


def a_link(entry: Path) -> None:
    entry.rename(entry.parent / "elsewhere")
    entry.symlink_to("elsewhere")


def a_fifo(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)


def too_big(entry: Path) -> None:
    os.truncate(entry, 1 << 40)


@pytest.mark.parametrize("exchange", [owned_by_another, of_mode_0666, a_link, a_fifo, too_big])
def test_an_entry_that_others_could_have_written_is_compiled_again(tmp_path: Path, exchange: object) -> None:
    target, _ = library(tmp_path)
    good = target.get(spec_number(1), emulated)
    path = target.cache.path(kernel_key(spec_number(1), emulated))
    content = path.read_bytes()
    exchange(path)  # type: ignore[operator]
    again, counts = library(tmp_path)
    assert again.get(spec_number(1), emulated) == good
    assert counts == {"KERNELS_COMPILED": 1}
    assert (path.read_bytes(), stat.S_IMODE(path.lstat().st_mode)) == (content, file_mode)
    assert stat.S_ISREG(path.lstat().st_mode)


@needs_root
def test_a_user_takes_what_root_wrote_and_writes_only_to_its_own_folder(tmp_path: Path) -> None:
    program = """
    import os, sys
    from pathlib import Path
    from ort_cuda_plugin.compiler.cache import KernelCache
    from ort_cuda_plugin.compiler.targets import KernelImage, Target
    from ort_cuda_plugin.compiler.caches.timing_cache import TimingCache
    os.setgroups([]), os.setgid(12345), os.setuid(12345)
    for folder in map(Path, sys.argv[1:]):
        cache = KernelCache(folder)
        cache.store("new", KernelImage(b"", "entry", Target.emulated(), {}))
        found = [cache.load(key, Target.emulated()) is not None for key in ("key", "new")]
        print(cache.usable, cache.writable, *found)
        with cache.lock("key") as held:
            print(held)
    os.environ["ORT_CUDA_PLUGIN_CACHE_DIR"] = sys.argv[2]
    assert not TimingCache().usable
    """
    with tempfile.TemporaryDirectory() as root:  # unlike tmp_path, other users may enter its parents
        os.chmod(root, 0o755)
        folders = [Path(root, name) for name in ("users", "roots", "private", "changed")]
        for folder in folders:
            KernelCache(folder).store("key", image(10))
        os.chown(folders[0], stranger, stranger)
        folders[2].chmod(0o700)
        (folders[3] / "key.kernel").chmod(0o666)
        done = python(program, *map(str, folders))
        assert os.listdir(folders[1]) == ["key.kernel"]
    assert done.stdout.split("\n")[::2] == [
        "True True True True",
        "True False True False",
        "False False False False",
        "True False False False",
        "",
    ]
    assert done.stdout.split("\n")[1::2] == ["True"] * 4
    assert "private is not used: the folder cannot be opened or created: Permission denied" in done.stderr
    assert "other users can write to the file (mode 0666)" in done.stderr
    assert "timing cache" not in done.stderr


image_bodies = st.one_of(
    st.binary(max_size=100),
    st.builds(
        lambda sizes, rest: struct.pack("<III", *sizes) + rest,
        st.tuples(*[st.integers(0, 1 << 32) | st.integers(0, 60) for _ in range(3)]).map(
            lambda sizes: tuple(size % (1 << 32) for size in sizes)
        ),
        st.binary(max_size=100),
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(image_bodies)
def test_bytes_that_are_no_image_are_a_miss(body: bytes) -> None:
    assert decode(body, emulated) is None


@given(json_values | st.fixed_dictionaries({"entry": json_values, "metadata": json_values}))
@example({"entry": "a\nb", "metadata": {}})
@example({"entry": "a", "metadata": {"fibers": True}})
@example({"entry": "a", "metadata": {"fibers": 1 << 32}})
@example({"entry": "\ud800", "metadata": {}})
def test_an_image_with_another_header_is_a_miss_or_has_a_name_and_numbers(header: object) -> None:
    text = json.dumps(header).encode()
    found = decode(struct.pack("<III", len(text), 1, 1) + text + b"ab", emulated)
    if found is not None:
        assert found.entry.isidentifier()
        assert found.entry.isascii()
        assert all(type(number) is int for number in found.metadata.values())


@given(json_values.map(lambda value: zlib.compress(json.dumps(value).encode())) | st.binary(max_size=100))
@example(zlib.compress(b"[" * 100_000))
@example(zlib.compress(b'["' + b"9" * 100_000 + b'", ' + b"9" * 100_000 + b"]"))
@example(zlib.compress(b'["name", "\\ud800"]'))
@example(zlib.compress(b'["name", "text"]')[:-3])
def test_texts_of_an_ir_are_texts_or_a_miss(body: bytes) -> None:
    texts = decode_texts(body)
    assert texts is None or (len(texts) > 1 and all(isinstance(text, str) for text in texts))


def test_texts_of_an_ir_that_are_too_long_are_a_miss() -> None:
    assert decode_texts(zlib.compress(b'["name", "' + b"x" * (80 << 20) + b'"]')) is None


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


@pytest.mark.parametrize("exchange", [owned_by_another, of_mode_0666, a_link, a_fifo])
def test_a_manifest_that_others_could_have_written_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: object
) -> None:
    path = tmp_path / "manifest.json"
    path.touch()
    exchange(path)  # type: ignore[operator]
    monkeypatch.setenv("ORT_CUDA_PLUGIN_KERNEL_MANIFEST", str(path))
    monkeypatch.setattr(kernel_library, "recorded", set())
    with pytest.raises(
        OSError, match=r"json belongs to|can write to .*json|symbolic link|json is not a regular file|No such device"
    ):
        kernel_library.record_specs([spec_number(1)])
    with pytest.raises(OSError, match=r"json belongs to|can write to .*json|symbolic link|json is not a regular file"):
        read_manifest(path)


def test_a_manifest_that_holds_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"name": "x"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_manifest(path)
