/* Loads the vendor libraries, and runs problems with the algorithms that the libraries choose for the sizes of a call.
 *
 * A call looks its sizes up in the problem's cache of algorithms (prepared.h), and runs the algorithm with the handle
 * of its stream (handle.h). The first call with new sizes asks the library for an algorithm.
 *
 * Invariants:
 * - A call holds its stream's handle and its algorithm. It takes these locks in this order: the handle's,
 *   ocp_problem.preparing, an algorithm's, that of the list of algorithms.
 * - An algorithm belongs to a device, not to a handle, and lives at least as long as a call, an automatic CUDA graph or
 *   unfinished work uses it. Algorithms of calls that ORT or the application has captured live as long as the problem.
 * - Once a handle and an algorithm have both executed a call, later calls allocate and load nothing, so they can be
 *   captured (ocp_library_capture). */
#include "vendor/problem.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/host.h"
#include "device/release.h"
#include "device/wait.h"
#include "vendor/attention.h"
#include "vendor/compare.h"
#include "vendor/convolution.h"
#include "vendor/cublaslt.h"
#include "vendor/handle.h"
#include "vendor/store.h"
#include "vendor/substitute.h"

struct ocp_problem {
  ocp_problem_spec spec;
  const ocp_library *library;
  pthread_mutex_t preparing; /* held while a thread makes an algorithm */
  ocp_prepared_list prepared;
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
      return ocp_fail(error, ORT_FAIL, "%s: %s has no function %s", library->name, path, library->symbols[i]);
    }
  }
  if (library->check && library->check(error) != ORT_OK) {
    dlclose(handle);
    return error->code;
  }
  return ORT_OK;
}

int ocp_library_load(uint32_t id, const char *path, ocp_error *error) {
  if (id >= OCP_NUM_LIBRARIES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "library number: got %u, expected 0 to %d", id, OCP_NUM_LIBRARIES - 1);
  pthread_mutex_lock(&load_lock);
  int code = ORT_OK;
  if (!atomic_load(&loaded[id])) {
    code = load(libraries[id], path, error);
    atomic_store(&loaded[id], code == ORT_OK);
  }
  pthread_mutex_unlock(&load_lock);
  return code;
}

uint64_t ocp_library_version(uint32_t id) {
  return id < OCP_NUM_LIBRARIES && atomic_load(&loaded[id]) ? libraries[id]->version() : 0;
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
  const uint32_t activation = spec->flags & (OCP_PROBLEM_RELU | OCP_PROBLEM_SWISH | OCP_PROBLEM_RELU6),
                 finish = OCP_PROBLEM_RELU | OCP_PROBLEM_SWISH | OCP_PROBLEM_RELU6 | OCP_PROBLEM_RESIDUAL,
                 known = OCP_PROBLEM_TF32 | OCP_PROBLEM_DETERMINISTIC | OCP_PROBLEM_BIAS | OCP_PROBLEM_BRIEF |
                         OCP_PROBLEM_MEASURED | OCP_PROBLEM_CHANNELS_LAST | finish;
  const bool bias = spec->flags & OCP_PROBLEM_BIAS;
  const bool has_activation =
      activation == 0 || activation == OCP_PROBLEM_RELU ||
      ((activation == OCP_PROBLEM_SWISH || activation == OCP_PROBLEM_RELU6) && spec->flags & OCP_PROBLEM_CHANNELS_LAST);
  return !(spec->flags & ~known) && (bias || !(spec->flags & finish)) && has_activation &&
         !(bias && spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) && spec->rank >= 2 && spec->rank <= 3 &&
         spec->alpha == 1 && spec->beta == !!(spec->flags & OCP_PROBLEM_RESIDUAL);
}

static bool is_attention(const ocp_problem_spec *spec) {
  const bool is_half =
      spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 || spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
  return is_half && !(spec->flags & ~(uint32_t)(OCP_PROBLEM_TF32 | OCP_PROBLEM_DETERMINISTIC | OCP_PROBLEM_BIAS)) &&
         spec->rank == 0 && isfinite(spec->alpha) && spec->beta == 0;
}

