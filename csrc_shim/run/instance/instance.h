/* Variants and instances of plans: creation, resolution and release. instance_state.h has a diagram of the states of
 * instances, and their invariants. */
#ifndef OCP_RUN_INSTANCE_INSTANCE_H
#define OCP_RUN_INSTANCE_INSTANCE_H

#include "base/error.h"
#include "device/stream.h"
#include "run/instance/input.h"
#include "run/instance/instance_state.h"

/* Whether the plan accepts inputs of these element types and ranks, with these numbers of host values (one for each
 * host input). */
bool ocp_variant_accepts(const ocp_variant *variant, const ocp_input *inputs, uint32_t num_inputs,
                         const uint32_t *host_counts);
/* Creates an instance for inputs for which ocp_variant_accepts is true, and resolves its first segment
 * (ocp_instance_resolve). host_values: the elements of all host inputs, in order. Returns NULL if the guards do not
 * hold; NULL with the error if the instance cannot be created. */
ocp_instance *ocp_instance_create(const ocp_variant *variant, const ocp_input *inputs, const int64_t *host_values,
                                  const uint64_t *key, uint32_t key_words, ocp_error *error);
/* Returns whether `instance` would enqueue the same work as `other`, so that they differ only in their keys. If so,
 * copies the key and the registers of `other` to `instance`: a Run can use `instance` instead of `other`. `instance`
 * must be in no cache. */
bool ocp_instance_become(ocp_instance *instance, const ocp_instance *other);
/* Moves the CUDA graph and the count of warm Runs of `from` to `instance` if both belong to one variant, whose plan has
 * one segment, and only one Run used `from`. So one graph serves all Runs if each Run has a new key, as in decoding. */
void ocp_instance_inherit(ocp_instance *instance, ocp_instance *from);
/* Explains why a plan that was built for exactly these inputs gave no instance: its guards could not be evaluated.
 * Fails with the error of the plan's assertion that these inputs violate, else with the error of the size that could
 * not be computed. Returns ORT_OK if all assertions hold and all sizes can be computed. */
int ocp_instance_refusal(const ocp_variant *variant, const ocp_input *inputs, const int64_t *host_values,
                         ocp_error *error);
/* Records the stream of the latest launch of the instance's graph, and its sequence number; called after
 * ocp_stream_enqueued. */
void ocp_instance_replayed(ocp_instance *instance, const ocp_stream *stream);
/* Restarts the count of warm Runs and doubles the number of them before the next graph (16 times at most), after the
 * instance lost its graph or memory did not suffice for one. */
void ocp_instance_cool(ocp_instance *instance);
/* Frees the instance and its graph. */
void ocp_instance_free(ocp_instance *instance);
uint64_t ocp_instance_key_hash(const uint64_t *key, uint32_t words);
/* Evaluates a segment after its read-backs have been stored in registers: checks its assertions, computes the
 * dimensions of its outputs, lays out its slab and fills its calls. */
int ocp_instance_resolve(ocp_instance *instance, uint32_t segment, ocp_error *error);

#endif
