/* A stand-in for libcudnn with the functions that library_cudnn.c calls. It offers two engines: the first with tensor
 * cores and results that vary, the second exact. */
#include "fake_library.h"

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000 };
enum {
  CONVOLUTION = 1,
  ENGINE = 2,
  CONFIG = 3,
  HEURISTIC = 4,
  PLAN = 5,
  FORWARD = 10,
  GRAPH = 15,
  PACK = 16,
  TENSOR = 17
};
enum { MAX_ATTRIBUTES = 12, MAX_ELEMENTS = 8 };

typedef struct attribute {
  int name, type;
  int64_t count;
  int64_t elements[MAX_ELEMENTS];
} attribute;
typedef struct descriptor {
  int type, finalized, count;
  attribute attributes[MAX_ATTRIBUTES];
  int64_t engine;
} descriptor;

/* The engine of the last run, and its stream's being set, for the test to read. */
int64_t fake_engine, fake_streams_set;

int cudnnCreate(void **handle) {
  MAY_FAIL();
  *handle = malloc(1);
  fake_handles++;
  return SUCCESS;
}
int cudnnDestroy(void *handle) {
  free(handle);
  fake_handles--;
  return SUCCESS;
}
int cudnnSetStream(void *handle, void *stream) {
  MAY_FAIL();
  (void)handle, (void)stream;
  fake_streams_set++;
  return SUCCESS;
}
const char *cudnnGetErrorString(int status) { return status == BAD_PARAM ? "bad parameter" : "not supported"; }

int cudnnBackendCreateDescriptor(int type, void **out) {
  MAY_FAIL();
  descriptor *d = calloc(1, sizeof *d);
  d->type = type;
  *out = d;
  fake_descriptors++;
  return SUCCESS;
}
int cudnnBackendDestroyDescriptor(void *d) {
  free(d);
  fake_descriptors--;
  return SUCCESS;
}

static size_t element_bytes(int type) { /* enums, booleans and floats have 4 bytes */
  return type == 0 || type == 3 || type == 5 || type == 6 || type == 15 ? 8 : 4;
}

int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
  MAY_FAIL();
  if (!d || d->finalized || d->count == MAX_ATTRIBUTES || count < 1 || count > MAX_ELEMENTS || name / 100 == 3)
    return BAD_PARAM;
  attribute *a = &d->attributes[d->count++];
  *a = (attribute){name, type, count, {0}};
  for (int64_t i = 0; i < count; i++)
    memcpy(&a->elements[i], (const char *)elements + (size_t)i * element_bytes(type), element_bytes(type));
  return SUCCESS;
}

static const int64_t *get(const descriptor *d, int name, int type, int64_t count) {
  for (int i = 0; i < d->count; i++)
    if (d->attributes[i].name == name && d->attributes[i].type == type && d->attributes[i].count == count)
      return d->attributes[i].elements;
  return NULL;
}

static const descriptor *get_descriptor(const descriptor *d, int name, int type) {
  const int64_t *element = get(d, name, 15, 1);
  const descriptor *found = element ? (const descriptor *)(uintptr_t)*element : NULL;
  return found && found->type == type && (found->finalized || type == CONFIG) ? found : NULL;
}

int cudnnBackendFinalize(descriptor *d) {
  MAY_FAIL();
  int complete = 1;
  switch (d->type) {
  case TENSOR:
    complete = get(d, 901, 1, 1) && get(d, 906, 3, 1) && get(d, 900, 3, 1) &&
               ((get(d, 902, 3, 4) && get(d, 903, 3, 4)) || (get(d, 902, 3, 5) && get(d, 903, 3, 5)));
    break;
  case CONVOLUTION: {
    const int64_t *rank = get(d, 106, 3, 1);
    complete = rank && get(d, 100, 1, 1) && get(d, 101, 7, 1);
    for (int name = 102; complete && name <= 105; name++)
      complete = get(d, name, 3, *rank) != NULL;
    break;
  }
  case FORWARD:
    complete = get_descriptor(d, 702, CONVOLUTION) && get_descriptor(d, 703, TENSOR) &&
               get_descriptor(d, 704, TENSOR) && get_descriptor(d, 705, TENSOR) && get(d, 700, 4, 1) &&
               get(d, 701, 4, 1);
    break;
  case GRAPH:
    complete = get(d, 800, 0, 1) && get_descriptor(d, 801, FORWARD);
    break;
  case HEURISTIC:
    complete = get_descriptor(d, 201, GRAPH) && get(d, 200, 8, 1);
    break;
  case PLAN:
    complete = get(d, 400, 0, 1) && get_descriptor(d, 401, CONFIG);
    break;
  case PACK:
    complete = get(d, 1000, 3, 3) && get(d, 1001, 6, 3) && get(d, 1003, 6, 1);
    break;
  default:
    complete = 0;
  }
  d->finalized = complete;
  return complete ? SUCCESS : BAD_PARAM;
}

