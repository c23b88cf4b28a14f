/* The checking mode: what compute-sanitizer would find, in kernels compiled with checks and in copies and fills. */
#include "emulator/check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/emulator.h"
#include "emulator/heap.h"
#include "emulator/kernel.h"
#include "emulator/loader.h"
#include "emulator/shadow.h"
#include "emulator/state.h"

#define MAX_FINDINGS 256
#define TEXT_BYTES 400
#define NEAR_STACK ((uint64_t)1 << 20) /* of the calling thread, where a kernel's locals may lie */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char findings[MAX_FINDINGS][TEXT_BYTES]; /* the first ones */
static int num_findings;

/* ---- findings ---- */

int ocp_emu_num_findings(void) {
  pthread_mutex_lock(&lock);
  int count = num_findings;
  pthread_mutex_unlock(&lock);
  return count;
}

int ocp_emu_finding(int index, char *text, size_t text_bytes) {
  pthread_mutex_lock(&lock);
  int length = -1;
  if (index >= 0 && index < num_findings)
    length = snprintf(text, text_bytes, "%s", findings[index]);
  pthread_mutex_unlock(&lock);
  return length;
}

void ocp_emu_clear_findings(void) {
  pthread_mutex_lock(&lock);
  num_findings = 0;
  pthread_mutex_unlock(&lock);
  for (uint32_t index = 0; index < EMU_MAX_DEVICES; index++)
    atomic_store(&emu.devices[index].error, CUDA_SUCCESS);
}

static void keep(const char *text) {
  pthread_mutex_lock(&lock);
  if (num_findings < MAX_FINDINGS)
    snprintf(findings[num_findings++], TEXT_BYTES, "%s", text);
  pthread_mutex_unlock(&lock);
}

/* Where an address lies: "byte 4096 of an allocation of 4096 bytes at 0x...". */
static void place(uint64_t address, char *text, size_t text_bytes) {
  uint64_t start, size;
  if (emu_is_device_address(address) && emu_heap_around(&emu_device_of(address)->heap, address, &start, &size))
    snprintf(text, text_bytes, "byte %" PRIu64 " of %" PRIu64 " allocated at 0x%" PRIx64, address - start, size, start);
  else
    snprintf(text, text_bytes, "no allocation is near");
}

/* ---- accesses of kernels ---- */

typedef enum kind { OUT_OF_BOUNDS, USE_AFTER_FREE, UNINITIALISED_READ, MISSING_WAIT, DIVERGENT_BARRIER } kind;
static const char *const kinds[] = {"out-of-bounds", "use-after-free", "uninitialised-read", "missing-wait",
                                    "divergent-barrier"};
static const char *const accesses[] = {"", "reads", "writes", "updates"};

/* Keeps the first finding of each kind of a launch, and makes the launch fail. */
static bool first_of_kind(emu_launch *launch, kind kind) {
  unsigned bit = 1u << kind;
  return !(atomic_fetch_or(&launch->found, bit) & bit);
}

static void report(ocp_emu_thread *thread, kind kind, emu_access access, uint64_t address, uint32_t bytes,
                   const char *where) {
  const emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  if (!first_of_kind(launch, kind))
    return;
  char text[TEXT_BYTES];
  snprintf(text, sizeof text, "%s: kernel %s, block (%u,%u,%u), thread (%u,%u,%u) %s %u bytes at 0x%" PRIx64 ": %s",
           kinds[kind], launch->function->name, thread->ctaid[0], thread->ctaid[1], thread->ctaid[2], thread->tid[0],
           thread->tid[1], thread->tid[2], accesses[access], bytes, address, where);
  keep(text);
}

/* The access must not happen: the kernel ends here. */
static _Noreturn void refuse(ocp_emu_thread *thread, kind kind, emu_access access, uint64_t address, uint32_t bytes,
                             const char *where) {
  report(thread, kind, access, address, bytes, where);
  emu_cpu *cpu = thread->scheduler;
  atomic_store(&cpu->launch->error, CUDA_ERROR_ILLEGAL_ADDRESS);
  emu_abandon_block(thread);
}

static void note(ocp_emu_thread *thread, emu_access access, uint64_t address, uint32_t bytes) {
  const emu_cpu *cpu = thread->scheduler;
  const emu_clock *clock = cpu->launch->clock;
  for (uint64_t end = address + bytes; clock && address < end;) {
    uint64_t within = address % EMU_GRANULE, last = within + (end - address) - 1;
    last = last < EMU_GRANULE ? last : EMU_GRANULE - 1;
    uint64_t other = emu_history_note(emu_history_of(address), clock, (uint32_t)within, (uint32_t)last, access);
    if (other) {
      char name[100], where[200];
      emu_clock_describe(other, name, sizeof name);
      snprintf(where, sizeof where, "nothing orders this after %s", name);
      report(thread, MISSING_WAIT, access, address, bytes, where);
    }
    address += last - within + 1;
  }
}

