#include "device/open/arena_settings.h"

#include <pthread.h>
#include <stdio.h>

#include "base/process.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/memory/memory.h"

typedef struct settings {
  ocp_arena_config config;
  uint32_t given; /* bits of the options that a user has set; while 0, the arena accepts the next options offered */
  int users;
  bool initialized;
} settings;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static settings all[2][OCP_MAX_DEVICES][OCP_NUM_MEMORIES];

static settings *settings_of(bool emulated, int ordinal, int memory) {
  settings *s = &all[emulated][ordinal][memory];
  if (!s->initialized)
    ocp_arena_config_defaults(&s->config);
  s->initialized = true;
  return s;
}

/* The pools of the open devices, by kind (1: emulated) and ordinal; NULL: not open. */
static ocp_pool *pools[2][OCP_MAX_DEVICES];

static void apply(bool emulated, int ordinal, int memory, const settings *s) {
  if (pools[emulated][ordinal])
    ocp_pool_configure(pools[emulated][ordinal], memory, &s->config);
}

void ocp_arena_attach(bool emulated, int ordinal, ocp_pool *pool) {
  pthread_mutex_lock(&lock);
  pools[emulated][ordinal] = pool;
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    apply(emulated, ordinal, memory, settings_of(emulated, ordinal, memory));
  pthread_mutex_unlock(&lock);
}

void ocp_arena_retain(bool emulated, int ordinal, int memory) {
  pthread_mutex_lock(&lock);
  settings_of(emulated, ordinal, memory)->users++;
  pthread_mutex_unlock(&lock);
}

/* By device: the options that were refused last. A session offers the same options several times: for device memory and
 * for pinned memory, both directly and through ONNX Runtime. One warning is enough. */
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
  if (memory < 0 || memory >= OCP_NUM_MEMORIES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "memory type: got %d, expected %d (device) or %d (pinned)", memory,
                    OCP_DEVICE_MEMORY, OCP_PINNED_MEMORY);
  return ocp_device_check_ordinal(ordinal, error);
}

static bool was_said(bool emulated, int ordinal, const ocp_arena_config *wanted, uint32_t refused) {
  const bool same = latest[emulated][ordinal].refused == refused &&
                    !ocp_arena_config_differences(&latest[emulated][ordinal].wanted, wanted, refused);
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
    given = ocp_arena_config_of_pinned(given);
  if (!given)
    return ORT_OK;
  pthread_mutex_lock(&lock);
  settings *s = settings_of(emulated != 0, ordinal, memory);
  const uint32_t refused = s->given ? ocp_arena_config_differences(&s->config, &wanted, given) : 0;
  if (refused && !was_said(emulated != 0, ordinal, &wanted, refused)) {
    char names[400];
    ocp_arena_config_list(refused, names, sizeof names);
    snprintf(warning, OCP_ARENA_WARNING_BYTES,
             "the %s arena of %sCUDA device %d is in use with other values of %s and keeps its values. Sessions share "
             "the arena: give all sessions the same values",
             memory == OCP_PINNED_MEMORY ? "pinned" : "device", emulated ? "emulated " : "", ordinal, names);
  } else if (!s->given) {
    ocp_arena_config_take(&s->config, &wanted, given);
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
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "arena.max_mem: got %lld bytes, expected 0 or more", (long long)bytes);
  if (atomic_load(&ocp_forked))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", OCP_FORKED_TEXT);
  pthread_mutex_lock(&lock);
  settings *s = settings_of(emulated != 0, ordinal, memory);
  s->config.max_mem = bytes ? bytes : INT64_MAX;
  apply(emulated != 0, ordinal, memory, s);
  pthread_mutex_unlock(&lock);
  return ORT_OK;
}
