/* Writes a line for each kernel launch into the file that ORT_CUDA_PLUGIN_EMULATE_PROFILE names: kernel, grid, block,
 * and the nanoseconds from its first block to its last. */
#define _GNU_SOURCE
#include "emulator/blocks/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "emulator/module.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static FILE *file;

static void open_file(void) {
  const char *path = getenv("ORT_CUDA_PLUGIN_EMULATE_PROFILE");
  if (!path || !*path)
    return;
  file = fopen(path, "ae");
  if (!file)
    fprintf(stderr, "ORT_CUDA_PLUGIN_EMULATE_PROFILE: %s cannot be written\n", path);
}

static uint64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t emu_profile_begin(void) {
  pthread_once(&once, open_file);
  return file ? nanoseconds() : 0;
}

void emu_profile_end(uint64_t begun, const emu_launch *launch) {
  if (!begun)
    return;
  uint64_t spent = nanoseconds() - begun;
  fprintf(file, "%s (%u,%u,%u) (%u,%u,%u) %llu\n", launch->function->name, launch->grid[0], launch->grid[1],
          launch->grid[2], launch->block[0], launch->block[1], launch->block[2], (unsigned long long)spent);
  fflush(file); /* the line is written even if the process does not end by exit() */
}
