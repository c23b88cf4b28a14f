/* What the stand-ins for vendor libraries share: they compute on the emulated device's memory, plainly and in float32,
 * and refuse what the real ones would refuse. */
#ifndef FAKE_LIBRARY_H
#define FAKE_LIBRARY_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Set by the test: the host's address of emulated device memory, NULL where none is allocated. */
void *(*fake_translate)(uint64_t address, size_t bytes);

/* How often things happened, for the test to read. */
int64_t fake_searches, fake_runs, fake_handles, fake_descriptors;

/* Set by tests of failures: whether the call of that function fails. */
int (*fake_fails)(const char *function);
#define MAY_FAIL()                                                                                                     \
  do {                                                                                                                 \
    if (fake_fails && fake_fails(__func__))                                                                            \
      return NOT_SUPPORTED;                                                                                            \
  } while (0)

static inline float *translate(const void *address, size_t elements) {
  return fake_translate((uint64_t)(uintptr_t)address, elements * sizeof(float));
}

#endif