static const struct {
  bool (*exists)(const ocp_problem_spec *spec);
  const ocp_library *library;
  ocp_library_id id;
} kinds[] = {{is_matmul, &ocp_cublaslt, OCP_CUBLASLT},
             {is_convolution, &ocp_cudnn, OCP_CUDNN},
             {is_attention, &ocp_cudnn_attention, OCP_CUDNN}};

ocp_problem *ocp_problem_create(const ocp_problem_spec *spec, ocp_error *error) {
  const bool is_float =
      spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ||
      spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 || spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  if (spec->kind > OCP_PROBLEM_ATTENTION || !is_float || !kinds[spec->kind].exists(spec)) {
    ocp_fail(error, ORT_INVALID_ARGUMENT,
             "library call: unsupported combination of kind %u, type %u, flags %u, rank %u, alpha %g and beta %g",
             spec->kind, spec->dtype, spec->flags, spec->rank, spec->alpha, spec->beta);
    return NULL;
  }
  if (!atomic_load(&loaded[kinds[spec->kind].id])) {
    ocp_fail(error, ORT_FAIL, "%s is not loaded", kinds[spec->kind].library->name);
    return NULL;
  }
  ocp_problem *problem = calloc(1, sizeof *problem);
  if (!problem) {
    ocp_fail_memory(error);
    return NULL;
  }
  problem->spec = *spec;
  problem->library = kinds[spec->kind].library;
  pthread_mutex_init(&problem->preparing, NULL);
  ocp_prepared_init(&problem->prepared);
  return problem;
}

void ocp_problem_release(ocp_problem *problem) {
  if (!problem)
    return;
  ocp_prepared_free(problem->prepared.first, problem->library->release);
  pthread_mutex_destroy(&problem->prepared.lock);
  pthread_mutex_destroy(&problem->preparing);
  free(problem);
}

bool ocp_problem_takes(const ocp_problem *problem, uint32_t num_pointers, uint32_t num_values) {
  const ocp_library *library = problem->library;
  const ocp_problem_spec *spec = &problem->spec;
  const uint32_t more = !!(spec->flags & OCP_PROBLEM_BIAS) + !!(spec->flags & OCP_PROBLEM_RESIDUAL);
  return num_pointers == library->num_pointers + more &&
         num_values == library->num_values + library->values_per_dimension * spec->rank;
}

/* ---- measuring ---- */

enum { MAX_MEASURED = 8, MEASURED_RUNS = 3 };

/* A call that needs an algorithm, with its stream and locked handle. */
typedef struct call_site {
  ocp_problem *problem;
  ocp_library_handle *handle;
  ocp_stream *stream;
  void *const *pointers;
} call_site;

/* Returns the time of MEASURED_RUNS calls with the algorithm, in milliseconds; negative if a call fails. */
static float measure(const call_site *site, const ocp_prepared *prepared, CUevent begin, CUevent end) {
  const ocp_driver *driver = site->stream->device->driver;
  const ocp_library *library = site->problem->library;
  ocp_error error = {0};
  float milliseconds = -1;
  for (int i = 0; i <= MEASURED_RUNS && error.code == ORT_OK; i++) {
    /* Start the clock after the first call, which loads the algorithm's kernels. */
    if (i == 1 && driver->EventRecord(begin, site->stream->handle) != CUDA_SUCCESS)
      return -1;
    library->run(&site->problem->spec, site->handle, prepared, site->stream->handle, site->pointers, &error);
  }
  if (error.code != ORT_OK || driver->EventRecord(end, site->stream->handle) != CUDA_SUCCESS ||
      driver->EventSynchronize(end) != CUDA_SUCCESS ||
      driver->EventElapsedTime(&milliseconds, begin, end) != CUDA_SUCCESS)
    return -1;
  return milliseconds;
}

