"""Pauses Python's cyclic garbage collector while the plugin claims nodes and builds plans.

Claiming and lowering make many objects that live until the plan is done. CPython reacts with full collections, which
traverse all objects of the process, including those of the application and its packages. These collections took up to a
quarter of the time in which a session of a small network is created with a warm cache. The program of a finished plan
is freed without the collector, because no cycle of references contains it.
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
    """Pause the collector of the whole process.

    When the last of overlapping pauses ends, the collector is enabled if it was enabled before the first pause.
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
