/* Loads the vendor libraries, and keeps what they prepared for each problem and set of sizes.
 *
 * A call looks its sizes up in the problem's list and runs the algorithm that it finds there. The first call with new
 * sizes asks the library for one, under the problem's lock.
 *
 * Invariants:
 * - The list grows at its head and nothing leaves it before the problem is released, so that calls read it without the
 *   lock.
 * - A stream has one handle of each library, in its slot. The thread that enqueues on the stream opens it, one thread
 *   at a time, and it is closed with the stream.
 * - Once a stream has its handle and a problem the algorithm for the sizes, a call allocates nothing. Then it can be
 *   captured (ocp_library_prepare). */
#include "vendor/problem.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "vendor/library.h"

struct ocp_problem {
  ocp_problem_spec spec;
  const ocp_library *library;
  pthread_mutex_t lock;             /* one thread prepares at a time */
  _Atomic(ocp_prepared *) prepared; /* grows at its head; read without the lock */
};

static const ocp_library *const libraries[OCP_NUM_LIBRARIES] = {&ocp_cublaslt, &ocp_cudnn};
static atomic_bool loaded[OCP_NUM_LIBRARIES];
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

static int load(const ocp_library *library, const char *path, ocp_error *error) {
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never closed: streams may hold its handles at exit */
  if (!handle)
    return ocp_fail(error, ORT_FAIL, "%s: %s", library->name, dlerror());
  for (uint32_t i = 0; i < library->num_symbols; i++) {
    library->functions[i] = dlsym(handle, library->symbols[i]);
    if (!library->functions[i]) {
      dlclose(handle);
      return ocp_fail(error, ORT_FAIL, "%s: %s has no %s", library->name, path, library->symbols[i]);
    }
  }
  return ORT_OK;
}

