/* The state of each byte of device memory in the checking mode, and the quarantine of freed blocks. */
#include "emulator/shadow.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulator/heap.h"

#define QUARANTINE_BYTES ((uint64_t)256 << 20) /* maximum per device; a quarter of its memory if that is less */

typedef struct freed {
  struct freed *next;
  emu_device *device;
  uint64_t address, bytes;
  uint64_t held; /* bytes of the block with its red zone */
} freed;

static uint8_t *states; /* one for each byte of the emulated devices' memory */
static emu_history *histories;
static emu_word *words;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the quarantine */
static freed *oldest, *newest;
static uint64_t quarantined[EMU_MAX_DEVICES];

static void *reserve(uint64_t bytes) {
  void *range = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? NULL : range;
}

static void mark_live(void *unused, uint64_t address, uint64_t bytes) {
  (void)unused;
  memset(states + (address - emu.base), EMU_BYTE_ALLOCATED | EMU_BYTE_WRITTEN, bytes);
}

static uint64_t words_bytes(void) { return emu.bytes / 4 * sizeof *words; }

int emu_shadow_start(void) {
  states = reserve(emu.bytes);
  histories = reserve(emu.bytes / EMU_GRANULE * sizeof *histories);
  words = reserve(words_bytes());
  if (!states || !histories || !words) {
    emu_shadow_stop();
    return -1;
  }
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    emu_heap_visit(&emu.devices[index].heap, mark_live, NULL);
  return 0;
}

void emu_shadow_stop(void) {
  if (states)
    for (uint32_t index = 0; index < EMU_MAX_DEVICES; index++)
      emu_shadow_flush(&emu.devices[index]);
  if (states)
    munmap(states, emu.bytes);
  if (histories)
    munmap(histories, emu.bytes / EMU_GRANULE * sizeof *histories);
  if (words)
    munmap(words, words_bytes());
  states = NULL;
  histories = NULL;
  words = NULL;
}

emu_word *emu_shadow_word(uint64_t address) { return &words[(address - emu.base) / 4]; }

void emu_shadow_forget_words(void) { madvise(words, words_bytes(), MADV_DONTNEED); }

/* Clears the state and the history of the range. */
static void forget(uint64_t address, uint64_t bytes) {
  memset(states + (address - emu.base), 0, bytes);
  memset(emu_history_of(address), 0, (bytes + EMU_GRANULE - 1) / EMU_GRANULE * sizeof *histories);
}

emu_history *emu_history_of(uint64_t address) { return &histories[(address - emu.base) / EMU_GRANULE]; }

static void mark_unwritten(uint64_t address, uint64_t bytes) {
  memset(states + (address - emu.base), EMU_BYTE_ALLOCATED, bytes);
  memset((void *)(address + (uint64_t)emu.alias), EMU_UNWRITTEN, bytes);
}

void emu_shadow_allocated(uint64_t address, uint64_t bytes) {
  if (!states)
    return;
  forget(address, bytes);
  mark_unwritten(address, bytes);
}

void emu_shadow_imported(uint64_t address, uint64_t bytes) {
  if (!states)
    return;
  forget(address, bytes);
  emu_shadow_written(address, bytes);
}

void emu_shadow_reused(uint64_t address, uint64_t bytes, uint64_t held) {
  if (!states)
    return;
  mark_unwritten(address, bytes);
  memset(states + (address - emu.base) + bytes, 0, held - bytes);
}

/* Removes the oldest quarantined block of a device from the list; the device must have a quarantined block. */
static freed *take_oldest(const emu_device *device) {
  freed *before = NULL, *block = oldest;
  while (block->device != device) {
    before = block;
    block = block->next;
  }
  *(before ? &before->next : &oldest) = block->next;
  if (newest == block)
    newest = before;
  quarantined[device->ordinal] -= block->held;
  return block;
}

static void give_back(freed *block) {
  forget(block->address, block->bytes);
  emu_heap_free(&block->device->heap, block->address);
  free(block);
}

bool emu_shadow_free(emu_device *device, uint64_t address, uint64_t bytes) {
  freed *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  if (!block || emu_shadow_is_freed(address)) {
    pthread_mutex_unlock(&lock);
    free(block);
    return false;
  }
  *block = (freed){NULL, device, address, bytes, emu_heap_held(&device->heap, address)};
  memset(states + (address - emu.base), EMU_BYTE_FREED, bytes);
  if (newest)
    newest->next = block;
  else
    oldest = block;
  newest = block;
  quarantined[device->ordinal] += block->held;
  uint64_t most = device->heap.capacity / 4 < QUARANTINE_BYTES ? device->heap.capacity / 4 : QUARANTINE_BYTES;
  while (quarantined[device->ordinal] > most)
    give_back(take_oldest(device));
  pthread_mutex_unlock(&lock);
  return true;
}

bool emu_shadow_flush(emu_device *device) {
  bool any = false;
  pthread_mutex_lock(&lock);
  while (states && quarantined[device->ordinal] > 0) {
    give_back(take_oldest(device));
    any = true;
  }
  pthread_mutex_unlock(&lock);
  return any;
}

uint64_t emu_shadow_quarantined(const emu_device *device) {
  pthread_mutex_lock(&lock);
  uint64_t bytes = quarantined[device->ordinal];
  pthread_mutex_unlock(&lock);
  return bytes;
}

uint8_t emu_shadow_state(uint64_t address) { return __atomic_load_n(&states[address - emu.base], __ATOMIC_RELAXED); }

bool emu_shadow_is_freed(uint64_t address) { return states && emu_shadow_state(address) & EMU_BYTE_FREED; }

/* Marks the range as written. Several host threads may do so at once: all store the same value. */
void emu_shadow_written(uint64_t address, uint64_t bytes) {
  uint8_t *first = states + (address - emu.base);
  for (uint64_t i = 0; i < bytes; i++)
    __atomic_store_n(&first[i], EMU_BYTE_ALLOCATED | EMU_BYTE_WRITTEN, __ATOMIC_RELAXED);
}

void emu_shadow_copied(uint64_t dst, uint64_t src, uint64_t bytes) {
  memmove(states + (dst - emu.base), states + (src - emu.base), bytes);
}

bool emu_shadow_is_written(uint64_t address, uint32_t bytes) {
  const uint8_t *first = states + (address - emu.base);
  if (bytes == 4 && address % 4 == 0)
    return __atomic_load_n((const uint32_t *)first, __ATOMIC_RELAXED) == 0x03030303u;
  return emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED | EMU_BYTE_WRITTEN) == bytes;
}

uint64_t emu_shadow_first_not(uint64_t address, uint64_t bytes, uint8_t wanted) {
  const uint8_t *first = states + (address - emu.base);
  for (uint64_t i = 0; i < bytes; i++)
    if ((__atomic_load_n(&first[i], __ATOMIC_RELAXED) & wanted) != wanted)
      return i;
  return bytes;
}
