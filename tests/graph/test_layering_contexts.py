"""Compiled models in sessions with layering rules for other providers.

ONNX Runtime then fuses no nodes, so EPContext nodes run as kernels of the plugin and no model can be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
from contexts import assert_same, compile_model, nothing_compiled, rows, settings, two_clusters
from ort_cuda_plugin.context.storage.errors import ContextError
from ort_cuda_plugin.ep.contexts.context_nodes import ContextIdentity, ContextNode
from ort_cuda_plugin.ep.session.layering import KEYS, NAMES_SINCE
from ort_cuda_plugin.model.ir import Node
from ort_versions import api_version
from session_pair import FLOAT, info

ANNOTATIONS, NAMES = KEYS
SOURCE = two_clusters()
FEEDS = [{"x": rows(2, 3)}, {"x": rows(5, 1)}]


def annotated(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        node.metadata_props.add(key="layer_ann", value="device" if node.op_type == "EPContext" else "host")
    return model


def session(
    model: bytes | Path, entries: Mapping[str, str], **options: str
) -> tuple[ort.InferenceSession, dict[str, int]]:
    """Create a session; return it and the number of nodes that run on each provider."""
    entries = {"session.record_ep_graph_assignment_info": "1", **entries}
    made = settings(entries, {"context_allow_host_code": "1", **options})
    given = model if isinstance(model, bytes) else str(model)
    found = ort.InferenceSession(given, made, enable_fallback=0)
    counts: dict[str, int] = {}
    for part in found.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return found, counts


def test_nothing_is_compiled_beside_rules_for_others(tmp_path: Path) -> None:
    """Compiling a model is an error that names the rules. Without it the session would write no compiled model."""
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(tmp_path / "m_ctx.onnx")}
    why = "ep.context_enable=1 with layering rules for cpu: .* nothing would be compiled. Compile the model without"
    known = api_version(ort.__version__) >= NAMES_SINCE
    for rule in ({ANNOTATIONS: "cpu(host)"}, *([{NAMES: "gpu(a); cpu(b)"}] if known else [])):
        with pytest.raises(Exception, match=why):
            session(SOURCE, {**entries, **rule})
        with pytest.raises(Exception, match=why):
            ort.ModelCompiler(settings(rule), SOURCE).compile_to_file(str(tmp_path / "m_ctx.onnx"))
    assert not list(tmp_path.iterdir())
    session(SOURCE, {**entries, ANNOTATIONS: "gpu(device)"})
    assert (tmp_path / "m_ctx.onnx").exists()


@pytest.mark.parametrize("embed", [False, True])
@pytest.mark.parametrize("weightless", ["0", "1"])
def test_compiled_models_load_beside_rules_for_others(tmp_path: Path, embed: bool, weightless: str) -> None:
    """Load a model with two EPContext nodes and two CPU nodes, from a path and from memory."""
    path = tmp_path / "m_ctx.onnx"
    (tmp_path / "m.onnx").write_bytes(SOURCE)
    source = str(tmp_path / "m.onnx")
    compiled = annotated(compile_model(source, path, embed=embed, context_weightless=weightless))
    onnx.save(compiled, path)
    rules = {ANNOTATIONS: "gpu(device); cpu(host)"}
    with nothing_compiled():
        for model in (path, path.read_bytes()):
            entries = {"ep.context_file_path": str(path)} if isinstance(model, bytes) else {}
            made, counts = session(model, {**entries, **rules})
            assert counts == {ort_cuda_plugin.get_ep_name(): 2, "CPUExecutionProvider": 2}
            assert_same(made, SOURCE, FEEDS)
    # Without permission for host code, the session compiles the stored graphs.
    made, _ = session(path, rules, context_allow_host_code="0")
    assert_same(made, SOURCE, FEEDS)


def test_errors_of_contexts_are_those_of_fused_nodes(tmp_path: Path) -> None:
    path = tmp_path / "m_ctx.onnx"
    onnx.save(annotated(compile_model(SOURCE, path)), path)
    for each in tmp_path.glob("*.bin"):
        each.unlink()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*cannot be read in .*put a readable file into this folder"):
        session(path, {ANNOTATIONS: "cpu(host)"})


def twice(compiled: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a model that runs the only EPContext node of ``compiled`` twice, the second time on the first result."""
    (node,) = compiled.graph.node
    second = onnx.NodeProto()
    second.CopyFrom(node)
    node.name, second.name = names
    second.input[0], second.output[0] = node.output[0], "z"
    inputs, outputs = [*compiled.graph.input], [info("z", FLOAT, ["n", 8])]
    values = [info("y", FLOAT, ["n", 8])]
    graph = helper.make_graph([node, second], "twice", inputs, outputs, value_info=values)
    return annotated(helper.make_model(graph, opset_imports=compiled.opset_import, ir_version=compiled.ir_version))


def test_a_node_that_the_session_did_not_claim_is_not_blamed_on_its_name() -> None:
    node = Node("known", "EPContext", "com.microsoft", 1, (), (), {"partition_name": "p0"}, 0)
    with pytest.raises(ContextError, match=r"^EPContext node 'lost': .*got partition 'p1', expected one of"):
        ContextIdentity("lost", "p1", "").find([ContextNode(node, None, "")])


@pytest.mark.parametrize("embed", [False, True])
def test_a_partition_may_be_used_twice(tmp_path: Path, embed: bool) -> None:
    source = helper.make_graph(
        [helper.make_node("Sin", ["x"], ["y"])], "g", [info("x", FLOAT, ["n", 8])], [info("y", FLOAT, ["n", 8])]
    )
    model = helper.make_model(source, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "m_ctx.onnx"
    compiled = compile_model(model.SerializeToString(), path, embed=embed)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    for names in (("one", "other"), ("", "")):
        again = onnx.ModelProto()
        again.CopyFrom(compiled)
        onnx.save(twice(again, names), path)
        if embed and not any(names):
            with pytest.raises(Exception, match=r"INVALID_GRAPH.*EPContext node '': .*got 2 nodes .*, expected 1"):
                session(path, {ANNOTATIONS: "cpu(host)"})
            continue
        made, _ = session(path, {ANNOTATIONS: "cpu(host)"})
        np.testing.assert_allclose(made.run(None, {"x": x})[0], np.sin(np.sin(x)), rtol=1e-5, atol=1e-6)
