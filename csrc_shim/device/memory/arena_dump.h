/* Arena statistics by chunk size, as text for the log of an out-of-memory error. */
#ifndef OCP_DEVICE_MEMORY_ARENA_DUMP_H
#define OCP_DEVICE_MEMORY_ARENA_DUMP_H

#include <stddef.h>

#include "device/memory/arena.h"

enum { OCP_ARENA_DUMP_BYTES = 6144 };

/* Writes statistics to `text` (`room` bytes). The first line has the number and total size of the arena's regions and
 * of the reserved ones among them, and the size of the largest chunk that is not in use. Then a line for each power of
 * two that has chunks (without reserved regions) gives the number and total size of the chunks from that size to below
 * twice that size, in three groups: in use; freed, but unfinished work of a stream may use them; free. Lines that do
 * not fit are left out. The caller holds the pool's lock. */
void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room);

#endif
