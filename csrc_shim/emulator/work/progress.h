/* The thread that runs queued work which involves external semaphores. Another process or an API that the emulated
 * device does not know may wait for a signal, so a signal must happen even if the program makes no further driver
 * call. */
#ifndef OCP_EMULATOR_WORK_PROGRESS_H
#define OCP_EMULATOR_WORK_PROGRESS_H

#include <stdbool.h>

/* Starts the thread unless it runs, and wakes it. Returns false if the system gives no thread. Called with emu_order
 * held (queue.h). */
bool emu_progress(void);

#endif
