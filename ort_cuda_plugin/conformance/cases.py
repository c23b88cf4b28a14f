"""The backend tests of the `onnx` wheel, as models and NumPy values."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")


@dataclass(frozen=True)
class Case:
    """One backend test. Values in its data sets are arrays, lists of arrays (sequences), or None (an optional without
    a value).
    """

    kind: str
    name: str
    rtol: float
    atol: float
    _source: Any = field(repr=False)

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    def model(self) -> onnx.ModelProto:
        """Return a copy of the model, with an IR version that the installed ONNX Runtime loads."""
        if self._source.model is None:
            model = onnx.load(Path(self._source.model_dir) / "model.onnx")
        else:
            model = onnx.ModelProto()
            model.CopyFrom(self._source.model)
        model.ir_version = min(model.ir_version, newest_ir_version())
        return model

    def data_sets(self, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
        if self._source.data_sets is not None:
            for inputs, outputs in self._source.data_sets:
                yield [_plain(value) for value in inputs], [_plain(value) for value in outputs]
            return
        for folder in sorted(Path(self._source.model_dir).glob("test_data_set_*")):
            yield (
                [_from_file(folder / f"input_{i}.pb", value.type) for i, value in enumerate(_fed_inputs(model))],
                [_from_file(folder / f"output_{i}.pb", value.type) for i, value in enumerate(model.graph.output)],
            )


@functools.cache
def load_cases() -> dict[str, Case]:
    """Return all backend tests by key, in a stable order. Takes seconds: `onnx` computes the values of node tests."""
    from onnx.backend.test.loader import load_model_tests

    with _quiet():
        return {case.key: case for kind in KINDS for case in _cases(kind, load_model_tests(kind=kind))}


def load_case(key: str) -> Case:
    """Return one test. Of the node tests, `onnx` computes only those of modules whose source has the test's name.

    Raises KeyError if no test has this key.
    """
    from onnx.backend.test.loader import DATA_DIR, load_model_tests

    kind, _, name = key.partition("/")
    if kind not in KINDS:
        raise KeyError(key)
    with _quiet():
        if Path(DATA_DIR, kind).is_dir():
            return {case.key: case for case in _cases(kind, load_model_tests(kind=kind))}[key]
        words = name.split("_")
        for count in range(len(words), 0, -1):  # sources have most names as literals, of others the beginning
            for case in _cases(kind, _node_tests("test_" + "_".join(words[:count]))):
                if case.key == key:
                    return case
        return load_cases()[key]


def matching_cases(patterns: Sequence[str]) -> list[Case]:
    """Return the tests whose keys match one of these patterns of `fnmatch`."""
    with suppress(KeyError):
        return [load_case(pattern) for pattern in dict.fromkeys(patterns)]
    return [case for key, case in load_cases().items() if any(fnmatch.fnmatch(key, pattern) for pattern in patterns)]


def _cases(kind: str, tests: Iterable[Any]) -> Iterator[Case]:
    for test in sorted(tests, key=lambda test: str(test.name)):
        yield Case(kind, test.name.removeprefix("test_"), test.rtol, test.atol, test)


def _node_tests(text: str) -> Iterable[Any]:
    """Import the modules of node tests whose source has ``text``; return the tests of all imported modules."""
    from onnx.backend.test.case import node

    for module, source in _node_modules().items():
        if text in source:
            importlib.import_module(module)
    tests: list[Any] = node._NodeTestCases  # what `load_model_tests` returns for node tests
    return tests


@functools.cache
def _node_modules() -> dict[str, str]:
    """Return the source of each module of node tests, by the module's name."""
    from onnx.backend.test.case import node

    sources = {}
    for found in pkgutil.walk_packages(node.__path__, node.__name__ + "."):
        spec = found.module_finder.find_spec(found.name, None)
        assert spec is not None
        assert spec.origin is not None
        sources[found.name] = Path(spec.origin).read_text()
    return sources


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: the node tests compute values that overflow, and divide by zero, on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def newest_ir_version() -> int:
    """Return the newest IR version that the installed ONNX Runtime loads."""
    import onnxruntime as ort

    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [result])
    for version in range(onnx.IR_VERSION, 6, -1):
        model = onnx.helper.make_model(graph, ir_version=version, opset_imports=[onnx.helper.make_opsetid("", 13)])
        try:
            ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:
            continue
        return version
    raise RuntimeError(
        f"ONNX Runtime {ort.__version__} loads no model of the IR versions 7 to {onnx.IR_VERSION}. Install another "
        "onnxruntime"
    )


def _fed_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    initializers = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in initializers]


def _plain(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None else np.asarray(value)


def _from_file(path: Path, value_type: onnx.TypeProto) -> Any:
    if value_type.HasField("sequence_type"):
        sequence = onnx.SequenceProto()
        sequence.ParseFromString(path.read_bytes())
        return numpy_helper.to_list(sequence)
    return numpy_helper.to_array(onnx.load_tensor(str(path)))
