/* Calls of vendor libraries: matrix products by cuBLASLt, convolutions and attention by cuDNN.
 *
 * A problem is plain data: the computation and its precision. Sizes and pointers come with each call, so one problem
 * serves every shape of a plan. The first call with new sizes asks the library for an algorithm and keeps it. The
 * plugin's library is not linked to the vendor libraries: it opens them when Python passes their paths, and operators
 * use a vendor library only if the plugin could open it. On the emulated device, and on a GPU without the vendor
 * libraries, operators launch kernels of the plugin, which compute the same. */
#ifndef OCP_VENDOR_PROBLEM_H
#define OCP_VENDOR_PROBLEM_H

#include "base/error.h"
#include "device/stream.h"
#include "vendor/spec.h"

typedef struct ocp_problem ocp_problem;
struct ocp_prepared; /* prepared.h */

/* Opens a library by path, or by a name that the system resolves, and finds its functions. Thread safe; after the first
 * success the library stays open. Returns 0, or an error code. */
int ocp_library_load(uint32_t library, const char *path, ocp_error *error);
/* Returns 10000 * major + 100 * minor + patch of the loaded library; 0 if it is not loaded. */
uint64_t ocp_library_version(uint32_t library);

/* Makes a problem; NULL with the error if the spec is invalid or its library is not loaded. Release the problem after
 * the last Run. */
ocp_problem *ocp_problem_create(const ocp_problem_spec *spec, ocp_error *error);
void ocp_problem_release(ocp_problem *problem);
/* Whether calls of the problem have these numbers of pointers and values. */
bool ocp_problem_takes(const ocp_problem *problem, uint32_t num_pointers, uint32_t num_values);

/* A call of a problem: its pointers and values. */
typedef struct ocp_library_call {
  ocp_problem *problem;
  void *const *pointers;
  uint32_t num_pointers, num_values;
  const int64_t *values;
} ocp_library_call;

/* A hint before the first of many calls: makes their missing algorithms on several threads, for libraries whose
 * algorithms are slow to make (is_for_device in library.h). Does nothing if only few algorithms are missing. Ignores
 * errors, which the calls themselves report. */
void ocp_library_prepare(const ocp_library_call *calls, uint32_t count, ocp_stream *stream);
/* Enqueues one call on the stream, whose device is current. If the library refuses the call, enqueues its substitute
 * (substitute.h). Thread safe, also for one stream. */
int ocp_library_run(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t num_pointers,
                    const int64_t *values, uint32_t num_values, ocp_error *error);
/* Enqueues one call on `captured`, a stream that is being captured, with the handle of `stream`. Returns false and
 * enqueues nothing if the library has refused the call, or if the handle or the algorithm has not executed yet: the
 * first call may allocate, which a capture forbids. Returns true, with the error, if the call fails. *used: the
 * algorithm, which must live as long as the graph; then pass it to ocp_library_let_go. If `captured` is NULL, only
 * returns whether the call could be captured. */
bool ocp_library_capture(ocp_problem *problem, ocp_stream *stream, const ocp_stream *captured, void *const *pointers,
                         uint32_t num_pointers, const int64_t *values, uint32_t num_values, struct ocp_prepared **used,
                         ocp_error *error);
void ocp_library_let_go(ocp_problem *problem, struct ocp_prepared *used);

#endif
