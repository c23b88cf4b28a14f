/* Timeline semaphores of the emulated devices: a 64-bit counter that only increases, in a file in memory (memfd) that
 * processes share. It stands in for a Vulkan timeline semaphore that is exported as a file descriptor. The file begins
 * with these members:
 *
 *   offset 0   8 bytes   the text EMU_TIMELINE_MAGIC
 *   offset 8   uint64_t  the value, in the machine's byte order; accessed atomically
 *
 * Any process signals by an atomic store of a larger value. Nothing wakes waiters: they poll. The file must not shrink,
 * since an access beyond its end would kill the process. So the file needs the seal F_SEAL_SHRINK; emu_timeline_map
 * adds it if the creator allows that (MFD_ALLOW_SEALING). */
#ifndef OCP_EMULATOR_WORK_TIMELINE_H
#define OCP_EMULATOR_WORK_TIMELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"

#define EMU_TIMELINE_MAGIC "ocp-time"
enum { EMU_TIMELINE_BYTES = 16 };

typedef struct emu_timeline emu_timeline;

/* Checks that the descriptor is a file in memory of at least `least` bytes, and seals it against shrinking. On failure
 * returns the driver's error, and sets its text by emu_fail; `what` names the descriptor's purpose in the text. */
CUresult emu_check_shared_file(int fd, uint64_t least, const char *what);

/* Maps the counter; the descriptor stays the caller's. `what`: what errors call the timeline, such as "timeline
 * semaphore"; a string literal. */
CUresult emu_timeline_map(int fd, const char *what, emu_timeline **out);
const char *emu_timeline_name(const emu_timeline *timeline);
emu_timeline *emu_timeline_share(emu_timeline *timeline);
/* Drops a reference; the last one unmaps the counter. Ignores NULL. */
void emu_timeline_release(emu_timeline *timeline);
/* Whether operations hold references to the timeline besides its one owner. */
bool emu_timeline_is_used(const emu_timeline *timeline);
uint64_t emu_timeline_value(const emu_timeline *timeline);
/* Sets the value. A lower value has no effect: the counter never decreases. */
void emu_timeline_signal(emu_timeline *timeline, uint64_t value);

#endif
