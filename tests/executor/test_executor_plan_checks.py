"""Plans that are damaged or inconsistent are refused when they are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from executor_harness import FLOAT, IDLE, INT64, TestCluster
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.plan.format import (
    InPlaceKind,
    Param,
    ParamKind,
    Plan,
    PlanAssert,
    PlanBuffer,
    PlanExpr,
    PlanInPlace,
    PlanInput,
    PlanOutput,
    PlanReadback,
    Record,
    RecordKind,
    Ref,
    RefKind,
    encode,
)
from ort_cuda_plugin.program.expressions.operations import ExprOp

x, shape = Ref(RefKind.INPUT, 0), Ref(RefKind.INPUT, 1)
first, second = Ref(RefKind.OUTPUT, 0), Ref(RefKind.OUTPUT, 1)
weight, scratch, count = Ref(RefKind.WEIGHT, 0), Ref(RefKind.BUFFER, 0), Ref(RefKind.BUFFER, 1)
pointer = Param.pointer

# Input x is [2, 3] (registers 0 and 1). Input shape is [2] (register 2), with host values 3 and 2 (registers 3 and 4).
exprs = (
    PlanExpr(ExprOp.MUL, 5, 0, 1, node=1),
    PlanExpr(ExprOp.CONST, 6, imm=4),
    PlanExpr(ExprOp.MUL, 7, 5, 6),
    PlanExpr(ExprOp.MUL, 8, 3, 4),
    PlanExpr(ExprOp.EQ, 9, 5, 8),
    PlanExpr(ExprOp.CONST, 10, imm=1),
    PlanExpr(ExprOp.SELECT, 11, 9, 7, 6),
    PlanExpr(ExprOp.ADD, 13, 12, 10, segment=1),
)
idle_params = (pointer(scratch), Param.i64(5))
records = (
    Record.memset(0, pointer(count), Param.i32(value=0), Param.i64(value=8)),
    Record(RecordKind.LAUNCH, 0, idle_params, grid=(10, 10, 10), block=(32, 1, 1), shared_register=6),
    Record.copy(1, pointer(first, register=6, offset=-4), pointer(x), Param.i64(11), condition=9),
    Record.copy(1, pointer(scratch), pointer(weight, offset=8), Param.i64(value=16)),
    Record(RecordKind.LAUNCH, 1, (pointer(second), Param.i64(13)), grid=(13, 10, 10), segment=1),
    Record.memset(1, pointer(scratch), Param.i32(value=7), Param.i64(7), segment=1),
)
valid = Plan(
    num_registers=14,
    inputs=(PlanInput(FLOAT, 2, 0), PlanInput(INT64, 1, 2, host_register=3, host_count=2)),
    outputs=(PlanOutput(FLOAT, (3, 4), node=0), PlanOutput(FLOAT, (13,), 1)),
    nodes=("Reshape_1", "Copy_2"),
    op_types=("Reshape", "Copy"),
    exprs=exprs,
    guards=(9,),
    asserts=(PlanAssert(9, 0, "the shape does not fit"),),
    readbacks=(PlanReadback(count, INT64, 1, 12, 1),),
    buffers=(PlanBuffer(7, 1, 5), PlanBuffer(7, 0, 0)),
    records=records,
    weights=(0,),
    kernels=(0,),
    num_segments=2,
    in_place=(PlanInPlace(output=0, input=0, kind=InPlaceKind.ELEMENTS),),
)


def changed(field: str, position: int, /, **changes: Any) -> Plan:
    """Return the valid plan with ``changes`` to the element at ``position`` of the array ``field``."""
    elements = list(getattr(valid, field))
    elements[position] = replace(elements[position], **changes)
    fields: dict[str, Any] = {field: tuple(elements)}
    return replace(valid, **fields)


def with_param(record: int, index: int, param: Param) -> Plan:
    params = list(records[record].params)
    params[index] = param
    return changed("records", record, params=tuple(params))


def with_loop(size: int, *params: Param, condition: int | None = None, nested: int | None = None) -> Plan:
    """Return the valid plan with a loop of ``size`` records before its record 3, and a loop in it of ``nested``."""
    params = params or (pointer(scratch),)
    loops = [Record(RecordKind.LOOP, 1, params, index=size, condition_register=condition)]
    if nested is not None:
        loops.append(Record(RecordKind.LOOP, 1, (pointer(scratch),), index=nested))
    buffers = (PlanBuffer(7, 1, 5 + len(loops)), valid.buffers[1])
    return replace(valid, records=(*records[:3], *loops, *records[3:]), buffers=buffers)


wrong_plans = {
    "loop that ends after its segment": with_loop(2),
    "loop that ends after the loop around it": with_loop(1, nested=1),
    "loop without a condition": with_loop(1, Param.i64(5)),
    "loop with a float": with_loop(1, pointer(scratch), Param.f32(1.0)),
    "loop with three parameters": with_loop(1, pointer(scratch), Param.i64(5), Param.i64(5)),
    "loop that may be skipped": with_loop(1, condition=9),
    "loop whose condition lies in a buffer that is gone": with_loop(1, pointer(count)),
    "condition of no loop": with_param(1, 1, Param(ParamKind.CONDITION, imm=2)),
    "condition of a record that does not exist": with_param(1, 1, Param(ParamKind.CONDITION, imm=99)),
    "condition from a register": with_param(1, 1, Param(ParamKind.CONDITION, register=5, imm=2)),
    "too many registers": replace(valid, num_registers=1 << 23),
    "no segment": replace(valid, num_segments=0, records=()),
    "unknown element type": changed("inputs", 0, dtype=99),
    "string input": changed("inputs", 0, dtype=8),
    "rank too high": changed("inputs", 0, rank=17),
    "dimensions not in order": changed("inputs", 1, first_register=3),
    "host values not after the dimensions": changed("inputs", 1, host_register=4),
    "host values of a float": changed("inputs", 1, dtype=FLOAT),
    "host values without a register": changed("inputs", 1, host_register=None),
    "too many host values": changed("inputs", 1, host_count=70000),
    "output in no segment": changed("outputs", 0, segment=2),
    "output dimension defined later": changed("outputs", 0, dims=(3, 13)),
    "output dimension out of range": changed("outputs", 0, dims=(3, 14)),
    "output of an unknown node": changed("outputs", 0, node=2),
    "expression of an unknown node": changed("exprs", 0, node=2),
    "unknown operation": changed("exprs", 0, op=17),
    "operand not defined": changed("exprs", 0, b=12),
    "operand not smaller": changed("exprs", 7, a=13),
    "register defined twice": changed("exprs", 1, dst=5),
    "register of an input defined again": changed("exprs", 1, dst=4),
    "expression out of segment order": changed("exprs", 0, segment=1),
    "expression in no segment": changed("exprs", 7, segment=2),
    "guard that depends on the device": replace(valid, guards=(13,)),
    "guard out of range": replace(valid, guards=(99,)),
    "assertion of no node": changed("asserts", 0, node=2),
    "assertion before its register": changed("asserts", 0, register=13),
    "assertion in no segment": changed("asserts", 0, segment=2),
    "read-back in the first segment": changed("readbacks", 0, segment=0),
    "read-back of nothing": changed("readbacks", 0, count=0),
    "read-back of too much": changed("readbacks", 0, count=70000),
    "read-back beyond the registers": changed("readbacks", 0, count=3),
    "read-back into a defined register": changed("readbacks", 0, dst=11),
    "read-back of a float": changed("readbacks", 0, dtype=FLOAT),
    "read-back of an output of its segment": changed("readbacks", 0, ref=second),
    "read-back of an unknown buffer": changed("readbacks", 0, ref=Ref(RefKind.BUFFER, 2)),
    "buffer that ends before it starts": changed("buffers", 0, first_record=5, last_record=1),
    "buffer beyond the records": changed("buffers", 0, last_record=6),
    "buffer in another segment than its first record": changed("buffers", 0, segment=1),
    "buffer size defined later": changed("buffers", 1, size_register=13),
    "record of no node": changed("records", 0, node=2),
    "unknown kernel": changed("records", 1, index=1),
    "grid not defined": changed("records", 1, grid=(13, 10, 10)),
    "empty block": changed("records", 1, block=(0, 1, 1)),
    "block too large": changed("records", 1, block=(64, 64, 1)),
    "wrong number of parameters": changed("records", 1, params=idle_params[:1]),
    "shared memory not defined": changed("records", 1, shared_register=13),
    "condition out of range": changed("records", 1, condition_register=77),
    "library problem that does not exist": changed("records", 1, kind=RecordKind.LIBRARY),
    "callback that the cluster lacks": changed("records", 1, kind=RecordKind.CALL),
    "callback with a float": changed("records", 1, kind=RecordKind.CALL, params=(pointer(scratch), Param.f32(1.0))),
    "copy without its size": changed("records", 2, params=records[2].params[:2]),
    "copy between numbers": with_param(2, 0, Param.i64(value=0)),
    "memset with a float": with_param(0, 1, Param.f32(0)),
    "buffer named outside its life": with_param(3, 0, pointer(count)),
    "output named before it is allocated": with_param(3, 0, pointer(second)),
    "unknown input": with_param(2, 1, pointer(Ref(RefKind.INPUT, 2))),
    "unknown weight": with_param(3, 1, pointer(Ref(RefKind.WEIGHT, 1))),
    "offset not defined": with_param(2, 0, pointer(first, register=13)),
    "float from a register": with_param(1, 1, Param(ParamKind.F64, register=5)),
    "another parameter than the kernel's": with_param(1, 1, Param.i32(5)),
    "node of a record out of range": changed("records", 0, nodes=(0, 2)),
    "memory of an unknown input": changed("in_place", 0, input=2),
    "memory of an unknown output": changed("in_place", 0, output=2),
    "memory shared in an unknown way": changed("in_place", 0, kind=2),
    "memory shared twice": replace(valid, in_place=(*valid.in_place, PlanInPlace(0, 0, InPlaceKind.KEPT))),
    "memory of an input that nothing reads": changed("in_place", 0, input=1),
    "memory of an input that is read before": changed("in_place", 0, output=1),
    "memory of an input that is read again": with_param(3, 1, pointer(x)),
    "weight that the cluster lacks": replace(valid, weights=(1,)),
    "kernel that the cluster lacks": replace(valid, kernels=(99,)),
    "problem that the cluster lacks": replace(valid, problems=(0,)),
}


def make_cluster() -> TestCluster:
    return TestCluster(weights=[np.zeros(16, np.float32)], host_inputs=[1])


def test_the_valid_plan_is_accepted() -> None:
    with make_cluster() as cluster:
        cluster.add(replace(valid, kernels=(IDLE,)))


def test_loops_nest() -> None:
    with make_cluster() as cluster:
        for plan in (with_loop(1), with_loop(0), with_loop(2, pointer(scratch), Param.i64(5), nested=1)):
            cluster.add(replace(plan, kernels=(IDLE,)))


@pytest.mark.parametrize("name", wrong_plans)
def test_a_plan_is_refused_for(name: str) -> None:
    plan = wrong_plans[name]
    if plan.kernels == valid.kernels:
        plan = replace(plan, kernels=(IDLE,))
    with make_cluster() as cluster, pytest.raises(PluginError, match="invalid plan: "):
        cluster.add(plan)


def test_a_blob_of_another_size_magic_or_version_is_refused() -> None:
    blob = encode(replace(valid, kernels=(IDLE,)))
    wrong = [b"", blob[:87], blob[:-8], blob + bytes(8), b"X" + blob[1:], blob[:4] + b"\xff" + blob[5:]]
    with make_cluster() as cluster:
        cluster.add_blob(blob)
        for other in wrong:
            with pytest.raises(PluginError, match="invalid plan: "):
                cluster.add_blob(other)


def test_strings_that_are_not_terminated_are_refused() -> None:
    blob = bytearray(encode(replace(valid, kernels=(IDLE,))))
    blob[blob.rindex(b"fit\0") + 3] = ord("x")
    with make_cluster() as cluster, pytest.raises(PluginError, match="expected a zero byte"):
        cluster.add_blob(bytes(blob))
