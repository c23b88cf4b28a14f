/* Findings: the checking mode's reports of errors in kernels, copies and memsets, like those of compute-sanitizer. */
#ifndef OCP_EMULATOR_FINDINGS_H
#define OCP_EMULATOR_FINDINGS_H

#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"

/* Returns the number of findings since the last clear. Kinds: out-of-bounds, use-after-free, uninitialized-read,
 * divergent-barrier, missing-wait, misaligned, race, pending-copy, read-only-written, invalid-mask; in every mode also
 * trap (of a kernel), interrupted (SIGINT has ended the launch) and invalid-handle (of cudaGraphSetConditional). Each
 * finding is one line of text, with kernel, block and thread, or "fill" for a memset, or the name of a copy; and with
 * address and size of an access. A finding also makes the launch, copy or memset fail with CUDA_ERROR_ILLEGAL_ADDRESS
 * or CUDA_ERROR_LAUNCH_FAILED, except for invalid-handle. */
int ocp_emu_num_findings(void);
/* Copies finding `index` into text. Returns the finding's length, or -1 for an index out of range. */
int ocp_emu_finding(int index, char *text, size_t text_bytes);
/* Forgets the findings and the sticky errors of the devices. */
void ocp_emu_clear_findings(void);

/* ---- for the code that checks ---- */

enum { EMU_FINDING_BYTES = 400 }; /* maximum length of a finding's text, with its final 0 */
typedef enum emu_finding_kind {
  EMU_OUT_OF_BOUNDS,
  EMU_USE_AFTER_FREE,
  EMU_UNINITIALIZED_READ,
  EMU_MISSING_WAIT,
  EMU_DIVERGENT_BARRIER,
  EMU_MISALIGNED,
  EMU_RACE,
  EMU_PENDING_COPY,
  EMU_READ_ONLY_WRITTEN,
  EMU_INVALID_MASK
} emu_finding_kind;
extern const char *const emu_finding_kinds[]; /* names, by emu_finding_kind */
/* Keeps the text of a finding. Returns its index for ocp_emu_finding; -1: the table is full, the text is dropped. */
int emu_finding_keep(const char *text);
/* Records a finding about a copy or memset. Returns the error with which that operation must fail. */
CUresult emu_finding_report(emu_finding_kind kind, const char *operation, uint64_t address, uint64_t bytes,
                            const char *where);
/* Describes where a device address lies: "byte 4096 of 4096 allocated at 0x...". */
void emu_finding_locate(uint64_t address, char *text, size_t text_bytes);

#endif
