/* Stream capture: operations of capturing streams become nodes of a graph instead of running.
 *
 * A capture begins in one stream. Another stream joins the capture by waiting for an event recorded in it; before the
 * capture ends, the first stream must wait for the work of the streams that joined. A call that CUDA forbids during a
 * capture fails with the error code that CUDA returns, and invalidates the capture. */
#include "emulator/work/capture.h"

#include <stdlib.h>
#include <string.h>

#include "emulator/work/graph.h"
#include "emulator/work/stream_list.h"

struct emu_capture {
  CUgraph graph;
  CUstream origin;
  int mode;
  pthread_t thread; /* the thread that called BeginCapture */
  bool invalidated;
  CUevent events; /* the events last recorded in the capture */
  struct emu_capture *next;
};

/* Guards all captures and the capture state of streams and events; taken after all other locks. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct emu_capture *captures;
static atomic_int num_captures; /* lets calls skip the lock while nothing is captured */
/* The calling thread's capture mode, which says whose captures forbid its potentially unsafe calls (such as
 * allocations). GLOBAL: the thread's own captures, and those captures of other threads that began in mode GLOBAL.
 * THREAD_LOCAL: the thread's own captures. RELAXED: none. A capture that began in mode RELAXED forbids nothing. */
static _Thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static bool any(void) { return atomic_load_explicit(&num_captures, memory_order_relaxed) > 0; }

static struct emu_capture *capture_of(CUstream stream) {
  return atomic_load_explicit(&stream->capture, memory_order_relaxed);
}

static void leave(CUstream stream) {
  atomic_store(&stream->capture, NULL);
  free(stream->frontier);
  stream->frontier = NULL;
  stream->num_frontier = 0;
}

static void forget(CUevent event) {
  if (!event->capture)
    return;
  for (CUevent *link = &event->capture->events; *link; link = &(*link)->next)
    if (*link == event) {
      *link = event->next;
      break;
    }
  event->capture = NULL;
  free(event->nodes);
  event->nodes = NULL;
  event->num_nodes = 0;
}

/* Ends the capture: detaches its streams and events, and frees it. The caller owns the graph. */
static void finish(struct emu_capture *capture) {
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    if (capture_of(stream) == capture)
      leave(stream);
  while (capture->events)
    forget(capture->events);
  for (struct emu_capture **link = &captures; *link; link = &(*link)->next)
    if (*link == capture) {
      *link = capture->next;
      break;
    }
  atomic_fetch_sub(&num_captures, 1);
  free(capture);
}

bool emu_is_capturing(CUstream stream, CUresult *result) {
  *result = CUDA_SUCCESS;
  if (!any())
    return false;
  pthread_mutex_lock(&lock);
  struct emu_capture *capture = capture_of(stream);
  if (capture && capture->invalidated)
    *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream == &stream->device->legacy) /* work on the null stream would have to wait for the capturing stream */
    for (struct emu_capture *other = captures; other; other = other->next)
      if (other->origin->device == stream->device && !(other->origin->flags & CU_STREAM_NON_BLOCKING)) {
        other->invalidated = true;
        *result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      }
  pthread_mutex_unlock(&lock);
  return capture && !*result;
}

