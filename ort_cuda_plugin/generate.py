"""Generates tokens on the device, with decoders as onnxruntime-genai's builder writes them.

::

    decoder = Decoder("model.onnx", max_length=2048, candidates=50)
    for token in decoder.generate([[1, 15043]], new_tokens=100, temperature=0.8, top_p=0.9, seed=1, stop={2}):
        ...

Past and present K/V caches share one buffer of ``max_length`` tokens, and the mask has the width of that buffer. So all
sizes are the same for each decoded token, each token is one launch of a CUDA graph, and only the token is read back. A
LongRoPE model chooses its rotary factors by the mask's width: short factors up to a limit, long factors above it. So
the mask is as wide as this limit until the sequences reach it; then the mask is widened, and the cache is recomputed.

Inputs whose names begin with "past" are caches of keys and values, with a row for each token, or states of a fixed
size, as in convolutions and linear attention. A state depends on all earlier tokens: it cannot be rewound, and padding
tokens must not be computed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from .api import GivenOptions, chosen_device, session
from .context.storage.files import ModelFolder
from .context.storage.source_model import SourceModel
from .model import token_choice as choice
from .model.mask_widths import width_limits
from .model.ort.ort_schema import TENSOR_TYPES

if TYPE_CHECKING:
    from .model.ir import Array, DType

_CACHE_RANK = 4
_TOKEN_INPUTS = (choice.IDS, choice.ATTENTION, choice.POSITIONS)
_KNOWN_INPUTS = {*_TOKEN_INPUTS, choice.UNIFORM, choice.TEMPERATURE, choice.TOP_K, choice.TOP_P}
_LARGEST_DRAW = np.float32(1 - 2**-23)
"""Largest uniform random number: 1 - 2**-23, so that its product with a sum of probabilities is below that sum."""


class Decoder:
    """A model with its cache, for ``batch`` sequences of at most ``max_length`` tokens.

    Args:
        model: path of the model; beside it, ``genai_config.json`` may say the size of a head.
        max_length: tokens that the cache holds for each sequence.
        batch: sequences that are decoded together.
        candidates: maximum number of tokens from which sampling chooses; 0: always the most probable token.
        head_size: columns of a key, if neither the model nor ``genai_config.json`` has it.
        emulate: True for the emulated device, False for a GPU, None as `ort_cuda_plugin.session` chooses.
        provider_options: as for `ort_cuda_plugin.session`.

    Raises: ValueError: the model is not such a decoder, or the sizes of its cache are unknown; a number is not
        positive. Others: those of `ort_cuda_plugin.session`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_length: int,
        batch: int = 1,
        candidates: int = 0,
        head_size: int | None = None,
        emulate: bool | None = None,
        provider_options: GivenOptions | None = None,
    ) -> None:
        if max_length < 1 or batch < 1 or candidates < 0 or (head_size is not None and head_size < 1):
            raise ValueError(
                f"Decoder: got max_length={max_length}, batch={batch}, candidates={candidates}, head_size={head_size}, "
                "expected max_length, batch and head_size of at least 1, and candidates of at least 0"
            )
        path = Path(model)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        model_bytes = path.read_bytes()
        whole = choice.with_token(model_bytes, candidates)
        limits = width_limits(model_bytes, choice.ATTENTION, _integers(model_bytes, path))
        self.session = session(whole, emulate=emulate, provider_options=provider_options, sess_options=options)
        self.max_length, self.batch, self.candidates = max_length, batch, candidates
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        """All tokens of the sequences. The last token of each may not be in the cache yet."""
        self._limits = [*(x for x in limits if 0 < x < max_length), max_length]
        """Widths of masks in tokens, ascending. A mask is used until the cache holds as many tokens as it is wide."""
        self._cached, self._cached_for = np.zeros(batch, np.int64), 0
        """Cached tokens of each sequence, and the mask width with which their keys were computed."""
        device = chosen_device(emulate, {key: str(value) for key, value in (provider_options or {}).items()})
        self._memory = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        inputs = {x.name: x for x in self.session.get_inputs()}
        _check_inputs(inputs, path)
        self._has_positions = choice.POSITIONS in inputs
        self._planes = choice.read_inputs(model_bytes).position_planes
        self._ids = self._on_device(np.zeros((batch, 1), np.int64))
        self._positions = self._on_device(self._in_planes(np.zeros((batch, 1), np.int64)))
        outputs = {x.name for x in self.session.get_outputs()}
        self._present: dict[str, str] = {}
        self._cache: dict[str, Any] = {}
        self._states: list[_State] = []
        for name, x in inputs.items():
            if name.startswith("past"):
                self._present[name] = _present_of(name, outputs, path)
                if _is_state(x):
                    self._states.append(_State(x, batch, self._memory))
                    self._cache[name] = self._states[-1].value
                else:
                    self._cache[name] = _zeros(
                        self._cache_shape(x, path, head_size), TENSOR_TYPES[x.type], self._memory
                    )
        self._changes = 0
        """Number of calls of `generate` and `rewind`. A generation raises an error if the number has changed."""
        self._adapter: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._set(1.0, max(candidates, 1), 1.0, None)
        self._steps = {limit: self._make_step(limit) for limit in self._limits}
        """By mask width: the IO binding of a decoding Run, and its mask, int64 [batch, width]."""

    def generate(
        self,
        prompt: Sequence[Sequence[int]] | Array,
        *,
        new_tokens: int,
        stop: Collection[int] = (),
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[Array]:
        """Yield the next token of each sequence, int64 [batch], up to ``new_tokens`` times.

        A second call continues after the first one: its prompt follows the tokens that were generated. Generation ends
        when each sequence has generated a token of ``stop``, or the cache is full. ``top_k``, ``top_p``,
        ``temperature`` and ``seed`` (None: a new seed in each call) are for a decoder with ``candidates``.

        Raises:
            ValueError: the prompt has another number of sequences, is empty or too long; a setting is out of its range.
            RuntimeError: `rewind` or another call of `generate` changed the sequences since the last token.
        """
        top_k = max(self.candidates, 1) if top_k is None else top_k
        if not 0 < top_k <= max(self.candidates, 1) or not 0 < top_p <= 1 or temperature <= 0:
            raise ValueError(
                f"generate: got top_k={top_k}, top_p={top_p}, temperature={temperature}, expected top_k from 1 to "
                f"{max(self.candidates, 1)} (the decoder's candidates), top_p above 0 and at most 1, and temperature "
                "above 0"
            )
        self._set(temperature, top_k, top_p, seed)
        self._append(prompt)
        self._changes += 1
        begun = self._changes
        stopped = np.zeros(self.batch, np.bool_)
        for number in range(new_tokens):
            if self._changes != begun:
                raise RuntimeError(
                    f"generate: token {number} of {new_tokens} cannot be generated: after the token before, rewind or "
                    "another call of generate changed the sequences. Stop this generation first, and call generate "
                    "with the prompt that follows the remaining tokens"
                )
            if number:
                self._decode()
            token = self._ids.numpy()[:, 0]
            self.tokens = [[*known, x] for known, x in zip(self.tokens, token.tolist(), strict=True)]
            yield token
            stopped |= np.isin(token, list(stop))
            if stopped.all() or max(map(len, self.tokens)) > self.max_length:
                return

    def rewind(self, length: int) -> None:
        """Drop all but the first ``length`` tokens of each sequence. The next prompt follows these tokens.

        A model with states of a fixed size then computes these tokens again. A generation that has not ended cannot go
        on: its next token is an error.
        """
        if not 0 <= length <= (longest := max(map(len, self.tokens))):
            raise ValueError(f"length={length}: expected 0 to {longest}, the number of tokens")
        self._changes += 1
        self.tokens = [known[:length] for known in self.tokens]
        if self._states and (self._cached > length).any():
            length = 0
        self._cached = np.minimum(self._cached, length)

    def use_adapter(self, parameters: Mapping[str, Any] | None) -> None:
        """Use a LoRA adapter from now on, or with None the model's defaults.

        The next Run, of a prompt or of a token, computes the cache of all tokens so far again with the adapter.

        Args:
            parameters: those of a `DeviceAdapter`, or other ``OrtValue`` objects by name of the model's input.

        Raises: ValueError: ``parameters`` names an input that the model does not have, or that has no default value.
        """
        known = {x.name for x in self.session.get_overridable_initializers()}
        if unknown := sorted((parameters or {}).keys() - known):
            raise ValueError(
                f"parameter {unknown[0]}: the model has no input of this name with a default value. Use an adapter for "
                f"this model, whose inputs with defaults are {', '.join(sorted(known)) or 'none'}"
            )
        self._adapter = dict(parameters or {})
        self._steps = {limit: self._make_step(limit) for limit in self._limits}
        self._cached, self._cached_for = np.zeros(self.batch, np.int64), 0

    def _append(self, prompt: Sequence[Sequence[int]] | Array) -> None:
        """Run the prompt, and earlier tokens that are not in the cache, and choose the next token of each sequence."""
        if len(prompt) != self.batch:
            raise ValueError(f"prompt: got {len(prompt)} sequences, expected {self.batch}, the batch of the Decoder")
        tokens = [[*known, *map(int, new)] for known, new in zip(self.tokens, prompt, strict=True)]
        lengths = np.array([len(row) for row in tokens])
        begin, count = self._first_new(lengths), int(lengths.max())
        if (lengths <= self._cached).any() or count > self.max_length:
            raise ValueError(
                f"prompt: got {', '.join(str(len(row)) for row in prompt)} new tokens after "
                f"{', '.join(str(len(row)) for row in self.tokens)}, expected at least 1 new token for each sequence, "
                f"and at most max_length={self.max_length} tokens with the earlier ones. Change the prompt, or create "
                "a Decoder with a larger max_length"
            )
        self.tokens = tokens
        self._compute(begin)

    def _decode(self) -> None:
        """Compute the last token of each sequence, and choose the next one."""
        limit = self._limit(int(self._cached.max()) + 1)
        if limit != self._cached_for:
            self._compute(0)
            return
        self.session.run_with_iobinding(self._steps[limit][0])
        self._cached += 1

    def _limit(self, length: int) -> int:
        return next(limit for limit in self._limits if length <= limit)

    def _first_new(self, lengths: Array) -> int:
        """Return the index of the first token that a Run for sequences of ``lengths`` has to compute."""
        # Sequences of different lengths are padded at the end. `_compute` can do that only if it begins at token 0.
        is_even = len(np.unique(lengths)) == len(np.unique(self._cached)) == 1
        of_same_width = lengths.max() > self.max_length or self._limit(int(lengths.max())) == self._cached_for
        return int(self._cached[0]) if is_even and of_same_width else 0

    def _compute(self, begin: int) -> None:
        """Run the tokens from ``begin`` on, and choose the next one of each sequence."""
        lengths = np.array([len(row) for row in self.tokens])
        count = int(lengths.max())
        if begin == 0:
            for state in self._states:
                state.clear()
        # Padding tokens would change states. So a model with states has one Run for each distinct length, from the
        # previous length to that one.
        ends = np.unique(lengths).tolist() if self._states else [count]
        chosen = np.zeros((self.batch, 1), np.int64)
        for end in ends:
            padded = np.array([row[begin:end] + [0] * (end - max(len(row), begin)) for row in self.tokens])
            places = np.arange(count) + np.zeros_like(lengths)[:, None]
            seen = places < (lengths[:, None] if len(ends) == 1 else end)
            given = padded, seen.astype(np.int64), self._in_planes(places[:, begin:end])
            self.session.run_with_iobinding(self._bound(*(self._on_device(np.ascontiguousarray(x)) for x in given)))
            if len(ends) > 1:
                chosen[lengths == end] = self._ids.numpy()[lengths == end]
                for state in self._states:
                    state.keep(lengths == end, lengths < end)
            begin = end
        if len(ends) > 1:
            self._ids.update_inplace(chosen)
        self._cached, self._cached_for = lengths, self._limit(count)
        self._positions.update_inplace(np.ascontiguousarray(self._in_planes(lengths[:, None])))
        self._steps[self._cached_for][1].update_inplace(
            (np.arange(self._cached_for) <= lengths[:, None]).astype(np.int64)
        )

    def _make_step(self, limit: int) -> tuple[Any, Any]:
        mask = self._on_device(np.zeros((self.batch, limit), np.int64))
        step = self._bound(self._ids, mask, self._positions)
        step.bind_ortvalue_output(choice.MASK, mask)
        if self._has_positions:
            step.bind_ortvalue_output(choice.POSITION, self._positions)
        return step, mask

    def _in_planes(self, positions: Array) -> Array:
        """Expand positions to the shape of the model's input, which may have several positions per token."""
        return positions if self._planes is None else np.repeat(positions[None], self._planes, 0)

    def _bound(self, ids: Any, mask: Any, positions: Any) -> Any:
        """Return an IO binding for Runs: past and present are one buffer, and so are the token output and the token
        input of the next Run.
        """
        bound = self.session.io_binding()
        bound.bind_ortvalue_input(choice.IDS, ids)
        bound.bind_ortvalue_input(choice.ATTENTION, mask)
        if self._has_positions:
            bound.bind_ortvalue_input(choice.POSITIONS, positions)
        bound.bind_ortvalue_output(choice.TOKEN, self._ids)
        for name, value in self._cache.items():
            bound.bind_ortvalue_input(name, value)
            bound.bind_ortvalue_output(self._present[name], value)
        for name, value in (*self._settings.items(), *self._adapter.items()):
            bound.bind_ortvalue_input(name, value)
        return bound

    def _set(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
        """Write the sampling parameters to the tensors that all Runs read."""
        if not self.candidates:
            return
        draws = np.random.default_rng(seed).random((self.batch, self.max_length), np.float32)
        for name, array in (
            (choice.UNIFORM, draws * _LARGEST_DRAW),
            (choice.TEMPERATURE, np.array([temperature], np.float32)),
            (choice.TOP_K, np.array([top_k], np.int64)),
            (choice.TOP_P, np.array([top_p], np.float32)),
        ):
            if name in self._settings:
                self._settings[name].update_inplace(array)
            else:
                self._settings[name] = self._on_device(array)

    def _on_device(self, array: Array) -> Any:
        memory = self._memory
        return ort.OrtValue.ortvalue_from_numpy(array, "gpu", memory.device_id, memory.device_vendor_id)

    def _cache_shape(self, x: Any, path: Path, head_size: int | None) -> tuple[int, int, int, int]:
        if len(x.shape) != _CACHE_RANK:
            raise ValueError(
                f"{path}: input {x.name}: got the shape {x.shape}, expected [batch, heads, tokens, head size]"
            )
        heads, size = x.shape[1], head_size or x.shape[3]
        config = path.parent / "genai_config.json"
        if not isinstance(size, int) and config.exists():
            size = _configured_head_size(config)
        if not isinstance(heads, int) or not isinstance(size, int):
            raise ValueError(
                f"{path}: input {x.name}: got the shape {x.shape}, expected numbers for heads and head size. Pass "
                "head_size if only the head size is symbolic, else export the model with a fixed number of heads"
            )
        return self.batch, heads, self.max_length, size


def _configured_head_size(config: Path) -> int:
    """Return the head size in ``genai_config.json``.

    Raises:
        ValueError: the file lacks the size, or cannot be read.
    """
    try:
        value = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{config}: cannot be read as JSON ({error}). Correct the file, or pass head_size") from error
    for key in ("model", "decoder", "head_size"):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{config}: model.decoder.head_size: got {value!r}, expected a positive integer. Correct the file, or pass "
            "head_size"
        )
    return value


def _check_inputs(inputs: Mapping[str, Any], path: Path) -> None:
    """Check that a `Decoder` can supply all inputs of the model at ``path``.

    Raises ValueError for an input that is neither a known one nor a state (``past...``), and for a state that is not a
    tensor of numbers.
    """
    for name, x in inputs.items():
        if name.startswith("past") and (x.type not in TENSOR_TYPES or x.type == "tensor(string)"):
            raise ValueError(f"{path}: input {name}: got the type {x.type}, expected a tensor of numbers")
        if name not in _KNOWN_INPUTS and not name.startswith("past"):
            raise ValueError(
                f"{path}: input {name}: a Decoder cannot supply its values, expected {', '.join(_TOKEN_INPUTS)}, and "
                'states whose names begin with "past"'
            )


class _State:
    """One input that is a state of fixed size for each sequence, on the device."""

    def __init__(self, x: Any, batch: int, memory: Any) -> None:
        shape = [size if isinstance(size, int) else batch for size in x.shape]
        dtype = TENSOR_TYPES[x.type]
        self.value = _zeros(shape, dtype, memory)
        self._axis = next((axis for axis, size in enumerate(x.shape) if not isinstance(size, int)), 0)
        self._array = np.zeros(shape, dtype.numpy)
        self._host = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(self._array, dtype.onnx)
        self._kept = np.zeros_like(self._array)

    def clear(self) -> None:
        self._array[...] = 0
        ort.copy_tensors([self._host], [self.value])

    def keep(self, ended: Array, over: Array) -> None:
        """Save the states of sequences that have ``ended``, and restore those of sequences that had ended before
        (``over``).
        """
        ort.copy_tensors([self.value], [self._host])
        present, kept = (np.moveaxis(x, self._axis, 0) for x in (self._array, self._kept))
        kept[ended], present[over] = present[ended], kept[over]
        ort.copy_tensors([self._host], [self.value])


def _zeros(shape: Sequence[int], dtype: DType, memory: Any) -> Any:
    """Return a tensor of zeros on the device, also of types that NumPy lacks."""
    value = ort.OrtValue.ortvalue_from_shape_and_type(
        shape, dtype.onnx, "gpu", memory.device_id, memory.device_vendor_id
    )
    zeros = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, dtype.numpy), dtype.onnx)
    ort.copy_tensors([zeros], [value])
    return value


def _is_state(x: Any) -> bool:
    """Return whether an input's size is independent of the number of tokens."""
    is_cache = x.name.rpartition(".")[2] in ("key", "value")
    return not is_cache and sum(not isinstance(size, int) for size in x.shape) <= 1


def _present_of(past: str, outputs: Collection[str], path: Path) -> str:
    """Return the name of the output that returns the new contents of input ``past``. Raises ValueError without one."""
    names = [past.replace(prefix, "present", 1) for prefix in ("past_key_values", "past") if past.startswith(prefix)]
    for name in names:
        if name in outputs:
            return name
    raise ValueError(
        f"{path}: input {past}: the model has no output with its new value, expected one named {' or '.join(names)}"
    )


def _integers(model: bytes, path: Path) -> Callable[[str], int | None]:
    """Return a function from an initializer's name to its single integer, also from external data.

    The function returns None for any other name.
    """
    source = SourceModel(model, str(path), ModelFolder.of(path))

    def integer(name: str) -> int | None:
        tensor = source.tensors.get(name)
        if tensor is None or tensor.dtype is None or not tensor.dtype.is_integer or math.prod(tensor.dims) != 1:
            return None
        return int(source.array(tensor).reshape(-1)[0])

    return integer
