"""Workspace of sessions with ep.share_ep_contexts=1: keeps a context file that a session has read for later sessions.

A session that needs another partition of the file takes it from the workspace, even if the file was deleted. The
workspace keeps a file until sessions have taken all of its partitions, or a session with ep.stop_share_ep_contexts=1
was created.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from typing import Final

from .storage.container import Container

_lock: Final = threading.Lock()
_used: Final[weakref.WeakValueDictionary[Hashable, Container]] = weakref.WeakValueDictionary()
_kept: Final[dict[Hashable, tuple[Container, set[str]]]] = {}
"""Key of a context file -> its container, and the names of the partitions that no session has taken yet."""


def find(key: Hashable) -> Container | None:
    """Return the container that another session has added for the context file with this key; None if none has."""
    with _lock:
        return _used.get(key)


def add(key: Hashable, container: Container, partitions: Iterable[str]) -> None:
    """Add a container, in place of one with the same key."""
    with _lock:
        _used[key] = container
        _kept[key] = container, set(partitions)


def take(key: Hashable, partition: str) -> None:
    """Record that a session has taken a partition. After the last partition, the workspace drops the container."""
    with _lock:
        if key in _kept:
            left = _kept[key][1]
            left.discard(partition)
            if not left:
                del _kept[key]


def end(keys: Iterable[Hashable]) -> None:
    """Forget containers, so that later sessions read the files again."""
    with _lock:
        for key in keys:
            _used.pop(key, None)
            _kept.pop(key, None)
