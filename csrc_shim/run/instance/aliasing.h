/* Aliasing: inputs and outputs of a Run that are bound to memory that overlaps.
 *
 * A Run gives the results that it would give if it read all inputs before it wrote any output. ocp_plan_sharing says
 * for which pairs of an input and an output that holds without scratch memory. If an output overlaps any other input,
 * or an earlier output, the Run redirects the output: it writes the output to scratch memory, and copies it to its
 * bound memory after the last record. */
#ifndef OCP_RUN_INSTANCE_ALIASING_H
#define OCP_RUN_INSTANCE_ALIASING_H

#include "base/error.h"
#include "device/stream.h"
#include "run/instance/instance.h"

/* Resets the state of redirections before a Run's first segment. */
void ocp_aliasing_begin(ocp_instance *instance);
/* Redirects the segment's outputs that overlap memory which the Run reads later. Before the call, the caller sets the
 * bases of the inputs, and sets the bases of the segment's outputs to their bound memory. */
int ocp_aliasing_resolve(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error);
/* In a Run that is repeated, called after ocp_aliasing_resolve and before the segment's records are enqueued: saves
 * the data that the segment's outputs overwrite and that the Run has read (device/memory/preserve.h). */
int ocp_aliasing_preserve(const ocp_instance *instance, uint32_t segment, const ocp_input *inputs, ocp_stream *stream,
                          ocp_error *error);
/* Enqueues the copies of redirected outputs to their bound memory, after the last record of a Run that succeeded. */
int ocp_aliasing_copy(const ocp_instance *instance, ocp_stream *stream, ocp_error *error);
/* Frees the scratch memory; called at the end of every Run, also of a failed one. */
void ocp_aliasing_release(ocp_instance *instance, ocp_stream *stream);

#endif
