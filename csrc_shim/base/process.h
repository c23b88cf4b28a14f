/* State of the process: a forked child, or one whose Python interpreter is shutting down. */
#ifndef OCP_BASE_PROCESS_H
#define OCP_BASE_PROCESS_H

#include <stdatomic.h>
#include <stdbool.h>

/* True in a child forked after ocp_watch_forks: neither Python nor CUDA works there. */
extern atomic_bool ocp_forked;
void ocp_watch_forks(void); /* called where Python or a device is first used */
#define OCP_FORKED_TEXT                                                                                                \
  "this process was forked from a process that used the CUDA plugin. Start this process with multiprocessing's "       \
  "spawn or forkserver method"

/* Whether the Python interpreter is shutting down. From then on the library calls no Python (python/host.h), and a
 * thread that ends releases no captured graphs (ort/data/capture.c), so that it does not call CUDA at the end of the
 * process. */
bool ocp_is_shutting_down(void);
void ocp_shut_down(void);

#endif