/* Whether the candidate's result agrees with that of the reference algorithm. Logs a wrong result: cuDNN has had
 * execution plans that were fast and wrong. */
static bool is_right(const call_site *site, const int64_t *key, uint32_t rank, const ocp_result *result,
                     const void *reference) {
  const ocp_problem *problem = site->problem;
  void *found = ocp_result_copy(site->stream, &problem->spec, result, site->pointers[0]);
  if (!found)
    return false;
  const double difference = ocp_result_difference(&problem->spec, result, reference, found),
               most = ocp_result_bound(&problem->spec);
  free(found);
  if (difference <= most)
    return true;
  char text[300];
  snprintf(
      text, sizeof text,
      "%s: the result of algorithm %u for a measured call (first values %lld, %lld, %lld) differs from that of the "
      "library's first algorithm: got a difference of %.2g of the largest element, expected at most %.2g. The "
      "algorithm is not used",
      problem->library->name, rank, (long long)key[0], (long long)key[1], (long long)key[2], difference, most);
  ocp_log(ORT_LOGGING_LEVEL_WARNING, text, OCP_EP_NAME);
  return false;
}

/* Replaces the algorithm by the fastest one whose result agrees with that of the first. Overwrites the call's result
 * several times; later work on the stream sees the call's own result. */
static void choose_fastest(const call_site *site, ocp_prepared *prepared) {
  const ocp_driver *driver = site->stream->device->driver;
  const ocp_problem *problem = site->problem;
  const ocp_result result = problem->library->result(&problem->spec, prepared->key);
  CUevent begin = NULL, end = NULL;
  void *best = prepared->algorithm, *reference = NULL;
  if (driver->EventCreate(&begin, CU_EVENT_DEFAULT) == CUDA_SUCCESS &&
      driver->EventCreate(&end, CU_EVENT_DEFAULT) == CUDA_SUCCESS) {
    float least = measure(site, prepared, begin, end), spent = least > 0 ? least : 0;
    for (uint32_t rank = 1; rank < MAX_MEASURED; rank++) {
      ocp_error ignored = {0};
      void *candidate = NULL;
      if (least >= 0 && !reference)
        reference = ocp_result_copy(site->stream, &problem->spec, &result, site->pointers[0]);
      if ((least >= 0 && !reference) || (problem->spec.measuring_ms && spent > (float)problem->spec.measuring_ms) ||
          problem->library->prepare(&problem->spec, site->handle, prepared->key, rank, &candidate, &ignored) !=
              ORT_OK ||
          !candidate)
        break;
      prepared->algorithm = candidate;
      const float time = measure(site, prepared, begin, end);
      const bool better =
          time >= 0 && (least < 0 || (time < least && is_right(site, prepared->key, rank, &result, reference)));
      spent += time > 0 ? time : 0;
      problem->library->release(better ? best : candidate);
      best = better ? candidate : best;
      least = better ? time : least;
    }
  }
  free(reference);
  prepared->algorithm = best;
  if (end)
    ocp_device_released(site->stream->device, driver->EventDestroy(end), "cuEventDestroy");
  if (begin)
    ocp_device_released(site->stream->device, driver->EventDestroy(begin), "cuEventDestroy");
}

/* Whether an application's or ORT's capture records what is enqueued on the stream. */
static bool is_captured(const ocp_stream *stream) {
  return atomic_load_explicit(&stream->capturing, memory_order_relaxed) ||
         (!stream->owned && ocp_stream_is_captured(stream));
}

/* Whether this call measures algorithms. A captured call cannot: it executes nothing. */
static bool is_measured(const call_site *site) {
  const uint32_t flags = site->problem->spec.flags;
  return flags & OCP_PROBLEM_MEASURED && !(flags & OCP_PROBLEM_DETERMINISTIC) && !is_captured(site->stream);
}

/* ---- preparing ---- */

