/* The checking mode, for kernels compiled with checks: finds the kinds of errors that compute-sanitizer finds on a
 * GPU. */
#include "emulator/blocks/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/blocks/fiber.h"
#include "emulator/blocks/order.h"
#include "emulator/clock.h"
#include "emulator/findings.h"
#include "emulator/heap.h"
#include "emulator/module.h"
#include "emulator/shadow.h"
#include "emulator/state.h"

#define NEAR_STACK ((uint64_t)1 << 20) /* maximum distance of a kernel's locals from the check's stack frame, bytes */

/* Reports the access and abandons the block before the access happens. */
static _Noreturn void refuse(ocp_emu_thread *thread, emu_finding_kind kind, emu_access access, uint64_t address,
                             uint32_t bytes, const char *where) {
  emu_order_report(thread, kind, access, address, bytes, where);
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
      snprintf(where, sizeof where, "no event, stream order or wait orders this after %s", name);
      emu_order_report(thread, EMU_MISSING_WAIT, access, address, bytes, where);
    }
    address += last - within + 1;
  }
}

/* Describes an address outside of all allocations by the nearest pointer among the launch's arguments. Leaves the text
 * empty after the first such finding of the launch, because only the first one is kept. */
static void locate_outside(const emu_cpu *cpu, uint64_t address, char *text, size_t text_bytes) {
  const emu_launch *launch = cpu->launch;
  const ocp_emu_kernel_meta *meta = launch->function->meta;
  uint64_t nearest = UINT64_MAX, start = 0, size = 0;
  uint32_t found = 0, pointers = 0;
  text[0] = 0;
  if (atomic_load(&launch->found) & 1u << EMU_OUT_OF_BOUNDS)
    return;
  for (uint32_t i = 0; i < meta->num_params; i++) {
    if (meta->params[i] != OCP_EMU_PARAM_POINTER)
      continue;
    uint64_t begin, number = pointers++;
    memcpy(&begin, launch->params[i], sizeof begin);
    begin -= (uint64_t)emu.alias;
    if (!emu_is_device_address(begin))
      continue;
    uint64_t end = begin > address ? begin : begin + emu_shadow_first_not(begin, address - begin, EMU_BYTE_ALLOCATED);
    uint64_t distance = begin > address ? begin - address : address - end;
    if (distance < nearest) {
      nearest = distance, found = (uint32_t)number, start = begin;
      size = end - begin;
    }
  }
  if (nearest == UINT64_MAX)
    emu_finding_locate(address, text, text_bytes);
  else if (start > address)
    snprintf(text, text_bytes,
             "outside of all tensors; the nearest one is tensor %u of the launch's arguments (counted from 0): this is "
             "%" PRIu64 " bytes before it",
             found, nearest);
  else
    snprintf(text, text_bytes,
             "outside of all tensors; the nearest one is tensor %u of the launch's arguments (counted from 0), %" PRIu64
             " bytes: this is its byte %" PRIu64,
             found, size, address - start);
}

static void check_device(ocp_emu_thread *thread, emu_access access, uint64_t address, uint32_t bytes) {
  if (!emu_shadow_is_written(address, bytes)) {
    char where[200];
    uint64_t missing = emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED);
    if (missing < bytes && !(emu_shadow_state(address + missing) & EMU_BYTE_FREED)) {
      locate_outside(thread->scheduler, address + missing, where, sizeof where);
      refuse(thread, EMU_OUT_OF_BOUNDS, access, address, bytes, where);
    }
    emu_finding_locate(address + emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED | EMU_BYTE_WRITTEN), where,
                       sizeof where);
    if (missing < bytes)
      refuse(thread, EMU_USE_AFTER_FREE, access, address, bytes, where);
    if (access & EMU_LOAD)
      emu_order_report(thread, EMU_UNINITIALIZED_READ, access, address, bytes, where);
    emu_shadow_written(address, bytes); /* after a load as well, so that each range is reported once */
  }
  note(thread, access, address, bytes);
}

static uint32_t shared_bytes(const emu_launch *launch) {
  return launch->function->meta->static_shared_bytes + launch->dynamic_shared;
}

/* ---- shared memory ---- */