static void check_device(ocp_emu_thread *thread, emu_access access, uint64_t address, uint32_t bytes) {
  if (!emu_shadow_is_written(address, bytes)) {
    char where[200];
    place(address + emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED | EMU_BYTE_WRITTEN), where, sizeof where);
    uint64_t missing = emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED);
    if (missing < bytes)
      refuse(thread, emu_shadow_state(address + missing) & EMU_BYTE_FREED ? USE_AFTER_FREE : OUT_OF_BOUNDS, access,
             address, bytes, where);
    if (access & EMU_LOAD)
      report(thread, UNINITIALISED_READ, access, address, bytes, where);
    emu_shadow_written(address, bytes); /* for a load, too: once reported is enough */
  }
  note(thread, access, address, bytes);
}

static uint32_t shared_bytes(const emu_launch *launch) {
  return launch->function->meta->static_shared_bytes + launch->dynamic_shared;
}

static void check_shared(ocp_emu_thread *thread, emu_access access, uint64_t offset, uint32_t bytes) {
  const emu_cpu *cpu = thread->scheduler;
  uint32_t size = shared_bytes(cpu->launch);
  char where[100];
  if (offset > size || bytes > size - offset) {
    snprintf(where, sizeof where, "byte %" PRId64 " of %u bytes of shared memory", (int64_t)offset, size);
    refuse(thread, OUT_OF_BOUNDS, access, offset, bytes, where);
  }
  if (access & EMU_LOAD) {
    const uint8_t *unwritten = memchr(cpu->written + offset, 0, bytes);
    if (unwritten) {
      snprintf(where, sizeof where, "byte %td of %u bytes of shared memory", unwritten - cpu->written, size);
      report(thread, UNINITIALISED_READ, access, offset, bytes, where);
    }
  }
  memset(cpu->written + offset, 1, bytes); /* for a load, too: once reported is enough */
}

bool emu_check_block(emu_cpu *cpu) {
  uint32_t size = shared_bytes(cpu->launch);
  if (!cpu->written && !(cpu->written = malloc(EMU_MAX_SHARED)))
    return false;
  memset(cpu->written, 0, size);
  memset(cpu->shared, EMU_UNWRITTEN, size);
  return true;
}

bool emu_is_of_thread(const ocp_emu_thread *thread, uint64_t host, uint32_t bytes, bool loads) {
  const emu_cpu *cpu = thread->scheduler;
  bool stack = host - (uint64_t)__builtin_frame_address(0) < NEAR_STACK;
  return stack || (loads && emu_module_owns(cpu->launch->function->module, host, bytes));
}

static void check(ocp_emu_thread *thread, const void *pointer, uint32_t bytes, emu_access access) {
  uint64_t host = (uint64_t)pointer, address = host - (uint64_t)emu.alias;
  const emu_cpu *cpu = thread->scheduler;
  if (!emu.config.check) /* a checked kernel outside of the checking mode */
    return;
  if (emu_is_device_address(address)) {
    if (bytes <= emu.base + emu.bytes - address)
      check_device(thread, access, address, bytes);
    else
      refuse(thread, OUT_OF_BOUNDS, access, address, bytes, "the end of the device's memory");
    return;
  }
  uint64_t shared = host - (uint64_t)cpu->shared;
  if (shared < EMU_MAX_SHARED + 4096 || shared > UINT64_MAX - 4096) {
    check_shared(thread, access, shared, bytes);
    return;
  }
  if (emu_is_pinned_address(host)) {
    if (!emu_heap_find(&emu.pinned, host, bytes, NULL, NULL))
      refuse(thread, OUT_OF_BOUNDS, access, host, bytes, "page-locked memory that is not allocated");
    return;
  }
  if (!emu_is_of_thread(thread, host, bytes, access == EMU_LOAD))
    refuse(thread, OUT_OF_BOUNDS, access, address, bytes, "outside of device memory");
}

void ocp_emu_check_load(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  check(thread, address, bytes, EMU_LOAD);
}
void ocp_emu_check_store(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  check(thread, address, bytes, EMU_STORE);
}
void ocp_emu_check_atomic(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  check(thread, address, bytes, EMU_ATOMIC);
}

