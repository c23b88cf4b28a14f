"""The tensors that a step of any type reads or writes."""

from __future__ import annotations

from ..steps.steps import Map
from ..steps.tensor import Tensor
from ..steps.trace import Copy, DeviceLoop, HostCall, Launch, LibraryCall, Memset, ReadBack, Step


def tensors_of(step: Step) -> tuple[Tensor, ...]:
    """Return all tensors that a step reads or writes.

    The tensors in ``parts`` (the unfused steps of an attention step) are left out, and so are tensors that only steps
    inside of a loop use.
    """
    match step:
        case DeviceLoop():
            known = {*step.reads, *step.writes}
            inner = (x for each in (*step.first, *step.body) for x in tensors_of(each))
            return tuple(x for x in dict.fromkeys(inner) if x.buffer in known)
        case Map():
            return step.tensors(without=("parts",))
        case Launch() | LibraryCall():
            return tuple(x for x in step.args if isinstance(x, Tensor))
        case Copy():
            return step.destination, step.source
        case Memset():
            return (step.destination,)
        case ReadBack():
            return (step.source,)
        case HostCall():
            return step.tensors
