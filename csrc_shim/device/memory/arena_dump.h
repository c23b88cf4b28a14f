/* Arena statistics by chunk size, as text for the log of an out-of-memory error. */
#ifndef OCP_DEVICE_MEMORY_ARENA_DUMP_H
#define OCP_DEVICE_MEMORY_ARENA_DUMP_H

#include <stddef.h>

#include "device/memory/arena.h"

enum { OCP_ARENA_DUMP_BYTES = 6144 };

/* For each power of two, writes how many chunks are in use, are freed but wait for work of a stream, and are free; then
 * the largest free chunk. The caller holds the pool's lock. */
void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room);

#endif
