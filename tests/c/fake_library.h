/* Common part of the fake vendor libraries. They compute on the emulated device's memory in float32, round results to
 * the element type once, and refuse what the real libraries refuse. */
#ifndef FAKE_LIBRARY_H
#define FAKE_LIBRARY_H

#include <fnmatch.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Set by the test: returns the host address of emulated device memory; NULL if it is not allocated. */
void *(*fake_translate)(uint64_t address, size_t bytes);

/* For the test: numbers of events. Atomic, since several threads prepare calls concurrently. */
_Atomic int64_t fake_searches, fake_runs, fake_handles, fake_descriptors;

/* Set by tests of failures: returns whether this call of the function fails. The function that the environment variable
 * FAKE_REFUSES names always fails. */
int (*fake_fails)(const char *function);
static inline int fails(const char *function) {
  const char *refused = getenv("FAKE_REFUSES");
  return (refused && strcmp(refused, function) == 0) || (fake_fails && fake_fails(function));
}
#define MAY_FAIL()                                                                                                     \
  do {                                                                                                                 \
    if (fails(__func__))                                                                                               \
      return NOT_SUPPORTED;                                                                                            \
  } while (0)

/* Set by tests of measurements: index of the only fast algorithm; -1: all are fast. */
int64_t fake_fastest = -1;
/* Set by tests of measurements: index of the algorithm whose results have a wrong element; -1: none. */
int64_t fake_wrong = -1;
static inline void take_time(int64_t algorithm) {
  if (fake_fastest >= 0 && algorithm != fake_fastest)
    usleep(50000); /* longer than noise on a busy machine */
}

/* Fault of some calls, as "HOW:CALL"; set by a test, or by the environment variable FAKE_FAULT. HOW: "refused" (no
 * algorithm is found), "failing" (the execution fails), "wrong" (one element of the result is wrong) or "slow". CALL:
 * an fnmatch pattern for the call's description, its computation, epilogue and element type, such as
 * product_bias_relu_float16. */
char fake_fault[128];
/* Number of calls that had the fault. */
_Atomic int64_t fake_faults;
enum { SLOW_MICROSECONDS = 100000 };

static inline int has_fault(const char *how, const char *call) {
  const char *fault = fake_fault[0] || !getenv("FAKE_FAULT") ? fake_fault : getenv("FAKE_FAULT");
  const size_t length = strlen(how);
  if (strncmp(fault, how, length) != 0 || fault[length] != ':' || fnmatch(fault + length + 1, call, 0) != 0)
    return 0;
  if (fake_faults++ == 0)
    fprintf(stderr, "FAKE_FAULT=%s: a library call has a fault on purpose: %s\n", fault, call);
  return 1;
}

/* A resource that one thread at a time may use: a handle, or an algorithm. */
typedef struct exclusive {
  atomic_int users;
  atomic_int executed; /* has executed outside of captures, so its initial allocations are done */
  void *stream;
} exclusive;

/* For the test: numbers of uses by two threads at once, and of first executions in a capture; both are errors of the
 * caller. */
int64_t fake_shared, fake_cold;
/* Set by tests: microseconds that each use takes, and the driver function that returns a stream's capture status. */
int64_t fake_slow;
int (*fake_capturing)(void *stream, int *status);

static inline void begin_use(exclusive *it) {
  if (atomic_fetch_add(&it->users, 1))
    __atomic_fetch_add(&fake_shared, 1, __ATOMIC_SEQ_CST);
  if (fake_slow)
    usleep((unsigned)fake_slow);
}
static inline void end_use(exclusive *it) { atomic_fetch_sub(&it->users, 1); }

/* Whether the resource may execute on the stream: outside of captures, or after a first execution. */
static inline int can_execute(exclusive *it, void *stream) {
  int status = 0;
  if (fake_capturing)
    fake_capturing(stream, &status);
  fake_cold += status && !it->executed;
  if (status)
    return it->executed;
  it->executed = 1;
  return 1;
}

/* Aborts if an address is not a multiple of the bytes that the caller declared or that the library assumes. On a GPU, a
 * vector load from such an address is a sticky error. */
static inline void check_alignment(const char *function, const char *pointer, const void *address, uint64_t bytes) {
  if (!bytes || (uintptr_t)address % bytes == 0)
    return;
  fprintf(stderr, "%s: the pointer %s is %p, not a multiple of %llu bytes, as its alignment says\n", function, pointer,
          address, (unsigned long long)bytes);
  abort();
}

typedef enum element { FLOAT32, FLOAT16, BFLOAT16, UNKNOWN } element;

static inline void *translate(const void *address, element type, size_t elements) {
  return fake_translate((uint64_t)(uintptr_t)address, elements * (type == FLOAT32 ? 4 : 2));
}

static inline const void *at(element type, const void *memory, int64_t index) {
  return (const char *)memory + index * (type == FLOAT32 ? 4 : 2);
}

static inline float load(element type, const void *memory, int64_t index) {
  float value;
  uint16_t bits;
  _Float16 half;
  switch (type) {
  case FLOAT16:
    memcpy(&half, at(type, memory, index), sizeof half);
    return (float)half;
  case BFLOAT16:
    memcpy(&bits, at(type, memory, index), sizeof bits);
    memcpy(&value, &(uint32_t){(uint32_t)bits << 16}, sizeof value);
    return value;
  default:
    memcpy(&value, at(type, memory, index), sizeof value);
    return value;
  }
}

static inline void store(element type, void *memory, int64_t index, float value) {
  void *to = (void *)at(type, memory, index);
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  switch (type) {
  case FLOAT16:
    memcpy(to, &(_Float16){(_Float16)value}, 2);
    break;
  case BFLOAT16: /* rounds to nearest, ties to even; NaN stays NaN */
    bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
    memcpy(to, &(uint16_t){(uint16_t)bits}, 2);
    break;
  default:
    memcpy(to, &value, sizeof value);
  }
}

/* Adds factor * values to totals. This loop makes the stand-ins about as fast as kernels of the emulated device, whose
 * times the selftest compares with theirs. */
static inline void add_product(float *restrict totals, float factor, const float *restrict values, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    totals[i] += factor * values[i];
}

static inline const char *name_of(element type) {
  return type == FLOAT32 ? "float32" : type == FLOAT16 ? "float16" : "bfloat16";
}

/* Appends a line to the file that the environment variable FAKE_CALLS names. */
static inline void note_call(const char *call) {
  const char *path = getenv("FAKE_CALLS");
  FILE *file = path ? fopen(path, "ae") : NULL;
  if (!file)
    return;
  fprintf(file, "%s\n", call);
  fclose(file);
}

/* Returns a wrong value, which stays wrong after a ReLU or a clip to [0, 6]. */
static inline float spoiled(float value) { return value > 0 ? -value - 8 : -value + 8; }

/* Ends an execution: makes one element wrong, or takes time, if the call or its algorithm has that fault. */
static inline void put_fault(const char *call, int64_t algorithm, element type, void *result) {
  note_call(call);
  if ((fake_wrong >= 0 && algorithm == fake_wrong) || has_fault("wrong", call))
    store(type, result, 0, spoiled(load(type, result, 0)));
  if (has_fault("slow", call))
    usleep(SLOW_MICROSECONDS);
}

#endif
