"""Worker processes that compile kernels, and the clients by which the parent process talks to them.

The first worker is a fresh process, because the parent has threads and cannot safely fork. It imports the compiler,
which takes longer than compiling most kernels, and then forks the other workers. All workers end with the call of
`compile_many` that started the first one.

A message is a length and bytes. A job is JSON, a compiled kernel has the format of a cache entry, and a kernel that did
not compile is an empty message.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ort_cuda_plugin.compiler.cache import KernelCache, decode, encode
from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import isolation
from ort_cuda_plugin.compiler.library.foreign_code import compile_for
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import installed_tools, joined_digest, toolchain_digest


class WorkerClient:
    """The parent's end of a worker's pipe. ``process`` is the first worker; all workers are in its process group."""

    def __init__(self, process: subprocess.Popen[bytes], jobs: IO[bytes], replies: IO[bytes]) -> None:
        self.process = process
        self.jobs = jobs
        self.replies = replies
        self.is_ready = False
        self.due = math.inf
        """Deadline of the kernel that the worker is compiling, in seconds of `time.monotonic`."""

    @staticmethod
    def start(cache: KernelCache, count: int = 1) -> list[WorkerClient]:
        """Start ``count`` workers: one that imports Numba and forks the others. Return no clients if none can be
        started.

        If the folder of ``cache`` is usable, the workers load and store LLVM IR in it.
        """
        pairs = [socket.socketpair() for _ in range(count - 1)]
        numbers = [theirs.fileno() for _, theirs in pairs]
        arguments = [str(cache.folder) if cache.usable else "", *map(str, numbers)]
        command = isolation.python_command(__name__, *arguments, distributions=isolation.COMPILER_DISTRIBUTIONS)
        try:
            if command is None:
                return []
            # In a separate process group, Ctrl-C does not reach the workers; the parent ends them.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                process_group=0,
                pass_fds=numbers,
                env=os.environ | ONE_THREAD,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            clients = [WorkerClient(process, process.stdin, process.stdout)]
            return [*clients, *(WorkerClient(process, ours.makefile("wb"), ours.makefile("rb")) for ours, _ in pairs)]
        except OSError:
            return []
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()  # the file objects of the clients keep the parent's end open

    def wait_ready(self) -> bool:
        """Wait for the worker's first message; return whether it has the compiler tools of this process."""
        self.is_ready = self.receive() == tools().encode()
        return self.is_ready

    def stop_unless_ready(self) -> None:
        """Kill all workers if this one is still importing the compiler, since all jobs are done by now."""
        if not self.is_ready:
            self.kill()

    def compile(self, spec: KernelSpec, target: Target) -> KernelImage | None:
        """Let the worker compile a kernel. Return None if the kernel does not compile, or if the worker died."""
        try:
            send(self.jobs, encode_job(spec, target))
        except OSError:
            return None
        reply = self.receive()
        return None if reply is None else decode(reply, target)

    def receive(self) -> bytes | None:
        return receive(self.replies)

    def kill(self) -> None:
        """Kill all workers, the whole process group."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        for pipe in (self.jobs, self.replies):
            with contextlib.suppress(OSError):  # closing a pipe writes buffered data, which fails if the worker is dead
                pipe.close()


ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of the workers: NumPy starts no threads, so that the first worker can fork."""


def tools() -> str:
    """Return a digest of this process's compiler tools, for GPUs and for the emulated device."""
    return joined_digest(*(toolchain_digest(installed_tools(emulated), emulated) for emulated in (True, False)))


# ---- messages ----


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Return a message; None if the other process has closed the pipe."""
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


WARMING = KernelSpec("warming", ("*f32", "i32"), "def kernel(x, n):\n    if cuda.grid(1) < n:\n        x[0] = 1\n")
"""The kernel that the first worker compiles before it forks, so that all workers share the tables that Numba fills."""


def main(folder: str = "", *channels: str) -> None:
    """Run a worker process: fork a worker for each channel, then compile jobs until the parent closes the pipe."""
    # Move the replies off stdout, so that output of libraries cannot get into the messages.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs: IO[bytes] = sys.stdin.buffer
    compiler = isolation.import_compiler()
    ends = [socket.socket(fileno=int(channel)) for channel in channels]
    if ends:
        compiler.kernel_ir(WARMING)
    for number, end in enumerate(ends):
        if os.fork() == 0:
            # The parent sees the end of a pipe only when all processes have closed the worker's end, so close inherited
            # copies.
            replies.close()
            for other in ends[number + 1 :]:
                other.close()
            jobs, replies = end.makefile("rb"), end.makefile("wb")
            answer(compiler, folder, jobs, replies)
            os._exit(0)
        end.close()
    answer(compiler, folder, jobs, replies)


def answer(compiler: Any, folder: str, jobs: IO[bytes], replies: IO[bytes]) -> None:
    """Send the digest of this worker's tools, then compile the jobs that the parent sends, until it closes the pipe."""
    cache = KernelCache(Path(folder)) if folder else None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
        send(replies, tools().encode())
        while (message := receive(jobs)) is not None:
            try:
                reply = encode(compile_for(compiler, *decode_job(message), cache))
            except compiler.KernelCompileError:
                reply = b""
            send(replies, reply)