/* Evicts algorithms if the device can be synchronized: a captured stream never becomes idle. */
static void evict(const call_site *site) {
  ocp_problem *problem = site->problem;
  ocp_error ignored = {0};
  if (!ocp_prepared_are_too_many(&problem->prepared) || is_captured(site->stream))
    return;
  ocp_prepared *evicted = ocp_prepared_evict(&problem->prepared);
  if (evicted)
    ocp_pool_synchronize(site->stream->device, &ignored);
  ocp_prepared_free(evicted, problem->library->release);
}

/* Fills a new entry with its algorithm: loads it from the store, or lets the library make it. */
static int make(const call_site *site, ocp_prepared *prepared, ocp_error *error) {
  const ocp_problem *problem = site->problem;
  const ocp_library *library = problem->library;
  const bool measured = is_measured(site);
  char text[OCP_STORE_KEY];
  const bool is_kept =
      ocp_store_key(library, &problem->spec, site->handle, prepared->key, prepared->key_words, measured, text);
  if (is_kept)
    prepared->algorithm = ocp_store_find(library, &problem->spec, site->handle, prepared->key, text);
  if (prepared->algorithm)
    return ORT_OK;
  const int code = library->prepare(&problem->spec, site->handle, prepared->key, 0, &prepared->algorithm, error);
  if (code != ORT_OK || !prepared->algorithm)
    return code;
  if (measured)
    choose_fastest(site, prepared);
  if (is_kept)
    ocp_store_keep(library, prepared->algorithm, text);
  return ORT_OK;
}

/* Finds or makes the entry for the key, with a reference for the caller; NULL with the error. */
static ocp_prepared *prepare(const call_site *site, const int64_t *key, uint32_t words, ocp_error *error) {
  ocp_problem *problem = site->problem;
  pthread_mutex_lock(&problem->preparing);
  ocp_prepared *known = ocp_prepared_find(&problem->prepared, key, words); /* made by another thread meanwhile */
  ocp_prepared *prepared = known ? known : ocp_prepared_create(key, words);
  if (!prepared) {
    ocp_fail_memory(error);
  } else if (!known) {
    if (make(site, prepared, error) == ORT_OK) {
      ocp_prepared_insert(&problem->prepared, prepared);
      evict(site);
    } else {
      ocp_prepared_free(prepared, problem->library->release);
      prepared = NULL;
    }
  }
  pthread_mutex_unlock(&problem->preparing);
  return prepared;
}

/* ---- calls ---- */

typedef struct arguments {
  void *const *pointers;
  const int64_t *values;
  uint32_t num_pointers, num_values;
} arguments;

/* Makes the key of a call from all numbers that decide the algorithm; returns its words, the same number for all calls
 * of a problem, or 0 with the error. */
static uint32_t make_key(const ocp_problem *problem, const arguments *call, int64_t key[OCP_MAX_KEY],
                         ocp_error *error) {
  const ocp_library *library = problem->library;
  if (!ocp_problem_takes(problem, call->num_pointers, call->num_values)) {
    ocp_fail(error, ORT_INVALID_GRAPH,
             "call of %s: wrong number of pointers (%u) or of integer arguments (%u). If the model is a compiled "
             "model, compile "
             "it again; else report the model",
             library->name, call->num_pointers, call->num_values);
    return 0;
  }
  if (!library->valid(&problem->spec, call->values)) {
    ocp_fail(
        error, ORT_INVALID_GRAPH,
        "call of %s: the sizes of its tensors are inconsistent. If the model is a compiled model, compile it again; "
        "else report the model",
        library->name);
    return 0;
  }
  memcpy(key, call->values, call->num_values * sizeof *key);
  return call->num_values + library->extend_key(&problem->spec, call->pointers, key + call->num_values);
}

/* ---- preparing many calls on several threads ---- */

enum { MIN_AHEAD = 4, MAX_THREADS = 8 };

/* An algorithm for one of the threads to make. */
typedef struct task {
  ocp_problem *problem;
  ocp_prepared *prepared;
  bool is_kept, is_new;
  char *text; /* OCP_STORE_KEY bytes */
} task;

