/* Calls of vendor libraries: matrix products by cuBLASLt, convolutions and attention by cuDNN.
 *
 * A problem is plain data (what is computed, in which precision); sizes and pointers come with each call, so one
 * problem serves every shape of a plan. The first call with new sizes asks the library for an algorithm and keeps it.
 * Nothing here is linked to the libraries: the library opens them when Python names them, and an operator uses them
 * only if that succeeded. On the emulated device, and on a GPU without the libraries, operators launch our own kernels,
 * which follow the same contract. */
#ifndef OCP_VENDOR_PROBLEM_H
#define OCP_VENDOR_PROBLEM_H

#include "base/error.h"
#include "device/stream.h"

typedef struct ocp_problem ocp_problem;
struct ocp_prepared; /* prepared.h */

typedef enum ocp_library_id { OCP_CUBLASLT = 0, OCP_CUDNN = 1, OCP_NUM_LIBRARIES } ocp_library_id;

/* Opens a library by path, or by name where the system knows it, and finds its functions. Thread safe; the first
 * success stays. 0, or a code with the reason. */
int ocp_library_load(uint32_t library, const char *path, ocp_error *error);

typedef enum ocp_problem_kind {
  /* out[batch][m][n] = activation(alpha * a[batch] @ b[batch] (+ beta * residual[batch][m][n]) (+ bias[n])); residual
   * is contiguous, out along n.
   * pointers: out, a, b, [bias,] [residual,] workspace
   * values: m, n, k, leading dimensions of a, b and out, batches, batch strides of a, b and out (elements), workspace
   * bytes
   * The leading dimension is the stride of the dimension that is not contiguous. */
  OCP_PROBLEM_MATMUL = 0,
  /* out = activation(convolution of x with w (+ residual) (+ bias)), all contiguous: [images, channels, space...],
   * [rows, channels / groups, space...], out and residual [images, rows, space...], bias [rows]. With CHANNELS_LAST
   * memory has the channels of x, w, out and residual last. The images of out, or with CHANNELS_LAST its places, may be
   * apart, but not with a residual. A residual or an activation needs a bias, since cuDNN has no engine without one
   * for this layout; nor has it one for DOUBLE.
   * pointers: out, x, w, [bias,] [residual,] workspace
   * values: images, channels, rows, groups, elements from image to image (or place to place) of out, then for each of
   * `rank` (2 or 3) dimensions: size of x, of the kernel, of out, stride, dilation, pad at the beginning, pad at the
   * end; then workspace bytes */
  OCP_PROBLEM_CONV = 1,
  /* out[b][h][m][d] = sum over n of softmax over n (alpha * q[b][h][m] . k[b][h][n] (+ bias[b][h][m][n])) *
   * v[b][h][n][d] pointers: out, q, k, v, [bias,] workspace values: batches, heads, m, n, elements of a row of q and k,
   * elements of a row of v and out; elements from batch to batch, head to head and row to row of q, k, v and out, whose
   * rows are dense; the same of bias, and from key to key, 0 where it is repeated, and all 0 without one; workspace
   * bytes */
  OCP_PROBLEM_ATTENTION = 2
} ocp_problem_kind;

enum {
  OCP_PROBLEM_TF32 = 1,          /* float32 may be computed in TensorFloat-32; else in float32 */
  OCP_PROBLEM_DETERMINISTIC = 2, /* the same inputs give the same bits in every Run */
  OCP_PROBLEM_BIAS = 4,
  OCP_PROBLEM_A_TRANSPOSED = 8,  /* MATMUL: a is contiguous along m, not along k */
  OCP_PROBLEM_B_TRANSPOSED = 16, /* MATMUL: b is contiguous along k, not along n */
  OCP_PROBLEM_RELU = 32,         /* the activation; cuBLASLt's gives 0 for NaN */
  OCP_PROBLEM_GELU = 64,         /* MATMUL: the activation, in the form with tanh */
  OCP_PROBLEM_RESIDUAL = 128,
  OCP_PROBLEM_BRIEF = 256,    /* CONV: the heuristic that takes the least time */
  OCP_PROBLEM_MEASURED = 512, /* the fastest of some algorithms, which the first call with new sizes measures, unless
                               * it must be deterministic or is captured */
  OCP_PROBLEM_CHANNELS_LAST = 1024, /* CONV: the channels of a place are neighbours in memory, in all tensors */
  OCP_PROBLEM_SWISH = 2048,         /* CONV with CHANNELS_LAST: the activation x * sigmoid(x) */
  OCP_PROBLEM_RELU6 = 4096          /* CONV with CHANNELS_LAST: the activation that keeps x from 0 to 6 */
};

typedef struct ocp_problem_spec {
  uint32_t kind;
  uint32_t dtype; /* FLOAT, FLOAT16, BFLOAT16, or DOUBLE; all but what is stored is float32, for DOUBLE float64 */
  uint32_t flags;
  uint32_t rank;         /* CONV */
  double alpha, beta;    /* MATMUL, alpha of ATTENTION; CONV: 1, and 1 with a residual. beta is 0 without a residual */
  uint32_t measuring_ms; /* MEASURED: no further algorithm after so long; 0: any time */
} ocp_problem_spec;

/* NULL with the error if the spec makes no sense or its library is not loaded. Release it after the last Run. */
ocp_problem *ocp_problem_create(const ocp_problem_spec *spec, ocp_error *error);
void ocp_problem_release(ocp_problem *problem);
/* Whether calls of the problem have so many pointers and numbers. */
bool ocp_problem_takes(const ocp_problem *problem, uint32_t num_pointers, uint32_t num_values);

/* A call of a problem. */
typedef struct ocp_library_call {
  ocp_problem *problem;
  void *const *pointers;
  uint32_t num_pointers, num_values;
  const int64_t *values;
} ocp_library_call;

/* Has the libraries prepare what the calls need and have not got, by several threads: a hint before the first of many
 * calls. What fails here is reported by the call itself. */
void ocp_library_prepare(const ocp_library_call *calls, uint32_t count, ocp_stream *stream);
/* Enqueues one call on the stream, whose device is current. Safe beside other threads, also on the same stream. */
int ocp_library_run(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t num_pointers,
                    const int64_t *values, uint32_t num_values, ocp_error *error);
/* Enqueues one call on `captured`, a stream that is being captured, with the handle of `stream`. False, and nothing is
 * enqueued, where the handle or the algorithm has not executed yet: their first call may allocate, which a capture
 * forbids. *used must live as long as the graph; then it goes to ocp_library_let_go. With captured NULL it only
 * answers. */
bool ocp_library_capture(ocp_problem *problem, ocp_stream *stream, const ocp_stream *captured, void *const *pointers,
                         uint32_t num_pointers, const int64_t *values, uint32_t num_values, struct ocp_prepared **used,
                         ocp_error *error);
void ocp_library_let_go(ocp_problem *problem, struct ocp_prepared *used);

#endif
