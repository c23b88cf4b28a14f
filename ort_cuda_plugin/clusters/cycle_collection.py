"""Pauses Python's cyclic garbage collector while the plugin claims nodes and builds plans.

Claiming and lowering make many objects that live until the plan is done. CPython reacts with full collections, which
traverse all objects of the process, those of the application and of its packages included: up to a quarter of the time
in which a warm session of a small network is created. A finished plan is freed without the collector, because no cycle
of references contains its program.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_resumes = False


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector of the whole process. When the last of overlapping pauses ends, the collector is on again if
    it was on before the first.
    """
    global _pauses, _resumes
    with _lock:
        if _pauses == 0:
            _resumes = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _resumes:
                gc.enable()
