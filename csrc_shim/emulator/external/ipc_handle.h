/* Handles of CUDA IPC on the emulated device, and the records behind them. A record is a small file in memory of the
 * exporting process. A handle contains the id of that process, the process's file descriptor of the record, and a
 * random number. The record contains the same number: so the handle of an ended process or a freed object never opens
 * another object. An importing process opens the record through /proc, and locks it for reading while it uses the
 * object. The operating system drops that lock when the process ends, so that the exporter always knows whether an
 * importer is left. */
#ifndef OCP_EMULATOR_EXTERNAL_IPC_HANDLE_H
#define OCP_EMULATOR_EXTERNAL_IPC_HANDLE_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"

/* The beginning of each record. Events use the first two members as a timeline (work/timeline.h). */
typedef struct emu_ipc_header {
  char magic[8];
  uint64_t counter;
  uint64_t secret; /* random */
} emu_ipc_header;

/* A kind of record. `what` names the object in errors: "CUDA IPC memory". */
typedef struct emu_ipc_kind {
  const char *what;
  char magic[9];  /* 8 characters */
  uint64_t bytes; /* of the record */
  int access;     /* O_RDONLY or O_RDWR: what importers need */
} emu_ipc_kind;

/* Makes the record's file, whose header is filled in, and the handle. *fd: the descriptor, which the caller owns. */
CUresult emu_ipc_export(const emu_ipc_kind *kind, emu_ipc_header *record, int *fd, char handle[CU_IPC_HANDLE_SIZE]);
/* Opens, locks and reads the record of another process's handle. *fd: the descriptor, which the caller owns; closing it
 * drops the lock. *process: the exporting process. */
CUresult emu_ipc_import(const emu_ipc_kind *kind, const char handle[CU_IPC_HANDLE_SIZE], emu_ipc_header *record,
                        int *fd, int *process);
/* Opens the file of descriptor `fd` of another process, which emu_ipc_make_file must have made there. *out: the
 * descriptor in this process, which the caller owns. */
CUresult emu_ipc_open(int process, int fd, int access, const char *what, int *out);
/* Makes a file in memory; *fd: its descriptor, which the caller owns. */
CUresult emu_ipc_make_file(int *fd);
/* Whether an importer has the record open; `fd`: the exporter's descriptor. */
bool emu_ipc_is_open(int fd);
/* Returns the random number in a handle. */
uint64_t emu_ipc_secret(const char handle[CU_IPC_HANDLE_SIZE]);

#endif
