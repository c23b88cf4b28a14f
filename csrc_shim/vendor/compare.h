/* Comparison of the results that two algorithms of a library have for one call. */
#ifndef OCP_VENDOR_COMPARE_H
#define OCP_VENDOR_COMPARE_H

#include "device/stream.h"
#include "vendor/library.h"

/* Waits for the stream, and returns a copy of the result at `address`, which the caller frees; NULL if there is not
 * enough host memory or the copy fails. */
void *ocp_result_copy(ocp_stream *stream, const ocp_problem_spec *spec, const ocp_result *result, const void *address);
/* Returns the largest difference between two copies of a result, relative to the largest finite magnitude in the first.
 * INFINITY: one has infinities or NaNs where the first is finite. Elements that are not finite in the first do not
 * count. */
double ocp_result_difference(const ocp_problem_spec *spec, const ocp_result *result, const void *first,
                             const void *second);
/* Returns the largest such difference of two right results: 8 roundings to the precision in which the call multiplies,
 * and 1024 for float32 without TF32 and for float64, where the order of the additions matters more than the rounding of
 * the result. */
double ocp_result_bound(const ocp_problem_spec *spec);

#endif
