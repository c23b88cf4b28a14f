/* A stream of a device. Types only. */
#ifndef OCP_DEVICE_STREAM_STATE_H
#define OCP_DEVICE_STREAM_STATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "device/device.h"
#include "driver/driver.h"

/* State that another folder of csrc_shim attaches to a stream, such as a library handle: one slot for each kind of
 * state. The folder that owns the slot sets it; destroying the stream calls the slot's `release`. */
typedef enum ocp_stream_slot_id {
  OCP_SLOT_ORT,
  OCP_SLOT_CUBLASLT,
  OCP_SLOT_CUDNN,
  OCP_SLOT_PEERS,
  OCP_SLOT_UPLOADS,       /* run/instance/uploads.c: the copy stream of a stream of Runs */
  OCP_SLOT_UPLOAD_EVENTS, /* run/instance/uploads.c: the events of a copy stream */
  OCP_NUM_SLOTS
} ocp_stream_slot_id;
typedef struct ocp_stream_slot {
  _Atomic(void *) state;        /* NULL: not made yet */
  void (*release)(void *state); /* NULL: nothing to do */
} ocp_stream_slot;

/* A CUDA stream with its attached state. */
typedef struct ocp_stream {
  ocp_device *device;
  CUstream handle;
  bool owned; /* true: the plugin created it; false: the application did, and keeps it alive while sessions use it */
  ocp_stream_slot slots[OCP_NUM_SLOTS];
  atomic_bool capturing; /* set in an exclusive turn, by the thread whose work on the stream is captured into a graph,
                            by the plugin, ORT or the application */
  atomic_bool capture_failed; /* set by code that cannot enqueue what the graph needs; cleared when a capture begins */
  struct ocp_stream_private *priv;
} ocp_stream;

#endif
