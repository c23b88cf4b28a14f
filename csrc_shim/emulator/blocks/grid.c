/* Runs a kernel launch: translates its parameters, and distributes the blocks of its grid over host threads. */
#include "emulator/blocks/grid.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulator/blocks/check.h"
#include "emulator/blocks/count.h"
#include "emulator/blocks/fiber.h"
#include "emulator/blocks/global_order.h"
#include "emulator/blocks/order.h"
#include "emulator/blocks/profile.h"
#include "emulator/blocks/workers.h"
#include "emulator/fault.h"
#include "emulator/host/cpu.h"
#include "emulator/kernel.h"
#include "emulator/module.h"

/* Ticks are those of emu_ticks, two to five per nanosecond. */
#define WAKE_TICKS 60000u  /* minimum remaining work for which waking a worker pays */
#define CHUNK_TICKS 60000u /* estimated work of the blocks that a thread takes at a time */

/* ---- resources of host threads that run blocks ---- */

static pthread_mutex_t cpus_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cpus_given_back = PTHREAD_COND_INITIALIZER;
static emu_cpu *cpus; /* free list; kept for the life of the process */
static uint32_t cpus_in_use;
static atomic_uint cpus_wanted; /* number of threads in take_from_list */
/* The emu_cpu that was used last, so that launches of one thread take no lock. It counts as in use. */
static _Atomic(emu_cpu *) last_cpu;

static emu_cpu *make_cpu(void) {
  emu_cpu *cpu = calloc(1, sizeof *cpu);
  if (!cpu)
    return NULL;
  size_t bytes = (EMU_MAX_SHARED + 4095) & ~4095u;
  uint8_t *pages =
      mmap(NULL, 4096 + bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages, 4096, PROT_NONE) || mprotect(pages + 4096 + bytes, 4096, PROT_NONE)) {
    free(cpu);
    return NULL;
  }
  cpu->shared = pages + 4096;
  cpu->patience = EMU_PATIENCE;
  return cpu;
}

static void put_on_list(emu_cpu *cpu) {
  pthread_mutex_lock(&cpus_lock);
  cpu->next = cpus;
  cpus = cpu;
  cpus_in_use--;
  pthread_cond_signal(&cpus_given_back);
  pthread_mutex_unlock(&cpus_lock);
}

/* Makes the emu_cpu available to other launches. take_from_list increments cpus_wanted before it reads last_cpu, and
 * this function reads cpus_wanted after it has set last_cpu. So a waiting thread finds the resources in last_cpu, or
 * this function puts them on the list and wakes the waiting thread. */
static void release_cpu(emu_cpu *cpu) {
  emu_cpu *none = NULL;
  if (!atomic_compare_exchange_strong(&last_cpu, &none, cpu))
    put_on_list(cpu);
  else if (atomic_load(&cpus_wanted) && (cpu = atomic_exchange(&last_cpu, NULL)))
    put_on_list(cpu);
}

static emu_cpu *take_from_list(void) {
  emu_cpu *cpu = NULL;
  pthread_mutex_lock(&cpus_lock);
  atomic_fetch_add(&cpus_wanted, 1);
  while (cpus_in_use >= emu.threads && !(cpu = atomic_exchange(&last_cpu, NULL)))
    pthread_cond_wait(&cpus_given_back, &cpus_lock);
  atomic_fetch_sub(&cpus_wanted, 1);
  if (!cpu) {
    if ((cpu = cpus))
      cpus = cpu->next;
    else
      cpu = make_cpu();
    cpus_in_use += cpu != NULL;
  }
  pthread_mutex_unlock(&cpus_lock);
  return cpu;
}

/* Borrows an emu_cpu for a launch; NULL: out of host memory. Waits while `emu.threads` host threads run blocks. This
 * cannot deadlock: a block waits only for blocks that run or have run, so each of these threads finishes its launch. */
static emu_cpu *acquire_cpu(emu_launch *launch) {
  emu_cpu *cpu = atomic_exchange(&last_cpu, NULL);
  if (!cpu && !(cpu = take_from_list()))
    return NULL;
  cpu->launch = launch;
  if (launch->function->meta->mode == OCP_EMU_FIBER && !emu_fibers_prepare(cpu, launch)) {
    release_cpu(cpu);
    return NULL;
  }
  return cpu;
}

