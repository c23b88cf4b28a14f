/* The options of an arena and what it reports, as the host, Python and the arena know them. */
#ifndef OCP_DEVICE_ARENA_CONFIG_H
#define OCP_DEVICE_ARENA_CONFIG_H

#include "base/core.h"

enum { OCP_DEVICE_MEMORY = 0, OCP_PINNED_MEMORY = 1, OCP_NUM_MEMORIES = 2 };

/* How the next region's size follows from the last one's. */
enum { OCP_EXTEND_NEXT_POWER_OF_TWO = 0, OCP_EXTEND_SAME_AS_REQUESTED = 1 };

typedef struct ocp_arena_config {
  int64_t extend_strategy;
  int64_t initial_chunk_size_bytes;        /* of the first region */
  int64_t max_dead_bytes_per_chunk;        /* a chunk that exceeds its request by this much is always split */
  int64_t initial_growth_chunk_size_bytes; /* of the first region after a shrink */
  int64_t max_power_of_two_extend_bytes;   /* largest region that growth alone leads to */
  int64_t max_mem;                         /* bytes that the arena may hold; INT64_MAX: no limit */
  int64_t use_cuda_mempool;                /* device memory comes from a CUDA memory pool instead */
  int64_t cuda_mempool_release_threshold;
  int64_t cuda_mempool_bytes_to_keep_on_shrink;
} ocp_arena_config;

typedef struct ocp_memory_stats {
  int64_t limit;            /* bytes; INT64_MAX: none */
  int64_t in_use;           /* bytes handed out, rounded up to chunks; weights included */
  int64_t max_in_use;       /* the most that in_use has been */
  int64_t total;            /* bytes held from the driver */
  int64_t weights;          /* bytes handed out that bypass the arena: read-only */
  int64_t num_allocs;       /* all allocations */
  int64_t num_reserves;     /* those that bypass the arena */
  int64_t num_extensions;   /* regions taken from the driver for the arena */
  int64_t num_shrinkages;   /* shrinks asked for, or made for want of memory */
  int64_t max_alloc_size;   /* bytes */
  int64_t num_bound_chunks; /* free, and still used by work of a stream */
} ocp_memory_stats;

void ocp_arena_config_defaults(ocp_arena_config *config);

/* Sets the members that the keys name ("arena.max_mem", ...) and in *given the bit of each. An unknown key, or a value
 * that its key cannot have, is an error that names the key and what it takes. */
int ocp_arena_config_parse(const char *const *keys, const char *const *values, size_t count, ocp_arena_config *config,
                           uint32_t *given, ocp_error *error);

/* ---- the living arenas' options: one for each kind of device, ordinal and memory; kept from the first user of an
 * arena to its last, whether the device is open or not ---- */
/* A user of the arena (an OrtAllocator) comes or goes. Release returns whether it was the last one, whose going makes
 * the options the defaults again. */
void ocp_arena_retain(bool emulated, int ordinal, int memory);
bool ocp_arena_release(bool emulated, int ordinal, int memory);
/* Options for the arena. An arena that nobody has given options takes them; one that lives with others keeps what it
 * has: then warning (of OCP_ARENA_WARNING_BYTES) gets a sentence that names the keys, unless the same wish for another
 * memory of the device has just had it; else it is "". */
enum { OCP_ARENA_WARNING_BYTES = 600 };
int ocp_arena_configure(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                        size_t count, char *warning, ocp_error *error);
/* ORT_OK, or the error that ocp_arena_configure would give. */
int ocp_arena_check(const char *const *keys, const char *const *values, size_t count, ocp_error *error);
/* As above, but the limit always changes. bytes: INT64_MAX for none. */
int ocp_arena_set_limit(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error);
/* Gives the device, if it is open, the options: when they change, and when it was opened. */
void ocp_arena_apply(bool emulated, int ordinal, int memory);

#endif