typedef struct tasks {
  task *all;
  uint32_t count;
  atomic_uint next;
  const ocp_library_handle *handle;
  ocp_device *device;
} tasks;

static void *make_ahead(void *argument) {
  tasks *work = argument;
  ocp_error ignored = {0};
  OCP_STAY stay = ocp_device_enter(work->device, &ignored);
  (void)stay;
  for (uint32_t i; (i = atomic_fetch_add(&work->next, 1)) < work->count && ignored.code == ORT_OK;) {
    task *t = &work->all[i];
    ocp_error error = {0};
    if (!t->prepared->algorithm) {
      t->problem->library->prepare(&t->problem->spec, work->handle, t->prepared->key, 0, &t->prepared->algorithm,
                                   &error);
      t->is_new = t->prepared->algorithm != NULL;
    }
  }
  return NULL;
}

/* Adds a task for the call unless its algorithm, or a task for it, exists. */
static void add_task(tasks *work, const ocp_library_call *call) {
  const ocp_library *library = call->problem->library;
  const arguments given = {call->pointers, call->values, call->num_pointers, call->num_values};
  int64_t key[OCP_MAX_KEY] = {0};
  ocp_error ignored = {0};
  if (!library->is_for_device || call->problem->spec.flags & OCP_PROBLEM_MEASURED)
    return;
  const uint32_t words = make_key(call->problem, &given, key, &ignored);
  ocp_prepared *known = words ? ocp_prepared_find(&call->problem->prepared, key, words) : NULL;
  if (known)
    ocp_prepared_let_go(&call->problem->prepared, known);
  bool is_task = false;
  for (uint32_t i = 0; i < work->count && !is_task; i++)
    is_task = work->all[i].problem == call->problem && memcmp(work->all[i].prepared->key, key, sizeof key) == 0;
  ocp_prepared *prepared = words && !known && !is_task ? ocp_prepared_create(key, words) : NULL;
  if (!prepared)
    return;
  work->all[work->count++] = (task){.problem = call->problem, .prepared = prepared};
}

/* Loads a stored algorithm through Python. Only the thread that prepares a Run does so: another thread could wait for
 * the GIL while the first one holds it and waits for that thread. */
static void look_up(const tasks *work, task *t) {
  const ocp_library *library = t->problem->library;
  t->text = malloc(OCP_STORE_KEY);
  t->is_kept = t->text && ocp_store_key(library, &t->problem->spec, work->handle, t->prepared->key,
                                        t->prepared->key_words, false, t->text);
  if (t->is_kept)
    t->prepared->algorithm = ocp_store_find(library, &t->problem->spec, work->handle, t->prepared->key, t->text);
}

/* Adds the finished algorithm to the problem. */
static void finish(task *t) {
  ocp_problem *problem = t->problem;
  /* For fewer than MIN_AHEAD tasks nothing was prepared: `algorithm` is NULL, and the library call prepares it in a
   * Run. */
  if (t->is_new && t->is_kept)
    ocp_store_keep(problem->library, t->prepared->algorithm, t->text);
  free(t->text);
  pthread_mutex_lock(&problem->preparing);
  ocp_prepared *known = ocp_prepared_find(&problem->prepared, t->prepared->key, t->prepared->key_words);
  if (t->prepared->algorithm && !known) {
    ocp_prepared_insert(&problem->prepared, t->prepared);
    known = t->prepared;
  } else {
    ocp_prepared_free(t->prepared, problem->library->release);
  }
  if (known)
    ocp_prepared_let_go(&problem->prepared, known);
  pthread_mutex_unlock(&problem->preparing);
}

