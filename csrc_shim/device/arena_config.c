/* The keys of an arena, and the options of the arenas that live. */
#include "device/arena_config.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/pool.h"

/* ---- keys ---- */

#define KEY(name, least, largest, initial, takes)                                                                      \
  {"arena." #name, offsetof(ocp_arena_config, name), least, largest, initial, takes}

static const struct {
  const char *key;
  size_t offset;
  int64_t least, largest, initial; /* -1 always means the default */
  const char *takes;
} keys_known[] = {
    KEY(extend_strategy, 0, 1, OCP_EXTEND_NEXT_POWER_OF_TWO, "0 (kNextPowerOfTwo) or 1 (kSameAsRequested)"),
    KEY(initial_chunk_size_bytes, 1, INT64_MAX, 1 << 20, "a number of bytes from 1"),
    KEY(max_dead_bytes_per_chunk, 0, INT64_MAX, 128 << 20, "a number of bytes"),
    KEY(initial_growth_chunk_size_bytes, 1, INT64_MAX, 2 << 20, "a number of bytes from 1"),
    KEY(max_power_of_two_extend_bytes, 1, INT64_MAX, 1 << 30, "a number of bytes from 1"),
    KEY(max_mem, 0, INT64_MAX, INT64_MAX, "a number of bytes, 0 for no limit"),
    KEY(use_cuda_mempool, 0, 1, 0, "0 or 1"),
    KEY(cuda_mempool_release_threshold, 0, INT64_MAX, 0, "a number of bytes"),
    KEY(cuda_mempool_bytes_to_keep_on_shrink, 0, INT64_MAX, 0, "a number of bytes"),
};
enum { NUM_KEYS = sizeof keys_known / sizeof *keys_known, MAX_MEM = 5, USE_MEMPOOL = 6 };

static int64_t *member(ocp_arena_config *config, int index) {
  return (int64_t *)(void *)((char *)config + keys_known[index].offset);
}

static int64_t value_of(const ocp_arena_config *config, int index) {
  return *member((ocp_arena_config *)config, index);
}

void ocp_arena_config_defaults(ocp_arena_config *config) {
  for (int i = 0; i < NUM_KEYS; i++)
    *member(config, i) = keys_known[i].initial;
}

/* "arena.max_mem, arena.extend_strategy": the keys of the bits. */
static void list_keys(uint32_t bits, char *text, size_t text_bytes) {
  size_t length = 0;
  text[0] = 0;
  for (int i = 0; i < NUM_KEYS; i++)
    if (bits >> i & 1 && length < text_bytes)
      length += (size_t)snprintf(text + length, text_bytes - length, "%s%s", length ? ", " : "", keys_known[i].key);
}

static bool parse_value(int index, const char *text, int64_t *value) {
  if (index == 0 && strcmp(text, "kNextPowerOfTwo") == 0) {
    *value = OCP_EXTEND_NEXT_POWER_OF_TWO;
    return true;
  }
  if (index == 0 && strcmp(text, "kSameAsRequested") == 0) {
    *value = OCP_EXTEND_SAME_AS_REQUESTED;
    return true;
  }
  char *end;
  errno = 0;
  const bool negative = *text == '-';
  const unsigned long long number = strtoull(text + negative, &end, 10);
  if (end == text + negative || *end || text[negative] < '0' || text[negative] > '9' || (errno && errno != ERANGE))
    return false;
  if (negative) {
    *value = keys_known[index].initial;
    return number == 1;
  }
  /* What SIZE_MAX, the built-in provider's "unlimited", means. */
  *value = errno == ERANGE || number > INT64_MAX ? INT64_MAX : (int64_t)number;
  if (errno == ERANGE || *value < keys_known[index].least || *value > keys_known[index].largest)
    return false;
  if (index == MAX_MEM && *value == 0)
    *value = INT64_MAX;
  return true;
}

static int unknown_key(const char *key, ocp_error *error) {
  char known[600] = "";
  list_keys((UINT32_C(1) << NUM_KEYS) - 1, known, sizeof known);
  return ocp_fail(error, ORT_INVALID_ARGUMENT, OCP_EP_NAME " has no option '%.100s'; known: %s", key, known);
}

int ocp_arena_config_parse(const char *const *keys, const char *const *values, size_t count, ocp_arena_config *config,
                           uint32_t *given, ocp_error *error) {
  for (size_t i = 0; i < count; i++) {
    int index = 0;
    while (index < NUM_KEYS && strcmp(keys[i], keys_known[index].key) != 0)
      index++;
    if (index == NUM_KEYS)
      return unknown_key(keys[i], error);
    if (!parse_value(index, values[i], member(config, index)))
      return ocp_fail(error, ORT_INVALID_ARGUMENT, OCP_EP_NAME " option %s='%.100s': it takes %s", keys[i], values[i],
                      keys_known[index].takes);
    *given |= UINT32_C(1) << index;
  }
  return ORT_OK;
}

/* The keys of `given` for which the two differ. */
static uint32_t differences(const ocp_arena_config *config, const ocp_arena_config *wanted, uint32_t given) {
  uint32_t differ = 0;
  for (int i = 0; i < NUM_KEYS; i++)
    if (given >> i & 1 && value_of(config, i) != value_of(wanted, i))
      differ |= UINT32_C(1) << i;
  return differ;
}

/* ---- the arenas that live ---- */

typedef struct settings {
  ocp_arena_config config;
  uint32_t given; /* keys that somebody gave; with none the arena takes what comes */
  int users;
  bool initialised;
} settings;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static settings all[2][OCP_MAX_DEVICES][OCP_NUM_MEMORIES];

static settings *settings_of(bool emulated, int ordinal, int memory) {
  settings *s = &all[emulated][ordinal][memory];
  if (!s->initialised)
    ocp_arena_config_defaults(&s->config);
  s->initialised = true;
  return s;
}

static void apply(bool emulated, int ordinal, int memory, const settings *s) {
  ocp_device *device = ocp_device_find(emulated, ordinal);
  if (device)
    ocp_pool_configure(device, memory, &s->config);
}

void ocp_arena_apply(bool emulated, int ordinal, int memory) {
  pthread_mutex_lock(&lock);
  apply(emulated, ordinal, memory, settings_of(emulated, ordinal, memory));
  pthread_mutex_unlock(&lock);
}

void ocp_arena_retain(bool emulated, int ordinal, int memory) {
  pthread_mutex_lock(&lock);
  settings_of(emulated, ordinal, memory)->users++;
  pthread_mutex_unlock(&lock);
}

/* What was refused last. Each session asks for the device's memory and for pinned memory, and both for itself and
 * through ONNX Runtime: one warning will do. */
static struct {
  ocp_arena_config wanted;
  uint32_t refused;
} latest[2][OCP_MAX_DEVICES];

bool ocp_arena_release(bool emulated, int ordinal, int memory) {
  pthread_mutex_lock(&lock);
  settings *s = settings_of(emulated, ordinal, memory);
  const bool last = --s->users == 0;
  if (last) {
    ocp_arena_config_defaults(&s->config);
    s->given = 0;
    latest[emulated][ordinal].refused = 0;
    apply(emulated, ordinal, memory, s);
  }
  pthread_mutex_unlock(&lock);
  return last;
}

static int check_place(int ordinal, int memory, ocp_error *error) {
  if (ordinal < 0 || ordinal >= OCP_MAX_DEVICES || memory < 0 || memory >= OCP_NUM_MEMORIES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no CUDA device %d", ordinal);
  return ORT_OK;
}

int ocp_arena_check(const char *const *keys, const char *const *values, size_t count, ocp_error *error) {
  ocp_arena_config config;
  uint32_t given = 0;
  return ocp_arena_config_parse(keys, values, count, &config, &given, error);
}

static bool was_said(bool emulated, int ordinal, const ocp_arena_config *wanted, uint32_t refused) {
  const bool same =
      latest[emulated][ordinal].refused == refused && !differences(&latest[emulated][ordinal].wanted, wanted, refused);
  latest[emulated][ordinal].wanted = *wanted;
  latest[emulated][ordinal].refused = refused;
  return same;
}

int ocp_arena_configure(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                        size_t count, char *warning, ocp_error *error) {
  warning[0] = 0;
  ocp_arena_config wanted;
  uint32_t given = 0;
  ocp_arena_config_defaults(&wanted);
  if (check_place(ordinal, memory, error) != ORT_OK ||
      ocp_arena_config_parse(keys, values, count, &wanted, &given, error) != ORT_OK)
    return error->code;
  if (memory == OCP_PINNED_MEMORY)
    given &= (UINT32_C(1) << USE_MEMPOOL) - 1; /* CUDA's pools are of device memory */
  if (!given)
    return ORT_OK;
  pthread_mutex_lock(&lock);
  settings *s = settings_of(emulated != 0, ordinal, memory);
  const uint32_t refused = s->given ? differences(&s->config, &wanted, given) : 0;
  if (refused && !was_said(emulated != 0, ordinal, &wanted, refused)) {
    char names[400];
    list_keys(refused, names, sizeof names);
    snprintf(warning, OCP_ARENA_WARNING_BYTES,
             "the %s arena of %sCUDA device %d is in use with other values of %s and keeps them",
             memory == OCP_PINNED_MEMORY ? "pinned" : "device", emulated ? "emulated " : "", ordinal, names);
  } else if (!s->given) {
    for (int i = 0; i < NUM_KEYS; i++)
      if (given >> i & 1)
        *member(&s->config, i) = value_of(&wanted, i);
    s->given = given;
    apply(emulated != 0, ordinal, memory, s);
  }
  pthread_mutex_unlock(&lock);
  return ORT_OK;
}

int ocp_arena_set_limit(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error) {
  if (check_place(ordinal, memory, error) != ORT_OK)
    return error->code;
  if (bytes < 0)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "a limit of %lld bytes", (long long)bytes);
  if (atomic_load(&ocp_forked))
    return ocp_fail(error, ORT_EP_FAIL, "%s", OCP_FORKED_TEXT);
  pthread_mutex_lock(&lock);
  settings *s = settings_of(emulated != 0, ordinal, memory);
  s->config.max_mem = bytes ? bytes : INT64_MAX;
  apply(emulated != 0, ordinal, memory, s);
  pthread_mutex_unlock(&lock);
  return ORT_OK;
}
