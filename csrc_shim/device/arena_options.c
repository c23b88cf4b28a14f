#include "device/arena_options.h"

#include <stdio.h>
#include <string.h>

#include "base/host.h"
#include "base/number.h"

#define KEY(name, least, largest, initial, takes)                                                                      \
  {"arena." #name, offsetof(ocp_arena_config, name), least, largest, initial, takes}

static const struct {
  const char *key;
  size_t offset;
  int64_t least, largest, initial; /* bounds and default of the value; the text "-1" selects the default */
  const char *takes;
} keys_known[] = {
    KEY(extend_strategy, 0, 1, OCP_EXTEND_NEXT_POWER_OF_TWO, "0 (kNextPowerOfTwo) or 1 (kSameAsRequested)"),
    KEY(initial_chunk_size_bytes, 1, INT64_MAX, 1 << 20, "a number of bytes from 1"),
    KEY(max_dead_bytes_per_chunk, 0, INT64_MAX, 128 << 20, "a number of bytes"),
    KEY(initial_growth_chunk_size_bytes, 1, INT64_MAX, 2 << 20, "a number of bytes from 1"),
    KEY(max_power_of_two_extend_bytes, 1, INT64_MAX, 1 << 30, "a number of bytes from 1"),
    KEY(max_mem, 0, INT64_MAX, INT64_MAX, "a number of bytes such as 2G, 0 for no limit"),
    KEY(use_cuda_mempool, 0, 1, 0, OCP_FLAG_TAKES),
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

void ocp_arena_config_list(uint32_t given, char *text, size_t text_bytes) {
  size_t length = 0;
  text[0] = 0;
  for (int i = 0; i < NUM_KEYS; i++)
    if (given >> i & 1 && length < text_bytes)
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
  if (strcmp(text, "-1") == 0) {
    *value = keys_known[index].initial;
    return true;
  }
  if (index == USE_MEMPOOL) {
    const int flag = ocp_parse_flag(text);
    *value = flag > 0;
    return flag >= 0;
  }
  uint64_t number;
  if (!ocp_parse_number(text, UINT64_MAX, &number))
    return false;
  /* For ONNX Runtime's built-in CUDA provider, SIZE_MAX means "unlimited". */
  *value = number > INT64_MAX ? INT64_MAX : (int64_t)number;
  if (*value < keys_known[index].least || *value > keys_known[index].largest)
    return false;
  if (index == MAX_MEM && *value == 0)
    *value = INT64_MAX;
  return true;
}

static int unknown_key(const char *key, ocp_error *error) {
  char known[600] = "";
  ocp_arena_config_list((UINT32_C(1) << NUM_KEYS) - 1, known, sizeof known);
  return ocp_fail(error, ORT_INVALID_ARGUMENT, OCP_EP_NAME " has no option '%.100s'; known: %s", key, known);
}

int ocp_arena_config_parse(const char *const *keys, const char *const *values, size_t count, ocp_arena_config *config,
                           uint32_t *given, ocp_error *error) {
  for (size_t i = 0; i < count; i++) {
    /* Not an option: ONNX Runtime 1.32 and later add the id of the session's EP that will use the allocator. */
    if (strcmp(keys[i], "ep_instance_id") == 0)
      continue;
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

uint32_t ocp_arena_config_differences(const ocp_arena_config *config, const ocp_arena_config *wanted, uint32_t given) {
  uint32_t differ = 0;
  for (int i = 0; i < NUM_KEYS; i++)
    if (given >> i & 1 && value_of(config, i) != value_of(wanted, i))
      differ |= UINT32_C(1) << i;
  return differ;
}

void ocp_arena_config_take(ocp_arena_config *config, const ocp_arena_config *wanted, uint32_t given) {
  for (int i = 0; i < NUM_KEYS; i++)
    if (given >> i & 1)
      *member(config, i) = value_of(wanted, i);
}

/* Drops the options from USE_MEMPOOL on: they configure CUDA's memory pools, which hold device memory only. */
uint32_t ocp_arena_config_of_pinned(uint32_t given) { return given & ((UINT32_C(1) << USE_MEMPOOL) - 1); }

int ocp_arena_check(const char *const *keys, const char *const *values, size_t count, ocp_error *error) {
  ocp_arena_config config;
  uint32_t given = 0;
  return ocp_arena_config_parse(keys, values, count, &config, &given, error);
}

int ocp_arena_read_limit(const char *text, int64_t *bytes, ocp_error *error) {
  const char *key = keys_known[MAX_MEM].key;
  ocp_arena_config config;
  uint32_t given = 0;
  if (ocp_arena_config_parse(&key, &text, 1, &config, &given, error) == ORT_OK)
    *bytes = config.max_mem;
  return error->code;
}
