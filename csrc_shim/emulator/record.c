#include "emulator/record.h"

#include <stdlib.h>
#include <time.h>

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

emu_record *emu_record_make(void) {
  emu_record *record = calloc(1, sizeof *record);
  if (record)
    atomic_store_explicit(&record->references, 1, memory_order_relaxed);
  return record;
}

void emu_record_release(emu_record *record) {
  if (record && atomic_fetch_sub(&record->references, 1) == 1) {
    emu_clock_free(record->clock);
    free(record);
  }
}

emu_record *emu_record_share(emu_record *record) {
  if (record)
    atomic_fetch_add(&record->references, 1);
  return record;
}

void emu_record_finish(emu_record *record) {
  record->time = now();
  atomic_store_explicit(&record->done, true, memory_order_release);
}

bool emu_record_is_done(const emu_record *record) {
  return !record || atomic_load_explicit(&record->done, memory_order_acquire);
}
