"""A helper process that compiles kernels, and the end of its pipe that its parent holds.

A fresh process and not a fork: the parent has threads. It lives as long as one call of `compile_many`. Messages are a
length and bytes: JSON for a job, the form of a cache entry for an image, nothing for a kernel that did not compile.
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

from ort_cuda_plugin.compiler import isolation
from ort_cuda_plugin.compiler.cache import KernelCache, decode, encode
from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import installed_tools, joined_digest, toolchain_digest


class WorkerClient:
    """The parent's end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.is_ready = False
        self.due = math.inf
        """When the kernel that it compiles should be there, in seconds of `time.monotonic`."""

    @staticmethod
    def start(cache: KernelCache) -> WorkerClient | None:
        """A helper that is importing Numba, or None where this interpreter cannot start one.

        It finds and keeps IR in the folder of ``cache``, where that is usable.
        """
        arguments = [str(cache.folder)] if cache.usable else []
        command = isolation.python_command(__name__, *arguments, distributions=isolation.COMPILER_DISTRIBUTIONS)
        if command is None:
            return None
        try:
            # A separate group: Ctrl-C is for the parent, which ends the helper.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", process_group=0)
        except OSError:
            return None
        return WorkerClient(process)

    def wait_ready(self) -> bool:
        """Whether the helper can compile, with the tools that this process has."""
        self.is_ready = self.receive() == tools().encode()
        return self.is_ready

    def stop_unless_ready(self) -> None:
        """Ends a helper that is still importing: nothing is left that it could do."""
        if not self.is_ready:
            self.process.kill()

    def compile(self, spec: KernelSpec, target: Target) -> KernelImage | None:
        """The compiled kernel, or None where it did not compile or the helper died."""
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
    """What a process compiles with."""
    return joined_digest(*(toolchain_digest(installed_tools(emulated), emulated) for emulated in (True, False)))


# ---- messages ----


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """None where the other end is gone."""
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
    """The helper's end: answers jobs until there are no more."""
    # Whatever a library prints must not get between the messages.
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
