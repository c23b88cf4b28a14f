/* Options and statistics of an arena (memory/arena.h), and the keys and values that users write for the options. */
#ifndef OCP_DEVICE_ARENA_OPTIONS_H
#define OCP_DEVICE_ARENA_OPTIONS_H

#include "base/error.h"

enum { OCP_DEVICE_MEMORY = 0, OCP_PINNED_MEMORY = 1, OCP_NUM_MEMORIES = 2 };

/* Values of extend_strategy: how an arena chooses the size of its next region. */
enum { OCP_EXTEND_NEXT_POWER_OF_TWO = 0, OCP_EXTEND_SAME_AS_REQUESTED = 1 };

typedef struct ocp_arena_config {
  int64_t extend_strategy;
  int64_t initial_chunk_size_bytes; /* bytes of the first region */
  int64_t max_dead_bytes_per_chunk; /* a chunk that exceeds its request by this or more, or by over 1/8, is split */
  int64_t initial_growth_chunk_size_bytes; /* bytes of the first region after a shrink */
  int64_t max_power_of_two_extend_bytes;   /* maximum bytes to which regions grow; a larger request gets a region of its
                                              own size */
  int64_t max_mem;                         /* bytes that the arena may hold; INT64_MAX: no limit */
  int64_t use_cuda_mempool;                /* 1: a CUDA memory pool replaces the arena for device memory */
  int64_t cuda_mempool_release_threshold;
  int64_t cuda_mempool_bytes_to_keep_on_shrink;
} ocp_arena_config;

typedef struct ocp_memory_stats {
  int64_t limit;            /* bytes; INT64_MAX: no limit */
  int64_t in_use;           /* bytes of the chunks that are allocated, weights included */
  int64_t max_in_use;       /* the most that in_use has been */
  int64_t total;            /* bytes allocated from the driver */
  int64_t weights;          /* bytes of read-only allocations, which bypass the arena */
  int64_t num_allocs;       /* all allocations */
  int64_t num_reserves;     /* allocations that bypass the arena */
  int64_t num_extensions;   /* regions taken from the driver for the arena */
  int64_t num_shrinkages;   /* shrinks on request, or because memory ran out */
  int64_t max_alloc_size;   /* bytes of the largest allocation */
  int64_t num_bound_chunks; /* free chunks that unfinished work of a stream may still use */
} ocp_memory_stats;

enum { OCP_ARENA_WARNING_BYTES = 600 }; /* buffer size, in bytes, of a warning about refused options */

void ocp_arena_config_defaults(ocp_arena_config *config);

/* Sets the members that the keys name ("arena.max_mem", ...), and in *given the bits of these options (one bit per
 * option, see below). Ignores the key "ep_instance_id", which ORT adds. The error of an unknown key lists the known
 * keys; the error of an invalid value says which values its key accepts. */
int ocp_arena_config_parse(const char *const *keys, const char *const *values, size_t count, ocp_arena_config *config,
                           uint32_t *given, ocp_error *error);
/* Returns ORT_OK, or the error that ocp_arena_config_parse would report. */
int ocp_arena_check(const char *const *keys, const char *const *values, size_t count, ocp_error *error);
/* Parses the text as a value of arena.max_mem, in bytes; INT64_MAX: no limit. */
int ocp_arena_read_limit(const char *text, int64_t *bytes, ocp_error *error);

/* ---- sets of options: one bit per option ---- */
/* Returns the bits of the options in `given` whose values in `config` and `wanted` differ. */
uint32_t ocp_arena_config_differences(const ocp_arena_config *config, const ocp_arena_config *wanted, uint32_t given);
/* Copies the members whose bits are in `given` from `wanted` to `config`. */
void ocp_arena_config_take(ocp_arena_config *config, const ocp_arena_config *wanted, uint32_t given);
/* Returns the bits of `given` whose options apply to pinned memory as well. */
uint32_t ocp_arena_config_of_pinned(uint32_t given);
/* Writes the keys of the options in `given`, for example "arena.max_mem, arena.extend_strategy". */
void ocp_arena_config_list(uint32_t given, char *text, size_t text_bytes);

#endif
