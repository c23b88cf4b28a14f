"""Generates tokens with a decoder as onnxruntime-genai's builder writes it, all on the device.

::

    decoder = Decoder("model.onnx", max_length=2048, candidates=50)
    for token in decoder.generate([[1, 15043]], new_tokens=100, temperature=0.8, top_p=0.9, seed=1, stop={2}):
        ...

Past and present are one buffer. No size differs from one decoded token to the next, so that each is one launch of a
CUDA graph, and nothing but the token is read back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from .api import chosen_device, session
from .model import token_choice as choice
from .model.ort_schema import TENSOR_TYPES

if TYPE_CHECKING:
    from .model.ir import Array, DType

_LARGEST_DRAW = np.float32(1 - 2**-23)
"""So large that no product with a sum of probabilities rounds to that sum."""


class Decoder:
    """A model with its cache, for ``batch`` sequences of at most ``max_length`` tokens.

    Args:
        model: path of the model; beside it, ``genai_config.json`` may say the size of a head.
        max_length: tokens that the cache holds for each sequence.
        batch: sequences that are decoded together.
        candidates: tokens that sampling chooses among, at most; 0: always the most probable one.
        head_size: columns of a key, where neither the model nor ``genai_config.json`` says it.
        emulate: True for the emulated device, False for a GPU, None as `ort_cuda_plugin.session` chooses.
        provider_options: as for `ort_cuda_plugin.session`.

    Raises:
        ValueError: the model is no such decoder, or does not say the sizes of its cache; a number is not positive.
        Others: those of `ort_cuda_plugin.session`.
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
        provider_options: Mapping[str, object] | None = None,
    ) -> None:
        if max_length < 1 or batch < 1 or candidates < 0:
            raise ValueError(f"a decoder with max_length={max_length}, batch={batch}, candidates={candidates}")
        path = Path(model)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        whole = choice.with_token(path.read_bytes(), candidates)
        self.session = session(whole, emulate=emulate, provider_options=provider_options, sess_options=options)
        self.max_length, self.batch, self.candidates = max_length, batch, candidates
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        """All tokens of the sequences, the last one of which may not be in the cache yet."""
        self._cached = np.zeros(batch, np.int64)
        device = chosen_device(emulate, {key: str(value) for key, value in (provider_options or {}).items()})
        self._memory = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        self._has_positions = choice.POSITIONS in {x.name for x in self.session.get_inputs()}
        self._ids = self._on_device(np.zeros((batch, 1), np.int64))
        self._mask = self._on_device(np.zeros((batch, max_length), np.int64))
        self._positions = self._on_device(np.zeros((batch, 1), np.int64))
        self._cache = {
            x.name: self._zeros(self._cache_shape(x, path, head_size), TENSOR_TYPES[x.type])
            for x in self.session.get_inputs()
            if x.name.startswith("past")
        }
        self._settings: dict[str, Any] = {}
        self._set(1.0, max(candidates, 1), 1.0, None)
        self._step = self._bound(self._ids, self._mask, self._positions)
        self._step.bind_ortvalue_output(choice.MASK, self._mask)
        if self._has_positions:
            self._step.bind_ortvalue_output(choice.POSITION, self._positions)

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
        """Gives up to ``new_tokens`` times the next token of each sequence, int64 [batch].

        A second call goes on where the first one ended: its prompt comes after the tokens that were generated. It ends
        where every sequence has had a token of ``stop``, and where the cache is full. ``top_k``, ``top_p``,
        ``temperature`` and ``seed`` (None: another one in each call) are for a decoder with ``candidates``.

        Raises:
            ValueError: the prompt has another number of sequences, is empty or too long; a setting is out of its range.
        """
        top_k = max(self.candidates, 1) if top_k is None else top_k
        if not 0 < top_k <= max(self.candidates, 1) or not 0 < top_p <= 1 or temperature <= 0:
            raise ValueError(
                f"top_k={top_k}, top_p={top_p}, temperature={temperature}: top_k is from 1 to the candidates "
                f"({self.candidates}), top_p above 0 and at most 1, temperature above 0"
            )
        self._set(temperature, top_k, top_p, seed)
        self._append(prompt)
        stopped = np.zeros(self.batch, np.bool_)
        for number in range(new_tokens):
            if number:
                self.session.run_with_iobinding(self._step)
                self._cached += 1
            token = self._ids.numpy()[:, 0]
            self.tokens = [[*known, x] for known, x in zip(self.tokens, token.tolist(), strict=True)]
            yield token
            stopped |= np.isin(token, list(stop))
            if stopped.all() or self._cached.max() == self.max_length:
                return

    def rewind(self, length: int) -> None:
        """Forgets all but the first ``length`` tokens of each sequence; the next prompt comes after these."""
        if not 0 <= length <= (longest := max(map(len, self.tokens))):
            raise ValueError(f"there are {longest} tokens, not {length}")
        self.tokens = [known[:length] for known in self.tokens]
        self._cached = np.minimum(self._cached, length)

    def _append(self, prompt: Sequence[Sequence[int]] | Array) -> None:
        """Runs the prompt, and what is not in the cache of the tokens before it, and chooses a token."""
        if len(prompt) != self.batch:
            raise ValueError(f"the prompt has {len(prompt)} sequences, not {self.batch}")
        tokens = [[*known, *map(int, new)] for known, new in zip(self.tokens, prompt, strict=True)]
        lengths = np.array([[len(row)] for row in tokens])
        # A sequence's tokens stand together from 0 on: padding is behind them, and only where the Run begins at 0.
        is_even = len(np.unique(lengths)) == len(np.unique(self._cached)) == 1
        begin, count = int(self._cached[0]) if is_even else 0, int(lengths.max())
        if (lengths[:, 0] <= self._cached).any() or count > self.max_length:
            raise ValueError(f"{count - begin} new tokens, and {begin} of {self.max_length} in the cache")
        new = np.array([row[begin:] + [0] * (count - len(row)) for row in tokens])
        places = np.arange(self.max_length) + 0 * lengths
        given = new, (places < lengths)[:, :count].astype(np.int64), places[:, begin:count]
        self.session.run_with_iobinding(self._bound(*(self._on_device(np.ascontiguousarray(x)) for x in given)))
        self.tokens, self._cached = tokens, lengths[:, 0]
        self._positions.update_inplace(lengths)
        self._mask.update_inplace((places <= lengths).astype(np.int64))

    def _bound(self, ids: Any, mask: Any, positions: Any) -> Any:
        """What every Run has: the cache in place, and the token, which goes where the next Run reads it."""
        bound = self.session.io_binding()
        bound.bind_ortvalue_input(choice.IDS, ids)
        bound.bind_ortvalue_input(choice.ATTENTION, mask)
        if self._has_positions:
            bound.bind_ortvalue_input(choice.POSITIONS, positions)
        bound.bind_ortvalue_output(choice.TOKEN, self._ids)
        for name, value in self._cache.items():
            bound.bind_ortvalue_input(name, value)
            bound.bind_ortvalue_output(name.replace("past_key_values", "present", 1), value)
        for name, value in self._settings.items():
            bound.bind_ortvalue_input(name, value)
        return bound

    def _set(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> None:
        """Puts the settings of sampling where all Runs read them."""
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

    def _zeros(self, shape: Sequence[int], dtype: DType) -> Any:
        """A tensor of zeros on the device, also of the types that NumPy does not have."""
        memory = self._memory
        value = ort.OrtValue.ortvalue_from_shape_and_type(
            shape, dtype.onnx, "gpu", memory.device_id, memory.device_vendor_id
        )
        zeros = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, dtype.numpy), dtype.onnx)
        ort.copy_tensors([zeros], [value])
        return value

    def _cache_shape(self, x: Any, path: Path, head_size: int | None) -> tuple[int, int, int, int]:
        heads, size = x.shape[1], head_size or x.shape[3]
        config = path.parent / "genai_config.json"
        if not isinstance(size, int) and config.exists():
            size = json.loads(config.read_text(encoding="utf-8"))["model"]["decoder"]["head_size"]
        if not isinstance(heads, int) or not isinstance(size, int):
            raise ValueError(f"{path} does not say the sizes of {x.name}: pass head_size")
        return self.batch, heads, self.max_length, size
