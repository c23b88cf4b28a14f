"""The public API: types for checkers, and tables for notebooks and pandas."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import ort_cuda_plugin
from isolated import HARNESS, add_model, python
from ort_cuda_plugin.abi import host
from ort_cuda_plugin.abi.result_table import Table
from ort_cuda_plugin.ep.options import arena
from ort_cuda_plugin.ep.options.option_table import OTHER_NAMES, ROWS, WITHOUT_EFFECT
from ort_cuda_plugin.ep.options.option_types import ConvolutionSearch, LogLevel, ProviderOptions
from ort_cuda_plugin.ep.options.option_values import ALGORITHM_SEARCHES, FLAG, LOG_LEVELS
from ort_cuda_plugin.ep.options.options import known_keys, parse_value

# ---- types ----


def test_a_typed_program_runs(tmp_path: Path) -> None:
    """Mypy checks the program (`test_static`)."""
    add_model(tmp_path / "add.onnx")
    code = (HARNESS / "typed_program.py").read_text()
    done = python(code, str(tmp_path / "add.onnx"), env={"ORT_CUDA_PLUGIN_EMULATE": "1"})
    assert done.stdout == "CudaPluginExecutionProvider\n"


def literals(kind: Any) -> list[Any]:
    """Return the values that the type of an option lists."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for each in get_args(kind) for value in ([True, False] if each is bool else literals(each))]


def test_provider_options_have_the_types_of_the_table() -> None:
    hints = get_type_hints(ProviderOptions)
    assert sorted(hints) == known_keys()
    for key, kind in hints.items():
        row = ROWS.get(OTHER_NAMES.get(key, key)) or WITHOUT_EFFECT.get(key)
        for value in literals(kind):
            if row is not None:
                parse_value(key, str(value), row.reader)
            else:
                assert arena.check_options({arena.CUDA_PROVIDER_KEYS.get(key, key): str(value)}) == ""
        if row is not None:
            assert (row.reader is FLAG) == (bool in get_args(kind)), key
    assert {*ALGORITHM_SEARCHES} == {value for value in literals(ConvolutionSearch) if isinstance(value, str)}
    assert {*LOG_LEVELS} == {value for value in literals(LogLevel) if isinstance(value, str)}


# ---- tables ----


@dataclass(frozen=True)
class Record:
    name: str
    share: float
    shape: tuple[int, ...]
    bytes: int | None = None


RECORDS = [Record("<b>&", 1 / 3, (1, 2)), Record("y", 0.5, (), 7)]


def test_a_table_has_columns_for_pandas() -> None:
    table = Table(Record, RECORDS)
    assert table == RECORDS
    columns = {"name": ["<b>&", "y"], "share": [1 / 3, 0.5], "shape": [(1, 2), ()], "bytes": [None, 7]}
    assert table.to_dict() == columns
    assert Table(Record).to_dict() == {name: [] for name in columns}
    assert pickle.loads(pickle.dumps(table)).to_dict() == columns
    assert json.loads(json.dumps([asdict(row) for row in table]))[1]["bytes"] == 7


def test_a_table_is_escaped_html_in_a_notebook() -> None:
    text = Table(Record, RECORDS)._repr_html_()
    assert "<tr><td>&lt;b&gt;&amp;</td><td>0.333333</td><td>1, 2</td><td></td></tr>" in text
    assert "<b>" not in text
    assert "<p>and 100 more rows</p>" in Table(Record, RECORDS * 300)._repr_html_()
    assert "<th>shape</th>" in Table(Record)._repr_html_()


def test_results_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = ort_cuda_plugin.explain(add_model(), emulate=True)
    assert verdicts.to_dict()["op_type"] == ["Add"]
    assert "<td>Add</td>" in verdicts._repr_html_()
    emulated = [row for row in ort_cuda_plugin.devices().to_dict()["emulated"] if row]
    assert emulated == [True]
    assert "seconds" in ort_cuda_plugin.plan_variants().to_dict()


def test_a_profile_has_a_table_of_each_kind() -> None:
    profile = ort_cuda_plugin.profile(add_model(), emulate=True, runs=2)
    assert profile.is_emulated
    assert profile.to_dict("nodes")["name"] == ["add"]
    for by in ("steps", "kernels", "host"):
        assert len(profile.table(by)) == len(getattr(profile, by)) > 0
    assert "say nothing about a GPU" in profile._repr_html_()
    with pytest.raises(ValueError, match="by='launches': expected one of 'nodes', 'steps'"):
        profile.to_dict("launches")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="runs=0: expected at least 1"):
        ort_cuda_plugin.profile(add_model(), emulate=True, runs=0)


# ---- logging ----

LOGS = """
import logging, sys, ort_cuda_plugin as plugin
records = []

class Lines(logging.Handler):
    def emit(self, record):
        records.append(record)

class Broken(logging.Filter):
    def filter(self, record):
        raise RuntimeError("a filter of the application")

model, options = bytes.fromhex(sys.argv[1]), {"do_copy_in_default_stream": "0"}
logger = logging.getLogger("ort_cuda_plugin.onnxruntime")
assert logger.name == sys.argv[2]
plugin.session(model, emulate=True, provider_options=options)  # no handler: only ONNX Runtime prints the warning
handler = Lines()
logging.getLogger("ort_cuda_plugin").addHandler(handler)
logging.getLogger("ort_cuda_plugin").setLevel(logging.INFO)
plugin.session(model, emulate=True, provider_options=options)
lines = {(record.levelname, record.getMessage()) for record in records if record.name == logger.name}
(warning,) = [text for level, text in lines if level == "WARNING"]
assert warning.startswith("options that the plugin ignores: do_copy"), warning
assert ("INFO", "graph 'add': the plugin runs 1 of 1 nodes (fused nodes: 1)") in lines, lines
records.clear()
plugin.session(model, emulate=True, provider_options=options | {"log_level": "ERROR"})
assert not [record for record in records if record.name == logger.name]
logger.addFilter(Broken())
plugin.session(model, emulate=True, provider_options=options)
"""


def test_lines_of_onnx_runtimes_log_reach_the_handlers_of_the_application() -> None:
    done = python(LOGS, add_model().hex(), host.python_logger.name, env={"CUDA_VISIBLE_DEVICES": ""}, preloaded=True)
    printed = [line for line in done.stderr.splitlines() if line.startswith("options that the plugin ignores")]
    assert printed == []  # Python's handler of last resort would print the bare line
    assert done.stderr.count("options that the plugin ignores: do_copy") == 3  # ONNX Runtime's lines


def test_the_documents_list_all_loggers() -> None:
    package = Path(ort_cuda_plugin.__file__).parent
    texts = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    found = re.findall(r'getLogger\("?([\w.]+)"?\)(?:\.getChild\("(\w+)"\))?', texts)
    used = {".".join(filter(None, names)) for names in found}
    text = (package.parent / "docs" / "api.md").read_text()
    assert used == set(re.findall(r"^\| `(ort_cuda_plugin[.\w]*)` \|", text, re.M))
