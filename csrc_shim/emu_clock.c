/* Which operations happen before which: a vector clock for each stream and one for the host. */
#include "emu_stream.h"

emu_clock *emu_clock_tick(CUstream stream) {
  (void)stream;
  return NULL;
}
emu_clock *emu_clock_snapshot(CUstream stream) {
  (void)stream;
  return NULL;
}
void emu_clock_join(CUstream stream, const emu_clock *clock) { (void)stream, (void)clock; }
void emu_clock_host_waits(const emu_clock *clock) { (void)clock; }
void emu_clock_free(emu_clock *clock) { (void)clock; }
