/* Arena statistics by chunk size, as text for the log of an out-of-memory error. */
#ifndef OCP_DEVICE_MEMORY_ARENA_DUMP_H
#define OCP_DEVICE_MEMORY_ARENA_DUMP_H

#include <stddef.h>

#include "device/memory/arena.h"

enum { OCP_ARENA_DUMP_BYTES = 6144 };

/* Writes statistics to `text` (`room` bytes): the number and total size of the arena's regions, and the size of its
 * largest chunk that is not in use; then for each power of two the number and total size of the chunks from that size
 * on that are in use, that are freed but wait for work of a stream, and that are free. The caller holds the pool's
 * lock. */
void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room);

#endif
