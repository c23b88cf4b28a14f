"""Common parts of GEMM, convolution and attention: operand prologues, epilogue patterns, layouts."""
