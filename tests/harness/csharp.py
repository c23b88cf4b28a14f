"""Compiles and runs C# programs with ONNX Runtime's C# sources, on Mono or .NET Core 3.1, without NuGet.

The npm package com.github.asus4.onnxruntime contains these sources (MIT license). `SOURCES_VARIABLE` names its unpacked
folder. The compiler is Mono's ``mcs``, for both runtimes. It does not know all of C# 7.3, so `older` rewrites a copy of
the sources. .NET Core comes from the PyPI package dotnetcore2. ``nox -s csharp`` gets both packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from c_programs import ort_library

SOURCES_VARIABLE = "ORT_CUDA_PLUGIN_TEST_CSHARP"
ASSEMBLY = "Microsoft.ML.OnnxRuntime.dll"
FLAGS = ("-langversion:latest", "-nologo", "-warn:0", "-unsafe", "-define:NETSTANDARD2_0")
"""With NETSTANDARD2_0 the sources use no references that mcs cannot convert."""

CORE_ASSEMBLIES = (
    *("System.Private.CoreLib", "System.Runtime", "System.Runtime.Extensions", "System.Linq", "System.Collections"),
    *("System.Console", "System.Memory", "System.Net.Primitives", "System.Runtime.InteropServices.RuntimeInformation"),
)


def older(source: str) -> str:
    """Return C# source text in which syntax that mcs does not know is replaced by older syntax of the same meaning."""
    replacements = (
        (r"\bis null\b", "== null"),
        (r"\((\S+) is not (\w+)\)", r"(!(\1 is \2))"),
        (r"\(static (\w+ =>)", r"(\1"),
        (r"\b(\w+<\w+>) (\w+) = new\(", r"\1 \2 = new \1("),
        (r"(where \w+ : )unmanaged\b", r"\1struct"),
        (r"(\w+\[\d\]) = (\w+\[\d\]) = (\w+);", r"\1 = \3; \2 = \3;"),
        (r"^( *)(\w+)\.Span\[(\w+)\] = ([^;]*);", r"\1var span = \2.Span; span[\3] = \4;"),
    )
    for pattern, replacement in replacements:
        source = re.sub(pattern, replacement, source, flags=re.M)
    while declaration := re.search(r"\busing (var [^;]*);", source):
        end = _end_of_block(source, declaration.end())
        body = source[declaration.end() : end]
        source = f"{source[: declaration.start()]}using ({declaration[1]}) {{{body}}}{source[end:]}"
    return source


def _end_of_block(source: str, start: int) -> int:
    """Return the index of the brace that closes the block around ``start``. Its texts must contain no braces."""
    depth = 0
    for brace in re.finditer("[{}]", source[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return start + brace.start()
    raise AssertionError("no brace closes the block")


class Runtime:
    """A C# runtime: compiles programs and runs them. The tests skip, with the reason, if a part of it is missing."""

    def __init__(self, name: str, folder: Path) -> None:
        """``name``: "mono" or "dotnet". ``folder`` gets the assembly of ONNX Runtime's API."""
        sources = os.environ.get(SOURCES_VARIABLE)
        if not sources:
            pytest.skip(f"{SOURCES_VARIABLE} is not set; nox -s csharp downloads the C# sources and sets it")
        for program, package in (("mcs", "mono-mcs"), ("mono", "mono-runtime")):
            if not shutil.which(program):
                pytest.skip(f"{program} is not installed (Debian's package is {package})")
        self.name, self.folder = name, folder
        self.root = self._root_of_core() if name == "dotnet" else Path("/")
        files = [path for path in (Path(sources) / "Runtime").rglob("*.cs") if path.parent.name != "Training"]
        assert files, f"{SOURCES_VARIABLE}: {sources}/Runtime contains no C# files"
        copies = []
        for path in files:
            copies.append(folder / "onnxruntime" / path.name)
            copies[-1].parent.mkdir(exist_ok=True)
            copies[-1].write_text(older(path.read_text(encoding="utf-8-sig")))
        self._compile("-target:library", f"-out:{folder / ASSEMBLY}", *map(str, copies))

    @staticmethod
    def _root_of_core() -> Path:
        spec = find_spec("dotnetcore2")
        if not spec or not spec.origin:
            pytest.skip("the package dotnetcore2 is not installed (nox -s csharp)")
        return Path(spec.origin).parent / "bin"

    def _compile(self, *arguments: str) -> None:
        if self.name == "mono":
            references = ["-r:System.Core.dll", "-r:System.Numerics.dll"]
        else:
            (assemblies,) = (self.root / "shared" / "Microsoft.NETCore.App").iterdir()
            references = ["-noconfig", "-nostdlib", *(f"-r:{assemblies / name}.dll" for name in CORE_ASSEMBLIES)]
        done = subprocess.run(["mcs", *FLAGS, *references, *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def build(self, source: str, folder: Path) -> Path:
        """Compile a program into ``folder``, beside the assembly of the API; return the program's path."""
        text, program = folder / "program.cs", folder / ("program.exe" if self.name == "mono" else "program.dll")
        text.write_text(source)
        self._compile(f"-r:{shutil.copy(self.folder / ASSEMBLY, folder)}", f"-out:{program}", str(text))
        if self.name == "dotnet":
            framework = {"name": "Microsoft.NETCore.App", "version": "3.1.0"}
            settings = {"runtimeOptions": {"framework": framework}}
            (folder / "program.runtimeconfig.json").write_text(json.dumps(settings))
        return program

    def run(self, program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program with no environment but ``environment`` and what the runtime needs."""
        command = ["mono"] if self.name == "mono" else [str(self.root / "dotnet")]
        settings = {"PATH": os.environ["PATH"], "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"}  # works without ICU
        command = [*command, str(program), *arguments]
        return subprocess.run(command, env=settings | environment, capture_output=True, text=True, timeout=600)


def library_folder(folder: Path) -> Path:
    """Make a folder for ``LD_LIBRARY_PATH`` in which a C# program finds the ONNX Runtime library of the wheel."""
    folder.mkdir()
    (folder / "libonnxruntime.so").symlink_to(ort_library(folder))
    return folder
