"""Faults of the stand-in libraries, which tests use to see whether checks notice wrong and slow calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from c_programs import fake_library
from isolated import HARNESS, ROOT
from library_faults import CALLS, HOW


def test_each_fault_of_a_library_call_has_its_effect(tmp_path: Path) -> None:
    stand_ins = [str(fake_library(name, tmp_path)) for name in ("cublaslt", "cudnn")]
    command = [sys.executable, str(HARNESS / "library_faults.py"), *stand_ins]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    assert "a library call has a fault on purpose" in done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == len(CALLS) * (1 + len(HOW))
    for result in results:
        how = result["how"]
        assert (result["faults"] > 0) == bool(how), result
        assert (result["refusals"] > 0) == (how in ("refused", "failing")), result
        assert (result["runs"] == 0) == (how in ("refused", "failing")), result
        assert (result["error"] > 0.1) == (how == "wrong"), result
