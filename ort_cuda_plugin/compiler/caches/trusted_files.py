"""Files that are safe to execute, because only this user and root can have written or can replace them.

The path of a folder is opened component by component from the root, each relative to the handle of its parent. Another
user who can rename a component could redirect the path, so every folder and symbolic link on it is checked. Checked
folders stay open, and are used through their handles.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

MOST_LINKS = 40
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


# Flags of `open`: another user may have replaced the file by a link, or by a FIFO on which `open` would block.
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Untrusted(PermissionError):
    """Another user controls the contents of a folder or of a file; the message gives the reason."""


class Absent(Untrusted):
    """The folder does not exist, and this user cannot create it."""


class TrustedFolder:
    """An open folder that belongs to this user or root. Its methods take names of files in it, and raise OSError.

    Files can be written only if ``is_writable``. The constructor raises Untrusted, and other OSErrors if the folder
    cannot be created or opened.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_absolute():
            raise Untrusted("the path is not absolute, and the working folder is not trusted")
        walk = _Walk()
        try:
            walk.go(path)
            self.handle, self.is_writable = walk.open_end()
        finally:
            walk.close()
        # The handle is not closed at the end of the process, since threads may still use it.
        weakref.finalize(self, os.close, self.handle).atexit = False

    def read(self, name: str, most_bytes: int, is_use: bool = True) -> bytes:
        """Return the contents of a file.

        With ``is_use``, the file's time stamp is updated, at most once an hour, so that eviction knows the last use.
        Raises Untrusted for a file that another user could have written, and for one of more than ``most_bytes``.
        """
        with os.fdopen(os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=self.handle), "rb", buffering=0) as file:
            status = _check_file(file.fileno(), "the file")
            if status.st_size > most_bytes:
                raise Untrusted(f"the file has {status.st_size} bytes, expected at most {most_bytes}")
            data = file.read(status.st_size)
            if is_use and time.time() - status.st_mtime > 3600:
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader sees all of it or nothing."""
        temporary = f"{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self.handle)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, _mode(0o600))  # sets the mode for any umask
                file.write(data)
            os.replace(temporary, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except BaseException:
            os.unlink(temporary, dir_fd=self.handle)
            raise

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold a lock across processes in a ``with`` block; yields False at once if another process holds it.

        The lock file is removed at the end of the block. A process that opened the file before its removal can still
        lock it. So the holder of a lock must first check whether another process has already done the work.
        """
        flags = os.O_RDWR | os.O_CREAT | CAREFULLY
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=self.handle), "rb") as file:
            _check_file(file.fileno(), "the file")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    self.remove(name)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield (name, status) of each file in the folder; symbolic links are not followed."""
        # Each listing needs its own handle, since the handle holds the position in the listing, and several threads may
        # list.
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.handle)
        try:
            with os.scandir(own) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        yield entry.name, entry.stat(follow_symlinks=False)
        finally:
            os.close(own)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.handle)


def read_file(path: Path) -> bytes:
    """Return the contents of a file at a path that the user gave. Raises Untrusted, and other OSErrors."""
    with os.fdopen(os.open(path, os.O_RDONLY | CAREFULLY), "rb") as file:
        _check_file(file.fileno(), str(path))
        return file.read()


def append_to_file(path: Path, data: bytes) -> None:
    """Append ``data`` in a single write to a file at a path that the user gave; create the file if it is missing.

    Raises the errors of `read_file`.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | CAREFULLY
    with os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        _check_file(file.fileno(), str(path))
        file.write(data)


# ---- checks ----


def _mode(private: int) -> int:
    """Return the mode of a new file or folder: ``private``, or for root also readable by all users.

    A container's image may hold a cache that root wrote.
    """
    reading = private & (stat.S_IRUSR | stat.S_IXUSR)
    return private if os.geteuid() else private | reading >> 3 | reading >> 6


