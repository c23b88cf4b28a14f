"""Fork server: a process that has imported the package, and forks a child for each program that a test runs.

A child of it starts in milliseconds, where a new interpreter takes most of a second for the imports. The server has not
imported onnxruntime, whose import starts a thread, and has not opened the plugin's library. So a child has no state of
another test: registration, environment of ONNX Runtime, device, and end of the process are its own.

    test                          server                        child
    Server.run  -- request -->    fork                    -->   environment, files, folder; the program; exit
                <-- process id --
                <-- exit status --  waitpid               <--
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

MODULES = (
    "numpy.testing",
    "onnx",
    "ort_cuda_plugin.api",
    "ort_cuda_plugin.clusters.claims.claims",
    "ort_cuda_plugin.ep.boundary",
    "ort_cuda_plugin.session_errors",
)
"""What the server imports: the modules that a session of the plugin needs, except onnxruntime."""
SERVER = "import fork_server; exec(fork_server.serve(), globals())"
_HARNESS = Path(__file__).resolve().parent


def serve() -> CodeType:
    """Fork a child for each request on standard input, until it is closed. Returns, in a child, the child's program."""
    connection = socket.socket(fileno=os.dup(0))
    requests = connection.makefile("r")
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("ort_cuda_plugin.ops.registry").operators()  # imports all modules of operators
    gc.freeze()  # a collection in a child would write to, and so copy, the pages of these objects
    for line in requests:
        child = os.fork()
        if child == 0:
            connection.close()
            return _become(json.loads(line))
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: Mapping[str, Any]) -> CodeType:
    """Give this process the request's environment, folder, arguments and files. Returns the program."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for descriptor, file in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(file, os.O_RDWR)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["-c", *request["arguments"]]
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys(["", *filter(None, paths), *sys.path]))
    return compile(request["code"], "<string>", "exec")


class Server:
    """A fork server of this process. Ends with it, or at `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the server, which has the values of ``environment`` as it imports ``MODULES``."""
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                stdin=its.fileno(),
                env={**environment, "PYTHONPATH": os.pathsep.join([str(_HARNESS), environment.get("PYTHONPATH", "")])},
            )
        self._connection = ours
        self._answers = ours.makefile("r")

    def run(
        self, code: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a child and return its exit status and what it printed.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout_s``. It was killed.
        """
        with tempfile.NamedTemporaryFile("r+") as stdout, tempfile.NamedTemporaryFile("r+") as stderr:
            request = {
                "code": code,
                "arguments": arguments,
                "environment": dict(environment),
                "folder": str(folder),
                "stdout": stdout.name,
                "stderr": stderr.name,
            }
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            child = int(self._answer())
            status = self._status(child, timeout_s)
            if status is None:
                raise subprocess.TimeoutExpired(["python", "-c", code], timeout_s, stdout.read(), stderr.read())
            return subprocess.CompletedProcess(["python", "-c", code], status, stdout.read(), stderr.read())

    def _answer(self) -> str:
        line = self._answers.readline()
        assert line, f"the fork server ended with {self._process.wait()}"
        return line

    def _status(self, child: int, timeout_s: float) -> int | None:
        """Wait for the exit status of ``child``; None: it was killed after ``timeout_s``."""
        if select.select([self._connection], [], [], timeout_s)[0]:
            return int(self._answer())
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        self._answer()
        return None

    def close(self) -> None:
        self._answers.close()
        self._connection.close()
        self._process.wait()
