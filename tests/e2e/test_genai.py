"""onnxruntime-genai with the library registered, where it is installed (``pip install onnxruntime-genai``)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import ort_cuda_plugin
from genai_decoder import genai_config, genai_decoder

PROGRAM = """
import json, sys
import numpy as np
import onnxruntime_genai as og
import ort_cuda_plugin

og.register_execution_provider_library("cuda_plugin.virtual", ort_cuda_plugin.get_library_path())
EP = ort_cuda_plugin.get_ep_name()


def load(provider):
    config = og.Config(sys.argv[1])
    config.clear_providers()
    if provider:
        config.append_provider(provider)
        config.set_provider_option(provider, "automatic_cuda_graphs", "0")
    return og.Model(config)


def continuous(provider):  # two requests of several lengths at once, the second of which begins later
    engine = og.Engine(load(provider))
    buffer, requests, tokens = engine.create_event_buffer(16), [], [[], []]
    for prompt in ([1, 5, 9, 33], [1, 8]):
        request = engine.create_request(options=og.RequestOptions())
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(8)
        request.begin_turn(np.array(prompt, np.int32), options)
        requests.append(request)
        while engine.has_pending_requests():
            for event in engine.run(buffer):
                if event.flags == og.EngineEventFlags.TOKEN:
                    tokens[[event.request is request for request in requests].index(True)].append(event.token)
            if len(requests) == 1 and len(tokens[0]) >= 3:
                break
    return tokens


def generated(provider, **search):
    model = load(provider)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=40, **search)
    generator = og.Generator(model, params)
    several = search.get("batch_size", 1)
    generator.append_tokens([1, 5, 9, 33] if several == 1 else [[1, 5, 9, 33], [1, 8, 8, 2]])
    for _ in range(8):
        generator.generate_next_token()
    if several == 1:  # goes on with a second prompt, and back
        generator.append_tokens([44, 45, 46])
        for _ in range(8):
            generator.generate_next_token()
        generator.rewind_to(10)
        generator.append_tokens([99])
        for _ in range(4):
            generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(i)] for i in range(several)]


result = []
for search in (
    {"do_sample": False},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "random_seed": 7},
    {"batch_size": 2},
):
    before = ort_cuda_plugin.counters()["runs"]
    result.append([generated(EP, **search), generated("", **search), ort_cuda_plugin.counters()["runs"] - before])
before = ort_cuda_plugin.counters()["runs"]
result.append([continuous(EP), continuous(""), ort_cuda_plugin.counters()["runs"] - before])
print(json.dumps(result))
"""


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed")
def test_onnxruntime_genai_generates_as_on_the_cpu(tmp_path: Path) -> None:
    """Compare greedy search, sampling, a batch of two, a second prompt, rewinding, and two concurrent requests."""
    model = genai_decoder()
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "genai_config.json").write_text(genai_config(model, "model.onnx"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    for ours, cpu, runs in json.loads(done.stdout.splitlines()[-1]):
        assert ours == cpu
        assert all(ours)
        assert runs >= 8, f"{ort_cuda_plugin.get_ep_name()} did not run"
