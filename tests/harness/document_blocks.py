"""Finds the code blocks of a Markdown document, and runs them in order.

A block runs unless the line before it says why not: ``<!-- not run: the reason -->``. `prepare` provides what the
document's reader is assumed to have, such as a model file.

    python document_blocks.py DOCUMENT      (in the folder in which the blocks should work)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = ("python", "sh", "c", "cpp")
fence = re.compile(
    r"^(?P<before>[^\n]*)\n(?P<indent> *)```(?P<language>[\w+]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
excuse = re.compile(r"<!-- not run: (?P<reason>\S.*\S) -->")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    reason: str
    """The reason why the block is not run; "" if it is run."""


def blocks(document: str) -> Iterator[Block]:
    previous = "\n" + document
    for match in fence.finditer(previous):
        found = excuse.search(match["before"])
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.M)
        line = previous.count("\n", 0, match.end("before"))
        yield Block(line + 1, match["language"], text, found["reason"] if found else "")


def prepare() -> dict[str, Any]:
    """Write the files that documents mention to the working folder, and return the names that their code uses.

    ``model.onnx`` has the input ``x``; ``decoder.onnx`` is a language model of two layers.
    """
    import numpy
    import onnx
    from onnx import TensorProto, helper

    from genai_decoder import genai_decoder

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "product"),
        helper.make_node("Relu", ["product"], ["y"], "relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "documents",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor("w", TensorProto.FLOAT, [8, 4], [0.5 - 0.03 * i for i in range(32)])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, "model.onnx")
    onnx.save(genai_decoder(vocabulary=16000, longest=2048), "decoder.onnx")
    array = numpy.arange(16, dtype=numpy.float32).reshape(2, 8)
    return {"__name__": "__main__", "np": numpy, "array": array, "feeds": {"x": array}}


def run_c(block: Block) -> None:
    """Compile a block as a C program, and run it with the paths of the library and of ``model.onnx`` as arguments."""
    import onnxruntime

    from c_programs import build_host
    from ort_cuda_plugin import get_library_path

    folder = Path.cwd()
    version = onnxruntime.__version__.split(".")[1]
    header = f'#include "base/ort_abi.h"\n#define ORT_API_VERSION {version}\nconst OrtApiBase *OrtGetApiBase(void);\n'
    (folder / "onnxruntime_c_api.h").write_text(header)
    (folder / "document.c").write_text(block.text)
    program = build_host("document", folder, folder / "document.c")
    environment = os.environ | {"ORT_CUDA_PLUGIN_PYTHON": sys.executable}
    subprocess.run([str(program), get_library_path(), "model.onnx"], check=True, timeout=300, env=environment)


CPP_MAIN = """
#include <cstdio>

int main(int count, char **arguments) {
  if (count != 3)
    return 2;
  try {
    Ort::Env env;
    Ort::Session session = make_session(env, arguments[1], arguments[2]);
    return session.GetInputCount() == 1 ? 0 : 3;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\\n", error.what());
    return 1;
  }
}
"""
"""Calls `make_session` of a C++ block with the paths of the library and of ``model.onnx``."""


def run_cpp(block: Block) -> None:
    """Compile a block that defines ``make_session``, and let it create a session for ``model.onnx``.

    The block gets ONNX Runtime's C++ header if the compiler finds it, else the stand-in of ``tests/c/cxx``.
    """
    from c_programs import ROOT, SOURCES, ort_library
    from ort_cuda_plugin import get_library_path

    folder = Path.cwd()
    source, program = folder / "document.cc", folder / "document_cpp"
    source.write_text(block.text + CPP_MAIN)
    library = ort_library(folder)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc_shim'}", "-idirafter", SOURCES / "cxx"]
    command = ["c++", *flags, "-o", program, source, library, f"-Wl,-rpath,{folder}"]
    subprocess.run([str(word) for word in command], check=True)
    environment = os.environ | {"ORT_CUDA_PLUGIN_PYTHON": sys.executable}
    subprocess.run([str(program), get_library_path(), "model.onnx"], check=True, timeout=300, env=environment)


def main() -> None:
    document = Path(sys.argv[1])
    names = prepare()
    for block in blocks(document.read_text()):
        if block.reason or block.language not in RUN:
            continue
        print(f"{document.name}:{block.line}", flush=True)
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(document), "exec"), names)
        elif block.language == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True, timeout=300)
        elif block.language == "cpp":
            run_cpp(block)
        else:
            run_c(block)


if __name__ == "__main__":
    main()
