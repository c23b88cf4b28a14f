/* Description of a library call: kinds of problems, their pointers, values and flags. Types only. */
#ifndef OCP_VENDOR_SPEC_H
#define OCP_VENDOR_SPEC_H

#include <stdint.h>

typedef enum ocp_library_id { OCP_CUBLASLT = 0, OCP_CUDNN = 1, OCP_NUM_LIBRARIES } ocp_library_id;

typedef enum ocp_problem_kind {
  /* out[batch][m][n] = activation(alpha * a[batch] @ b[batch] (+ beta * residual[batch][m][n]) (+ bias[n]));
   * residual is contiguous, out is contiguous along n.
   * pointers: out, a, b, [bias,] [residual,] workspace
   * values: m, n, k, leading dimensions of a, b and out, batches, batch strides of a, b and out (elements), workspace
   * bytes
   * The leading dimension is the stride of the dimension that is not contiguous. */
  OCP_PROBLEM_MATMUL = 0,
  /* out = activation(convolution of x with w (+ residual) (+ bias)). All tensors are contiguous: x [images, channels,
   * space...], w [rows, channels / groups, space...], out and residual [images, rows, space...], bias [rows]. With
   * CHANNELS_LAST the channels of x, w, out and residual are the innermost dimension in memory. Without a residual, out
   * may have gaps between images, or with CHANNELS_LAST between pixels. A residual or an activation needs a bias:
   * cuDNN's precompiled engines do not fuse them otherwise. For DOUBLE, no engine of cuDNN fuses a bias.
   * pointers: out, x, w, [bias,] [residual,] workspace
   * values: images, channels, rows, groups, elements from image to image (or pixel to pixel) of out, 0 if it has no
   * gaps; then for each of `rank` (2 or 3) dimensions: size of x, of the kernel, of out, stride, dilation, pad at the
   * beginning, pad at the end; then workspace bytes */
  OCP_PROBLEM_CONV = 1,
  /* out[b][h][m][d] = sum over n of softmax over n (alpha * q[b][h][m] . k[b][h][n] (+ bias[b][h][m][n])) *
   * v[b][h][n][d]
   * pointers: out, q, k, v, [bias,] workspace
   * values: batches, heads, m, n, elements of a row of q and k, elements of a row of v and out; strides between
   * batches, heads and rows of q, k, v and out, whose rows are contiguous; strides between batches, heads, rows and
   * keys of the bias, 0 where it is broadcast, all 0 without a bias; workspace bytes */
  OCP_PROBLEM_ATTENTION = 2
} ocp_problem_kind;

enum {
  OCP_PROBLEM_TF32 = 1,          /* float32 may be computed in TensorFloat-32; else in float32 */
  OCP_PROBLEM_DETERMINISTIC = 2, /* the same inputs give the same bits in every Run */
  OCP_PROBLEM_BIAS = 4,
  OCP_PROBLEM_A_TRANSPOSED = 8,  /* MATMUL: a is contiguous along m, not along k */
  OCP_PROBLEM_B_TRANSPOSED = 16, /* MATMUL: b is contiguous along k, not along n */
  OCP_PROBLEM_RELU = 32,         /* the activation ReLU; cuBLASLt's gives 0 for NaN */
  OCP_PROBLEM_GELU = 64,         /* MATMUL: the activation GELU, tanh approximation */
  OCP_PROBLEM_RESIDUAL = 128,
  OCP_PROBLEM_BRIEF = 256,          /* CONV: cuDNN's heuristic mode INSTANT chooses the engine, not mode A */
  OCP_PROBLEM_MEASURED = 512,       /* the first call with new sizes times some algorithms and keeps the fastest, unless
                                       DETERMINISTIC is set or the call is captured */
  OCP_PROBLEM_CHANNELS_LAST = 1024, /* CONV: NHWC layout of all tensors */
  OCP_PROBLEM_SWISH = 2048,         /* CONV with CHANNELS_LAST: the activation x * sigmoid(x) */
  OCP_PROBLEM_RELU6 = 4096          /* CONV with CHANNELS_LAST: the activation min(max(x, 0), 6) */
};

typedef struct ocp_problem_spec {
  uint32_t kind;
  uint32_t dtype; /* FLOAT, FLOAT16, BFLOAT16 or DOUBLE; accumulators and alpha, beta are float32, for DOUBLE float64 */
  uint32_t flags;
  uint32_t rank;         /* CONV: number of spatial dimensions, 2 or 3 */
  double alpha, beta;    /* factors of MATMUL; ATTENTION: alpha only; CONV: 1. beta is 0 without a residual */
  uint32_t measuring_ms; /* MEASURED: maximum time for timing further algorithms; 0: no limit */
} ocp_problem_spec;

#endif
