/* Aliasing: inputs and outputs of a Run that are bound to memory that overlaps.
 *
 * The outputs of a Run are what they would be if it read all its inputs before it writes an output. The plan knows for
 * which inputs that holds of itself (ocp_plan_sharing). An output that aliases another input, or an output before it,
 * is redirected: the Run writes it to scratch memory, and copies it to where it is bound behind all its records. */
#ifndef OCP_RUN_INSTANCE_ALIASING_H
#define OCP_RUN_INSTANCE_ALIASING_H

#include "base/error.h"
#include "device/stream.h"
#include "run/instance/instance.h"

/* Called before a Run's first segment. */
void ocp_aliasing_begin(ocp_instance *instance);
/* Redirects the outputs of a segment that alias memory which is still read: bases of inputs are set, and those of the
 * segment's outputs to where they are bound. */
int ocp_aliasing_resolve(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error);
/* In a Run that is repeated, before the segment's records are enqueued: keeps what its outputs overwrite of what the
 * Run has read (device/memory/preserve.h). After ocp_aliasing_resolve. */
int ocp_aliasing_preserve(const ocp_instance *instance, uint32_t segment, const ocp_input *inputs, ocp_stream *stream,
                          ocp_error *error);
/* Enqueues the copies of redirected outputs to where they are bound, after the last record of a Run that succeeded. */
int ocp_aliasing_copy(const ocp_instance *instance, ocp_stream *stream, ocp_error *error);
/* Frees the scratch memory; called at the end of every Run, also of a failed one. */
void ocp_aliasing_release(ocp_instance *instance, ocp_stream *stream);

#endif