int ocp_library_load(uint32_t id, const char *path, ocp_error *error) {
  if (id >= OCP_NUM_LIBRARIES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no library %u", id);
  pthread_mutex_lock(&load_lock);
  int code = ORT_OK;
  if (!atomic_load(&loaded[id])) {
    code = load(libraries[id], path, error);
    atomic_store(&loaded[id], code == ORT_OK);
  }
  pthread_mutex_unlock(&load_lock);
  return code;
}

/* ---- problems ---- */

static bool is_matmul(const ocp_problem_spec *spec) {
  const uint32_t known = OCP_PROBLEM_TF32 | OCP_PROBLEM_DETERMINISTIC | OCP_PROBLEM_BIAS | OCP_PROBLEM_A_TRANSPOSED |
                         OCP_PROBLEM_B_TRANSPOSED | OCP_PROBLEM_RELU | OCP_PROBLEM_GELU | OCP_PROBLEM_RESIDUAL |
                         OCP_PROBLEM_MEASURED;
  return !(spec->flags & ~known) && !(spec->flags & OCP_PROBLEM_RELU && spec->flags & OCP_PROBLEM_GELU) &&
         spec->rank == 0 && isfinite(spec->alpha) && isfinite(spec->beta) &&
         (spec->beta != 0) == !!(spec->flags & OCP_PROBLEM_RESIDUAL);
}

static bool is_convolution(const ocp_problem_spec *spec) {
  const uint32_t finish = OCP_PROBLEM_RELU | OCP_PROBLEM_RESIDUAL,
                 known = OCP_PROBLEM_TF32 | OCP_PROBLEM_DETERMINISTIC | OCP_PROBLEM_BIAS | OCP_PROBLEM_BRIEF |
                         OCP_PROBLEM_MEASURED | finish;
  const bool bias = spec->flags & OCP_PROBLEM_BIAS;
  return !(spec->flags & ~known) && (bias || !(spec->flags & finish)) &&
         !(bias && spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) && spec->rank >= 2 && spec->rank <= 3 &&
         spec->alpha == 1 && spec->beta == !!(spec->flags & OCP_PROBLEM_RESIDUAL);
}

ocp_problem *ocp_problem_create(const ocp_problem_spec *spec, ocp_error *error) {
  const bool conv = spec->kind == OCP_PROBLEM_CONV;
  const ocp_library_id id = conv ? OCP_CUDNN : OCP_CUBLASLT;
  const bool is_float =
      spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ||
      spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 || spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  if (spec->kind > OCP_PROBLEM_CONV || !is_float || !(conv ? is_convolution(spec) : is_matmul(spec))) {
    ocp_fail(error, ORT_INVALID_ARGUMENT,
             "no library problem has kind %u, type %u, flags %u, rank %u and factors %g and %g", spec->kind,
             spec->dtype, spec->flags, spec->rank, spec->alpha, spec->beta);
    return NULL;
  }
  if (!atomic_load(&loaded[id])) {
    ocp_fail(error, ORT_FAIL, "%s is not loaded", libraries[id]->name);
    return NULL;
  }
  ocp_problem *problem = calloc(1, sizeof *problem);
  if (!problem) {
    ocp_fail(error, ORT_FAIL, "not enough host memory");
    return NULL;
  }
  problem->spec = *spec;
  problem->library = libraries[id];
  pthread_mutex_init(&problem->lock, NULL);
  return problem;
}

void ocp_problem_release(ocp_problem *problem) {
  if (!problem)
    return;
  for (ocp_prepared *prepared = atomic_load(&problem->prepared), *next; prepared; prepared = next) {
    next = prepared->next;
    problem->library->release(prepared->algorithm);
    free(prepared);
  }
  pthread_mutex_destroy(&problem->lock);
  free(problem);
}

bool ocp_problem_takes(const ocp_problem *problem, uint32_t num_pointers, uint32_t num_values) {
  const ocp_library *library = problem->library;
  const ocp_problem_spec *spec = &problem->spec;
  const uint32_t more = !!(spec->flags & OCP_PROBLEM_BIAS) + !!(spec->flags & OCP_PROBLEM_RESIDUAL);
  return num_pointers == library->num_pointers + more &&
         num_values == library->num_values + library->values_per_dimension * spec->rank;
}

static const ocp_prepared *find(ocp_problem *problem, const int64_t *key, uint32_t words) {
  const ocp_prepared *prepared = atomic_load_explicit(&problem->prepared, memory_order_acquire);
  while (prepared && memcmp(prepared->key, key, words * sizeof *key) != 0)
    prepared = prepared->next;
  return prepared;
}

/* ---- measuring ---- */

enum { MAX_MEASURED = 8, MEASURED_RUNS = 3 };

/* A call whose algorithm is looked for. */
typedef struct call_site {
  ocp_problem *problem;
  void *handle;
  ocp_stream *stream;
  void *const *pointers;
} call_site;

/* The milliseconds of some calls with the algorithm, or a negative number where it does not run. */
static float measure(const call_site *site, const ocp_prepared *prepared, CUevent begin, CUevent end) {
  const ocp_driver *driver = site->stream->device->driver;
  const ocp_library *library = site->problem->library;
  ocp_error error = {0};
  float milliseconds = -1;
  for (int i = 0; i <= MEASURED_RUNS && error.code == ORT_OK; i++) {
    if (i == 1) /* the first one loads its kernels */
      driver->EventRecord(begin, site->stream->handle);
    library->run(&site->problem->spec, site->handle, prepared, site->stream->handle, site->pointers, &error);
  }
  if (error.code != ORT_OK || driver->EventRecord(end, site->stream->handle) != CUDA_SUCCESS ||
      driver->EventSynchronize(end) != CUDA_SUCCESS ||
      driver->EventElapsedTime(&milliseconds, begin, end) != CUDA_SUCCESS)
    return -1;
  return milliseconds;
}

/* Replaces the algorithm by the fastest one. The call's result is written several times; what follows on the stream
 * sees it as the call leaves it. */
static void choose_fastest(const call_site *site, ocp_prepared *prepared) {
  const ocp_driver *driver = site->stream->device->driver;
  const ocp_problem *problem = site->problem;
  CUevent begin = NULL, end = NULL;
  void *best = prepared->algorithm;
  if (driver->EventCreate(&begin, CU_EVENT_DEFAULT) == CUDA_SUCCESS &&
      driver->EventCreate(&end, CU_EVENT_DEFAULT) == CUDA_SUCCESS) {
    float least = measure(site, prepared, begin, end), spent = least > 0 ? least : 0;
    for (uint32_t rank = 1; rank < MAX_MEASURED; rank++) {
      ocp_error ignored = {0};
      void *candidate = NULL;
      if ((problem->spec.measuring_ms && spent > (float)problem->spec.measuring_ms) ||
          problem->library->prepare(&problem->spec, site->handle, prepared->key, rank, &candidate, &ignored) !=
              ORT_OK ||
          !candidate)
        break;
      prepared->algorithm = candidate;
      const float time = measure(site, prepared, begin, end);
      const bool better = time >= 0 && (least < 0 || time < least);
      spent += time > 0 ? time : 0;
      problem->library->release(better ? best : candidate);
      best = better ? candidate : best;
      least = better ? time : least;
    }
  }
  prepared->algorithm = best;
  if (end)
    driver->EventDestroy(end);
  if (begin)
    driver->EventDestroy(begin);
}

/* Only a call that enqueues can be measured. */
static bool is_measured(const call_site *site) {
  const uint32_t flags = site->problem->spec.flags;
  return flags & OCP_PROBLEM_MEASURED && !(flags & OCP_PROBLEM_DETERMINISTIC) &&
         !atomic_load_explicit(&site->stream->capturing, memory_order_relaxed);
}

/* All keys of a problem have as many words: they depend on its spec alone. */
static const ocp_prepared *prepare(const call_site *site, const int64_t *key, uint32_t words, ocp_error *error) {
  ocp_problem *problem = site->problem;
  pthread_mutex_lock(&problem->lock);
  const ocp_prepared *known = find(problem, key, words);
  ocp_prepared *prepared = known ? NULL : calloc(1, sizeof *prepared);
  if (prepared) {
    prepared->key_words = words;
    memcpy(prepared->key, key, words * sizeof *key);
    if (problem->library->prepare(&problem->spec, site->handle, key, 0, &prepared->algorithm, error) == ORT_OK) {
      if (prepared->algorithm && is_measured(site))
        choose_fastest(site, prepared);
      prepared->next = atomic_load(&problem->prepared);
      atomic_store_explicit(&problem->prepared, prepared, memory_order_release);
      known = prepared;
    } else {
      free(prepared);
    }
  } else if (!known) {
    ocp_fail(error, ORT_FAIL, "not enough host memory");
  }
  pthread_mutex_unlock(&problem->lock);
  return known;
}

/* ---- calls ---- */

/* The stream's handle of the library: opened with its first call there, closed with the stream. */
static void **stream_handle(ocp_stream *stream, const ocp_library *library) {
  ocp_stream_slot *slot = &stream->slots[library == &ocp_cublaslt ? OCP_SLOT_CUBLASLT : OCP_SLOT_CUDNN];
  slot->release = library->close;
  return &slot->state;
}

/* The algorithm for a call; its stream's handle is open then. NULL with the error. */
static const ocp_prepared *prepared_for(ocp_problem *problem, ocp_stream *stream, void *const *pointers,
                                        uint32_t num_pointers, const int64_t *values, uint32_t num_values,
                                        ocp_error *error) {
  const ocp_library *library = problem->library;
  if (!ocp_problem_takes(problem, num_pointers, num_values)) {
    ocp_fail(error, ORT_INVALID_GRAPH, "a call of %s has %u pointers and %u numbers", library->name, num_pointers,
             num_values);
    return NULL;
  }
  if (!library->valid(&problem->spec, values)) {
    ocp_fail(error, ORT_INVALID_GRAPH, "a call of %s has sizes that contradict each other", library->name);
    return NULL;
  }
  int64_t key[OCP_MAX_KEY] = {0};
  memcpy(key, values, num_values * sizeof *key);
  const uint32_t words = num_values + library->extend_key(&problem->spec, pointers, key + num_values);
  void **handle = stream_handle(stream, library);
  if (!*handle && library->open(handle, error) != ORT_OK)
    return NULL;
  const ocp_prepared *prepared = find(problem, key, words);
  return prepared ? prepared : prepare(&(call_site){problem, *handle, stream, pointers}, key, words, error);
}

int ocp_library_prepare(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t num_pointers,
                        const int64_t *values, uint32_t num_values, ocp_error *error) {
  return prepared_for(problem, stream, pointers, num_pointers, values, num_values, error) ? ORT_OK : error->code;
}

int ocp_library_run(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t num_pointers,
                    const int64_t *values, uint32_t num_values, ocp_error *error) {
  const ocp_prepared *prepared = prepared_for(problem, stream, pointers, num_pointers, values, num_values, error);
  return prepared ? problem->library->run(&problem->spec, *stream_handle(stream, problem->library), prepared,
                                          stream->handle, pointers, error)
                  : error->code;
}
