"""The constants of a context: stored contents, or references to initializers of the source model.

A context without weights names initializers of its source model. Tensors that are derived from them, such as weights in
a kernel's layout, are stored as recipes, so that new weights can replace the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...model.ir import Array, Constant, ConstantView, DType, Parameter, Recipe
from ...model.recipes import FUNCTIONS, derived_constant, parts_inside
from .container import Builder, Container, Json, array_bytes
from .errors import ContextError
from .graph_data import dims_of, dtype_of
from .source_model import SourceModel, SourceTensor

_UNIFORM_BYTES = 1 << 12
"""Bytes above which a constant whose elements are all equal is stored as one element, if weights are left out."""
_MAX_UNIFORM_BYTES = 1 << 34
"""Maximum bytes of a constant that is stored as one element: a small file must not claim all memory."""
_MAX_GROWTH, _FREE_GROWTH = 16, 1 << 20
"""A recipe may make at most `_MAX_GROWTH` times the bytes of its operands, plus `_FREE_GROWTH` bytes."""


@dataclass(frozen=True, eq=False)
class Source:
    """A source model, from which a context reads initializers. ``file`` is its name in the context."""

    file: str
    model: SourceModel

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return the hashes that `digest` has computed, by the names of the initializers."""
        return {}

    def digest(self, tensor: SourceTensor) -> str:
        """Return the hash of an initializer as it is stored, in hexadecimal. Raises ContextError."""
        if tensor.name not in self.digests:
            self.digests[tensor.name] = self.model.digest(tensor).hex()
        return self.digests[tensor.name]


