#include "ort/data/capture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/counters.h"
#include "base/host.h"
#include "base/process.h"
#include "device/memory/memory.h"
#include "device/memory/preserve.h"
#include "device/order.h"
#include "device/release.h"
#include "device/run_memory.h"
#include "driver/activity.h"
#include "driver/driver.h"

/* The state of one annotation id (run option gpu_graph_id) on one thread. */
typedef struct captured {
  struct captured *next;
  int id;
  uint32_t warm_runs;
  unsigned computations; /* calls of clusters in the latest warm Run */
  CUgraphExec exec;      /* NULL: not captured yet */
  ocp_graph_sources sources;
  ocp_run_memory memory; /* the memory of the last warm Run, reused by the captured Run */
} captured;

/* The state of one thread for one EP. */
struct ocp_capture_thread {
  ocp_capture *owner;
  ocp_capture_thread *next_of_owner, *next_of_thread;
  ocp_capture_thread **list; /* the owning thread's list (thread_key), which contains this state */
  ocp_stream *stream;
  pthread_mutex_t lock; /* guards `ids` and its entries; other threads leave the entry `active` unchanged */
  captured *ids;
  captured *active;      /* the entry of the current Run if it is captured or its allocations are watched; else NULL */
  bool captures;         /* true: the current Run is captured */
  bool has_turn;         /* true: the thread holds a turn (ocp_stream_take_turn), from the start of a Run to its end */
  unsigned computations; /* calls of clusters in the latest Run; accessed by the thread only */
  ocp_preserved preserved; /* data that a warm Run overwrote, restored because ONNX Runtime repeats the Run */
  atomic_bool failed;
};

struct ocp_capture {
  ocp_device *device;
  ocp_stream *stream; /* shared by all threads; NULL: each thread has its own */
  uint32_t warm_runs;
  ocp_capture_thread *threads;
};

/* Guards the two lists that link an ocp_capture_thread: its thread's list and its EP's list. */
static pthread_mutex_t links = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t thread_key; /* the calling thread's list of ocp_capture_thread */
static bool has_thread_key;
/* The capture state of the calling thread's current Run. */
static _Thread_local ocp_capture_thread *running;

/* ---- graphs ---- */

/* Destroys the id's graph, so that its next Runs are warm Runs. */
static void drop_graph(ocp_device *device, captured *entry) {
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered && entry->exec)
    ocp_device_released(device, device->driver->GraphExecDestroy(entry->exec), "cuGraphExecDestroy");
  if (entry->exec)
    ocp_count(OCP_GRAPHS_LIVE, -1);
  ocp_run_memory_release(&entry->memory);
  ocp_graph_sources_clear(&entry->sources);
  entry->exec = NULL;
  entry->warm_runs = 0;
}

static captured *find_id(const ocp_capture_thread *thread, int id) {
  captured *entry = thread->ids;
  while (entry && entry->id != id)
    entry = entry->next;
  return entry;
}

/* ---- threads ---- */

/* Ends the thread's turn, if it holds one. */
static void end_turn(ocp_capture_thread *thread) {
  if (thread->has_turn)
    ocp_stream_end_turn(thread->stream);
  thread->has_turn = false;
}

static void take_turn(ocp_capture_thread *thread, bool alone) {
  end_turn(thread);
  ocp_stream_take_turn(thread->stream, alone);
  thread->has_turn = true;
}

static void abandon_run(ocp_capture_thread *thread, ocp_device *device);

/* Frees a state that is unlinked from its thread and its EP; the EP may already be destroyed. Called without `links`
 * locked: this function may wait for another thread to end its capture on the stream, and that thread then locks
 * `links`. */
static void destroy_thread(ocp_capture_thread *thread, ocp_device *device) {
  ocp_error ignored;
  abandon_run(thread, device);
  take_turn(thread, false);
  ocp_stream_synchronize(thread->stream, &ignored);
  end_turn(thread);
  for (captured *entry = thread->ids, *next; entry; entry = next) {
    next = entry->next;
    drop_graph(device, entry);
    free(entry);
  }
  ocp_stream_release(thread->stream);
  pthread_mutex_destroy(&thread->lock);
  free(thread);
}