static void check_shared(ocp_emu_thread *thread, emu_access access, uint64_t offset, uint32_t bytes) {
  emu_cpu *cpu = thread->scheduler;
  uint32_t size = shared_bytes(cpu->launch);
  char where[160];
  if (offset > size || bytes > size - offset) {
    snprintf(where, sizeof where, "byte %" PRId64 " of %u bytes of shared memory", (int64_t)offset, size);
    refuse(thread, EMU_OUT_OF_BOUNDS, access, offset, bytes, where);
  }
  if (access & EMU_LOAD) {
    const uint8_t *unwritten = memchr(cpu->written + offset, EMU_BLOCK_UNWRITTEN, bytes);
    const uint8_t *pending = memchr(cpu->written + offset, EMU_BLOCK_PENDING, bytes);
    const uint8_t *first = unwritten ? unwritten : pending;
    if (first) {
      snprintf(where, sizeof where, "byte %td of %u bytes of shared memory%s", first - cpu->written, size,
               unwritten ? "" : ", to which a cp.async copies that its thread has not waited for");
      emu_order_report(thread, unwritten ? EMU_UNINITIALIZED_READ : EMU_PENDING_COPY, access, offset, bytes, where);
    }
  }
  emu_order_note(thread, access, (uint32_t)offset, bytes);
  memset(cpu->written + offset, EMU_BLOCK_WRITTEN, bytes); /* a load counts too: each range is reported once */
}

bool emu_check_block(emu_cpu *cpu) {
  uint32_t size = shared_bytes(cpu->launch);
  if (!cpu->written && !(cpu->written = malloc(EMU_MAX_SHARED)))
    return false;
  memset(cpu->written, 0, size);
  memset(cpu->shared, EMU_UNWRITTEN, size);
  return emu_order_begin(cpu, size);
}

bool emu_is_of_thread(const ocp_emu_thread *thread, uint64_t host, uint32_t bytes, bool loads) {
  const emu_cpu *cpu = thread->scheduler;
  bool stack = host - (uint64_t)__builtin_frame_address(0) < NEAR_STACK;
  return stack || emu_module_owns(cpu->launch->function->module, host, bytes, loads);
}

/* ---- local memory ---- */

void *ocp_emu_local_begin(ocp_emu_thread *thread, void *memory, uint32_t bytes) {
  emu_fiber *fiber = (emu_fiber *)thread;
  memset(memory, EMU_UNWRITTEN, bytes);
  memset((uint8_t *)memory + bytes, 0, bytes);
  uint32_t index = 0;
  while (index < fiber->num_locals && fiber->locals[index].start != memory)
    index++;
  if (index == fiber->num_locals && index < EMU_MAX_LOCALS)
    fiber->locals[fiber->num_locals++] = (emu_local){memory, bytes};
  return memory;
}

/* Checks an access to the thread's stack if it hits local memory that ocp_emu_local_begin has registered. */
static void check_local(ocp_emu_thread *thread, emu_access access, uint64_t host, uint32_t bytes) {
  const emu_cpu *cpu = thread->scheduler;
  const emu_fiber *fiber = (const emu_fiber *)thread;
  if (cpu->launch->function->meta->mode != OCP_EMU_FIBER)
    return;
  for (uint32_t index = 0; index < fiber->num_locals; index++) {
    const emu_local *local = &fiber->locals[index];
    uint64_t offset = host - (uint64_t)local->start;
    if (offset >= 2 * (uint64_t)local->bytes)
      continue;
    char where[100];
    snprintf(where, sizeof where, "byte %" PRIu64 " of %u bytes of local memory", offset, local->bytes);
    if (offset + bytes > local->bytes)
      refuse(thread, EMU_OUT_OF_BOUNDS, access, offset, bytes, where);
    uint8_t *written = local->start + local->bytes + offset;
    if (access & EMU_LOAD && memchr(written, 0, bytes))
      emu_order_report(thread, EMU_UNINITIALIZED_READ, access, offset, bytes, where);
    memset(written, 1, bytes);
    return;
  }
}

/* Counts an access as a step of a loop that may never end. */
static void count_step(ocp_emu_thread *thread) {
  emu_cpu *cpu = thread->scheduler;
  if (cpu->launch->function->meta->mode == OCP_EMU_FIBER)
    emu_step(cpu);
  else if (--cpu->patience == 0 && !emu_launch_continues(cpu, thread->ctaid))
    emu_abandon_block(thread);
}

static void check(ocp_emu_thread *thread, const void *pointer, uint32_t bytes, emu_access access) {
  uint64_t host = (uint64_t)pointer, address = host - (uint64_t)emu.alias;
  const emu_cpu *cpu = thread->scheduler;
  if (!emu.config.check) /* kernels compiled with checks also run while the checking mode is off */
    return;
  count_step(thread);
  if (emu_is_device_address(address)) {
    if (bytes <= emu.base + emu.bytes - address)
      check_device(thread, access, address, bytes);
    else
      refuse(thread, EMU_OUT_OF_BOUNDS, access, address, bytes, "beyond the end of the device's memory");
    return;
  }
  uint64_t shared = host - (uint64_t)cpu->shared;
  if (shared < EMU_MAX_SHARED + 4096 || shared > UINT64_MAX - 4096) {
    check_shared(thread, access, shared, bytes);
    return;
  }
  if (emu_is_pinned_address(host)) {
    if (!emu_heap_find(&emu.pinned, host, bytes, NULL, NULL))
      refuse(thread, EMU_OUT_OF_BOUNDS, access, host, bytes, "outside of the allocations of page-locked memory");
    return;
  }
  if (emu_is_of_thread(thread, host, bytes, access == EMU_LOAD))
    check_local(thread, access, host, bytes);
  else
    refuse(thread, EMU_OUT_OF_BOUNDS, access, address, bytes, "outside of device memory");
}

