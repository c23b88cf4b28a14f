/* Stores the findings of the checking mode as text. */
#include "emulator/findings.h"

#include <inttypes.h>
#include <stdio.h>

#include "emulator/heap.h"
#include "emulator/state.h"

#define MAX_FINDINGS 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char findings[MAX_FINDINGS][EMU_FINDING_BYTES]; /* the first findings; later ones are dropped */
static int num_findings;

const char *const emu_finding_kinds[] = {
    "out-of-bounds", "use-after-free", "uninitialized-read", "missing-wait",      "divergent-barrier",
    "misaligned",    "race",           "pending-copy",       "read-only-written", "invalid-mask"};

int ocp_emu_num_findings(void) {
  pthread_mutex_lock(&lock);
  int count = num_findings;
  pthread_mutex_unlock(&lock);
  return count;
}

int ocp_emu_finding(int index, char *text, size_t text_bytes) {
  pthread_mutex_lock(&lock);
  int length = -1;
  if (index >= 0 && index < num_findings)
    length = snprintf(text, text_bytes, "%s", findings[index]);
  pthread_mutex_unlock(&lock);
  return length;
}

void ocp_emu_clear_findings(void) {
  pthread_mutex_lock(&lock);
  num_findings = 0;
  pthread_mutex_unlock(&lock);
  for (uint32_t index = 0; index < EMU_MAX_DEVICES; index++)
    emu_recover(&emu.devices[index]);
}

int emu_finding_keep(const char *text) {
  int index = -1;
  pthread_mutex_lock(&lock);
  if (num_findings < MAX_FINDINGS) {
    index = num_findings++;
    snprintf(findings[index], EMU_FINDING_BYTES, "%s", text);
  }
  pthread_mutex_unlock(&lock);
  return index;
}

CUresult emu_finding_report(emu_finding_kind kind, const char *operation, uint64_t address, uint64_t bytes,
                            const char *where) {
  char text[EMU_FINDING_BYTES];
  snprintf(text, sizeof text, "%s: %s of %" PRIu64 " bytes at 0x%" PRIx64 ": %s", emu_finding_kinds[kind], operation,
           bytes, address, where);
  emu_finding_keep(text);
  return emu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "%s", text);
}

void emu_finding_locate(uint64_t address, char *text, size_t text_bytes) {
  uint64_t start, size;
  if (emu_is_device_address(address) && emu_heap_around(&emu_device_of(address)->heap, address, &start, &size))
    snprintf(text, text_bytes, "byte %" PRIu64 " of %" PRIu64 " allocated at 0x%" PRIx64, address - start, size, start);
  else
    snprintf(text, text_bytes, "no allocation is near");
}
