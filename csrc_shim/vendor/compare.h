/* Comparison of the results that two algorithms of a library have for one call. */
#ifndef OCP_VENDOR_COMPARE_H
#define OCP_VENDOR_COMPARE_H

#include "device/stream.h"
#include "vendor/library.h"

/* Waits for the stream, and returns a copy of the result at `address`, which the caller frees; NULL if there is not
 * enough host memory or the copy fails. */
void *ocp_result_copy(ocp_stream *stream, const ocp_problem_spec *spec, const ocp_result *result, const void *address);
/* Returns the largest difference between two copies of a result, relative to the largest finite magnitude in the first.
 * INFINITY: an element is finite in the first copy and not in the second. Elements that are not finite in the first
 * copy do not count. */
double ocp_result_difference(const ocp_problem_spec *spec, const ocp_result *result, const void *first,
                             const void *second);
/* Returns the bound of ocp_result_difference for two correct results. The unit is the rounding error of the precision
 * in which the call multiplies: 2^-11 for float16 and TF32, 2^-8 for bfloat16, 2^-24 for float32, 2^-53 for float64.
 * The bound is 8 units. For float32 without TF32 and for float64 it is 1024 units, since the order of the additions
 * matters more than the rounding of the result. */
double ocp_result_bound(const ocp_problem_spec *spec);

#endif