/* ---- blocks ---- */

/* Runs a block of a kernel without fibers that is checked or counted, so that emu_abandon_block may end it early. */
static void run_observed(const emu_launch *launch, emu_cpu *cpu, ocp_emu_thread *thread) {
  if (!setjmp(cpu->abandon))
    launch->function->entry(launch->params, thread);
}

/* Runs blocks [first, last) of the launch. */
static void run_blocks(emu_launch *launch, emu_cpu *cpu, uint64_t first, uint64_t last) {
  uint32_t block[3] = {(uint32_t)(first % launch->grid[0]), (uint32_t)(first / launch->grid[0] % launch->grid[1]),
                       (uint32_t)(first / launch->grid[0] / launch->grid[1])};
  bool fibers = launch->function->meta->mode == OCP_EMU_FIBER;
  bool is_checked = launch->function->meta->checked && emu.config.check;
  bool is_observed = launch->function->meta->checked || emu_counting();
  ocp_emu_thread thread = {
      .ntid = {launch->block[0], launch->block[1], launch->block[2]},
      .nctaid = {launch->grid[0], launch->grid[1], launch->grid[2]},
      .dynamic_shared = launch->dynamic_shared,
      .shared = cpu->shared,
      .scheduler = cpu,
  };
  for (uint64_t index = first; index < last; index++) {
    if (atomic_load_explicit(&launch->error, memory_order_relaxed))
      return;
    if (--cpu->patience == 0 && !emu_launch_continues(cpu, block))
      return;
    emu_global_settle(cpu);
    if (is_checked && !emu_check_block(cpu)) {
      atomic_store(&launch->error, CUDA_ERROR_OUT_OF_MEMORY);
      return;
    }
    if (fibers) {
      if (!emu_fibers_run_block(cpu, block)) {
        emu_check_divergence(cpu);
        atomic_store(&launch->error, CUDA_ERROR_LAUNCH_FAILED);
      }
    } else {
      memcpy(thread.ctaid, block, sizeof block);
      if (is_observed)
        run_observed(launch, cpu, &thread);
      else
        launch->function->entry(launch->params, &thread);
    }
    if (++block[0] == launch->grid[0]) {
      block[0] = 0;
      if (++block[1] == launch->grid[1]) {
        block[1] = 0;
        block[2]++;
      }
    }
  }
  emu_global_settle(cpu);
}

/* The blocks of a grid from `first` on. */
typedef struct grid_rest {
  emu_launch *launch;
  uint64_t first;
} grid_rest;

static void run_range(void *context, uint64_t first, uint64_t last) {
  const grid_rest *rest = context;
  emu_cpu *cpu = acquire_cpu(rest->launch);
  if (!cpu) {
    atomic_store(&rest->launch->error, CUDA_ERROR_OUT_OF_MEMORY);
    return;
  }
  run_blocks(rest->launch, cpu, rest->first + first, rest->first + last);
  release_cpu(cpu);
}

static CUresult run_counted(emu_launch *launch, ocp_emu_count *count) {
  emu_cpu *cpu = acquire_cpu(launch);
  if (!cpu)
    return CUDA_ERROR_OUT_OF_MEMORY;
  for (uint32_t i = 0; i < count->num_blocks; i++)
    if (count->blocks[i] < launch->blocks) {
      emu_count_begin(count, i);
      run_blocks(launch, cpu, count->blocks[i], count->blocks[i] + 1);
      emu_count_end(count);
    }
  release_cpu(cpu);
  return emu_check_launched(launch);
}

/* Runs the grid. The calling thread runs blocks until the measured cost says that the rest is worth waking a worker. It
 * measures after 1, 2, 4, ... blocks, so a wrong estimate costs little. */
