"""Device assignment of nodes: by the rules of the option ``device_of``, or by a split that balances time and memory.

The balanced split is a pipeline: each device gets a range of consecutive nodes, in topological order. The split
minimizes the time of the slowest device, which limits the throughput of a pipeline. The time of a device is estimated
from the bytes and multiply-adds of its nodes, and from the bytes that enter and leave the device. The weights of a
device's nodes must fit into its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from ..model.ir import Constant, Node, Value
from .stages import StageError

#: Assumed size of each dimension that is not known when the session is created.
_USUAL_SIZE = 8
#: Multiply-adds that a GPU does in the time in which it moves one byte of its memory. H100, dense float16: 495e12/s
#: against 3.35 TB/s.
_OPERATIONS_PER_BYTE = 148
#: Bytes of device memory that a GPU moves in the time in which one byte crosses between two devices. H100: 3.35 TB/s
#: against 64 GB/s of PCIe 5.0.
_LINK_COST = 52
#: Approximate maximum number of parts between which the balanced split chooses its cuts, to bound the search time.
_MOST_PARTS = 256
#: Fraction of a device's available memory that weights may take; the rest is for tensors of Runs.
_WEIGHT_SHARE = 0.9


@dataclass(frozen=True)
class Rule:
    """A rule of the option ``device_of``: nodes whose name matches the pattern run on the device with this ordinal."""

    pattern: str
    ordinal: int

    def matches(self, node: Node) -> bool:
        """Return whether the pattern matches the node's name or the name of a result."""
        names = [node.name, *(value.name for value in node.outputs if value is not None)]
        return any(fnmatchcase(name, self.pattern) for name in names if name)


def by_rules(nodes: Sequence[Node], rules: Sequence[Rule], ordinals: Sequence[int]) -> dict[Node, int]:
    """Return the index in ``ordinals`` of each node's device; the first rule that matches a node decides.

    A node without a rule runs on the device of the latest node whose result it reads, else on the first device.
    """
    index = {ordinal: number for number, ordinal in enumerate(ordinals)}
    makers = {value: number for number, node in enumerate(nodes) for value in node.outputs if value is not None}
    found: list[int] = []
    for node in nodes:
        rule = next((rule for rule in rules if rule.matches(node)), None)
        latest = max((makers[value] for value in node.reads() if value in makers), default=None)
        found.append(index[rule.ordinal] if rule is not None else 0 if latest is None else found[latest])
    return dict(zip(nodes, found, strict=True))


