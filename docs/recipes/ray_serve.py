"""Serves a model on several devices with Ray Serve: serve run ray_serve:app. Environment: MODEL, EMULATE, REPLICAS."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError

MODEL = os.environ.get("MODEL", "model.onnx")
EMULATE = os.environ.get("EMULATE") == "1"
REPLICAS = int(os.environ.get("REPLICAS", "2"))
TRIES = 8  # attempts for a request before its error goes to the caller


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=64,
    graceful_shutdown_timeout_s=10,
    health_check_period_s=1,
    health_check_timeout_s=5,
    ray_actor_options={"num_cpus": 0.5} if EMULATE else {"num_gpus": 1},
)
class Model:
    """One session on one device. Concurrent requests are batched into one Run."""

    def __init__(self, path: str) -> None:
        import onnxruntime as ort

        import ort_cuda_plugin

        devices = ort_cuda_plugin.register(emulate=EMULATE)
        if not devices:
            raise RuntimeError("no CUDA device. To use the emulated device, set EMULATE=1")
        rank = serve.get_replica_context().rank
        self.rank = getattr(rank, "rank", rank)  # a number, or an object with one, depending on Ray's version
        self.device = devices[int(self.rank) % len(devices)]
        options = ort.SessionOptions()
        options.add_provider_for_devices([self.device], {})
        self.session = ort.InferenceSession(path, options)
        self.input = self.session.get_inputs()[0].name
        self.output = self.session.get_outputs()[0].name

    def check_health(self) -> None:
        """Raise if the device is lost: every Run fails then, and Ray replaces the replica."""
        self.infer(np.zeros((1, *self.session.get_inputs()[0].shape[1:]), np.float32))

    def infer(self, batch: np.ndarray) -> np.ndarray:
        binding = self.session.io_binding()
        binding.bind_cpu_input(self.input, batch)
        binding.bind_output(self.output, "cpu")
        self.session.run_with_iobinding(binding)
        result: np.ndarray = binding.copy_outputs_to_cpu()[0]
        return result

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.002)
    async def __call__(self, rows: list[np.ndarray]) -> list[tuple[int, np.ndarray]]:
        """Return rows of the model's result, each with the number of the replica that ran it."""
        results = await asyncio.to_thread(self.infer, np.stack(rows))
        return [(int(self.rank), row) for row in results]


async def ask(handle: Any, row: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the answer to one request, which is sent again if its replica died."""
    for attempt in range(TRIES):
        try:
            answer: tuple[int, np.ndarray] = await handle.remote(row)
            return answer
        except RayActorError:
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")


app = Model.bind(MODEL)