static CUresult run_grid(emu_launch *launch, struct CUfunc_st *function) {
  ocp_emu_count *count = emu_counting();
  if (count)
    return run_counted(launch, count);
  if (launch->blocks == 1) { /* no blocks for workers: skip the measurement */
    emu_cpu *cpu = acquire_cpu(launch);
    if (!cpu)
      return CUDA_ERROR_OUT_OF_MEMORY;
    run_blocks(launch, cpu, 0, 1);
    release_cpu(cpu);
    return emu_check_launched(launch);
  }
  uint64_t cost = atomic_load_explicit(&function->ticks_per_block, memory_order_relaxed), done = 0;
  if (cost * launch->blocks < WAKE_TICKS || emu.threads == 1) {
    emu_cpu *cpu = acquire_cpu(launch);
    if (!cpu)
      return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t step = 1;
    do {
      uint64_t start = emu_ticks();
      run_blocks(launch, cpu, done, done + step);
      cost = (emu_ticks() - start) / step + 1;
      done += step;
      step = done < launch->blocks - done ? done : launch->blocks - done;
    } while (step && (cost * (launch->blocks - done) < WAKE_TICKS || emu.threads == 1));
    release_cpu(cpu);
  }
  if (done < launch->blocks) {
    grid_rest rest = {launch, done};
    uint64_t count = launch->blocks - done, fair = count / (4 * emu.threads), chunk = CHUNK_TICKS / (cost + 1);
    chunk = chunk < fair ? chunk : fair;
    uint64_t start = emu_ticks();
    emu_pool_run(run_range, &rest, count, chunk ? chunk : 1);
    cost = (emu_ticks() - start) * emu.threads / count + 1;
  }
  atomic_store_explicit(&function->ticks_per_block, cost < UINT32_MAX ? (uint32_t)cost : UINT32_MAX,
                        memory_order_relaxed);
  return emu_check_launched(launch);
}

/* Copies the parameters of the launch to `values`, and translates pointers: a device address becomes the host address
 * of its bytes; the address of page-locked memory stays; any other address is an error. */
static CUresult translate(const emu_op *op, uint64_t *values, const void **pointers) {
  const ocp_emu_kernel_meta *meta = op->kernel.function->meta;
  for (uint32_t i = 0; i < op->num_params; i++) {
    uint64_t value = op->params[i];
    if (meta->params[i] == OCP_EMU_PARAM_POINTER) {
      if (emu_is_device_address(value))
        value += (uint64_t)emu.alias;
      else if (value && !emu_is_pinned_address(value))
        return emu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "parameter %u of kernel \"%s\" is 0x%llx: not device memory", i,
                        op->kernel.function->name, (unsigned long long)value);
    }
    values[i] = value;
    pointers[i] = &values[i];
  }
  return CUDA_SUCCESS;
}

CUresult emu_run_kernel(emu_device *device, const emu_op *op, const emu_clock *clock) {
  uint64_t values[OCP_EMU_MAX_PARAMS];
  const void *pointers[OCP_EMU_MAX_PARAMS];
  CUresult result = translate(op, values, pointers);
  if (result || emu_is_idle(op))
    return result;
  struct CUfunc_st *function = op->kernel.function;
  const uint32_t *grid = op->kernel.grid, *block = op->kernel.block;
  emu_launch launch = {
      .function = function,
      .params = pointers,
      .grid = {grid[0], grid[1], grid[2]},
      .block = {block[0], block[1], block[2]},
      .threads = block[0] * block[1] * block[2],
      .dynamic_shared = op->kernel.dynamic_shared,
      .blocks = (uint64_t)grid[0] * grid[1] * grid[2],
      .device = device,
      .clock = clock,
  };
  emu_float_control control = emu_float_control_read(); /* the host thread may have set another rounding mode */
  bool differs = (control & ~EMU_FLOAT_STATUS) != EMU_FLOAT_DEFAULT; /* or that subnormals are flushed to zero */
  if (differs)
    emu_float_control_write(EMU_FLOAT_DEFAULT);
  emu_wrong *wrong = emu_wrong_begin(op);
  uint64_t begun = emu_profile_begin();
  do {
    result = emu_global_begin(&launch) ? run_grid(&launch, function) : CUDA_ERROR_OUT_OF_MEMORY;
    emu_global_end(&launch);
  } while (result == CUDA_SUCCESS && emu_wrong_again(wrong));
  emu_launch_ended(&launch);
  emu_profile_end(begun, &launch);
  emu_wrong_end(wrong);
  if (differs)
    emu_float_control_write(control);
  return result;
}