static void unlink_from_owner(ocp_capture_thread *thread) {
  ocp_capture_thread **link = &thread->owner->threads;
  while (*link != thread)
    link = &(*link)->next_of_owner;
  *link = thread->next_of_owner;
}

/* The destructor of thread_key: frees the capture states of a thread that ends. */
static void thread_ends(void *list) {
  ocp_capture_thread **head = list;
  while (!ocp_is_shutting_down() && !atomic_load(&ocp_forked)) {
    pthread_mutex_lock(&links);
    ocp_capture_thread *thread = *head;
    ocp_device *device = thread ? thread->owner->device : NULL;
    if (thread) {
      *head = thread->next_of_thread;
      unlink_from_owner(thread);
    }
    pthread_mutex_unlock(&links);
    if (!thread)
      break;
    destroy_thread(thread, device);
  }
  free(head);
}

static void make_key(void) { has_thread_key = pthread_key_create(&thread_key, thread_ends) == 0; }

/* Returns the calling thread's list of ocp_capture_thread; NULL if it has none yet. */
static ocp_capture_thread **thread_list(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_key);
  return has_thread_key ? pthread_getspecific(thread_key) : NULL;
}

/* Returns the calling thread's state for the EP; NULL: it has none. */
static ocp_capture_thread *find_thread(const ocp_capture *capture) {
  ocp_capture_thread **list = thread_list();
  if (!list)
    return NULL;
  pthread_mutex_lock(&links); /* an EP that is destroyed removes its entries from the lists of all threads */
  ocp_capture_thread *thread = *list;
  while (thread && thread->owner != capture)
    thread = thread->next_of_thread;
  pthread_mutex_unlock(&links);
  return thread;
}

static ocp_capture_thread *make_thread(ocp_capture *capture, ocp_error *error) {
  ocp_capture_thread **list = thread_list();
  if (!list && has_thread_key && (list = calloc(1, sizeof(ocp_capture_thread *))) &&
      pthread_setspecific(thread_key, list) != 0) {
    free(list);
    list = NULL;
  }
  ocp_capture_thread *thread = list ? calloc(1, sizeof *thread) : NULL;
  if (!thread) {
    ocp_fail_memory(error);
    return NULL;
  }
  if (capture->stream) {
    thread->stream = ocp_stream_share(capture->stream);
  } else if (ocp_stream_create(capture->device, &thread->stream, error) != ORT_OK) {
    free(thread);
    return NULL;
  }
  thread->owner = capture;
  pthread_mutex_init(&thread->lock, NULL);
  pthread_mutex_lock(&links);
  thread->next_of_owner = capture->threads;
  capture->threads = thread;
  thread->list = list;
  thread->next_of_thread = *list;
  *list = thread;
  pthread_mutex_unlock(&links);
  return thread;
}

static ocp_capture_thread *this_thread(ocp_capture *capture, ocp_error *error) {
  ocp_capture_thread *thread = find_thread(capture);
  return thread ? thread : make_thread(capture, error);
}

ocp_capture *ocp_capture_create(ocp_device *device, ocp_stream *stream, uint32_t warm_runs) {
  ocp_capture *capture = calloc(1, sizeof *capture);
  if (capture)
    *capture = (ocp_capture){.device = device, .stream = stream, .warm_runs = warm_runs};
  return capture;
}

static void unlink_from_thread(ocp_capture_thread *thread) {
  ocp_capture_thread **link = thread->list;
  while (*link != thread)
    link = &(*link)->next_of_thread;
  *link = thread->next_of_thread;
}

void ocp_capture_destroy(ocp_capture *capture) {
  if (!capture)
    return;
  for (;;) {
    pthread_mutex_lock(&links);
    ocp_capture_thread *thread = capture->threads;
    if (thread) {
      capture->threads = thread->next_of_owner;
      unlink_from_thread(thread);
    }
    pthread_mutex_unlock(&links);
    if (!thread)
      break;
    destroy_thread(thread, capture->device);
  }
  free(capture);
}

int ocp_capture_stream(ocp_capture *capture, ocp_stream **stream, ocp_error *error) {
  ocp_capture_thread *thread = this_thread(capture, error);
  *stream = thread ? ocp_stream_share(thread->stream) : NULL;
  return thread ? ORT_OK : error->code;
}

