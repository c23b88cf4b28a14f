/* The options of the arenas in use: one set for each kind of device (CUDA, emulated), ordinal and memory (device,
 * pinned). They exist from the first user of an arena to its last, whether or not the device is open, since ORT creates
 * allocators before the device is opened. */
#ifndef OCP_DEVICE_OPEN_ARENA_SETTINGS_H
#define OCP_DEVICE_OPEN_ARENA_SETTINGS_H

#include "base/error.h"
#include "device/pool.h"

/* Add or remove a user of the arena (an OrtAllocator). ocp_arena_release returns whether it was the last user; the
 * options are then reset to their defaults. */
void ocp_arena_retain(bool emulated, int ordinal, int memory);
bool ocp_arena_release(bool emulated, int ordinal, int memory);
/* Offers options to the arena. If no user has set options of the arena yet, it takes them. Otherwise it keeps its own,
 * and `warning` (OCP_ARENA_WARNING_BYTES bytes) gets a sentence that names the keys that differ. `warning` is ""
 * if no option differs, or if the same keys and values were refused last time on this device. */
int ocp_arena_configure(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                        size_t count, char *warning, ocp_error *error);
/* Sets the arena's limit, even if the arena has options already. `bytes`: 0 or INT64_MAX for no limit. */
int ocp_arena_set_limit(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error);
/* Called when a device was opened: gives its pool the options, now and whenever they change. */
void ocp_arena_attach(bool emulated, int ordinal, ocp_pool *pool);

#endif
