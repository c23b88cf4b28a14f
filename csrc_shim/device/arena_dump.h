/* What an arena holds when memory runs out, as text for the log. */
#ifndef OCP_DEVICE_ARENA_DUMP_H
#define OCP_DEVICE_ARENA_DUMP_H

#include <stddef.h>

#include "device/arena.h"

enum { OCP_ARENA_DUMP_BYTES = 6144 };

/* Writes how many chunks of each power of two are in use, wait for work of a stream, and are free, and the largest free
 * one. The caller holds the pool's lock. */
void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room);

#endif
