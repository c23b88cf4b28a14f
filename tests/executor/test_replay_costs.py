"""Counts what a steady Run costs the host that is one replay of a CUDA graph: driver calls, locks, allocations.

Like `test_run_costs`, a gate for performance without times: a replay must cost as much for many nodes as for few. A
number that grows makes each replay of each model slower, so a change has to say why it needs more.
"""

from __future__ import annotations

import json

import pytest

from isolated import python

RUNS = 10
NODES = (3, 30)
"""Numbers of kernels in the graphs that are compared."""
COUNT = f"""
import json, sys
sys.path.insert(0, "tests/harness")
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from faults import Faults
from onnx import parser
from ort_cuda_plugin.benchmark.sides import plugin_place
faults = Faults()
plugin.register(emulate=True)

def softmaxes(count):
    # Softmax along the other axis each time, so that no two of them become one kernel.
    lines = " ".join(f"x{{n + 1}} = Softmax<axis = {{n % 2}}>(x{{n}})" for n in range(count))
    sides = f"(float[n, 8] x0) => (float[n, 8] x{{count}})"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> g {{sides}} {{{{ {{lines}} }}}}')
    return model.SerializeToString()

def bindings(session, count, rows=4):
    x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
    binding = session.io_binding()
    kept = [ort.OrtValue.ortvalue_from_numpy(x, *plugin_place(True)) for _ in range(2)]
    binding.bind_ortvalue_input("x0", kept[0])
    binding.bind_ortvalue_output(f"x{{count}}", kept[1])
    return binding, kept

def measured(steps):
    for _ in range(10):
        for step in steps:
            step()
    before = plugin.counters()
    faults.arm(None)
    for _ in range({RUNS} // len(steps)):
        for step in steps:
            step()
    calls, locks = faults.calls(), faults.locks
    after = plugin.counters()
    return {{"locks": locks, **calls}} | {{key: after[key] - before[key] for key in after if after[key] != before[key]}}

found = {{}}
for count in {NODES}:
    model = softmaxes(count)
    for kind, options, shapes in (
        ("automatic", {{}}, (4,)),
        ("other addresses", {{}}, (4, 4)),
        ("other sizes", {{"cuda_graph_cache_size": "2"}}, (4, 5)),
        ("captured", {{"enable_cuda_graph": "1"}}, (4,)),
    ):
        session = plugin.session(model, emulate=True, provider_options=options)
        bound = [bindings(session, count, rows) for rows in shapes]
        steps = [lambda binding=binding: session.run_with_iobinding(binding) for binding, _ in bound]
        found[f"{{kind}} {{count}}"] = measured(steps)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[str, float]]:
    """Return the counts per Run, by the kind of replay and the number of nodes."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE_STREAMS": "inline"}
    found = json.loads(python(COUNT, env=environment, preloaded=True).stdout.splitlines()[-1])
    return {kind: {name: count / RUNS for name, count in counts.items()} for kind, counts in found.items()}


EXPECTED = {
    "automatic": {"locks": 8},
    # Only the first and the last node have addresses of inputs and outputs.
    "other addresses": {"locks": 10, "GraphExecKernelNodeSetParams": 2, "graph_updates": 2, "malloc": 2},
    "other sizes": {"locks": 10},  # a graph for each of the sizes
    "captured": {"locks": 17},
}
"""Counts per Run beyond those of `ALWAYS`. The emulated device allocates the parameters of a changed node (malloc)."""
ALWAYS = {"GraphLaunch": 1, "StreamSynchronize": 1, "graph_replays": 1, "calloc": 2}
"""Counts of each replay: one launch and one wait. The emulated device allocates a record of the launch, and one of the
graph's nodes (calloc)."""
CALLBACKS = {"CtxSetCurrent": 4, "ThreadExchangeStreamCaptureMode": 4}
"""Counts of two callbacks of ONNX Runtime, the launch and the wait: each sets and restores the context and the mode."""


@pytest.mark.parametrize("count", NODES)
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_replay_is_one_launch_whatever_its_nodes(costs: dict[str, dict[str, float]], kind: str, count: int) -> None:
    found = dict(costs[f"{kind} {count}"])
    contexts = found.pop("CtxGetCurrent")
    assert contexts == (3 if kind == "captured" else 2)
    if kind != "captured":  # the Runs of a graph that ONNX Runtime has captured do not reach the plan
        assert {name: found.pop(name) for name in ("runs", "plan_hits", "launches")} == {
            "runs": 1,
            "plan_hits": 1,
            "launches": count,
        }
    assert found == ALWAYS | CALLBACKS | EXPECTED[kind]
