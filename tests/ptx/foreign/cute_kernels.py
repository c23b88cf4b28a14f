"""A CuTe DSL kernel. ``CUTE_DSL_KEEP_PTX=1 CUTE_DSL_ARCH=sm_80 python cute_kernels.py`` writes its PTX."""

# mypy: ignore-errors

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_ptr


@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < n:
        b[i] = a[i] * 2.0


@cute.jit
def host(a: cute.Pointer, b: cute.Pointer, n: cutlass.Int32):
    layout = cute.make_layout(n)
    add(cute.make_tensor(a, layout), cute.make_tensor(b, layout), n).launch(grid=(2, 1, 1), block=(64, 1, 1))


def main():
    pointer = make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem)
    cute.compile(host, pointer, pointer, cutlass.Int32(100))


if __name__ == "__main__":
    main()
