"""A helper process that compiles kernels, and its parent's client.

It is a fresh process, not a fork, because the parent has threads. It lives as long as one call of `compile_many`.
Messages are a length and bytes: JSON for a job, the form of a cache entry for an image, nothing for a kernel that did
not compile.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO

from ort_cuda_plugin.compiler.cache import KernelCache, decode, encode
from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import isolation
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import installed_tools, joined_digest, toolchain_digest


class WorkerClient:
    """The parent's end of the pipe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.is_ready = False
        self.due = math.inf
        """Deadline of the kernel that the helper compiles, in seconds of `time.monotonic`."""

    @staticmethod
    def start(cache: KernelCache) -> WorkerClient | None:
        """Start a helper, which begins to import Numba; None if this interpreter cannot start one.

        The helper loads and stores IR in the folder of ``cache`` if that is usable.
        """
        arguments = [str(cache.folder)] if cache.usable else []
        command = isolation.python_command(__name__, *arguments, distributions=isolation.COMPILER_DISTRIBUTIONS)
        if command is None:
            return None
        try:
            # A separate process group: Ctrl-C goes to the parent, which ends the helper.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", process_group=0)
        except OSError:
            return None
        return WorkerClient(process)

    def wait_ready(self) -> bool:
        """Wait; return whether the helper can compile with the same tools as this process."""
        self.is_ready = self.receive() == tools().encode()
        return self.is_ready

    def stop_unless_ready(self) -> None:
        """End a helper that is still importing: no work is left for it."""
        if not self.is_ready:
            self.process.kill()

    def compile(self, spec: KernelSpec, target: Target) -> KernelImage | None:
        """Return the compiled kernel; None if it did not compile or the helper died."""
        assert self.process.stdin is not None
        try:
            send(self.process.stdin, encode_job(spec, target))
        except OSError:
            return None
        reply = self.receive()
        return None if reply is None else decode(reply, target)

    def receive(self) -> bytes | None:
        assert self.process.stdout is not None
        return receive(self.process.stdout)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def tools() -> str:
    """Return the tools of this process."""
    return joined_digest(*(toolchain_digest(installed_tools(emulated), emulated) for emulated in (True, False)))


# ---- messages ----


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Receive a message; None if the other process is gone."""
    try:
        head = pipe.read(8)
        if len(head) < 8:
            return None
        (length,) = struct.unpack("<Q", head)
        message = pipe.read(length)
    except OSError:
        return None
    return message if len(message) == length else None


def encode_job(spec: KernelSpec, target: Target) -> bytes:
    fields = spec.to_json() if isinstance(spec, ForeignKernel) else asdict(spec)
    return json.dumps([fields, asdict(target)]).encode()


def decode_job(message: bytes) -> tuple[KernelSpec, Target]:
    spec, target = json.loads(message)
    spec["signature"] = tuple(spec["signature"])
    target["compute_capability"] = tuple(target["compute_capability"])
    kernel = ForeignKernel.from_json(spec) if "foreign" in spec else KernelSpec(**spec)
    return kernel, Target(**target)


def main(folder: str | None = None) -> None:
    """Run the helper: answer jobs until there are no more."""
    # Output of libraries must not get into the messages.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    compiler = isolation.import_compiler()
    cache = None if folder is None else KernelCache(Path(folder))
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        send(replies, tools().encode())
        while (message := receive(sys.stdin.buffer)) is not None:
            try:
                reply = encode(compiler.compile_kernel(*decode_job(message), cache))
            except compiler.KernelCompileError:
                reply = b""
            send(replies, reply)