void ocp_library_prepare(const ocp_library_call *calls, uint32_t count, ocp_stream *stream) {
  const ocp_library_handle handle = {.ordinal = stream->device->ordinal};
  tasks work = {.handle = &handle, .device = stream->device};
  work.all = count >= MIN_AHEAD ? calloc(count, sizeof *work.all) : NULL;
  for (uint32_t i = 0; work.all && i < count; i++)
    add_task(&work, &calls[i]);
  if (work.count >= MIN_AHEAD) {
    pthread_t threads[MAX_THREADS];
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t started = 0;
    for (uint32_t i = 0; i < work.count; i++)
      look_up(&work, &work.all[i]);
    while (started + 1 < work.count && started < MAX_THREADS && started + 1 < cores &&
           pthread_create(&threads[started], NULL, make_ahead, &work) == 0)
      started++;
    make_ahead(&work);
    for (uint32_t i = 0; i < started; i++)
      pthread_join(threads[i], NULL);
  }
  for (uint32_t i = 0; i < work.count; i++)
    finish(&work.all[i]);
  free(work.all);
}

/* Enqueues a call on a stream. The caller has locked the handle, and has a reference to the algorithm. */
static int enqueue(const ocp_problem *problem, const ocp_library_handle *handle, ocp_prepared *prepared,
                   CUstream stream, void *const *pointers, ocp_error *error) {
  if (problem->library->one_thread)
    pthread_mutex_lock(&prepared->lock);
  const int code = problem->library->run(&problem->spec, handle, prepared, stream, pointers, error);
  if (problem->library->one_thread)
    pthread_mutex_unlock(&prepared->lock);
  return code;
}

static int fail_refused(const ocp_problem *problem, ocp_error *error) {
  return ocp_fail(error, ORT_FAIL, "%s refused this call in an earlier attempt", problem->library->name);
}

/* Enqueues a call with the stream's handle, which the caller has locked. *used: before the call, the entry for the key;
 * NULL: no entry is known yet. Afterwards, the entry with a reference for the caller; NULL with the error if the
 * library finds no algorithm. */
static int run_with(ocp_problem *problem, ocp_stream *stream, ocp_library_handle *handle, const arguments *call,
                    const int64_t *key, uint32_t words, ocp_prepared **used, ocp_error *error) {
  ocp_prepared *prepared = *used;
  if (!prepared)
    prepared = *used = prepare(&(call_site){problem, handle, stream, call->pointers}, key, words, error);
  if (!prepared)
    return error->code;
  if (atomic_load_explicit(&prepared->refused, memory_order_relaxed)) /* by another thread meanwhile */
    return fail_refused(problem, error);
  const int code = enqueue(problem, handle, prepared, stream->handle, call->pointers, error);
  if (is_captured(stream)) {
    ocp_prepared_keep(&problem->prepared, prepared);
  } else if (code == ORT_OK) {
    handle->executed |= prepared->algorithm != NULL;
    atomic_store_explicit(&prepared->executed, true, memory_order_relaxed);
  }
  return code;
}

/* Marks the entry of a call as refused. Makes the entry if the library has no algorithm. Returns NULL, with the error,
 * if memory runs out. */
static ocp_prepared *mark_refused(ocp_problem *problem, ocp_prepared *known, const int64_t *key, uint32_t words,
                                  ocp_error *error) {
  pthread_mutex_lock(&problem->preparing);
  ocp_prepared *found = known ? known : ocp_prepared_find(&problem->prepared, key, words);
  ocp_prepared *prepared = found ? found : ocp_prepared_create(key, words);
  if (prepared)
    atomic_store_explicit(&prepared->refused, true, memory_order_relaxed);
  else
    ocp_fail_memory(error);
  if (prepared && !found)
    ocp_prepared_insert(&problem->prepared, prepared);
  pthread_mutex_unlock(&problem->preparing);
  return prepared;
}

/* Whether the device still works after a library's error: a lost device fails every later call. A captured stream
 * cannot be queried; the launches of the substitute then report the device's error. */
static bool device_works(const ocp_stream *stream, ocp_error *error) {
  if (is_captured(stream))
    return true;
  const CUresult result = stream->device->driver->StreamQuery(stream->handle);
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY)
    return true;
  ocp_device_fail(stream->device, result, "a library call", error);
  return false;
}

