"""Reads the options of a session: which entries hold them, and what their keys and values mean.

Options arrive as session entries ``ep.cudapluginexecutionprovider.<key>`` (from ``providers=[(name, {...})]`` or
``add_provider_for_devices``), as ``ep.cuda.<key>``, or from the environment's entries
``ep_factory.CudaPluginExecutionProvider.<key>``; the first of these that has a key decides. Keys in `BARE_KEYS` are
also accepted as session entries without a prefix, with the lowest priority. If the provider is registered under another
name (`ep.device.identity`), the entries have that name. `option_table` defines the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...abi.errors import Error
from ...abi.message_texts import did_you_mean
from ...plugin_library import EP_NAME
from ...program.device import AttentionKernel
from ..device.identity import Identity
from . import arena
from .option_table import (
    BARE_KEYS,
    MOST_GRAPH_RUNS,
    OTHER_NAMES,
    ROWS,
    SERVED_ATTENTION_KERNELS,
    WITHOUT_EFFECT,
    Options,
)

__all__ = ["ALIAS_PREFIX", "OptionError", "Options", "collect", "known_keys", "parse", "parse_value"]

ALIAS_PREFIX = "ep.cuda."


class OptionError(Error, ValueError):
    """An option is unknown or has an invalid value.

    Examples:
        >>> try:
        ...     session = ort_cuda_plugin.session("model.onnx", provider_options={"use_tf32": "perhaps"})
        ... except ort_cuda_plugin.OptionError as error:
        ...     print(error)
        CudaPluginExecutionProvider option use_tf32='perhaps': use 1 or 0
    """

    ort_code = 2  # ORT_INVALID_ARGUMENT


def known_keys() -> list[str]:
    """Return all keys that an option may have, in alphabetical order."""
    return sorted({*ROWS, *WITHOUT_EFFECT, *OTHER_NAMES, *arena.CUDA_PROVIDER_KEYS, *arena.keys()})


def collect(session: Mapping[str, str], environment: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """Return the options by bare key, from all entries of a session and of the environment.

    An entry overrides entries for the same option, under any of its names, from sources of lower priority.
    """
    merged: dict[str, str] = {}
    for prefix, entries in (
        (identity.environment_prefix, environment),
        ("", {key: value for key, value in session.items() if key in BARE_KEYS}),
        (ALIAS_PREFIX, session),
        (identity.session_prefix, session),
    ):
        found = {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
        meant = {OTHER_NAMES.get(key, key) for key in found}
        merged = {key: value for key, value in merged.items() if OTHER_NAMES.get(key, key) not in meant} | found
    return merged


def parse(given: Mapping[str, str]) -> tuple[Options, dict[str, str]]:
    """Return the options, and the keys that do not have the requested effect, each with the reason.

    Raises:
        OptionError: a key is unknown, a value is invalid, or two options contradict each other.
    """
    parsed: dict[str, Any] = _arena_options(given)
    ignored: dict[str, str] = {}
    for key, text in given.items():
        if key.startswith(arena.PREFIX) or key in arena.CUDA_PROVIDER_KEYS:
            continue
        meant = OTHER_NAMES.get(key, key)
        if meant in ROWS:
            value = parse_value(key, text, ROWS[meant].reader)
            if meant == key or meant not in given:
                parsed[meant] = value
            elif key in ROWS[meant].former_keys and value != parse_value(meant, given[meant], ROWS[meant].reader):
                raise OptionError(
                    f"{EP_NAME} option {meant}={given[meant]!r}: its former name has another value: {key}={text!r}. "
                    f"Leave {key} out"
                )
        elif key in WITHOUT_EFFECT:
            entry = WITHOUT_EFFECT[key]
            if parse_value(key, text, entry.reader) != entry.usual:
                ignored[key] = entry.why
        else:
            hint = " ".join(filter(None, [did_you_mean(key, known_keys()), "known:"]))
            raise OptionError(f"{EP_NAME} has no option {key!r}; {hint} {', '.join(known_keys())}")
    options = _with_stream(Options(**parsed))
    if lacking := options.sdpa_kernel & ~int(SERVED_ATTENTION_KERNELS):
        names = [str(bit.name) for bit in AttentionKernel if bit & lacking]
        names += [f"bit {bit}" for bit in range(lacking.bit_length()) if lacking >> bit & 1 and 1 << bit > 256]
        ignored["sdpa_kernel"] = f"the plugin has no attention kernel for {', '.join(names)}; it chooses its own"
    if options.enable_cuda_graph and options.min_num_runs_before_cuda_graph_capture > MOST_GRAPH_RUNS:
        raise OptionError(
            f"{EP_NAME} option min_num_runs_before_cuda_graph_capture={options.min_num_runs_before_cuda_graph_capture}:"
            f" with enable_cuda_graph=1 use a number from 1 to {MOST_GRAPH_RUNS}, since ONNX Runtime repeats a Run "
            f"at most {MOST_GRAPH_RUNS + 1} times until it is captured"
        )
    return options, dict(sorted(ignored.items()))


def _with_stream(options: Options) -> Options:
    """Apply ``has_user_compute_stream``, which turns ``user_compute_stream`` on or off, and return the options without
    it.
    """
    if options.has_user_compute_stream and options.user_compute_stream is None:
        raise OptionError(
            f"{EP_NAME} option has_user_compute_stream=1 needs the option user_compute_stream with the stream's address"
        )
    stream = None if options.has_user_compute_stream is False else options.user_compute_stream
    return replace(options, has_user_compute_stream=None, user_compute_stream=stream)


def parse_value(key: str, text: str, read: Callable[[str], Any]) -> Any:
    """Read the text of an option.

    Raises:
        OptionError: the text is not a value of the option.
    """
    try:
        return read(text)
    except ValueError as error:
        raise OptionError(f"{EP_NAME} option {key}={text!r}: {error}") from None


def _arena_options(given: Mapping[str, str]) -> dict[str, Any]:
    own = {key: text for key, text in given.items() if key.startswith(arena.PREFIX)}
    if problem := arena.check_options(own):
        raise OptionError(problem)
    aliases: dict[str, str] = {}
    for key, ours in arena.CUDA_PROVIDER_KEYS.items():
        if key not in given:
            continue
        if problem := arena.check_options({ours: given[key]}):
            raise OptionError(problem.replace(ours, key))
        aliases[ours] = given[key]
    return {"device_arena": aliases | own, "pinned_arena": own}
