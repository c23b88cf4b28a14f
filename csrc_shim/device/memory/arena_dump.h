/* Arena statistics by chunk size, as text for the log of an out-of-memory error. */
#ifndef OCP_DEVICE_MEMORY_ARENA_DUMP_H
#define OCP_DEVICE_MEMORY_ARENA_DUMP_H

#include <stddef.h>

#include "device/memory/arena.h"

enum { OCP_ARENA_DUMP_BYTES = 6144 };

/* Writes a summary to `text`, which has `room` bytes: the total size of the arena's regions, the size of its largest
 * chunk that is not in use, and a histogram of chunk sizes by power of two. Each line of the histogram has the number
 * and total size of the chunks in use, of those freed but waiting for a stream, and of the free ones. The caller holds
 * the pool's lock. */
void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room);

#endif
