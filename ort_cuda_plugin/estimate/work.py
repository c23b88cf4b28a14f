"""The work of a Run as plain data: its memory, and in order its kernels, library calls, copies and fills.

An estimate needs only these records, so other programs can write them as JSON and get an estimate.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..compiler.kernel import KernelSpec

FORMAT = 1


@dataclass(frozen=True)
class Region:
    """Memory of a Run, at ``offset`` in the memory of its kind: "input", "output", "weight" or "scratch".

    ``contents``: the initial bytes, if control flow on the device may depend on them; shorter contents are repeated.
    """

    kind: str
    name: str
    nbytes: int
    offset: int = 0
    contents: bytes = b""


@dataclass(frozen=True)
class Access:
    """Bytes that a step reads or writes at least once: ``nbytes`` of region number ``region``, from ``offset`` on."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Pointer:
    """A kernel argument that is an address: byte ``offset`` of region number ``region``."""

    region: int
    offset: int = 0


@dataclass(frozen=True)
class Number:
    """A kernel argument that is a number, of type ``kind``: "i32", "i64", "f32" or "f64"."""

    kind: str
    value: float


Argument: TypeAlias = Pointer | Number


@dataclass(frozen=True)
class Step:
    """Base of the steps: the labels of the ONNX nodes that a step computes, and the memory that it accesses."""

    nodes: tuple[str, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def read_bytes(self) -> int:
        return sum(access.nbytes for access in self.reads)

    @property
    def written_bytes(self) -> int:
        return sum(access.nbytes for access in self.writes)


@dataclass(frozen=True)
class KernelStep(Step):
    """A launch of a kernel of the plugin, whose grid has ``turns`` groups of blocks that run one after the other."""

    kernel: KernelSpec
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Argument, ...]
    turns: int = 1


@dataclass(frozen=True)
class LibraryStep(Step):
    """A call of a vendor library: "matmul", "conv" or "attention".

    ``dtype`` is an ONNXTensorElementDataType, ``flags`` are names of `ProblemFlags`, and ``sizes`` are the values that
    ``csrc_shim/vendor/spec.h`` lists for the kind, in that order.
    """

    kind: str
    dtype: int
    flags: frozenset[str]
    rank: int
    sizes: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class CopyStep(Step):
    """A copy, a fill, a read-back by the host, or a call of Python."""

    kind: str


Product: TypeAlias = tuple[str, float, tuple[str, ...]]
"""A GEMM or convolution: the key of the device's peak rate, the number of operations, and the labels of its nodes."""


@dataclass(frozen=True)
class Work:
    """A Run of a model.

    ``products`` has the arithmetic of the GEMMs and convolutions in its clusters. ``elsewhere`` are the nodes that
    another provider runs and that are not estimated.
    """

    regions: tuple[Region, ...]
    steps: tuple[Step, ...]
    products: tuple[Product, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> dict[int, int]:
        """Return the bytes of each weight that is not empty, by the number of its region."""
        return {n: region.nbytes for n, region in enumerate(self.regions) if region.kind == "weight" and region.nbytes}

    @property
    def weight_reads(self) -> list[set[int]]:
        """Return the numbers of the weights that each step reads."""
        weights = self.weight_bytes.keys()
        return [{access.region for access in step.reads} & weights for step in self.steps]

    @property
    def states(self) -> set[int]:
        """Return the numbers of the weights that steps write."""
        return {access.region for step in self.steps for access in step.writes} & self.weight_bytes.keys()


# ---- JSON ----

_kinds: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Region, Access, Pointer, Number, KernelStep, LibraryStep, CopyStep, KernelSpec)
}


def to_json(work: Work) -> str:
    """Return the work as JSON; kernels that several steps launch are written once."""
    kernels: dict[KernelSpec, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, KernelSpec):
            return {"kernel": kernels.setdefault(value, len(kernels))}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
            return {"is": type(value).__name__, **fields}
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, frozenset):
            return sorted(value)
        if isinstance(value, (tuple, list)):
            return [plain(each) for each in value]
        return value

    body = {name: plain(getattr(work, name)) for name in ("regions", "steps", "products", "elsewhere")}
    specs = [{one.name: getattr(spec, one.name) for one in dataclasses.fields(KernelSpec)} for spec in kernels]
    return json.dumps({"format": FORMAT, "kernels": specs, **body})


def from_json(text: str) -> Work:
    """Return the work that `to_json` wrote as ``text``. Raises ValueError for JSON of another format."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f"file of kernels: expected a JSON object with format {FORMAT} that describes the kernels of a Run"
        )
    kernels = [KernelSpec(**{**spec, "signature": tuple(spec["signature"])}) for spec in data["kernels"]]

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(made(each) for each in value)
        if isinstance(value, Mapping):
            if "kernel" in value and "is" not in value:
                return kernels[value["kernel"]]
            fields = {name: made(each) for name, each in value.items() if name != "is"}
            if "contents" in fields:
                fields["contents"] = base64.b64decode(fields["contents"])
            if "flags" in fields:
                fields["flags"] = frozenset(fields["flags"])
            return _kinds[value["is"]](**fields)
        return value

    regions, steps, products, elsewhere = (made(data[name]) for name in ("regions", "steps", "products", "elsewhere"))
    return Work(regions, steps, tuple((*product, ())[:3] for product in products), elsewhere)


def distinct(accesses: Sequence[Access]) -> tuple[Access, ...]:
    """Return the accesses, joined where they overlap or are adjacent."""
    found: list[Access] = []
    for access in sorted(accesses, key=lambda one: (one.region, one.offset)):
        last = found[-1] if found else None
        if last is None or last.region != access.region or access.offset > last.offset + last.nbytes:
            found.append(access)
        else:
            end = max(last.offset + last.nbytes, access.offset + access.nbytes)
            found[-1] = Access(last.region, last.offset, end - last.offset)
    return tuple(found)