/* ---- Runs ---- */

void ocp_capture_computed(ocp_stream *stream, bool succeeded) {
  if (running) {
    running->computations++;
    if (!succeeded)
      atomic_store(&running->failed, true);
  } else if (!succeeded && stream && atomic_load_explicit(&stream->capturing, memory_order_relaxed)) {
    /* This thread does not track the Run: in a parallel session ORT runs nodes on other threads. */
    atomic_store(&stream->capture_failed, true);
  }
}

static int activate(ocp_capture_thread *thread, captured *entry, bool captures, ocp_error *error) {
  if (ocp_run_memory_watch(&entry->memory, thread->owner->device, captures, error) != ORT_OK)
    return error->code;
  thread->active = entry;
  thread->captures = captures;
  if (captures) {
    atomic_store(&thread->stream->capture_failed, false);
    atomic_store(&thread->stream->capturing, true);
    ocp_activity_begin_graph();
  }
  return ORT_OK;
}

static void deactivate(ocp_capture_thread *thread) {
  ocp_run_memory_unwatch(&thread->active->memory);
  thread->active = NULL;
  if (thread->captures)
    atomic_store(&thread->stream->capturing, false);
  thread->captures = false;
}

/* Finds or adds the thread's entry for an annotation id; NULL: out of memory. */
static captured *entry_of(ocp_capture_thread *thread, int id) {
  captured *entry = find_id(thread, id);
  if (entry || !(entry = calloc(1, sizeof *entry)))
    return entry;
  entry->id = id;
  entry->next = thread->ids;
  return thread->ids = entry;
}

/* Forgets a Run that ORT never ended, for example because of an exception. */
static void abandon_run(ocp_capture_thread *thread, ocp_device *device) {
  captured *entry = thread->active;
  ocp_preserve_drop(&thread->preserved);
  if (!entry)
    return;
  CUgraph graph = NULL;
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered && thread->captures)
    ocp_stream_end_capture(thread->stream, &graph);
  if (graph)
    ocp_device_released(device, device->driver->GraphDestroy(graph), "cuGraphDestroy");
  pthread_mutex_lock(&thread->lock);
  deactivate(thread);
  drop_graph(device, entry);
  pthread_mutex_unlock(&thread->lock);
}

static bool is_warm(const ocp_capture_thread *thread, const captured *entry) {
  return entry && !entry->exec && entry->warm_runs >= thread->owner->warm_runs;
}

/* Begins the capture if the annotation id is warm; watches the Run's allocations if it is the last warm Run. Called
 * under the thread's lock, so that no other thread releases the entry meanwhile. */
static int track_run(ocp_capture_thread *thread, int id, ocp_error *error) {
  ocp_device *device = thread->owner->device;
  captured *entry = entry_of(thread, id);
  if (!entry)
    return ocp_fail_memory(error);
  const bool warm = is_warm(thread, entry);
  if (!warm && (entry->exec || entry->warm_runs + 1 != thread->owner->warm_runs))
    return ORT_OK;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered || activate(thread, entry, warm, error) != ORT_OK)
    return error->code;
  if (!warm)
    return ORT_OK;
  const CUresult result =
      device->driver->StreamBeginCapture(thread->stream->handle, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  if (result == CUDA_SUCCESS)
    return ORT_OK;
  deactivate(thread);
  return ocp_device_fail(device, result, "capturing a Run: cuStreamBeginCapture", error);
}

static int begin_run(ocp_capture_thread *thread, int id, ocp_error *error) {
  pthread_mutex_lock(&thread->lock);
  /* Until the turn begins, another thread may release the id's graph: a warm id becomes cold, never the reverse. */
  const bool alone = is_warm(thread, find_id(thread, id));
  pthread_mutex_unlock(&thread->lock);
  take_turn(thread, alone);
  pthread_mutex_lock(&thread->lock);
  const int code = track_run(thread, id, error);
  const captured *entry = find_id(thread, id);
  if (code == ORT_OK && !thread->captures && !(entry && entry->exec))
    ocp_preserve_begin(&thread->preserved, thread->owner->device);
  pthread_mutex_unlock(&thread->lock);
  return code;
}

