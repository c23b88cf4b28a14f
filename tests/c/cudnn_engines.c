/* Makes cuDNN execution plans through the code that Runs use, for a device that exists only as a JSON description:
 *
 * cudnn_engines LIBCUDNN DEVICE.json < problems
 *
 * An input line describes one call: the number of its values, kind, dtype, flags, rank and alpha of the
 * ocp_problem_spec, then the values. A negative number -n among the values sets the address of the next pointer to n,
 * for its alignment. For each input line, one line is printed: the engine's index, whether it uses tensor cores, the
 * bytes of its workspace, the milliseconds that making the plan took, the bytes of the plan as text, and the
 * milliseconds of loading that text; or "none" and the reason. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vendor/attention.h"
#include "vendor/convolution.h"
#include "vendor/cudnn.h"

enum { CUDNN_ATTR_ENGINE_GLOBAL_INDEX = 1301 };

static char json[1 << 16];
static cudnnStatus_t (*set_attribute)(cudnnBackendDescriptor_t, int, int, int64_t, const void *);

/* A BackendSetAttribute that sets the JSON description of the device where the code sets its ordinal. */
static cudnnStatus_t set_for_device(cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                                    const void *elements) {
  if (attribute == CUDNN_ATTR_DEVICEPROP_DEVICE_ID)
    return set_attribute(descriptor, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(json),
                         json);
  return set_attribute(descriptor, attribute, type, count, elements);
}

static bool open_library(const char *path, const char *json_path) {
  void *library = dlopen(path, RTLD_NOW);
  if (!library) {
    puts(dlerror());
    return false;
  }
  for (uint32_t i = 0; i < NUM_DNN_SYMBOLS; i++)
    ((void **)&ocp_dnn)[i] = dlsym(library, ocp_dnn_symbols[i]);
  FILE *file = fopen(json_path, "r");
  const size_t length = file ? fread(json, 1, sizeof json - 1, file) : 0;
  set_attribute = ocp_dnn.BackendSetAttribute;
  ocp_dnn.BackendSetAttribute = set_for_device;
  ocp_error error = {0};
  return length && !fclose(file) && ocp_dnn_check(&error) == ORT_OK;
}

static long milliseconds_since(const struct timespec *before) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec - before->tv_sec) * 1000 + (now.tv_nsec - before->tv_nsec) / 1000000;
}

/* Prints the engine, tensor cores and workspace of an execution plan. */
static void describe(const ocp_dnn_plan *conv) {
  cudnnBackendDescriptor_t config = NULL, engine = NULL;
  int notes[MAX_NOTES] = {0};
  int64_t count = 0, number = -1, workspace = -1;
  bool tensor_cores = false;
  ocp_dnn.BackendCreateDescriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &config);
  ocp_dnn.BackendCreateDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine);
  const int type = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  ocp_dnn.BackendGetAttribute(conv->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, type, 1, &count, &config);
  ocp_dnn.BackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, type, 1, &count, &engine);
  ocp_dnn.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count, &number);
  ocp_dnn.BackendGetAttribute(conv->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                              &workspace);
  count = 0;
  ocp_dnn.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, MAX_NOTES, &count,
                              notes);
  for (int64_t i = 0; i < count && i < MAX_NOTES; i++)
    tensor_cores |= notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
  printf("%lld %d %lld", (long long)number, tensor_cores, (long long)workspace);
  ocp_dnn.BackendDestroyDescriptor(engine);
  ocp_dnn.BackendDestroyDescriptor(config);
}

/* Saves a plan as text and loads it again. Prints the bytes of the text and the milliseconds of loading it; -1 if the
 * loaded plan differs. */
static void reload(const ocp_library *library, const ocp_problem_spec *spec, const int64_t *key,
                   const ocp_dnn_plan *conv) {
  const ocp_library_handle none = {0};
  struct timespec before;
  char identity[4096];
  uint64_t bytes = 0, again = 0;
  char *text = library->identify(&none, identity, sizeof identity) ? library->save(conv, &bytes) : NULL;
  clock_gettime(CLOCK_MONOTONIC, &before);
  ocp_dnn_plan *loaded = text ? library->load(spec, &none, key, text, bytes) : NULL;
  const long milliseconds = milliseconds_since(&before);
  char *same = loaded ? library->save(loaded, &again) : NULL;
  const bool equal = same && again == bytes && memcmp(same, text, bytes) == 0;
  printf(" %lld %ld\n", (long long)bytes, equal ? milliseconds : -1);
  free(same);
  free(text);
  library->release(loaded);
}

enum { MAX_POINTERS = 5 };

static void answer(const ocp_problem_spec *spec, const int64_t *values, uint32_t num_values, void *const *pointers) {
  const ocp_library_handle none = {0};
  int64_t key[OCP_MAX_KEY] = {0};
  memcpy(key, values, num_values * sizeof *key);
  void *algorithm = NULL;
  ocp_error error = {0};
  struct timespec before;
  clock_gettime(CLOCK_MONOTONIC, &before);
  const ocp_library *library = spec->kind == OCP_PROBLEM_CONV ? &ocp_cudnn : &ocp_cudnn_attention;
  library->extend_key(spec, pointers, key + num_values);
  const int code = library->valid(spec, key) ? library->prepare(spec, &none, key, 0, &algorithm, &error) : ORT_FAIL;
  const long milliseconds = milliseconds_since(&before);
  if (code) {
    printf("none %s\n", error.text);
  } else {
    describe(algorithm);
    printf(" %ld", milliseconds);
    reload(library, spec, key, algorithm);
  }
  fflush(stdout);
  ocp_dnn_release(algorithm);
}

int main(int argc, char **argv) {
  if (argc != 3 || !open_library(argv[1], argv[2]))
    return 2;
  ocp_problem_spec spec = {.alpha = 1};
  uint32_t num_values = 0;
  while (scanf("%u %u %u %u %u %lf", &num_values, &spec.kind, &spec.dtype, &spec.flags, &spec.rank, &spec.alpha) == 6) {
    int64_t values[OCP_MAX_KEY];
    void *pointers[MAX_POINTERS];
    for (uint32_t i = 0; i < MAX_POINTERS; i++)
      pointers[i] = (void *)256;
    for (uint32_t i = 0, p = 0; i < num_values && i < OCP_MAX_KEY;) {
      long long number = 0;
      if (scanf("%lld", &number) != 1)
        return 2;
      if (number < 0 && p < MAX_POINTERS)
        pointers[p++] = (void *)(uintptr_t)-number;
      else
        values[i++] = number;
    }
    spec.beta = !!(spec.flags & OCP_PROBLEM_RESIDUAL);
    answer(&spec, values, num_values, pointers);
  }
  return 0;
}
