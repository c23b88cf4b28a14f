#include "run/plan_memory.h"

#include <string.h>

#include "plan/load.h"
#include "run/cluster_state.h"
#include "run/instance/instance.h"
#include "run/instance/instance_cache.h"

/* Returns the peak memory of a segment: the maximum over its records of the total size in bytes of the live buffers. */
static uint64_t alive_at_once(const ocp_instance *instance, uint32_t segment) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].buffers;
  uint64_t most = 0;
  for (uint32_t i = 0; i < range.count; i++) {
    const uint32_t start = plan->buffers[plan->buffer_order[range.first + i]].first_record;
    uint64_t alive = 0; /* live bytes at the record where this buffer's life starts */
    for (uint32_t k = 0; k < range.count; k++) {
      const uint32_t other = plan->buffer_order[range.first + k];
      if (plan->buffers[other].first_record <= start && plan->buffer_last[other] >= start)
        alive += (uint64_t)instance->registers[plan->buffers[other].size_register];
    }
    most = alive > most ? alive : most;
  }
  return most;
}

bool ocp_cluster_memory(ocp_cluster *cluster, ocp_plan_memory *memory) {
  memset(memory, 0, sizeof *memory);
  ocp_instance *instance = atomic_exchange(&cluster->cache.last_used, NULL);
  if (!instance)
    return false;
  const uint32_t num_segments = instance->variant->plan->header.num_segments;
  for (uint32_t s = 0; s < num_segments; s++) {
    memory->planned += instance->slab_bytes[s];
    memory->alive_at_once += alive_at_once(instance, s);
  }
  ocp_instance_cache_put(&cluster->cache, instance);
  return true;
}