class ConstantWriter:
    """Assigns numbers to constants. ``used`` collects the numbers that `number` returned."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._numbers: dict[Constant, int] = {}
        self._constants: list[Constant] = []
        self._rows: list[Json] = []
        self._sources: list[Source] = []
        self._inside: dict[Constant, ConstantView] = {}
        self.used: set[int] = set()

    def number(self, constant: Constant, source: Source | None, for_plans: bool = True) -> int:
        """Return the number of a constant. Unchanged initializers of ``source`` are not stored; None: all are stored.

        Without ``for_plans`` only the graph uses the constant: it becomes a view of a stored constant with the same
        contents if there is one.

        Raises:
            ContextError: the source cannot be read.
        """
        found = self._numbers.get(constant)
        if found is None:
            row = None if for_plans or source is not None else self._row_inside(constant)
            row = row or self._row(constant, source)
            found = self._numbers[constant] = len(self._rows)
            self._constants.append(constant)
            self._rows.append({"dtype": constant.dtype.onnx, "shape": list(constant.shape), **row})
            if "array" in row:
                self._inside.update(parts_inside(constant))
        self.used.add(found)
        return found

    def contents(self) -> dict[str, Json]:
        """Return the entries of a context's index that describe constants and their sources.

        Raises ContextError if a source of constants cannot be read.
        """
        for constant, row in zip(self._constants, self._rows, strict=True):
            if "source" in row:
                row["decides"] = constant.decides
        return {"constants": self._rows, "sources": [self._rest(number) for number in range(len(self._sources))]}

    def source_number(self, source: Source) -> int:
        """Return the number of a source in the context; a new source gets the next one."""
        if source not in self._sources:
            self._sources.append(source)
        return self._sources.index(source)

    def _rest(self, number: int) -> Json:
        """Return the entry of source ``number``: its file, and hashes of initializers that no constant refers to.

        Such initializers were folded into constants, or are unused.
        """
        source = self._sources[number]
        named = {row["source"][1] for row in self._rows if "source" in row and row["source"][0] == number}
        tensors = [tensor for name, tensor in source.model.tensors.items() if name not in named]
        readable = [tensor for tensor in tensors if tensor.dtype is not None and tensor.dtype.is_supported]
        return {"file": source.file, "rest": {tensor.name: source.digest(tensor) for tensor in readable}}

    def _row(self, constant: Constant, source: Source | None) -> Json:
        flags = {"initializer": constant.is_initializer, "state": constant.is_state}
        if source is not None and not constant.is_state:
            if (row := self._source_row(constant, source) or self._recipe_row(constant, source)) is not None:
                return {**row, **flags}
            if constant.nbytes > _UNIFORM_BYTES and _is_uniform(constant.array):
                return {"array": self._builder.add(constant.array.reshape(-1)[:1]), "repeats": True, **flags}
        again = (lambda: array_bytes(constant.array)) if constant.is_file else None
        return {"array": self._builder.add(constant.array, again), **flags}

    def _source_row(self, constant: Constant, source: Source) -> Json | None:
        tensor = source.model.tensors.get(constant.name) if constant.name else None
        if tensor is None or (tensor.dtype, tensor.dims) != (constant.dtype, constant.shape):
            return None
        if not np.array_equal(array_bytes(constant.array), array_bytes(source.model.array(tensor))):
            return None  # ONNX Runtime's optimizer has changed the initializer
        return {"source": [self.source_number(source), tensor.name], "digest": source.digest(tensor)}

    def _recipe_row(self, constant: Constant, source: Source) -> Json | None:
        """Return the entry of a constant as a recipe.

        Return None if the constant has no recipe, is too large for its operands, or if all operands would be stored.
        """
        recipe = constant.recipe
        if recipe is None or constant.nbytes > _allowed_bytes(recipe.parts):
            return None
        if not any(self._is_left_out(part.constant, source) for part in recipe.parts):
            return None
        parts = [
            [self.number(part.constant, source), list(part.shape), list(part.strides), part.offset]
            for part in recipe.parts
        ]
        return {"recipe": [recipe.function, parts, [_encoded(value) for value in recipe.parameters]]}

    def _row_inside(self, constant: Constant) -> Json | None:
        view = self._inside.get(constant)
        if view is None:
            return None
        home = [self.number(view.constant, None), list(view.shape), list(view.strides), view.offset]
        return {
            "recipe": ["view", [home], []],
            "initializer": constant.is_initializer,
            "state": constant.is_state,
        }

    def _is_left_out(self, constant: Constant, source: Source) -> bool:
        return "array" not in self._rows[self.number(constant, source)]


class StoredConstants:
    """The constants of a context.

    ``sources`` maps the numbers of source models to the models. The caller that loads the context sets the entries.

    Raises ContextError, and the exceptions of `MALFORMED`.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._rows: list[Json] = container.index["constants"]
        self.files: list[str] = []
        self._rest: list[dict[str, str]] = []
        for row in container.index.get("sources", ()):
            self.files.append(str(row["file"]))
            self._rest.append({str(name): str(digest) for name, digest in row["rest"].items()})
        self.sources: dict[int, Source] = {}
        self.all: list[Constant] = []
        for row in self._rows:
            self.all.append(self._constant(row))

    def check(self, numbers: Sequence[int], accepts_new: bool) -> list[str]:
        """Compare initializers with their contents at compilation, and return the names of those that differ.

        Raises:
            ContextError: an initializer is missing, has another type or shape, or differs although ``accepts_new`` is
                false or the context depends on its contents.
        """
        differing = []
        for number in numbers:
            row = self._rows[number]
            if "source" not in row:
                continue
            source, tensor = self._place(row)
            if source.digest(tensor) == row["digest"]:
                continue
            subject = f"initializer {tensor.name!r} of {source.model.subject}"
            if not accepts_new:
                raise ContextError(
                    f"{subject} differs from the one that {self._container.subject} was compiled with; use the original"
                    " model, or context_refit=1 to run with new weights"
                )
            if row["decides"]:
                raise ContextError(
                    f"{subject} has new contents, but the compiled plans depend on the old contents; compile the model "
                    "again"
                )
            differing.append(tensor.name)
        return differing

    def check_rest(self, number: int) -> None:
        """Check that initializers to which no constant refers have not changed.

        ONNX Runtime may have folded them into constants.

        Raises:
            ContextError: an initializer differs.
        """
        source = self._source(number)
        for name, digest in self._rest[number].items():
            tensor = source.model.tensors.get(name)
            if tensor is None or source.digest(tensor) != digest:
                raise ContextError(
                    f"initializer {name!r} of {source.model.subject} is missing or has new contents, but the context "
                    "may hold constants that ONNX Runtime computed from the old contents; compile the model again"
                )

    def _source(self, number: Any) -> Source:
        if number not in self.sources:
            raise self._container.damaged(f"a constant refers to source model {number!r}, which is not in the context")
        return self.sources[number]

    def _place(self, row: Json) -> tuple[Source, SourceTensor]:
        """Return a constant's source and initializer. Raises ContextError if the source has no such initializer."""
        number, name = row["source"]
        source = self._source(number)
        tensor = source.model.tensors.get(name)
        wanted = f"initializer {name!r} of type {DType(row['dtype']).name} and shape {row['shape']}"
        if tensor is None:
            raise ContextError(
                f"{source.model.subject} has no {wanted}, which {self._container.subject} needs; use the original "
                "model, or compile the model again"
            )
        if (tensor.dtype, tensor.dims) != (DType(row["dtype"]), tuple(row["shape"])):
            kind = "unknown" if tensor.dtype is None else tensor.dtype.name
            raise ContextError(
                f"initializer {name!r} of {source.model.subject} has type {kind} and shape {list(tensor.dims)}; "
                f"{self._container.subject} needs {wanted}; use the original model, or compile the model again"
            )
        return source, tensor

    def _constant(self, row: Json) -> Constant:
        dtype, dims = dtype_of(row["dtype"]), dims_of(row["shape"])
        if not dtype.is_supported:
            raise ValueError(f"a constant: got the type {dtype.name}, expected a type of tensors in device memory")
        if "recipe" in row:
            return self._recipe(row["recipe"], dtype, dims)

        def from_source() -> Array:
            source, tensor = self._place(row)
            return source.model.array(tensor)

        def from_array() -> Array:
            view = self._container.array(row["array"])
            is_uniform = bool(row.get("repeats"))
            wanted = dtype.itemsize if is_uniform else constant.nbytes
            if len(view) != wanted:
                raise self._container.damaged(f"array {row['array']}: got {len(view)} bytes, expected {wanted}")
            if is_uniform and constant.nbytes > _MAX_UNIFORM_BYTES:
                raise self._container.damaged(
                    f"a constant that is stored as one element: got {constant.nbytes} bytes, expected at most "
                    f"{_MAX_UNIFORM_BYTES}"
                )
            array = np.frombuffer(view, dtype.numpy)
            return np.full(dims, array[0]) if is_uniform else array.reshape(dims)

        load = from_source if "source" in row else from_array
        name = str(row["source"][1]) if "source" in row else ""
        flags = {flag: bool(row[key]) for flag, key in (("is_initializer", "initializer"), ("is_state", "state"))}
        constant = Constant(dtype, dims, load, is_file=not row.get("repeats"), name=name, **flags)
        return constant

    def _recipe(self, row: Json, dtype: DType, dims: tuple[int, ...]) -> Constant:
        function, operands, parameters = row
        parts = []
        for number, shape, strides, offset in operands:
            if type(number) is not int or not 0 <= number < len(self.all) or type(offset) is not int:
                raise ValueError(
                    f"a preprocessed weight: got constant {number!r} and offset {offset!r}, expected a constant below "
                    f"{len(self.all)} and an integer"
                )
            part = ConstantView(self.all[number], dims_of(shape), dims_of(strides), offset)
            if not part.is_inside:
                raise ValueError(f"a preprocessed weight reads elements outside of constant {number}")
            parts.append(part)
        allowed = _allowed_bytes(parts)
        recipe = Recipe(function, tuple(parts), tuple(_decoded(value) for value in parameters))
        if function not in FUNCTIONS or not parts:
            raise ValueError(
                f"a preprocessed weight: got the function {function!r} of {len(parts)} constants, expected a known "
                "function of at least one constant"
            )
        constant = derived_constant(recipe, dtype, dims)
        sizes = [constant.nbytes, *(math.prod(part.shape) * part.constant.dtype.itemsize for part in parts)]
        if max(sizes) > allowed:
            raise ValueError(
                f"a preprocessed weight: {function!r} has up to {max(sizes)} bytes, expected at most {allowed}"
            )
        return constant


def _is_uniform(array: Array) -> bool:
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.itemsize}")
    return bool((bits == bits[0]).all())


def _allowed_bytes(parts: Sequence[ConstantView]) -> int:
    return _MAX_GROWTH * sum(part.constant.nbytes for part in parts) + _FREE_GROWTH


def _encoded(value: Parameter) -> Json:
    """Encode a parameter. Floats become hexadecimal text, which JSON cannot round."""
    if isinstance(value, float):
        return value.hex()
    return list(value) if isinstance(value, tuple) else value


def _decoded(value: Json) -> Parameter:
    if isinstance(value, str):
        return float.fromhex(value)
    if isinstance(value, list):
        return dims_of(value)
    if not isinstance(value, (bool, int)):
        raise ValueError(f"a preprocessed weight: expected a number or a shape, got {value!r}")
    return value
