/* The options of the living arenas: one set for each kind of device, ordinal and memory. They live from the first
 * user of an arena to its last, independently of the device, since ORT creates allocators before the device is
 * opened. */
#ifndef OCP_DEVICE_OPEN_ARENA_SETTINGS_H
#define OCP_DEVICE_OPEN_ARENA_SETTINGS_H

#include "base/error.h"
#include "device/pool.h"

/* Adds or removes a user of the arena (an OrtAllocator). Release returns whether it was the last user; the options
 * are reset to the defaults then. */
void ocp_arena_retain(bool emulated, int ordinal, int memory);
bool ocp_arena_release(bool emulated, int ordinal, int memory);
/* Offers options to the arena. An arena without options takes them. An arena with different options keeps its own,
 * and `warning` (of OCP_ARENA_WARNING_BYTES) gets a sentence that names the keys. It stays "" if no option differs, or
 * if the same options for another memory of the device have just given that warning. */
int ocp_arena_configure(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                        size_t count, char *warning, ocp_error *error);
/* Sets the arena's limit, even if the arena has options already. `bytes`: INT64_MAX for no limit. */
int ocp_arena_set_limit(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error);
/* Called when a device was opened: gives its pool the options, now and whenever they change. */
void ocp_arena_attach(bool emulated, int ordinal, ocp_pool *pool);

#endif