int cudnnBackendGetAttribute(const descriptor *d, int name, int type, int64_t requested, int64_t *count,
                             void *elements) {
  MAY_FAIL();
  descriptor **results = elements;
  switch (name) {
  case 202: /* ENGINEHEUR_RESULTS */
    if (type != 15 || requested < 2)
      return BAD_PARAM;
    fake_searches++;
    *count = 2;
    for (int64_t i = 0; i < 2; i++) {
      results[i]->engine = i;
      results[i]->attributes[results[i]->count++] =
          (attribute){201, 15, 1, {get(d, 201, 15, 1)[0]}}; /* the graph, for the run */
    }
    return SUCCESS;
  case 300: /* ENGINECFG_ENGINE */
    results[0]->engine = d->engine;
    *count = 1;
    return SUCCESS;
  case 1303: /* ENGINE_NUMERICAL_NOTE */
    *count = d->engine == 0 ? 2 : 0;
    if (d->engine == 0)
      memcpy(elements, (int[]){0 /* TENSOR_CORE */, 4 /* NONDETERMINISTIC */}, 2 * sizeof(int));
    return SUCCESS;
  case 402: /* EXECUTION_PLAN_WORKSPACE_SIZE */
    *(int64_t *)elements = 1024;
    *count = 1;
    return SUCCESS;
  default:
    return BAD_PARAM;
  }
}

/* The tensor's memory of a pack, and its dimensions as [n, c, z, y, x]. */
static float *bind(const descriptor *pack, const descriptor *tensor, int64_t dims[5]) {
  const int rank = get(tensor, 902, 3, 5) ? 5 : 4;
  const int64_t *sizes = get(tensor, 902, 3, rank), *strides = get(tensor, 903, 3, rank);
  int64_t dense = 1;
  for (int i = rank; i-- > 0; dense *= sizes[i])
    if (strides[i] != dense)
      return NULL;
  dims[2] = 1;
  for (int i = 0; i < rank; i++)
    dims[i < 2 ? i : i + 5 - rank] = sizes[i];
  for (int i = 0; i < 3; i++)
    if (get(pack, 1000, 3, 3)[i] == *get(tensor, 906, 3, 1)) {
      const int64_t address = get(pack, 1001, 6, 3)[i];
      return address % *get(tensor, 900, 3, 1) ? NULL : translate((void *)(uintptr_t)address, (size_t)dense);
    }
  return NULL;
}

int cudnnBackendExecute(void *handle, const descriptor *plan, const descriptor *pack) {
  MAY_FAIL();
  const descriptor *config = get_descriptor(plan, 401, CONFIG);
  const descriptor *forward = get_descriptor(get_descriptor(config, 201, GRAPH), 801, FORWARD);
  const descriptor *conv = get_descriptor(forward, 702, CONVOLUTION);
  int64_t in[5], kernel[5], size[5];
  const float *w = bind(pack, get_descriptor(forward, 703, TENSOR), kernel);
  const float *x = bind(pack, get_descriptor(forward, 704, TENSOR), in);
  float *out = bind(pack, get_descriptor(forward, 705, TENSOR), size);
  if (!handle || !plan->finalized || !pack->finalized || !w || !x || !out || *get(conv, 101, 7, 1) != 1 ||
      !translate((void *)(uintptr_t)*get(pack, 1003, 6, 1), 256))
    return BAD_PARAM;
  fake_runs++;
  fake_engine = config->engine;
  const int64_t rank = *get(conv, 106, 3, 1), groups = in[1] / kernel[1], rows = size[1] / groups;
  int64_t dilation[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, pad[3] = {0, 0, 0};
  for (int64_t i = 0; i < rank; i++) {
    dilation[3 - rank + i] = get(conv, 102, 3, rank)[i];
    stride[3 - rank + i] = get(conv, 103, 3, rank)[i];
    pad[3 - rank + i] = get(conv, 105, 3, rank)[i];
  }
  const int64_t places = size[2] * size[3] * size[4], taps = kernel[2] * kernel[3] * kernel[4];
  for (int64_t i = 0; i < size[0] * size[1] * places; i++) {
    const int64_t place = i % places, row = i / places % size[1], image = i / places / size[1];
    const int64_t o[3] = {place / (size[3] * size[4]), place / size[4] % size[3], place % size[4]};
    float total = 0;
    for (int64_t t = 0; t < kernel[1] * taps; t++) {
      const int64_t k[3] = {t % taps / (kernel[3] * kernel[4]), t % taps / kernel[4] % kernel[3], t % kernel[4]};
      int64_t at = image * in[1] + row / rows * kernel[1] + t / taps, inside = 1;
      for (int axis = 0; axis < 3; axis++) {
        const int64_t p = o[axis] * stride[axis] - pad[axis] + k[axis] * dilation[axis];
        inside &= p >= 0 && p < in[2 + axis];
        at = at * in[2 + axis] + p;
      }
      if (inside)
        total += x[at] * w[row * kernel[1] * taps + t];
    }
    out[i] = total;
  }
  return SUCCESS;
}
