#include "run/instance/sources.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver/activity.h"

/* A range of source ids: those of one variant's records. */
typedef struct block {
  uint64_t first;
  const ocp_variant *variant; /* NULL: the variant is freed; the block owns the names */
  ocp_plan *plan;
  char *cluster, **kernels;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks; /* sorted by `first` */
static size_t num_blocks, max_blocks, num_kept;
static uint64_t next_number = 1;

bool ocp_sources_add(ocp_variant *variant) {
  pthread_mutex_lock(&lock);
  if (num_blocks == max_blocks) {
    const size_t grown = max_blocks ? 2 * max_blocks : 64;
    block *more = realloc(blocks, grown * sizeof *more);
    if (more) {
      blocks = more;
      max_blocks = grown;
    }
  }
  const bool fits = num_blocks < max_blocks;
  if (fits) {
    variant->first_source = next_number;
    next_number += variant->plan->header.num_records;
    blocks[num_blocks++] = (block){.first = variant->first_source, .variant = variant, .plan = variant->plan};
  }
  pthread_mutex_unlock(&lock);
  return fits;
}

/* Returns the last block whose first number is at most `number`, or NULL if all blocks begin later. */
static block *find(uint64_t number) {
  size_t low = 0, high = num_blocks;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (blocks[middle].first <= number)
      low = middle + 1;
    else
      high = middle;
  }
  return low ? &blocks[low - 1] : NULL;
}

/* Returns the variant's block. The block of a plan without records has the same first number as the next block. */
static block *block_of(const ocp_variant *variant) {
  block *last = find(variant->first_source);
  while (last && last > blocks && last->variant != variant)
    last--;
  return last && last->variant == variant ? last : NULL;
}

static void drop(const block *gone) {
  const size_t after = (size_t)(blocks + num_blocks - gone) - 1, index = (size_t)(gone - blocks);
  memmove(&blocks[index], &blocks[index + 1], after * sizeof *blocks);
  num_blocks--;
}

static void free_names(const block *own) {
  for (uint32_t i = 0; own->kernels && i < own->plan->header.num_kernels; i++)
    free(own->kernels[i]);
  free(own->kernels);
  free(own->cluster);
}

/* Copies the names that belong to the variant into the block; false: out of memory. */
static bool keep(block *own) {
  const uint32_t count = own->plan->header.num_kernels;
  own->cluster = strdup(own->variant->cluster_name);
  own->kernels = calloc(count + 1, sizeof *own->kernels);
  bool ok = own->cluster && own->kernels;
  for (uint32_t i = 0; ok && i < count; i++)
    ok = (own->kernels[i] = strdup(own->variant->function_names[i])) != NULL;
  if (!ok)
    free_names(own);
  return ok;
}

void ocp_sources_remove(ocp_variant *variant) {
  pthread_mutex_lock(&lock);
  block *own = block_of(variant);
  if (own && ocp_is_anybody_listening() && keep(own)) {
    own->variant = NULL;
    variant->plan = NULL;
    num_kept++;
  } else if (own) {
    drop(own);
  }
  pthread_mutex_unlock(&lock);
}

bool ocp_source_find(uint64_t number, ocp_source *source) {
  pthread_mutex_lock(&lock);
  const block *own = find(number);
  const bool found = own && number - own->first < own->plan->header.num_records;
  if (found) {
    const ocp_plan_record *record = &own->plan->records[number - own->first];
    const bool launch = record->kind == OCP_RECORD_LAUNCH;
    const char *kernel = NULL;
    if (launch)
      kernel = own->variant ? own->variant->function_names[record->index] : own->kernels[record->index];
    *source = (ocp_source){
        .cluster = own->variant ? own->variant->cluster_name : own->cluster,
        .kernel = kernel,
        .plan = own->plan,
        .record = record,
    };
  }
  pthread_mutex_unlock(&lock);
  return found;
}

void ocp_sources_sweep(void) {
  pthread_mutex_lock(&lock);
  for (size_t i = num_blocks; num_kept && !ocp_is_anybody_listening() && i-- > 0;) {
    if (blocks[i].variant)
      continue;
    free_names(&blocks[i]);
    ocp_plan_free(blocks[i].plan);
    drop(&blocks[i]);
    num_kept--;
  }
  pthread_mutex_unlock(&lock);
}