void ocp_capture_forget_run(void) {
  running = NULL;
  ocp_activity_end_graph(NULL);
  ocp_run_memory_forget();
  ocp_preserve_forget();
}

int ocp_capture_run_start(ocp_capture *capture, int id, ocp_error *error) {
  ocp_capture_thread *thread = this_thread(capture, error);
  if (!thread)
    return error->code;
  abandon_run(thread, capture->device);
  thread->computations = 0;
  atomic_store(&thread->failed, false);
  running = thread;
  int code = ocp_stream_close_capture(thread->stream, error);
  if (code == ORT_OK && id == OCP_NO_CAPTURE)
    take_turn(thread, false);
  else if (code == ORT_OK)
    code = begin_run(thread, id, error);
  if (code != ORT_OK) { /* ORT does not end a Run that did not start */
    running = NULL;
    end_turn(thread);
  }
  return code;
}

static int launch(ocp_capture_thread *thread, captured *entry, ocp_error *error) {
  ocp_device *device = thread->owner->device;
  const bool named = ocp_is_anybody_listening();
  if (named)
    ocp_activity_of_graph(&entry->sources);
  const CUresult result = device->driver->GraphLaunch(entry->exec, thread->stream->handle);
  if (named)
    ocp_activity_of(0);
  ocp_stream_enqueued(thread->stream);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "replaying a captured Run: cuGraphLaunch", error);
  ocp_count(OCP_GRAPH_REPLAYS, 1);
  return ORT_OK;
}

#define HINT " (earlier errors name the work of the Run that CUDA cannot capture; gpu_graph_id=-1 runs without capture)"

/* Logs a capture: one line for each id and thread. */
static void report_capture(const captured *entry, size_t num_nodes) {
  size_t bytes = 0;
  char text[200];
  for (const ocp_run_block *block = entry->memory.blocks; block; block = block->next)
    if (block->memory == OCP_DEVICE_MEMORY)
      bytes += block->bytes;
  snprintf(text, sizeof text,
           "captured a CUDA graph of %zu nodes for gpu_graph_id %d; the graph keeps %zu bytes of memory", num_nodes,
           entry->id, bytes);
  ocp_log(ORT_LOGGING_LEVEL_INFO, text, OCP_EP_NAME);
}

/* Ends the capture of a Run and stores its graph, or returns the error; called under the thread's lock. */
static int take_graph(ocp_capture_thread *thread, captured *entry, ocp_error *error) {
  ocp_device *device = thread->owner->device;
  CUgraph graph = NULL;
  CUgraphExec exec = NULL;
  CUresult result = ocp_stream_end_capture(thread->stream, &graph);
  deactivate(thread);
  ocp_activity_end_graph(&entry->sources);
  const bool ended = result == CUDA_SUCCESS;
  const bool complete = !atomic_load(&thread->failed) && !atomic_load(&thread->stream->capture_failed) &&
                        thread->computations == entry->computations;
  const char *call = "capturing the Run into a CUDA graph" HINT ": cuStreamEndCapture";
  size_t num_nodes = 0;
  if (ended && complete) {
    call = "capturing the Run into a CUDA graph" HINT ": cuGraphGetNodes";
    result = device->driver->GraphGetNodes(graph, NULL, &num_nodes);
    if (result == CUDA_SUCCESS) {
      call = "capturing the Run into a CUDA graph" HINT ": cuGraphInstantiate";
      result = device->driver->GraphInstantiate(&exec, graph, 0);
    }
  }
  if (graph)
    ocp_device_released(device, device->driver->GraphDestroy(graph), "cuGraphDestroy");
  entry->exec = exec;
  ocp_run_memory_forget_held(&entry->memory);
  if (exec)
    ocp_count(OCP_GRAPHS_LIVE, 1);
  else
    drop_graph(device, entry);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, call, error);
  if (!exec)
    return ocp_fail(
        error, ORT_RUNTIME_EXCEPTION,
        "CUDA graph %d: the Run that the graph was to capture did not finish. The log has the earlier error",
        entry->id);
  ocp_count(OCP_GRAPH_CAPTURES, 1);
  report_capture(entry, num_nodes);
  return ORT_OK;
}

