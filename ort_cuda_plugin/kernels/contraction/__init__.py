"""What GEMM, convolution and attention share: operand prologues, epilogue patterns, layouts."""