def balanced(nodes: Sequence[Node], memory: Sequence[int]) -> dict[Node, int]:
    """Return the index of each node's device. ``memory`` has the available bytes of each device.

    ``nodes`` are in topological order. Each device gets nodes, if there are enough.

    Raises:
        StageError: the weights do not fit into the memory of the devices.
    """
    parts = _parts(nodes)
    count = min(len(memory), len(parts))
    if count < 2 or not parts:
        return dict.fromkeys(nodes, 0)
    bounds = _best_cuts(parts, _crossing_bytes(parts), memory[:count])
    if bounds is None:
        weights = {value.initializer for node in nodes for value in node.reads() if value.initializer is not None}
        raise StageError(
            f"device_ids: the weights of the model ({_megabytes(sum(each.nbytes for each in weights))}) do not fit "
            f"into the available memory of the devices ({', '.join(map(_megabytes, memory))}): weights may take at "
            f"most {_WEIGHT_SHARE:.0%} of each device's available memory. Use more devices, or devices with more memory"
        )
    found: dict[Node, int] = {}
    for device, (first, last) in enumerate(pairwise(bounds)):
        found.update((node, device) for part in parts[first:last] for node in part)
    return found


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes as about `_MOST_PARTS` ranges or fewer, of about equal cost, between which a cut may lie.

    A range ends where few bytes cross. Values that are not tensors, such as sequences, never cross.
    """
    single = [[node] for node in nodes]
    crossing = _crossing_bytes(single)
    allowed = [position for position in range(1, len(nodes)) if crossing[position] < math.inf]
    costs = [_cost(node) for node in nodes]
    step = sum(costs) / _MOST_PARTS
    best: dict[int, int] = {}  # the best position to cut, by the bucket of the cost before it
    total, at = 0.0, 0
    for position in allowed:
        total += sum(costs[at:position])
        at = position
        bucket = position if len(allowed) < _MOST_PARTS else int(total / max(step, 1e-9))
        if bucket not in best or crossing[position] < crossing[best[bucket]]:
            best[bucket] = position
    bounds = [0, *sorted(best.values()), len(nodes)]
    return [list(nodes[first:last]) for first, last in pairwise(bounds) if first < last]


def _crossing_bytes(parts: Sequence[Sequence[Node]]) -> list[float]:
    """Return, for each position between two parts, the bytes of the values that cross it; infinity forbids a cut."""
    part_of = {value: number for number, part in enumerate(parts) for node in part for value in node.outputs if value}
    last_reader: dict[Value, int] = {}
    for number, part in enumerate(parts):
        last_reader.update((value, number) for node in part for value in node.reads() if value in part_of)
    changes = [0.0] * (len(parts) + 1)
    closed = [0] * (len(parts) + 1)
    for value, last in last_reader.items():
        first = part_of[value]
        if first < last:
            is_tensor = not value.is_container and value.dtype is not None and value.dtype.is_supported
            changes[first + 1] += _nbytes(value)
            changes[last + 1] -= _nbytes(value)
            closed[first + 1] += not is_tensor
            closed[last + 1] -= not is_tensor
    result: list[float] = []
    total, forbidden = 0.0, 0
    for change, more in zip(changes, closed, strict=True):
        total, forbidden = total + change, forbidden + more
        result.append(math.inf if forbidden else total)
    return result


def _best_cuts(parts: Sequence[Sequence[Node]], crossing: Sequence[float], memory: Sequence[int]) -> list[int] | None:
    """Return the bounds of the devices' parts that minimize the time of the slowest device.

    Return None if the weights do not fit into the memory.

    Dynamic programming over (number of devices, end of their parts).
    """
    costs = [sum(map(_cost, part)) for part in parts]
    weights = _weights_up_to(parts)
    ends = [crossing[position] * _LINK_COST for position in range(len(parts) + 1)]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for device, available in enumerate(memory):
        found: dict[int, tuple[float, int]] = {}
        for first, (slowest, _) in best[-1].items():
            time = ends[first] if device else 0.0
            for last in range(first + 1, len(parts) + 1):
                time += costs[last - 1]
                if weights[first][last - first] > _WEIGHT_SHARE * available:
                    break
                own = time + (ends[last] if last < len(parts) else 0.0)
                candidate = max(slowest, own)
                if last not in found or candidate < found[last][0]:
                    found[last] = (candidate, first)
        best.append(found)
    if len(parts) not in best[-1]:
        return None
    bounds = [len(parts)]
    for found in reversed(best[1:]):
        bounds.append(found[bounds[-1]][1])
    return bounds[::-1]


def _weights_up_to(parts: Sequence[Sequence[Node]]) -> list[list[int]]:
    """Return the bytes of the constants of parts, by first part and number of parts. Each constant counts once."""
    reads = [[value.initializer for node in part for value in node.reads() if value.initializer] for part in parts]
    previous: dict[Constant, int] = {}
    # By part, for each of its constants: the latest earlier part that reads the constant (-1: none), and its bytes.
    new: list[list[tuple[int, int]]] = []
    for number, constants in enumerate(reads):
        new.append([(previous.get(constant, -1), constant.nbytes) for constant in dict.fromkeys(constants)])
        previous.update(dict.fromkeys(constants, number))
    result = []
    for first in range(len(parts)):
        sizes = [0]
        for number in range(first, len(parts)):
            sizes.append(sizes[-1] + sum(nbytes for before, nbytes in new[number] if before < first))
        result.append(sizes)
    return result


def _cost(node: Node) -> float:
    """Return the estimated time of a node, as the bytes of device memory that the device moves in this time."""
    read = _total(value for value in node.reads() if value is not None)
    written = _total(value for value in node.outputs if value is not None)
    return max(read + written, _multiplications(node) / _OPERATIONS_PER_BYTE)


def _total(values: Iterable[Value]) -> float:
    return float(sum(map(_nbytes, dict.fromkeys(values))))


def _multiplications(node: Node) -> float:
    """Return the multiply-adds of a convolution or matrix product; 0 for other nodes."""
    if not node.inputs or len(node.inputs) < 2 or node.inputs[1] is None or not node.outputs or node.outputs[0] is None:
        return 0.0
    weight, result = node.inputs[1], node.outputs[0]
    if node.op_type in ("Conv", "FusedConv") and weight.shape is not None:
        return _elements(result) * math.prod(_sizes(weight)[1:])
    if "MatMul" in node.op_type or "Gemm" in node.op_type:
        first = node.inputs[0]
        return _elements(result) * (_sizes(first)[-1] if first is not None and first.shape else 1)
    return 0.0


def _sizes(value: Value) -> list[int]:
    return [dim if isinstance(dim, int) else _USUAL_SIZE for dim in value.shape or ()]


def _elements(value: Value) -> float:
    return float(math.prod(_sizes(value)))


def _nbytes(value: Value) -> int:
    """Return the bytes of a value, with assumed sizes of unknown dimensions; 0 for an unknown rank or type."""
    if value.initializer is not None:
        return value.initializer.nbytes
    if value.dtype is None or value.shape is None:
        return 0
    return (math.prod(_sizes(value)) * value.dtype.bits + 7) // 8


def unmatched(rules: Sequence[Rule], nodes: Iterable[Node]) -> list[Rule]:
    """Return the rules that match none of the nodes."""
    known = list(nodes)
    return [rule for rule in rules if not any(rule.matches(node) for node in known)]