def _check_file(descriptor: int, subject: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(f"{subject} is not a regular file")
    _check_owner(status, subject)
    _check_writers(status, subject)
    return status


def _check_owner(status: os.stat_result, subject: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(
            f"{subject} belongs to user {status.st_uid}, expected this user or root, who may supply machine code"
        )


def _check_writers(status: os.stat_result, subject: str) -> None:
    if status.st_mode & OTHERS_WRITE:
        raise Untrusted(f"other users can write to {subject} (mode {stat.S_IMODE(status.st_mode):04o})")


def _is_group_of_one(group: int) -> bool:
    """Return whether the group is this user's private group: it has the user's name, and no other member."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


class _Walk:
    """State of the traversal of a path: open handles of all folders from the root to the current one."""

    def __init__(self) -> None:
        self.handles = [os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        self.names: list[str] = []
        self.links = 0

    def go(self, path: Path) -> None:
        """Enter each component of the path, and create missing folders. Raises Untrusted if one fails a check."""
        todo = deque(path.parts[1:])
        self.check()
        while todo:
            name = todo.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                self.leave()
                continue
            status = self.look(name)
            if stat.S_ISLNK(status.st_mode):
                todo.extendleft(reversed(self.follow(name, status).split("/")))
            else:
                self.enter(name)

    def look(self, name: str) -> os.stat_result:
        try:
            return os.stat(name, dir_fd=self.handles[-1], follow_symlinks=False)
        except FileNotFoundError:
            try:
                os.mkdir(name, _mode(0o700), dir_fd=self.handles[-1])
            except FileExistsError:
                pass
            except OSError as error:
                raise Absent(f"the folder cannot be opened or created: {error.strerror or error}") from error
            return os.stat(name, dir_fd=self.handles[-1], follow_symlinks=False)

    def follow(self, name: str, status: os.stat_result) -> str:
        """Return the target of the symbolic link ``name``, after checking its owner. If the target is absolute, go to
        the root. Raises Untrusted for a link of another user, and for more than `MOST_LINKS` links.
        """
        _check_owner(status, f"the link {self.place(name)}")
        self.links += 1
        if self.links > MOST_LINKS:
            raise Untrusted(
                f"the path leads through more than {MOST_LINKS} symbolic links, so they probably form a cycle"
            )
        target = os.readlink(name, dir_fd=self.handles[-1])
        while target.startswith("/") and self.names:
            self.leave()
        return target

    def enter(self, name: str) -> None:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.handles.append(os.open(name, flags, dir_fd=self.handles[-1]))
        self.names.append(name)
        self.check()

    def leave(self) -> None:
        if self.names:
            self.names.pop()
            os.close(self.handles.pop())

    def check(self) -> None:
        """Check that only this user and root can rename entries of the current folder.

        Every user with write access to a folder can rename its entries. In a folder with the sticky bit, only the owner
        of the entry or of the folder can.
        """
        status = os.fstat(self.handles[-1])
        _check_owner(status, self.place())
        if status.st_mode & stat.S_ISVTX or (
            status.st_mode & OTHERS_WRITE == stat.S_IWGRP
            and _is_group_of_one(status.st_gid)
            and not self.has_access_list()
        ):
            return
        _check_writers(status, self.place())

    def has_access_list(self) -> bool:
        try:
            return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{self.handles[-1]}")
        except OSError as error:
            return error.errno != errno.ENOTSUP

    def open_end(self) -> tuple[int, bool]:
        """Open the last folder of the path; return (handle, whether this user can write there).

        No other user may write to it, not even with a sticky bit, which `check` accepts. `check` has checked the owner.
        """
        _check_writers(os.fstat(self.handles[-1]), self.place())
        is_writable = os.access(".", os.W_OK | os.X_OK, dir_fd=self.handles[-1], effective_ids=True)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.handles[-1]), is_writable

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)

    def place(self, *name: str) -> str:
        return "/" + "/".join([*self.names, *name])