void emu_check_divergence(emu_cpu *cpu) {
  emu_launch *launch = cpu->launch;
  if (!first_of_kind(launch, DIVERGENT_BARRIER))
    return;
  uint32_t meeting = 0, waiting = 0;
  for (uint32_t index = cpu->threads; index-- > 0;) {
    const emu_warp *warp = &cpu->warps[index / EMU_WARP];
    if (warp->live >> index % EMU_WARP & 1)
      waiting = index;
    meeting += warp->meeting >> index % EMU_WARP & 1;
  }
  const uint32_t *tid = cpu->fibers[waiting].thread.tid;
  char text[TEXT_BYTES];
  snprintf(text, sizeof text,
           "%s: kernel %s, block (%u,%u,%u): thread (%u,%u,%u) waits for ever; of %u threads %u wait at a barrier, %u "
           "in a warp operation, %u have ended",
           kinds[DIVERGENT_BARRIER], launch->function->name, cpu->block_index[0], cpu->block_index[1],
           cpu->block_index[2], tid[0], tid[1], tid[2], cpu->threads, cpu->live - meeting, meeting,
           cpu->threads - cpu->live);
  keep(text);
}

CUresult emu_check_launched(emu_launch *launch) {
  int error = atomic_load(&launch->error);
  if (!error && !atomic_load(&launch->found))
    return CUDA_SUCCESS;
  char text[TEXT_BYTES] = "";
  int last = ocp_emu_num_findings() - 1;
  ocp_emu_finding(last, text, sizeof text);
  return emu_fail(error ? error : CUDA_ERROR_LAUNCH_FAILED, "%s", text);
}

/* ---- copies and fills ---- */

static CUresult finding(kind kind, const char *what, uint64_t address, uint64_t bytes, const char *where) {
  char text[TEXT_BYTES];
  snprintf(text, sizeof text, "%s: %s of %" PRIu64 " bytes at 0x%" PRIx64 ": %s", kinds[kind], what, bytes, address,
           where);
  keep(text);
  return emu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "%s", text);
}

static CUresult note_range(const emu_clock *clock, const char *what, uint64_t address, uint64_t bytes,
                           emu_access access) {
  uint64_t other = 0;
  for (uint64_t at = address, end = address + bytes; at < end;) {
    uint64_t within = at % EMU_GRANULE, last = within + (end - at) - 1;
    last = last < EMU_GRANULE ? last : EMU_GRANULE - 1;
    uint64_t conflict = emu_history_note(emu_history_of(at), clock, (uint32_t)within, (uint32_t)last, access);
    other = other ? other : conflict;
    at += last - within + 1;
  }
  if (!other)
    return CUDA_SUCCESS;
  char name[100], where[200];
  emu_clock_describe(other, name, sizeof name);
  snprintf(where, sizeof where, "nothing orders this after %s", name);
  return finding(MISSING_WAIT, what, address, bytes, where);
}

static CUresult check_copy(const emu_op *op, const emu_clock *clock) {
  const char *what = op->copy.src_host   ? "copy to the device"
                     : op->copy.dst_host ? "copy to the host"
                                         : "copy within the device";
  uint64_t dst = op->copy.dst, src = op->copy.src, bytes = op->copy.bytes;
  CUresult result = CUDA_SUCCESS;
  emu_clock_name(clock, what);
  if (!op->copy.src_host)
    result = note_range(clock, what, src, bytes, EMU_LOAD);
  if (!op->copy.dst_host && !result)
    result = note_range(clock, what, dst, bytes, EMU_STORE);
  if (op->copy.src_host) {
    emu_shadow_written(dst, bytes);
  } else if (!op->copy.dst_host) {
    emu_shadow_copied(dst, src, bytes);
  } else {
    uint64_t unwritten = emu_shadow_first_not(src, bytes, EMU_BYTE_WRITTEN);
    if (unwritten < bytes && !result) {
      char where[200];
      place(src + unwritten, where, sizeof where);
      result = finding(UNINITIALISED_READ, what, src, bytes, where);
    }
  }
  return result;
}

/* What a kernel without checks does is not seen: all that it could write counts as written. */
static void trust(const emu_op *op) {
  const ocp_emu_kernel_meta *meta = op->kernel.function->meta;
  for (uint32_t i = 0; i < op->num_params; i++) {
    uint64_t start, size;
    if (meta->params[i] == OCP_EMU_PARAM_POINTER && emu_is_device_address(op->params[i]) &&
        emu_heap_find(&emu_device_of(op->params[i])->heap, op->params[i], 0, &start, &size))
      emu_shadow_written(start, size);
  }
}

CUresult emu_check_op(const emu_op *op, const emu_clock *clock) {
  if (!emu.config.check || !clock)
    return CUDA_SUCCESS;
  switch (op->kind) {
  case EMU_OP_KERNEL:
    emu_clock_name(clock, op->kernel.function->name);
    if (!op->kernel.function->meta->checked)
      trust(op);
    return CUDA_SUCCESS;
  case EMU_OP_COPY:
    return check_copy(op, clock);
  case EMU_OP_SET:
    emu_clock_name(clock, "fill");
    emu_shadow_written(op->set.dst, op->set.bytes);
    return note_range(clock, "fill", op->set.dst, op->set.bytes, EMU_STORE);
  case EMU_OP_FREE:
  case EMU_OP_REUSE:
    break;
  }
  return CUDA_SUCCESS;
}