CUresult emu_capture_op(CUstream stream, const emu_op *op) {
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  struct emu_capture *capture = capture_of(stream);
  struct CUgraphNode_st **frontier = malloc(sizeof *frontier);
  struct CUgraphNode_st *node =
      frontier && capture ? emu_graph_add(capture->graph, op, stream->frontier, stream->num_frontier) : NULL;
  if (node) {
    free(stream->frontier);
    stream->frontier = frontier;
    stream->num_frontier = 1;
    *frontier = node;
    result = CUDA_SUCCESS;
  } else {
    free(frontier);
    if (capture)
      capture->invalidated = true;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static struct CUgraphNode_st **copy_nodes(struct CUgraphNode_st **nodes, uint32_t count) {
  struct CUgraphNode_st **copy = malloc((count ? count : 1) * sizeof *copy);
  if (copy && count)
    memcpy(copy, nodes, count * sizeof *copy);
  return copy;
}

CUresult emu_capture_record(CUstream stream, CUevent event) {
  pthread_mutex_lock(&lock);
  forget(event);
  struct emu_capture *capture = capture_of(stream);
  struct CUgraphNode_st **nodes = copy_nodes(stream->frontier, stream->num_frontier);
  if (nodes && capture) {
    event->nodes = nodes;
    event->num_nodes = stream->num_frontier;
    event->capture = capture;
    event->next = capture->events;
    capture->events = event;
  }
  pthread_mutex_unlock(&lock);
  return nodes ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Makes the stream's next node depend on the event's nodes as well. */
static CUresult join(CUstream stream, const struct CUevent_st *event) {
  struct CUgraphNode_st **both = malloc((stream->num_frontier + event->num_nodes + 1) * sizeof *both);
  if (!both)
    return CUDA_ERROR_OUT_OF_MEMORY;
  uint32_t count = 0;
  for (; count < stream->num_frontier; count++)
    both[count] = stream->frontier[count];
  for (uint32_t i = 0; i < event->num_nodes; i++) {
    uint32_t known = 0;
    while (known < count && both[known] != event->nodes[i])
      known++;
    if (known == count)
      both[count++] = event->nodes[i];
  }
  free(stream->frontier);
  stream->frontier = both;
  stream->num_frontier = count;
  return CUDA_SUCCESS;
}

bool emu_capture_wait(CUstream stream, CUevent event, CUresult *result) {
  *result = CUDA_SUCCESS;
  if (!any())
    return false;
  pthread_mutex_lock(&lock);
  struct emu_capture *capture = capture_of(stream), *other = event->capture;
  bool concerned = capture || other;
  if ((capture && capture->invalidated) || (other && other->invalidated)) {
    *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (capture && !other) {
    if (event->record) { /* recorded outside of the capture. Waiting for an event that was never recorded is valid. */
      capture->invalidated = true;
      *result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
  } else if (capture && capture != other) {
    capture->invalidated = other->invalidated = true;
    *result = EMU_ERROR_CAPTURE_MERGE;
  } else if (other && stream == &stream->device->legacy) {
    other->invalidated = true;
    *result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  } else if (other) {
    *result = join(stream, event);
    if (!*result)
      atomic_store(&stream->capture, other);
  }
  pthread_mutex_unlock(&lock);
  return concerned;
}

void emu_capture_forget(CUevent event) {
  pthread_mutex_lock(&lock);
  forget(event);
  pthread_mutex_unlock(&lock);
}

void emu_capture_leave(CUstream stream) {
  if (!any())
    return;
  pthread_mutex_lock(&lock);
  struct emu_capture *capture = capture_of(stream);
  if (capture) {
    capture->invalidated = true;
    if (capture->origin == stream) {
      emu_graph_free(capture->graph);
      finish(capture);
    } else {
      leave(stream);
    }
  }
  pthread_mutex_unlock(&lock);
}

CUresult emu_capture_forbids(CUstream stream) {
  if (!any())
    return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  for (struct emu_capture *capture = captures; capture; capture = capture->next)
    if (!stream || capture_of(stream) == capture) {
      capture->invalidated = true;
      result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  pthread_mutex_unlock(&lock);
  return result ? result : emu_capture_unsafe();
}

static bool forbids_unsafe_calls(const struct emu_capture *capture) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
    return false;
  return pthread_equal(capture->thread, pthread_self()) ||
         (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult emu_capture_unsafe(void) {
  if (!any())
    return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  for (struct emu_capture *capture = captures; capture; capture = capture->next)
    if (forbids_unsafe_calls(capture)) {
      capture->invalidated = true;
      result = emu_fail(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not allowed while a stream is being captured");
    }
  pthread_mutex_unlock(&lock);
  return result;
}

CUresult emu_capture_event(CUevent event) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  if (event->capture) {
    event->capture->invalidated = true;
    result = EMU_ERROR_CAPTURED_EVENT;
  }
  pthread_mutex_unlock(&lock);
  return result ? result : emu_capture_unsafe();
}

/* ---- members of the driver table ---- */

CUresult emu_stream_begin_capture(CUstream stream, int mode) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  if (emu_stream_of(device, stream) == &device->legacy)
    return emu_fail(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the null stream cannot be captured");
  struct emu_capture *capture = calloc(1, sizeof *capture);
  CUgraph graph = emu_graph_make(stream->device);
  if (!capture || !graph) {
    free(capture);
    emu_graph_free(graph);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *capture = (struct emu_capture){.graph = graph, .origin = stream, .mode = mode, .thread = pthread_self()};
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&lock);
  if (capture_of(stream)) {
    result = emu_fail(EMU_ERROR_ILLEGAL_STATE, "the stream is already being captured");
  } else {
    capture->next = captures;
    captures = capture;
    atomic_fetch_add(&num_captures, 1);
    atomic_store(&stream->capture, capture);
  }
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&stream->lock);
  if (result) {
    free(capture);
    emu_graph_free(graph);
  }
  return result;
}

static CUresult end_capture(CUstream stream, CUgraph *graph) {
  struct emu_capture *capture = capture_of(stream);
  if (!capture)
    return emu_fail(EMU_ERROR_ILLEGAL_STATE, "the stream is not being captured");
  if (capture->origin != stream) {
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
    return EMU_ERROR_CAPTURE_WRONG_THREAD;
  CUresult result = CUDA_SUCCESS;
  if (capture->invalidated)
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  else
    result = emu_graph_check_joined(capture->graph, stream->frontier, stream->num_frontier);
  if (result)
    emu_graph_free(capture->graph);
  else
    *graph = capture->graph;
  finish(capture);
  return result;
}

CUresult emu_stream_end_capture(CUstream stream, CUgraph *graph) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!graph)
    return CUDA_ERROR_INVALID_VALUE;
  stream = emu_stream_of(device, stream);
  *graph = NULL;
  emu_streams_lock(); /* finish() visits the streams */
  pthread_mutex_lock(&lock);
  result = end_capture(stream, graph);
  pthread_mutex_unlock(&lock);
  emu_streams_unlock();
  return result;
}

CUresult emu_stream_is_capturing(CUstream stream, int *status) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!status)
    return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!any())
    return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  const struct emu_capture *capture = capture_of(emu_stream_of(device, stream));
  if (capture)
    *status = capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

CUresult emu_thread_exchange_stream_capture_mode(int *mode) {
  if (!atomic_load_explicit(&emu.started, memory_order_acquire))
    return CUDA_ERROR_NOT_INITIALIZED;
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  const int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}
