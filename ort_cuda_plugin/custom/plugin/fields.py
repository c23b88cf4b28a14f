"""Fields of applications' plugins: the attributes that a creator takes, and the state that a compiled model stores."""

from __future__ import annotations

import base64
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...model.ir import AttrValue, InvalidModel
from ..operator import Attribute, AttributeKind

FieldData: TypeAlias = "NDArray[Any] | str | bytes"


class PluginFieldType(enum.Enum):
    """The type of a field; CHAR is text, UNKNOWN any bytes, DIMS a shape."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    DIMS = "dims"
    CHAR = "char"
    UNKNOWN = "bytes"

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """Return NumPy's type of the field's elements, None for text and bytes."""
        if self in (PluginFieldType.CHAR, PluginFieldType.UNKNOWN):
            return None
        return np.dtype(np.int64 if self is PluginFieldType.DIMS else self.value)


@dataclass(frozen=True, eq=False)
class PluginField:
    """A field: an array of one dimension, text or bytes.

    Fields of `PluginCreator.get_field_names` have no ``data``; ``length`` is then the number of elements that the field
    must have, 0 for any number.
    """

    name: str
    data: FieldData | None = None
    type: PluginFieldType = PluginFieldType.UNKNOWN
    length: int = 1

    @staticmethod
    def of(name: str, value: Any, type: PluginFieldType) -> PluginField:
        """Return the field ``name`` with ``value``. Raises ValueError if ``type`` cannot hold the value."""
        kind = type.numpy
        if kind is None:
            wanted = str if type is PluginFieldType.CHAR else bytes
            data = bytes(value) if wanted is bytes and isinstance(value, bytearray | memoryview) else value
            if not isinstance(data, wanted):
                raise ValueError(f"field {name!r} = {value!r}, expected {wanted.__name__}")
            return PluginField(name, data, type, len(data))
        array = np.atleast_1d(np.asarray(value))
        cast = array.astype(kind) if array.dtype.kind in "iufb" and array.ndim == 1 else None
        is_exact = cast is not None and (kind.kind == "f" or np.array_equal(cast.astype(object), array.astype(object)))
        if cast is None or not is_exact:
            raise ValueError(
                f"field {name!r} = {value!r}, expected a number or a list of numbers that {type.name} holds exactly"
            )
        return PluginField(name, cast, type, cast.size)

    @property
    def value(self) -> Any:
        """Return the field's data as a Python object: a number, a tuple of numbers, text or bytes."""
        if isinstance(self.data, np.ndarray):
            numbers = tuple(self.data.tolist())
            return numbers[0] if len(numbers) == 1 and self.type is not PluginFieldType.DIMS else numbers
        return self.data


class PluginFieldCollection(Sequence[PluginField]):
    """Fields in order. `get` finds the value of a field by name."""

    def __init__(self, fields: Iterable[PluginField] = ()) -> None:
        self._fields = tuple(fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: Any) -> Any:
        return self._fields[index]

    def __iter__(self) -> Iterator[PluginField]:
        return iter(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field of that name, or the default."""
        return next((field.value for field in self._fields if field.name == name), default)

    def __repr__(self) -> str:
        return ", ".join(f"{field.name} = {_short(field.value)}" for field in self._fields) or "no fields"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def attribute_of(field: PluginField) -> Attribute:
    """Return the declaration of the ONNX attribute for a field; a node may omit the attribute."""
    if field.type.numpy is None:
        return Attribute(field.name, AttributeKind.STRING, optional=True)
    is_single = field.length == 1 and field.type is not PluginFieldType.DIMS
    is_float = field.type.numpy.kind == "f"
    kinds = {
        (True, True): AttributeKind.FLOAT,
        (True, False): AttributeKind.FLOATS,
        (False, True): AttributeKind.INT,
        (False, False): AttributeKind.INTS,
    }
    return Attribute(field.name, kinds[is_float, is_single], optional=True)


def fields_of(
    wanted: PluginFieldCollection, attributes: Mapping[str, AttrValue | None], label: str
) -> PluginFieldCollection:
    """Return those of the fields ``wanted`` that a node has as attributes, with their values.

    Raises InvalidModel, whose message names plugin, field and value, if a value does not fit its field.
    """
    found = []
    for field in wanted:
        value: Any = attributes.get(field.name)
        if value is None:
            continue
        if field.type is PluginFieldType.UNKNOWN and isinstance(value, str):
            value = value.encode("utf-8", "surrogateescape")
        try:
            made = PluginField.of(field.name, value, field.type)
        except ValueError as error:
            raise InvalidModel(f"{label}: {error}") from error
        is_text = field.type.numpy is None
        if field.length and not is_text and made.length != field.length:
            raise InvalidModel(
                f"{label}: field {field.name!r} = {_short(value)} has {made.length} elements, expected {field.length}"
            )
        found.append(made)
    return PluginFieldCollection(found)


# ---- encoding for compiled models ----


def fields_to_json(fields: Iterable[PluginField]) -> list[list[str]]:
    """Encode name, type and data of each field."""
    rows = []
    for field in fields:
        data = field.data
        raw = data.encode() if isinstance(data, str) else data.tobytes() if isinstance(data, np.ndarray) else data
        rows.append([field.name, field.type.name, base64.b64encode(raw or b"").decode()])
    return rows


def fields_from_json(rows: Iterable[Sequence[str]]) -> PluginFieldCollection:
    """Decode fields that `fields_to_json` encoded. Raises ValueError or KeyError for other data."""
    found = []
    for name, type_name, text in rows:
        type_, raw = PluginFieldType[type_name], base64.b64decode(text, validate=True)
        value: FieldData
        if type_ is PluginFieldType.CHAR:
            value = raw.decode()
        elif type_.numpy is None:
            value = raw
        else:
            value = np.frombuffer(raw, type_.numpy)
        found.append(PluginField(str(name), value, type_, len(value)))
    return PluginFieldCollection(found)