void emu_check_aligned(ocp_emu_thread *thread, emu_access access, const void *address, uint32_t bytes) {
  uint64_t host = (uint64_t)address;
  char where[60];
  if (host % bytes && emu.config.check) {
    snprintf(where, sizeof where, "the address is not a multiple of %u", bytes);
    refuse(thread, EMU_MISALIGNED, access, host - (uint64_t)emu.alias, bytes, where);
  }
}

void emu_check_mask(ocp_emu_thread *thread, const char *operation, uint32_t mask) {
  const emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  if (!emu.config.check || !launch->function->meta->checked || mask >> thread->laneid & 1 ||
      !emu_order_first(launch, EMU_INVALID_MASK))
    return;
  char text[EMU_FINDING_BYTES];
  snprintf(text, sizeof text,
           "%s: kernel %s, block (%u,%u,%u), thread (%u,%u,%u): the mask 0x%08x of %s leaves out the calling lane %u",
           emu_finding_kinds[EMU_INVALID_MASK], launch->function->name, thread->ctaid[0], thread->ctaid[1],
           thread->ctaid[2], thread->tid[0], thread->tid[1], thread->tid[2], mask, operation, thread->laneid);
  emu_order_keep(launch, text);
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

/* Describes a lane that waits in a warp operation for lanes that never arrive; "" if there is none. */
static void describe_meeting(const emu_cpu *cpu, char *text, size_t text_bytes) {
  text[0] = 0;
  for (uint32_t index = 0; index < cpu->num_warps; index++) {
    const emu_warp *warp = &cpu->warps[index];
    if (!warp->meeting)
      continue;
    uint32_t lane = (uint32_t)__builtin_ctz(warp->meeting);
    const emu_meeting *meeting = warp->ragged ? &warp->lanes[lane] : &warp->uniform;
    uint32_t elsewhere = meeting->mask & warp->live & ~warp->meeting;
    if (elsewhere)
      snprintf(text, text_bytes, "; lane %u of warp %u waits for lanes 0x%08x of its mask, which are elsewhere", lane,
               index, elsewhere);
    else
      snprintf(text, text_bytes,
               "; lane %u of warp %u waits with the mask 0x%08x, other lanes with other masks or in "
               "other operations",
               lane, index, meeting->mask);
    return;
  }
}

void emu_check_divergence(emu_cpu *cpu) {
  emu_launch *launch = cpu->launch;
  if (!emu_order_first(launch, EMU_DIVERGENT_BARRIER))
    return;
  uint32_t meeting = 0, waiting = 0;
  for (uint32_t index = cpu->threads; index-- > 0;) {
    const emu_warp *warp = &cpu->warps[index / EMU_WARP];
    if (warp->live >> index % EMU_WARP & 1)
      waiting = index;
    meeting += warp->meeting >> index % EMU_WARP & 1;
  }
  const uint32_t *tid = cpu->fibers[waiting].thread.tid;
  char text[EMU_FINDING_BYTES], lanes[140];
  describe_meeting(cpu, lanes, sizeof lanes);
  snprintf(text, sizeof text,
           "%s: kernel %s, block (%u,%u,%u): thread (%u,%u,%u) waits for ever; of %u threads %u wait at a barrier, %u "
           "in a warp operation, %u have ended%s",
           emu_finding_kinds[EMU_DIVERGENT_BARRIER], launch->function->name, cpu->block_index[0], cpu->block_index[1],
           cpu->block_index[2], tid[0], tid[1], tid[2], cpu->threads, cpu->live - meeting, meeting,
           cpu->threads - cpu->live, lanes);
  emu_order_keep(launch, text);
}

CUresult emu_check_launched(emu_launch *launch) {
  int error = atomic_load(&launch->error);
  if (!error && !atomic_load(&launch->found))
    return CUDA_SUCCESS;
  char text[EMU_FINDING_BYTES];
  const char *name = launch->function->name;
  if (ocp_emu_finding(atomic_load(&launch->finding) - 1, text, sizeof text) >= 0)
    return emu_fail(error ? error : CUDA_ERROR_LAUNCH_FAILED, "%s", text);
  if (error == CUDA_ERROR_OUT_OF_MEMORY)
    return emu_fail(error, "kernel %s: out of host memory for its threads", name);
  return emu_fail(error ? error : CUDA_ERROR_LAUNCH_FAILED,
                  "kernel %s: a fault whose finding was dropped, because the table of findings is full", name);
}