/* Whether the library would refuse the call in a later process as well: it has not run out of memory, and all addresses
 * are aligned for vector loads. */
static bool lasts(const arguments *call, int code) {
  uintptr_t bits = 0;
  for (uint32_t i = 0; i < call->num_pointers; i++)
    bits |= (uintptr_t)call->pointers[i];
  return code == ORT_RUNTIME_EXCEPTION && bits % 16 == 0;
}

/* Runs kernels of the plugin in place of a refused call. The caller has locked nothing, since this may call Python. */
static int run_substitute(ocp_problem *problem, ocp_stream *stream, const arguments *call, ocp_prepared *prepared,
                          ocp_error *error) {
  const ocp_refused_call refused = {problem->library->name, &problem->spec, call->values,
                                    call->num_values,       call->pointers, call->num_pointers};
  const void *substitute = atomic_load_explicit(&prepared->substitute, memory_order_acquire);
  if (!substitute) {
    substitute = ocp_substitute_make(stream->device, &refused, lasts(call, error->code), error);
    atomic_store_explicit(&prepared->substitute, substitute, memory_order_release);
  }
  return substitute ? ocp_substitute_run(substitute, stream, &refused, error) : error->code;
}

int ocp_library_run(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t num_pointers,
                    const int64_t *values, uint32_t num_values, ocp_error *error) {
  const arguments call = {pointers, values, num_pointers, num_values};
  int64_t key[OCP_MAX_KEY] = {0};
  const uint32_t words = make_key(problem, &call, key, error);
  if (!words)
    return error->code;
  ocp_prepared *prepared = ocp_prepared_find(&problem->prepared, key, words);
  int code;
  if (prepared && atomic_load_explicit(&prepared->refused, memory_order_relaxed)) {
    code = fail_refused(problem, error);
  } else {
    ocp_library_handle *handle = ocp_library_handle_take(stream, problem->library, error);
    code = handle ? run_with(problem, stream, handle, &call, key, words, &prepared, error) : error->code;
    if (handle)
      ocp_library_handle_give_back(handle);
    if (code != ORT_OK && device_works(stream, error))
      prepared = mark_refused(problem, prepared, key, words, error);
  }
  if (code != ORT_OK && prepared && atomic_load_explicit(&prepared->refused, memory_order_relaxed))
    code = run_substitute(problem, stream, &call, prepared, error);
  if (prepared)
    ocp_prepared_let_go(&problem->prepared, prepared);
  return code == ORT_OK ? ORT_OK : error->code;
}

bool ocp_library_capture(ocp_problem *problem, ocp_stream *stream, const ocp_stream *captured, void *const *pointers,
                         uint32_t num_pointers, const int64_t *values, uint32_t num_values, ocp_prepared **used,
                         ocp_error *error) {
  const arguments call = {pointers, values, num_pointers, num_values};
  int64_t key[OCP_MAX_KEY] = {0};
  const uint32_t words = make_key(problem, &call, key, error);
  ocp_library_handle *handle = words ? ocp_library_handle_take(stream, problem->library, error) : NULL;
  *used = NULL;
  if (!handle)
    return true;
  ocp_prepared *prepared = ocp_prepared_find(&problem->prepared, key, words);
  const bool warm = prepared && !atomic_load_explicit(&prepared->refused, memory_order_relaxed) && handle->executed &&
                    atomic_load_explicit(&prepared->executed, memory_order_relaxed);
  if (warm && captured)
    enqueue(problem, handle, prepared, captured->handle, pointers, error);
  ocp_library_handle_give_back(handle);
  if (warm && captured)
    *used = prepared;
  else if (prepared)
    ocp_prepared_let_go(&problem->prepared, prepared);
  return warm;
}

void ocp_library_let_go(ocp_problem *problem, ocp_prepared *used) {
  if (used)
    ocp_prepared_let_go(&problem->prepared, used);
}
