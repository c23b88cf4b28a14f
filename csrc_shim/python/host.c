#include "python/host.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/counters.h"
#include "base/host.h"
#include "base/process.h"
#include "emulator/calls/image.h"
#include "python/start.h"
#include "run/executor.h"
#include "vendor/store.h"
#include "vendor/substitute.h"

static ocp_python python;

/* Reads a vendor library's execution plan from the store; 0 on failure: the library then makes the plan. */
static uint64_t load_plan(const char *key, char *data, uint64_t capacity) {
  ocp_error ignored = {0};
  uint64_t bytes = 0;
  const ocp_python *table = ocp_python_call(&ignored);
  if (!table)
    return 0;
  const int code = table->load_plan(key, data, capacity, &bytes, &ignored);
  ocp_python_returned();
  return code == ORT_OK ? bytes : 0;
}

static void keep_plan(const char *key, const char *data, uint64_t bytes) {
  ocp_error ignored = {0};
  const ocp_python *table = ocp_python_call(&ignored);
  if (!table)
    return;
  table->keep_plan(key, data, bytes, &ignored);
  ocp_python_returned();
}

static const void *make_substitute(ocp_device *device, const ocp_refused_call *call, const char *why, bool lasts,
                                   ocp_error *error) {
  const ocp_python *table = ocp_python_call(error);
  const ocp_substitute *made = NULL;
  if (!table)
    return NULL;
  const int code = table->make_substitute(device, call->library, call->spec, call->values, call->num_values, why, lasts,
                                          &made, error);
  ocp_python_returned();
  return code == ORT_OK ? made : NULL;
}

static int no_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data, ocp_error *error) {
  (void)context, (void)dims, (void)rank, (void)data;
  return ocp_fail(error, ORT_INVALID_GRAPH,
                  "internal error: a substitute of a library call has output %u. Please "
                  "report it",
                  index);
}

static int run_substitute(const void *made, ocp_stream *stream, const ocp_refused_call *call, ocp_error *error) {
  const ocp_substitute *substitute = made;
  ocp_input inputs[OCP_MAX_SUBSTITUTE_INPUTS];
  for (uint32_t i = 0; i < substitute->num_inputs; i++)
    inputs[i] = (ocp_input){call->pointers[i], &substitute->elements[i], 1, substitute->dtype, true};
  return ocp_cluster_run(substitute->cluster, stream, inputs, substitute->num_inputs, no_output, NULL, error);
}

/* The emu_translate_fn of the emulated device. */
static int translate_image(const void *image, size_t bytes, emu_deliver_fn deliver, void *context, char *text,
                           size_t text_bytes) {
  ocp_error error = {0};
  const ocp_python *table = ocp_python_call(&error);
  if (table) {
    table->translate_image(image, bytes, deliver, context, &error);
    ocp_python_returned();
  }
  snprintf(text, text_bytes, "%s", error.text);
  return error.code;
}

int ocp_set_python(const ocp_python *table, ocp_error *error) {
  if (table->abi != OCP_CORE_ABI)
    return ocp_fail(
        error, ORT_FAIL,
        "_bridge.abi3.so has ABI %u and libort_cuda_plugin.so ABI %u, expected equal ones: run build_plugin.py again",
        table->abi, OCP_CORE_ABI);
  ocp_watch_forks();
  python = *table;
  ocp_python_set_ready();
  ocp_store_use(&(ocp_plan_store){load_plan, keep_plan});
  ocp_substitutes_use(&(ocp_substitutes){make_substitute, run_substitute});
  emu_use_translator(translate_image);
  return ORT_OK;
}

const ocp_python *ocp_python_call(ocp_error *error) {
  const char *why = NULL;
  if (atomic_load(&ocp_forked))
    why = OCP_FORKED_TEXT;
  else if (ocp_is_shutting_down())
    why = "the Python interpreter is shutting down";
  else if (!ocp_python_is_ready() && ocp_python_load(error) != ORT_OK)
    return NULL;
  if (why) {
    ocp_fail(error, ORT_FAIL, "%s: %s", OCP_EP_NAME, why);
    return NULL;
  }
  ocp_count(OCP_PYTHON_CALLS, 1);
  return &python;
}

static _Thread_local bool interrupted;

void ocp_interrupt_after_call(void) { interrupted = true; }

void ocp_python_returned(void) {
  if (interrupted) {
    interrupted = false;
    raise(SIGINT);
  }
}

OrtStatus *ocp_python_status(OrtStatus *status) {
  ocp_python_returned();
  if ((uintptr_t)status != OCP_PYTHON_BROKE)
    return status;
  return ocp_api->CreateStatus(ORT_FAIL,
                               OCP_EP_NAME ": Python failed and could not say why; stderr has more (the usual "
                                           "reason is a call at the limit of Python's recursion)");
}

int ocp_python_build_variant(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                             const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error) {
  const ocp_python *table = ocp_python_call(error);
  if (!table)
    return error->code;
  const int code = table->build_variant(cluster, inputs, num_inputs, host_values, host_counts, num_host_inputs, error);
  ocp_python_returned();
  return code;
}

int ocp_python_call_back(int64_t cluster, uint32_t callback, const uint64_t *pointers, uint32_t num_pointers,
                         const int64_t *numbers, uint32_t num_numbers, ocp_stream *stream, ocp_error *error) {
  const ocp_python *table = ocp_python_call(error);
  if (!table)
    return error->code;
  const int code = table->call_back(cluster, callback, pointers, num_pointers, numbers, num_numbers, stream, error);
  ocp_python_returned();
  return code;
}
