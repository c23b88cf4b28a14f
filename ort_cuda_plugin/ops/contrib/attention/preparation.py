"""QK norm and rotary embedding of queries and new keys, before attention of com.microsoft."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ....model.ir import DType
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import reshape
from ... import requirements as require
from ...onnx.attention.attention import rotate
from ...onnx.nn.normalization import layer_norm
from ...registry import attributes_of


@dataclass(frozen=True)
class Preparation:
    """QK norm and rotary embedding as data. Fields are inputs and attributes of an operator, by their ONNX names."""

    cos_cache: Tensor | None
    sin_cache: Tensor | None
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None
    _: KW_ONLY
    do_rotary: int = 0
    rotary_interleaved: int = 0
    qk_norm_epsilon: float = 1e-6
    rotary_offset: int = 0

    def __call__(self, ctx: Lowering, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize and rotate q and k at ``positions``.

        Q and k are [batch, heads, sequence, size] at positions [batch, sequence], or packed tokens
        [tokens, heads, size] at positions [tokens].
        """
        require.least(0, rotary_offset=self.rotary_offset)
        require.all_or_none(q_norm_weight=self.q_norm_weight, k_norm_weight=self.k_norm_weight)
        q, k = self._normalized(ctx, q, self.q_norm_weight), self._normalized(ctx, k, self.k_norm_weight)
        return self._rotated(ctx, q, positions), self._rotated(ctx, k, positions)

    def _normalized(self, ctx: Lowering, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        require.shape(ctx, x.shape[-1:], **{"q_norm_weight and k_norm_weight": weight})
        return layer_norm(ctx, x, weight, None, [x.rank - 1], self.qk_norm_epsilon, DType.FLOAT32.onnx, center=False)[0]

    def _rotated(self, ctx: Lowering, x: Tensor, positions: Tensor) -> Tensor:
        if not self.do_rotary:
            return x
        cos, sin = self.cos_cache, self.sin_cache
        if cos is None or sin is None:
            found = require.named(cos_cache=cos, sin_cache=sin)
            raise require.violation("cos_cache and sin_cache", "be given if do_rotary is 1", found)
        require.rank(2, cos_cache=cos)
        sequence, heads = 2, x
        if x.rank == 3:  # treat packed tokens as one sequence
            sequence, heads, positions = 1, reshape(ctx, x, [1, *x.shape]), reshape(ctx, positions, [1, x.shape[0]])
        turned = rotate(
            ctx, heads, sequence, cos, sin, positions, 2 * cos.shape[1],
            interleaved=bool(self.rotary_interleaved), offset=self.rotary_offset,
        )  # fmt: skip
        return reshape(ctx, turned, x.shape) if x.rank == 3 else turned


prepares = attributes_of(Preparation)
"""Declares the attributes of `Preparation`."""
rotates = attributes_of(Preparation, ("do_rotary", "rotary_interleaved"))
"""Declares the attributes of rotary embedding without an offset."""
