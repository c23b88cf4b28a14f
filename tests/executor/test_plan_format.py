"""The binary form of a plan."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.plan.decoder import decode
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
    param_kind,
)
from ort_cuda_plugin.program.expressions.operations import ExprOp

plan_with_everything = Plan(
    num_registers=9,
    inputs=(PlanInput(1, 2, 0), PlanInput(7, 1, 2, host_register=3, host_count=1)),
    outputs=(PlanOutput(1, (0, 4)), PlanOutput(7, (7,), segment=1, node=1)),
    nodes=("first", "zweite Näherung (Add)", "first"),
    op_types=("", "Add", ""),
    exprs=(
        PlanExpr(ExprOp.MUL, 4, 0, 3, node=2),
        PlanExpr(ExprOp.CONST, 5, imm=-(1 << 63)),
        PlanExpr(ExprOp.SELECT, 6, 4, 5, 0),
        PlanExpr(ExprOp.ADD, 8, 7, 0, segment=1),
    ),
    guards=(4,),
    asserts=(PlanAssert(4, 1, "must not be empty"),),
    readbacks=(PlanReadback(Ref(RefKind.BUFFER, 0), 7, 1, 7, 1, byte_offset_register=4),),
    buffers=(PlanBuffer(4, 0, 1),),
    records=(
        Record(
            RecordKind.LAUNCH,
            0,
            (
                Param.pointer(Ref(RefKind.INPUT, 0), register=4, offset=-16),
                Param.pointer(Ref(RefKind.BUFFER, 0)),
                Param.i32(register=3),
                Param.i64(value=-7),
                Param.f32(0.5),
                Param.f64(-1e300),
            ),
            grid=(4, 4, 4),
            block=(128, 2, 1),
            shared_register=4,
            condition_register=4,
            nodes=(2, 0),
        ),
        Record.memset(
            1, Param.pointer(Ref(RefKind.OUTPUT, 0)), Param.i32(value=255), Param.i64(register=4), condition=4
        ),
        Record.copy(
            2,
            Param.pointer(Ref(RefKind.OUTPUT, 1)),
            Param.pointer(Ref(RefKind.WEIGHT, 0)),
            Param.i64(value=8),
            segment=1,
        ),
    ),
    weights=(3,),
    kernels=(11, 12, 13),
    problems=(1,),
    num_segments=2,
    in_place=(PlanInPlace(0, 0, InPlaceKind.KEPT), PlanInPlace(0, 1, InPlaceKind.ELEMENTS)),
)


def test_decode_gives_back_what_was_encoded() -> None:
    assert decode(encode(plan_with_everything)) == plan_with_everything


def test_an_empty_plan_is_its_header_and_one_segment() -> None:
    plan = Plan(num_registers=0, inputs=(), outputs=())
    assert len(encode(plan)) == 88 + 8
    assert decode(encode(plan)) == plan


def test_float_parameters_hold_their_bits() -> None:
    assert Param.f32(1.0) == Param(ParamKind.F32, imm=0x3F800000)
    assert Param.f64(-0.0) == Param(ParamKind.F64, imm=-(1 << 63))


def test_kernel_signatures_have_parameter_kinds() -> None:
    entries = ("*f32", "*bf16", "i32", "i64", "f32", "f64")
    assert [param_kind(entry).name for entry in entries] == ["POINTER", "POINTER", "I32", "I64", "F32", "F64"]


def test_equal_strings_are_stored_once() -> None:
    assert encode(plan_with_everything).count(b"first") == 1


def test_records_out_of_segment_order_are_refused() -> None:
    late, early = (Record(RecordKind.LAUNCH, 0, (), segment=s) for s in (1, 0))
    with pytest.raises(ValueError, match="out of order"):
        encode(Plan(num_registers=0, inputs=(), outputs=(), records=(late, early), num_segments=2))


def test_numbers_that_do_not_fit_their_field_are_refused() -> None:
    with pytest.raises(ValueError, match="a field of the plan does not fit its type in the plan format"):
        encode(Plan(num_registers=1 << 32, inputs=(), outputs=()))
    with pytest.raises(ValueError, match="a field of the plan does not fit its type in the plan format"):
        encode(Plan(1, (), (), exprs=(PlanExpr(ExprOp.CONST, 0, imm=1 << 63),)))


@pytest.mark.parametrize("blob", [b"", b"OPLN", bytes(80), encode(plan_with_everything)[:-200]])
def test_decoding_something_else_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a plan|truncated"):
        decode(blob)
