"""Signal operators: Fourier transforms, window functions and mel filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import squeeze, unsqueeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...axes import axis_of_input, normalize_axis
from ...registry import ARITHMETIC, FLOATS, INDICES, NO_BFLOAT16, T1, T2, HostTensor, contrib_op, op


def _element_type(number: int) -> DType:
    dtype = DType.of_attribute(number)
    require.supported(
        dtype in ARITHMETIC, "dtype", "output_datatype", dtype.name, "integers of 8 to 64 bits and floats of 16 to 64"
    )
    return dtype


def _window(name: str, *cosines: float) -> None:
    """Register a window function: cosines[0] - cosines[1] * cos(t) + cosines[2] * cos(2 * t) over one period of t."""

    @op(name, since=17, types={"T1": INDICES})
    def function(ctx: Lowering, size: HostTensor, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
        count = ctx.host_number(size, "size")
        require.least_dim(ctx, 0, size=count)
        dtype = _element_type(output_datatype)

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            period = maps.dim(count if periodic else count - 1)
            angle = s.cast(c[0], DType.FLOAT64) * (2 * math.pi) / s.cast(period, DType.FLOAT64)
            constant, first, second = cosines
            value = constant - first * s.cos(angle)
            return s.cast(value + second * s.cos(2.0 * angle) if second else value, dtype)

        return gather_map(ctx, [count], dtype, element)


_window("HannWindow", 0.5, 0.5, 0.0)
_window("HammingWindow", 25 / 46, 21 / 46, 0.0)
_window("BlackmanWindow", 0.42, 0.5, 0.08)


@op("MelWeightMatrix", since=17, types={"T1": INDICES, "T2": FLOATS})
def mel_weight_matrix(
    ctx: Lowering,
    num_mel_bins: HostTensor,
    dft_length: HostTensor,
    sample_rate: HostTensor,
    lower_edge_hertz: T2,
    upper_edge_hertz: T2,
    *,
    output_datatype: int = 1,
) -> Tensor:
    bins = ctx.host_number(num_mel_bins, "num_mel_bins")
    length = ctx.host_number(dft_length, "dft_length")
    rate = ctx.host_number(sample_rate, "sample_rate")
    dtype, real = _element_type(output_datatype), DType.FLOAT64
    require.least_dim(ctx, 0, num_mel_bins=bins, dft_length=length)
    require.scalar(ctx, lower_edge_hertz=lower_edge_hertz, upper_edge_hertz=upper_edge_hertz)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        def mel(edge: Tensor) -> Scalar:
            return 2595.0 * s.unary_float("log10", 1.0 + s.cast(maps.number(edge), real) / 700.0)

        low, high = mel(lower_edge_hertz), mel(upper_edge_hertz)
        step = (high - low) / s.cast(maps.dim(bins) + 2, real)

        def edge(band: Scalar) -> Scalar:
            hertz = 700.0 * (s.power(s.constant(10.0, real), (s.cast(band, real) * step + low) / 2595.0) - 1.0)
            return s.floor(s.cast(maps.dim(length) + 1, real) * hertz / s.cast(maps.dim(rate), real))

        at = s.cast(c[0], real)
        lower, center, higher = (edge(c[1] + k) for k in range(3))
        rising = s.where(lower < center, (at - lower) / (center - lower), 1.0)
        falling = (higher - at) / (higher - center)
        value = s.where((at > center) & (at < higher), falling, 0.0)
        return s.cast(s.where((at >= lower) & (at <= center), rising, value), dtype)

    return gather_map(ctx, [length // 2 + 1, bins], dtype, element)


_FEW = 32
"""Maximum length of a DFT that is always evaluated directly, elements. Longer lengths are factorized if possible."""
_LARGEST_DIVISOR = 2**16
"""Largest candidate divisor of a length: enough to factorize any composite length below 2**32."""


def _terms(length: Dim) -> Dim:
    """Return the radix of the last Cooley-Tukey step: a divisor of the length, or the length for a direct DFT."""
    if not isinstance(length, int) or length <= _FEW:
        return length
    largest = min(math.isqrt(length), _LARGEST_DIVISOR)
    divisors = itertools.chain(range(_FEW // 2, 1, -1), range(_FEW // 2 + 1, largest + 1))
    return next((n for n in divisors if length % n == 0), length)


Sample: TypeAlias = Callable[[IndexMap, list[Scalar], Scalar], tuple[Scalar, Scalar | None]]
"""``sample(maps, c, i)`` returns the real and imaginary part (None for 0) of input i for the frequency at c."""


def _spectrum(
    ctx: Lowering,
    shape: Sequence[Dim],
    dtype: DType,
    axis: int,
    length: Dim,
    sample: Sample,
    *,
    inverse: bool = False,
    divisor: Dim = 1,
    least_length: int = 1,
) -> Tensor:
    """Return discrete Fourier transforms of ``length``, with frequencies along ``axis`` of ``shape``.

    The last dimension is 2, or 1 for the real part only. A known composite length is factorized (Cooley-Tukey). A
    length below ``least_length`` is an error; with 0, ``shape`` must be empty if the length is 0.
    """
    # float64, since the terms of absent frequencies cancel: float32 would leave residues far from 0.
    real = DType.FLOAT64
    require.least_dim(ctx, least_length, **{"the length of the transform": length})
    terms = _terms(length)
    if terms != length:
        # For each r < terms, transform the inputs terms * j + r; r is the second-last dimension of ``parts``.
        part = length // terms
        parts = _spectrum(
            ctx,
            [*shape[:axis], part, *shape[axis + 1 : -1], terms, 2],
            real,
            axis,
            part,
            lambda maps, c, j: sample(maps, [*c[:-2], c[-1]], j * maps.dim(terms) + c[-2]),
            inverse=inverse,
        )

    def term(maps: IndexMap, c: list[Scalar], r: Scalar) -> tuple[Scalar, Scalar | None]:
        if terms == length:
            return sample(maps, c, r)
        source = maps.source(parts)
        index = [*c[:axis], s.trunc_modulo(c[axis], maps.dim(part)), *c[axis + 1 : -1], r]
        a, b = (source.at([*index, s.constant(k, DType.INT64)]) for k in (0, 1))
        return a, b

    def root(maps: IndexMap, c: list[Scalar]) -> Scalar:
        turn = 2 * math.pi * s.cast(c[0], DType.FLOAT64) / s.cast(maps.dim(length), DType.FLOAT64)
        cosine, sine = s.cos(turn), s.sin(turn)
        return s.cast(s.where(s.equal(c[1], 0), cosine, sine if inverse else -sine), real)

    roots = gather_map(ctx, [length, 2], real, root)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        table, period = maps.source(roots), maps.dim(length)
        is_real = s.equal(c[-1], 0)

        def product(i: Scalar) -> list[Scalar]:
            power = s.trunc_modulo(c[axis] * i, period)
            cosine, sine = (table.at([power, s.constant(k, DType.INT64)]) for k in (0, 1))
            a, b = term(maps, c, i)
            value = s.cast(a, real) * s.where(is_real, cosine, sine)
            if b is not None:
                value = value + s.cast(b, real) * s.where(is_real, -sine, cosine)
            return [value]

        (total,) = maps.fold(SUM, maps.dim(terms), product)
        return s.cast(total if divisor == 1 else total / s.cast(maps.dim(divisor), real), dtype)

    return gather_map(ctx, shape, dtype, element)


def _parts(ctx: Lowering, x: Tensor) -> int:
    """Return the number of floats per element: 1 (real) or 2 (complex)."""
    if ctx.guard(eq(x.shape[-1], 1)):
        return 1
    subject, expected = "the last dimension of the signal", "be 1 for real or 2 for complex numbers"
    require.holds(ctx, eq(x.shape[-1], 2), subject, expected, x.shape[-1])
    return 2


def discrete_transform(
    ctx: Lowering, x: Tensor, dft_length: Tensor | None, axis: int, *, inverse: int, onesided: int
) -> Tensor:
    """Compute the DFT of ai.onnx along ``axis``; the last dimension holds real and imaginary parts."""
    require.that(axis != x.rank - 1, "axis", "not be the dimension of real and imaginary parts", axis)
    parts = _parts(ctx, x)
    # A one-sided inverse extends the spectrum by conjugate symmetry, and its result is real.
    mirrored = bool(inverse and onesided)
    given = (x.shape[axis] - 1) * 2 if mirrored else x.shape[axis]
    length = given if dft_length is None else ctx.host_number(dft_length, "dft_length")
    shape = [*x.shape[:-1], 1 if mirrored else 2]
    shape[axis] = length // 2 + 1 if onesided and not inverse else length

    def sample(maps: IndexMap, c: list[Scalar], i: Scalar) -> tuple[Scalar, Scalar | None]:
        source = maps.source(x)
        second = i > s.trunc_divide(maps.dim(length), 2)
        at = s.where(second, maps.dim(length) - i, i) if mirrored else i
        index = [*c[:axis], at, *c[axis + 1 : -1]]
        inside = None if length == x.shape[axis] else at < source.dim(axis)
        a, *b = (source.at([*index, s.constant(part, DType.INT64)], inside) for part in range(parts))
        if not b:
            return a, None
        return a, s.where(second, -b[0], b[0]) if mirrored else b[0]

    divisor = length if inverse else 1
    # A signal without elements has an empty spectrum. One side of it would have a frequency, which is undefined.
    least = 1 if onesided else 0
    return _spectrum(
        ctx, shape, x.dtype, axis, length, sample, inverse=bool(inverse), divisor=divisor, least_length=least
    )


@op("DFT", since=17, until=17, types={"T1": FLOATS, "T2": INDICES})
def dft_17(
    ctx: Lowering, x: T1, dft_length: HostTensor | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    return discrete_transform(ctx, x, dft_length, normalize_axis(axis, x.rank), inverse=inverse, onesided=onesided)


@op("DFT", since=20, types={"T1": FLOATS, "T2": INDICES})
def dft(
    ctx: Lowering,
    x: T1,
    dft_length: HostTensor | None = None,
    axis: HostTensor | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    at = normalize_axis(-2, x.rank) if axis is None else axis_of_input(ctx, axis, x.rank, "axis", -2)
    return discrete_transform(ctx, x, dft_length, at, inverse=inverse, onesided=onesided)


@op("STFT", since=17, types={"T1": FLOATS, "T2": INDICES})
def stft(
    ctx: Lowering,
    signal: T1,
    frame_step: HostTensor,
    window: T1 | None = None,
    frame_length: HostTensor | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """Compute the STFT of a signal [batch, samples, 1 or 2] or [batch, samples]."""
    parts = _parts(ctx, signal) if signal.rank == 3 else 1
    require.rank((2, 3), signal=signal)
    require.rank(1, window=window)
    step = ctx.host_number(frame_step, "frame_step")
    require.least_dim(ctx, 1, frame_step=step)
    if frame_length is not None:
        length = ctx.host_number(frame_length, "frame_length")
    elif window is not None:
        length = window.shape[0]
    else:
        raise require.violation("window or frame_length", "be given", "neither")
    require.shape(ctx, (length,), window=window)
    require.least_dim(ctx, 1, frame_length=length)
    require.most_dim(ctx, signal.shape[1], frame_length=length)
    frames = (signal.shape[1] - length) // step + 1
    bins = length // 2 + 1 if onesided else length

    def sample(maps: IndexMap, c: list[Scalar], i: Scalar) -> tuple[Scalar, Scalar | None]:
        source = maps.source(signal)
        index = [c[0], c[1] * maps.dim(step) + i]
        tails = [[s.constant(part, DType.INT64)] for part in range(parts)] if signal.rank == 3 else [[]]
        values = [s.widen(source.at([*index, *tail])) for tail in tails]
        if window is not None:
            weight = s.widen(maps.source(window).at([i]))
            values = [value * weight for value in values]
        return values[0], values[1] if parts == 2 else None

    return _spectrum(ctx, [signal.shape[0], frames, bins, 2], signal.dtype, 2, length, sample)


def _check_real_transform(rank: int, signal_ndim: int, onesided: int, normalized: int) -> None:
    """Check the attributes of Rfft and Irfft; ``rank`` is the rank of the real signal."""
    if onesided != 1 or normalized != 0:
        raise require.unsupported("attribute", "(onesided, normalized)", (onesided, normalized), "(1, 0)")
    require.that(1 <= signal_ndim <= rank, "signal_ndim", f"be in [1, {rank}]", signal_ndim)


@contrib_op("Rfft", T=NO_BFLOAT16)
def rfft(ctx: Lowering, x: Tensor, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> Tensor:
    """Transform the last ``signal_ndim`` dimensions; the last one keeps its non-negative frequencies."""
    _check_real_transform(x.rank, signal_ndim, onesided, normalized)
    result = discrete_transform(ctx, unsqueeze(ctx, x, [x.rank]), None, x.rank - 1, inverse=0, onesided=1)
    for axis in range(x.rank - signal_ndim, x.rank - 1):
        result = discrete_transform(ctx, result, None, axis, inverse=0, onesided=0)
    return result


@contrib_op("Irfft", T=NO_BFLOAT16)
def irfft(ctx: Lowering, x: Tensor, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Tensor:
    """Invert Rfft; the last dimension of the result has an even size."""
    rank = x.rank - 1
    _check_real_transform(rank, signal_ndim, onesided, normalized)
    require.dim(ctx, -1, 2, X=x)
    for axis in range(rank - signal_ndim, rank - 1):
        x = discrete_transform(ctx, x, None, axis, inverse=1, onesided=0)
    return squeeze(ctx, discrete_transform(ctx, x, None, rank - 1, inverse=1, onesided=1), [rank])