/* Ends a captured Run: takes its graph and launches it, because the capture has executed nothing. */
static int end_capture(ocp_capture_thread *thread, captured *entry, ocp_error *error) {
  pthread_mutex_lock(&thread->lock); /* no other thread releases the graph meanwhile */
  if (take_graph(thread, entry, error) == ORT_OK)
    launch(thread, entry, error);
  pthread_mutex_unlock(&thread->lock);
  return error->code;
}

static void end_warm_run(ocp_capture_thread *thread, captured *entry) {
  if (!entry)
    return;
  if (atomic_load(&thread->failed)) {
    drop_graph(thread->owner->device, entry);
    return;
  }
  ocp_run_memory_forget_held(&entry->memory);
  entry->warm_runs++;
  entry->computations = thread->computations;
}

int ocp_capture_run_end(ocp_capture *capture, int id, bool synchronize, ocp_error *error) {
  ocp_capture_thread *thread = find_thread(capture);
  if (!thread)
    return ORT_OK;
  captured *entry = thread->active;
  running = NULL;
  int code = ORT_OK;
  if (entry && thread->captures) {
    OCP_STAY stay = ocp_device_enter_to_release(capture->device); /* a capture must end even on a lost device */
    code = end_capture(thread, entry, error);
  } else if (id != OCP_NO_CAPTURE) {
    pthread_mutex_lock(&thread->lock);
    if (entry)
      deactivate(thread);
    end_warm_run(thread, find_id(thread, id));
    pthread_mutex_unlock(&thread->lock);
    OCP_STAY stay = ocp_device_enter_to_release(capture->device);
    code = ocp_preserve_end(&thread->preserved, thread->stream, error);
  }
  if (code == ORT_OK && synchronize && !ocp_stream_is_idle(thread->stream))
    code = ocp_stream_synchronize(thread->stream, error);
  end_turn(thread);
  return code;
}

bool ocp_capture_has(ocp_capture *capture, int id) {
  ocp_capture_thread *thread = find_thread(capture);
  if (!thread)
    return false;
  pthread_mutex_lock(&thread->lock);
  const captured *entry = find_id(thread, id);
  const bool has = entry && entry->exec;
  pthread_mutex_unlock(&thread->lock);
  return has;
}

static int fail_uncaptured(int id, ocp_error *error) {
  return ocp_fail(
      error, ORT_INVALID_ARGUMENT,
      "this thread has captured no CUDA graph %d. Run the session in this thread first, with gpu_graph_id=%d", id, id);
}

int ocp_capture_replay(ocp_capture *capture, int id, ocp_error *error) {
  ocp_capture_thread *thread = find_thread(capture);
  if (!thread)
    return fail_uncaptured(id, error);
  OCP_STAY stay = ocp_device_enter(capture->device, error);
  if (!stay.entered)
    return error->code;
  abandon_run(thread, capture->device);
  take_turn(thread, false);
  pthread_mutex_lock(&thread->lock); /* no other thread releases the graph meanwhile */
  captured *entry = find_id(thread, id);
  int code;
  if (!entry || !entry->exec)
    code = fail_uncaptured(id, error);
  else if ((code = launch(thread, entry, error)) == ORT_OK)
    code = ocp_stream_synchronize(thread->stream, error);
  pthread_mutex_unlock(&thread->lock);
  end_turn(thread);
  return code;
}

/* Releases the thread's state for the id, unless the thread tracks a Run of the id now. Called under the thread's
 * lock. */
static void release_id(ocp_capture_thread *thread, int id) {
  captured **link = &thread->ids;
  while (*link && (*link)->id != id)
    link = &(*link)->next;
  captured *entry = *link;
  if (!entry || entry == thread->active)
    return;
  *link = entry->next;
  drop_graph(thread->owner->device, entry);
  free(entry);
}

void ocp_capture_release(ocp_capture *capture, int id) {
  pthread_mutex_lock(&links);
  for (ocp_capture_thread *thread = capture->threads; thread; thread = thread->next_of_owner) {
    pthread_mutex_lock(&thread->lock);
    release_id(thread, id);
    pthread_mutex_unlock(&thread->lock);
  }
  pthread_mutex_unlock(&links);
}
