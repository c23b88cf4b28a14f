"""A helper process that compiles kernels, and the end of its pipe that its parent holds.

A fresh process and not a fork: the parent has threads. It lives as long as one call of `compile_many`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from ort_cuda_plugin.runtime.cache import KernelCache
from ort_cuda_plugin.runtime.kernel import KernelSpec
from ort_cuda_plugin.runtime.targets import KernelImage, Target


class WorkerClient:
    """The parent's end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.is_ready = False

    @staticmethod
    def start(cache: KernelCache) -> WorkerClient | None:
        """A helper that is importing Numba, or None where this interpreter cannot start one.

        It finds and keeps IR in the folder of ``cache``, where that is usable. In a program that embeds Python,
        sys.executable may be that program.
        """
        if not os.path.basename(sys.executable or "").startswith("python"):
            return None
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        command = [sys.executable, "-m", __name__, *([str(cache.folder)] if cache.usable else [])]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        except OSError:
            return None
        return WorkerClient(process)

    def wait_ready(self) -> None:
        """Returns once the helper can compile, or has failed."""
        self.is_ready = self.receive() is not None

    def stop_unless_ready(self) -> None:
        """Ends a helper that is still importing: nothing is left that it could do."""
        if not self.is_ready:
            self.process.kill()

    def compile(self, spec: KernelSpec, target: Target) -> KernelImage | None:
        """The compiled kernel, or None where it did not compile or the helper died."""
        assert self.process.stdin is not None
        try:
            send(self.process.stdin, (spec, target))
        except OSError:
            return None
        image = self.receive()
        return image if isinstance(image, KernelImage) else None

    def receive(self) -> Any:
        assert self.process.stdout is not None
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            return None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def send(pipe: IO[bytes], message: Any) -> None:
    pipe.write(pickle.dumps(message))
    pipe.flush()


def main() -> None:
    # Whatever a library prints must not get between the messages.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from ort_cuda_plugin.runtime.compile import KernelCompileError, compile_kernel

    cache = KernelCache(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    send(replies, "ready")
    while True:
        try:
            spec, target = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(replies, compile_kernel(spec, target, cache))
        except KernelCompileError as error:
            send(replies, str(error))


if __name__ == "__main__":
    main()
