/* A stand-in for libcudnn with the functions that vendor/cudnn.c calls. It supports the graphs for which the real
 * library has precompiled engines: attention, and a convolution, which a residual, a bias and an activation may
 * follow. It offers two engines: the first uses tensor cores and is nondeterministic, the second is exact. */
#include <stdio.h>

#include "fake_library.h"

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum {
  POINTWISE = 0,
  CONVOLUTION = 1,
  ENGINE = 2,
  CONFIG = 3,
  HEURISTIC = 4,
  PLAN = 5,
  FORWARD = 10,
  ELEMENTS = 13, /* a pointwise operation */
  GRAPH = 15,
  PACK = 16,
  TENSOR = 17,
  PRODUCT = 18,
  MULTIPLY = 19,
  REDUCTION = 21,
  REDUCE = 22,
  DEVICE = 38
};
enum { ADD = 0, MUL = 1, DIV = 6, SUB = 9, EXP = 13, LOG = 15, RELU = 100, SWISH = 106 };
enum { MAX_OPERATIONS = 12, WORKSPACE = 256 /* bytes: alignment of the workspace */ };
enum { PLAN_AS_TEXT = 405, DEVICE_AS_TEXT = 2702, CHARACTERS = 24 };
enum { MAX_ATTRIBUTES = 12, MAX_ELEMENTS = 12 };

typedef struct attribute {
  int name, type;
  int64_t count;
  int64_t elements[MAX_ELEMENTS];
} attribute;
typedef struct descriptor {
  int type, finalized, count;
  attribute attributes[MAX_ATTRIBUTES];
  int64_t engine;
  int is_text; /* whether the plan was loaded from text */
  exclusive use;
} descriptor;

/* For the test: engine of the last run, number of calls of cudnnSetStream, operations of the last run's graph. */
int64_t fake_engine, fake_streams_set, fake_operations;
/* For the test: the mode of the last search that was not FALLBACK, and the innermost dimension of the last run's x. */
_Atomic int64_t fake_mode;
int64_t fake_columns;
/* For the test: number of runs with x in NHWC. */
int64_t fake_channels_last;

/* For the test: numbers of plans that an engine built, and of plans loaded from text. A text is valid while its plan
 * exists. */
_Atomic int64_t fake_plans_built, fake_plans_loaded;
enum { MAX_PLANS = 64 };
static descriptor *plans[MAX_PLANS];
static _Atomic int64_t num_plans;
/* Number of plans being built now, its maximum so far, and the microseconds that building one takes (set by tests). */
_Atomic int64_t fake_building, fake_most_at_once, fake_building_takes;
static int saves_plans(void) { return getenv("FAKE_CUDNN_SAVES") != NULL; }
static int64_t write_text(char *text, int64_t room, const char *what, long long number) {
  char own[64];
  const int64_t length = snprintf(own, sizeof own, "%s %lld", what, number) + 1;
  if (length <= room)
    memcpy(text, own, (size_t)length);
  return length;
}

size_t cudnnGetVersion(void) {
  const char *version = getenv("FAKE_CUDNN_VERSION");
  return version ? strtoul(version, NULL, 10) : 91200;
}
int cudnnCreate(void **handle) {
  MAY_FAIL();
  *handle = calloc(1, sizeof(exclusive));
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
  begin_use(handle);
  ((exclusive *)handle)->stream = stream;
  fake_streams_set++;
  end_use(handle);
  return SUCCESS;
}
const char *cudnnGetErrorString(int status) {
  return status == BAD_PARAM ? "bad parameter" : status == EXECUTION_FAILED ? "execution failed" : "not supported";
}

int cudnnBackendCreateDescriptor(int type, void **out) {
  MAY_FAIL();
  descriptor *d = calloc(1, sizeof *d);
  d->type = type;
  *out = d;
  fake_descriptors++;
  return SUCCESS;
}
int cudnnBackendDestroyDescriptor(void *d) {
  for (int64_t i = 0; i < num_plans; i++)
    plans[i] = plans[i] == d ? NULL : plans[i];
  free(d);
  fake_descriptors--;
  return SUCCESS;
}

static size_t element_bytes(int type) { /* enums, booleans and floats have 4 bytes, other elements 8 */
  return type == 0 || type == 3 || type == 5 || type == 6 || type == 15 ? 8 : 4;
}

static const int64_t *get(const descriptor *d, int name, int type, int64_t count) {
  for (int i = 0; i < d->count; i++)
    if (d->attributes[i].name == name && d->attributes[i].type == type && d->attributes[i].count == count)
      return d->attributes[i].elements;
  return NULL;
}

int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
  MAY_FAIL();
  if (d && d->type == PLAN && name == PLAN_AS_TEXT) {
    long long number = -1;
    if (type != CHARACTERS || count < 2 || sscanf(elements, "fake plan %lld", &number) != 1 || number < 0 ||
        number >= num_plans || !plans[number])
      return BAD_PARAM;
    d->attributes[d->count++] = (attribute){401, 15, 1, {get(plans[number], 401, 15, 1)[0]}};
    d->is_text = 1;
    fake_plans_loaded++;
    return SUCCESS;
  }
  if (!d || d->finalized || d->count == MAX_ATTRIBUTES || count < 1 || count > MAX_ELEMENTS || name / 100 == 3)
    return BAD_PARAM;
  attribute *a = &d->attributes[d->count++];
  *a = (attribute){name, type, count, {0}};
  for (int64_t i = 0; i < count; i++)
    memcpy(&a->elements[i], (const char *)elements + (size_t)i * element_bytes(type), element_bytes(type));
  return SUCCESS;
}

static element type_of(const descriptor *tensor) {
  const int64_t type = *get(tensor, 901, 1, 1);
  return type == 0 ? FLOAT32 : type == 2 ? FLOAT16 : type == 9 ? BFLOAT16 : UNKNOWN;
}
/* Returns the number of tensors that a variant pack has addresses for. */
static int64_t tensors_of(const descriptor *pack) {
  for (int64_t count = 3; count <= 6; count++)
    if (get(pack, 1000, 3, count))
      return count;
  return 0;
}

/* Returns element `index` of a descriptor attribute with `count` elements, if it is a finalized descriptor of this
 * type. */
static const descriptor *get_one(const descriptor *d, int name, int type, int64_t count, int64_t index) {
  const int64_t *elements = d ? get(d, name, 15, count) : NULL;
  const descriptor *found = elements ? (const descriptor *)(uintptr_t)elements[index] : NULL;
  return found && found->type == type && (found->finalized || type == CONFIG) ? found : NULL;
}
static const descriptor *get_descriptor(const descriptor *d, int name, int type) {
  return get_one(d, name, type, 1, 0);
}

/* A tensor's dimensions and strides as [n, c, z, y, x]; span: elements from its first to its last. */
typedef struct layout {
  int64_t dims[5], strides[5], span;
} layout;

static layout layout_of(const descriptor *tensor) {
  const int rank = get(tensor, 902, 3, 5) ? 5 : 4;
  layout l = {.dims = {1, 1, 1, 1, 1}, .span = 1};
  for (int i = 0; i < rank; i++) {
    const int axis = i < 2 ? i : i + 5 - rank;
    l.dims[axis] = get(tensor, 902, 3, rank)[i];
    l.strides[axis] = get(tensor, 903, 3, rank)[i];
    l.span += (l.dims[axis] - 1) * l.strides[axis];
  }
  return l;
}
static int64_t elements_of(const layout *l) { return l->dims[0] * l->dims[1] * l->dims[2] * l->dims[3] * l->dims[4]; }
/* Whether the dimensions `axes`, innermost first, are contiguous from `stride` on; the outermost may have a larger
 * stride. */
static int follows(const layout *l, const int *axes, int count, int64_t stride) {
  for (int i = 0; i < count; i++) {
    const int64_t have = l->strides[axes[i]];
    if (l->dims[axes[i]] != 1 && (i == count - 1 ? have < stride : have != stride))
      return 0;
    stride *= l->dims[axes[i]];
  }
  return 1;
}
/* Whether the layout is NCHW with contiguous images, or NHWC with equal distances between all pixels. */
static int has_order(const layout *l) {
  static const int first[] = {4, 3, 2, 1, 0}, last[] = {4, 3, 2, 0};
  int64_t step = l->dims[1];
  for (int i = 3; i >= 0; i--)
    step = l->dims[last[i]] != 1 ? l->strides[last[i]] : step;
  return follows(l, first, 5, 1) ||
         ((l->strides[1] == 1 || l->dims[1] == 1) && step >= l->dims[1] && follows(l, last, 4, step));
}
static int is_ordered(const descriptor *tensor) {
  const layout l = layout_of(tensor);
  return has_order(&l);
}
static int is_dense(const layout *l) { return l->span == elements_of(l); }
static int is_virtual(const descriptor *tensor) { return get(tensor, 907, 2, 1) != NULL; }
static int64_t count_operations(const descriptor *graph) {
  for (int64_t count = 1; count <= MAX_OPERATIONS; count++)
    if (get(graph, 801, 15, count))
      return count;
  return 0;
}
static int mode_of(const descriptor *operation) {
  return (int)*get(get_descriptor(operation, 750, POINTWISE), 0, 14, 1);
}
static int is_activation(const descriptor *operation) {
  return mode_of(operation) == RELU || mode_of(operation) == SWISH;
}
/* Returns the number of elements of a pointwise operation's second operand; 0: it has none. */
static int64_t added_elements(const descriptor *operation) {
  const descriptor *b = get_descriptor(operation, 752, TENSOR);
  int64_t count = b != NULL;
  for (int64_t rank = 4; b && rank <= 5; rank++)
    for (int64_t i = 0; get(b, 902, 3, rank) && i < rank; i++)
      count *= get(b, 902, 3, rank)[i];
  return count;
}

/* The operations of attention, in order: a pointwise mode, or the negated descriptor type of another operation. The
 * real library recognizes no other order. */
static const int attention[] = {-MULTIPLY, MUL, ADD, -REDUCE, SUB, EXP, -REDUCE, LOG, ADD, DIV, -MULTIPLY};

static int is_attention(const descriptor *graph) {
  const int64_t count = count_operations(graph), all = sizeof attention / sizeof *attention;
  for (int64_t i = 0, at = 0; i < count; i++, at++) {
    at += count < all && at == 2; /* skips the addition of the bias */
    const int wanted = attention[at];
    const descriptor *operation = get_one(graph, 801, wanted < 0 ? -wanted : ELEMENTS, count, i);
    if (!operation || (wanted >= 0 && mode_of(operation) != wanted))
      return 0;
  }
  return count == all || count == all - 1;
}

/* Whether an engine supports the operations: attention, or a convolution with a chain of residual, bias and activation.
 */
static int has_engines(const descriptor *graph) {
  const int64_t count = count_operations(graph);
  if (get_one(graph, 801, MULTIPLY, count, 0))
    return is_attention(graph);
  const descriptor *forward = get_one(graph, 801, FORWARD, count, 0), *value = get_descriptor(forward, 705, TENSOR);
  const descriptor *bias = NULL;
  int addends = 0;
  for (int64_t i = 1; i < count; i++) {
    const descriptor *operation = get_one(graph, 801, ELEMENTS, count, i);
    if (!operation || !is_virtual(value) || get_descriptor(operation, 751, TENSOR) != value)
      return 0;
    value = get_descriptor(operation, 753, TENSOR);
    addends += mode_of(operation) == ADD;
    if (is_activation(operation) ? !bias || i != count - 1 : bias != NULL)
      return 0; /* only an activation follows the bias, and nothing follows the activation */
    const descriptor *b = get_descriptor(operation, 752, TENSOR);
    const int last_addend = i == count - 1 || is_activation(get_one(graph, 801, ELEMENTS, count, i + 1));
    if (mode_of(operation) == ADD && last_addend) {
      const int rank = get(b, 902, 3, 5) ? 5 : 4;
      if (added_elements(operation) != get(b, 902, 3, rank)[1])
        return 0;
      bias = b;
    }
  }
  /* A result to which a residual was added has the residual's strides, so its images must be contiguous. */
  const layout result = layout_of(value);
  return !is_virtual(value) && (is_dense(&result) || addends < 2);
}

enum { CALL_BYTES = 64 };
static void describe(char text[CALL_BYTES], const descriptor *graph) {
  const int64_t count = count_operations(graph);
  const descriptor *multiply = get_one(graph, 801, MULTIPLY, count, 0),
                   *forward = get_one(graph, 801, FORWARD, count, 0);
  if (multiply) {
    const int has_bias = count == sizeof attention / sizeof *attention;
    snprintf(text, CALL_BYTES, "attention%s_%s", has_bias ? "_bias" : "",
             name_of(type_of(get_descriptor(multiply, 1520, TENSOR))));
    return;
  }
  int addends = 0, activation = 0;
  for (int64_t i = 1; i < count; i++) {
    const int mode = mode_of(get_one(graph, 801, ELEMENTS, count, i));
    addends += mode == ADD;
    activation = mode == RELU || mode == SWISH ? mode : activation;
  }
  const descriptor *x = get_descriptor(forward, 704, TENSOR);
  const layout l = layout_of(x);
  snprintf(text, CALL_BYTES, "convolution%s%s%s%s%s_%s", get(x, 902, 3, 5) ? "_3d" : "_2d",
           l.strides[1] == 1 && l.dims[1] > 1 ? "_nhwc" : "", addends ? "_bias" : "", addends > 1 ? "_residual" : "",
           activation == RELU    ? "_relu"
           : activation == SWISH ? "_swish"
                                 : "",
           name_of(type_of(x)));
}

static void build_plan(void) {
  const int64_t now = ++fake_building;
  for (int64_t most = fake_most_at_once; now > most && !atomic_compare_exchange_weak(&fake_most_at_once, &most, now);)
    continue;
  usleep((useconds_t)fake_building_takes);
  fake_building--;
  fake_plans_built++;
}

int cudnnBackendFinalize(descriptor *d) {
  MAY_FAIL();
  int complete = 1;
  switch (d->type) {
  case TENSOR:
    complete = get(d, 901, 1, 1) && type_of(d) != UNKNOWN && get(d, 906, 3, 1) && get(d, 900, 3, 1) &&
               *get(d, 900, 3, 1) % (type_of(d) == FLOAT32 ? 4 : 2) == 0 &&
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
    for (int name = 703; complete && name <= 705; name++) {
      const descriptor *x = get_descriptor(d, name, TENSOR);
      complete = is_ordered(x) && (!is_virtual(x) || type_of(x) == FLOAT32);
    }
    break;
  case PRODUCT:
    complete = get(d, 1500, 1, 1) != NULL;
    break;
  case REDUCTION:
    complete = get(d, 1601, 1, 1) && get(d, 1600, 18, 1);
    break;
  case MULTIPLY:
    complete = get_descriptor(d, 1523, PRODUCT) && get_descriptor(d, 1520, TENSOR) && get_descriptor(d, 1521, TENSOR) &&
               get_descriptor(d, 1522, TENSOR);
    break;
  case REDUCE:
    complete = get_descriptor(d, 1612, REDUCTION) && get_descriptor(d, 1610, TENSOR) && get_descriptor(d, 1611, TENSOR);
    break;
  case POINTWISE: {
    const int64_t *mode = get(d, 0, 14, 1);
    complete = mode && (*mode != RELU || get(d, 2, 10, 1)) && get(d, 1, 1, 1);
    break;
  }
  case ELEMENTS:
    complete = get_descriptor(d, 750, POINTWISE) && get_descriptor(d, 751, TENSOR) && get_descriptor(d, 753, TENSOR) &&
               (!is_activation(d) && mode_of(d) != EXP && mode_of(d) != LOG) == (added_elements(d) > 0);
    break;
  case GRAPH: {
    const int64_t count = count_operations(d);
    complete = get_one(d, 801, FORWARD, count, 0) || get_one(d, 801, MULTIPLY, count, 0);
    break;
  }
  case HEURISTIC:
    complete = get_descriptor(d, 201, GRAPH) && get(d, 200, 8, 1) && get_descriptor(d, 204, DEVICE);
    break;
  case PLAN: /* a plan may outlive the handle with which it was made */
    complete = get_descriptor(d, 407, DEVICE) && get_descriptor(d, 401, CONFIG);
    if (complete && !d->is_text)
      build_plan();
    if (complete && num_plans < MAX_PLANS - 16) /* several threads may pass this test at once */
      plans[num_plans++] = d;
    break;
  case DEVICE:
    complete = get(d, 2700, 23, 1) != NULL;
    break;
  case PACK: {
    const int64_t count = tensors_of(d);
    complete = count && get(d, 1001, 6, count) && get(d, 1003, 6, 1);
    break;
  }
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
    if (*get(d, 200, 8, 1) != 2) /* FALLBACK */
      fake_mode = *get(d, 200, 8, 1);
    char call[CALL_BYTES];
    describe(call, get_descriptor(d, 201, GRAPH));
    *count = has_engines(get_descriptor(d, 201, GRAPH)) && !has_fault("refused", call) ? 2 : 0;
    for (int64_t i = 0; i < *count; i++) {
      results[i]->engine = i;
      results[i]->attributes[results[i]->count++] =
          (attribute){201, 15, 1, {get(d, 201, 15, 1)[0]}}; /* the graph, for execution */
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
  case PLAN_AS_TEXT:
    for (int64_t i = 0; saves_plans() && i < num_plans; i++)
      if (plans[i] == d) {
        *count = write_text(elements, requested, "fake plan", (long long)i);
        return SUCCESS;
      }
    return NOT_SUPPORTED;
  case DEVICE_AS_TEXT:
    *count = write_text(elements, requested, "fake device of process", (long long)getpid());
    return saves_plans() ? SUCCESS : NOT_SUPPORTED;
  case 402: /* EXECUTION_PLAN_WORKSPACE_SIZE */
    *(int64_t *)elements = 1024;
    *count = 1;
    return SUCCESS;
  default:
    return BAD_PARAM;
  }
}

/* Returns the memory of a tensor in a variant pack. */
static void *bind(const descriptor *pack, const descriptor *tensor, layout *l) {
  *l = layout_of(tensor);
  const int64_t count = tensors_of(pack);
  for (int64_t i = 0; i < count; i++)
    if (get(pack, 1000, 3, count)[i] == *get(tensor, 906, 3, 1)) {
      const int64_t address = get(pack, 1001, 6, count)[i];
      static const char *const names[] = {"out", "x or q", "w or k", "bias or v", "residual or bias"};
      check_alignment("cudnnBackendExecute", names[get(pack, 1000, 3, count)[i]], (void *)(uintptr_t)address,
                      (uint64_t)*get(tensor, 900, 3, 1));
      return translate((void *)(uintptr_t)address, type_of(tensor), (size_t)l->span);
    }
  return NULL;
}
static int64_t place_in(const layout *l, const int64_t at[5]) {
  int64_t place = 0;
  for (int i = 0; i < 5; i++)
    place += l->dims[i] == 1 ? 0 : at[i] * l->strides[i]; /* dimensions of size 1 are broadcast */
  return place;
}

/* Returns a dense copy. */
static float *to_floats(element type, const void *memory, const layout *l) {
  const int64_t count = elements_of(l);
  float *values = malloc((size_t)(count ? count : 1) * sizeof *values);
  for (int64_t i = 0; i < count; i++) {
    int64_t at[5], rest = i;
    for (int axis = 5; axis-- > 0; rest /= l->dims[axis])
      at[axis] = rest % l->dims[axis];
    values[i] = load(type, memory, place_in(l, at));
  }
  return values;
}

/* The epilogue of the convolution, with the memory of its operands. */
typedef struct epilogue {
  int64_t count;
  int modes[MAX_OPERATIONS];
  double limits[MAX_OPERATIONS];
  const void *added[MAX_OPERATIONS];
  layout layouts[MAX_OPERATIONS];
  const descriptor *out;
} epilogue;

/* Fills `e`; false if the variant pack lacks a tensor. */
static int bind_epilogue(const descriptor *pack, const descriptor *graph, epilogue *e) {
  const int64_t count = count_operations(graph);
  e->out = get_descriptor(get_one(graph, 801, FORWARD, count, 0), 705, TENSOR);
  for (int64_t i = 1; i < count; i++) {
    const descriptor *operation = get_one(graph, 801, ELEMENTS, count, i);
    const int64_t *limit = get(get_descriptor(operation, 750, POINTWISE), 4, 5, 1);
    e->modes[e->count] = mode_of(operation);
    e->limits[e->count] = __builtin_inf();
    if (limit)
      memcpy(&e->limits[e->count], limit, sizeof(double));
    if (mode_of(operation) == ADD) {
      e->added[e->count] = bind(pack, get_descriptor(operation, 752, TENSOR), &e->layouts[e->count]);
      if (!e->added[e->count])
        return 0;
    }
    e->count++;
    e->out = get_descriptor(operation, 753, TENSOR);
  }
  return 1;
}

static float finished(const epilogue *e, element type, float value, const int64_t at[5]) {
  for (int64_t i = 0; i < e->count; i++)
    if (e->modes[i] == ADD)
      value += load(type, e->added[i], place_in(&e->layouts[i], at));
    else if (e->modes[i] == SWISH)
      value /= 1 + __builtin_expf(-value);
    else
      value = value < 0 ? 0 : value > e->limits[i] ? (float)e->limits[i] : value;
  return value;
}

static int execute(exclusive *handle, descriptor *plan, const descriptor *pack, const char *call) {
  const descriptor *config = get_descriptor(plan, 401, CONFIG), *graph = get_descriptor(config, 201, GRAPH);
  const descriptor *forward = get_one(graph, 801, FORWARD, count_operations(graph), 0);
  const descriptor *conv = get_descriptor(forward, 702, CONVOLUTION);
  check_alignment("cudnnBackendExecute", "workspace", (void *)(uintptr_t)*get(pack, 1003, 6, 1), WORKSPACE);
  layout in, kernel, size;
  epilogue e = {0};
  const void *w = bind(pack, get_descriptor(forward, 703, TENSOR), &kernel);
  const void *x = bind(pack, get_descriptor(forward, 704, TENSOR), &in);
  if (!handle || !plan->finalized || !pack->finalized || !w || !x || !bind_epilogue(pack, graph, &e) ||
      *get(conv, 101, 7, 1) != 1 || !translate((void *)(uintptr_t)*get(pack, 1003, 6, 1), FLOAT32, 256))
    return BAD_PARAM;
  void *out = bind(pack, e.out, &size);
  const element type = type_of(e.out);
  if (!out)
    return BAD_PARAM;
  if (!can_execute(handle, handle->stream) || !can_execute(&plan->use, handle->stream))
    return NOT_SUPPORTED;
  fake_runs++;
  fake_engine = config->engine;
  fake_columns = in.dims[4];
  fake_channels_last += in.strides[1] == 1 && in.dims[1] > 1;
  take_time(fake_engine);
  fake_operations = count_operations(graph);
  const int64_t rank = *get(conv, 106, 3, 1), rows = size.dims[1] / (in.dims[1] / kernel.dims[1]);
  int64_t dilation[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, pad[3] = {0, 0, 0};
  for (int64_t i = 0; i < rank; i++) {
    dilation[3 - rank + i] = get(conv, 102, 3, rank)[i];
    stride[3 - rank + i] = get(conv, 103, 3, rank)[i];
    pad[3 - rank + i] = get(conv, 105, 3, rank)[i];
  }
  const int64_t *k = kernel.dims, *i = in.dims, *o = size.dims, taps = k[2] * k[3] * k[4];
  float *image = to_floats(type, x, &in), *factors = to_floats(type, w, &kernel);
  float *totals = malloc((size_t)(o[2] * o[3] * o[4]) * sizeof *totals);
  for (int64_t channel = 0; channel < o[0] * o[1]; channel++) {
    const int64_t n = channel / o[1], row = channel % o[1];
    memset(totals, 0, (size_t)(o[2] * o[3] * o[4]) * sizeof *totals);
    for (int64_t t = 0; t < k[1] * taps; t++) {
      const float *plane = image + (n * i[1] + row / rows * k[1] + t / taps) * i[2] * i[3] * i[4];
      const int64_t tap[3] = {t % taps / (k[3] * k[4]), t / k[4] % k[3], t % k[4]};
      int64_t from[3]; /* pixel of the image for the first output pixel */
      for (int axis = 0; axis < 3; axis++)
        from[axis] = tap[axis] * dilation[axis] - pad[axis];
      int64_t begin = 0, end = o[4];
      while (begin < end && from[2] + begin * stride[2] < 0)
        begin++;
      while (begin < end && from[2] + (end - 1) * stride[2] >= i[4])
        end--;
      for (int64_t line = 0; line < o[2] * o[3]; line++) {
        const int64_t z = from[0] + line / o[3] * stride[0], y = from[1] + line % o[3] * stride[1];
        if (z < 0 || z >= i[2] || y < 0 || y >= i[3])
          continue;
        const float *pixels = plane + (z * i[3] + y) * i[4] + from[2] + begin * stride[2];
        if (stride[2] == 1)
          add_product(totals + line * o[4] + begin, factors[row * k[1] * taps + t], pixels, end - begin);
        for (int64_t p = 0; stride[2] != 1 && p < end - begin; p++)
          totals[line * o[4] + begin + p] += factors[row * k[1] * taps + t] * pixels[p * stride[2]];
      }
    }
    for (int64_t p = 0; p < o[2] * o[3] * o[4]; p++) {
      const int64_t at[5] = {n, row, p / (o[3] * o[4]), p / o[4] % o[3], p % o[4]};
      store(type, out, place_in(&size, at), finished(&e, type, totals[p], at));
    }
  }
  free(totals);
  free(factors);
  free(image);
  put_fault(call, fake_engine, type, out);
  return SUCCESS;
}

/* Returns the index in a layout of the head at `at`. A dimension of size 1 is broadcast: several heads share one. */
static int64_t head_in(const layout *l, const int64_t at[5]) {
  return (l->dims[0] == 1 ? 0 : at[0]) * l->dims[1] + (l->dims[1] == 1 ? 0 : at[1]);
}

/* softmax(scale * q @ k + bias) @ v */
static int execute_attention(const descriptor *graph, const descriptor *pack, const char *call) {
  const int64_t count = count_operations(graph);
  const descriptor *first = get_one(graph, 801, MULTIPLY, count, 0),
                   *second = get_one(graph, 801, MULTIPLY, count, count - 1);
  const descriptor *factor = get_descriptor(get_one(graph, 801, ELEMENTS, count, 1), 752, TENSOR);
  const descriptor *result = get_descriptor(second, 1522, TENSOR);
  const descriptor *bias = count == sizeof attention / sizeof *attention
                               ? get_descriptor(get_one(graph, 801, ELEMENTS, count, 2), 752, TENSOR)
                               : NULL;
  layout of_q, of_k, of_v, of_out, of_bias;
  const void *q = bind(pack, get_descriptor(first, 1520, TENSOR), &of_q);
  const void *k = bind(pack, get_descriptor(first, 1521, TENSOR), &of_k);
  const void *v = bind(pack, get_descriptor(second, 1521, TENSOR), &of_v);
  void *out = bind(pack, result, &of_out);
  const void *b = bias ? bind(pack, bias, &of_bias) : NULL;
  const float *scale = NULL;
  const int64_t bound = tensors_of(pack), keys = of_k.dims[4];
  for (int64_t i = 0; i < bound; i++)
    if (get(pack, 1000, 3, bound)[i] == *get(factor, 906, 3, 1) && get(factor, 908, 2, 1))
      scale = (const float *)(uintptr_t)get(pack, 1001, 6, bound)[i]; /* a scalar in host memory */
  if (!q || !k || !v || !out || !scale || (bias && !b) || of_q.dims[4] != of_k.dims[3] || of_v.dims[3] != keys)
    return BAD_PARAM;
  fake_runs++;
  const element type = type_of(result);
  const int64_t width = of_q.dims[4], columns = of_out.dims[4];
  float *queries = to_floats(type, q, &of_q), *of_keys = to_floats(type, k, &of_k), *values = to_floats(type, v, &of_v);
  float *weights = malloc((size_t)(keys + columns) * sizeof *weights), *totals = weights + keys;
  for (int64_t row = 0; row < of_out.dims[0] * of_out.dims[1] * of_out.dims[3]; row++) {
    const int64_t head = row / of_out.dims[3];
    int64_t at[5] = {head / of_out.dims[1], head % of_out.dims[1], 0, row % of_out.dims[3], 0};
    const float *own_keys = of_keys + head_in(&of_k, at) * width * keys;
    const float *own_values = values + head_in(&of_v, at) * keys * columns;
    float most = -__builtin_inff(), sum = 0;
    memset(weights, 0, (size_t)(keys + columns) * sizeof *weights);
    for (int64_t i = 0; i < width; i++)
      add_product(weights, queries[row * width + i], own_keys + i * keys, keys);
    for (int64_t n = 0; n < keys; n++) {
      weights[n] *= *scale;
      weights[n] += b ? load(type, b, place_in(&of_bias, (int64_t[]){at[0], at[1], 0, at[3], n})) : 0;
      most = weights[n] > most ? weights[n] : most;
    }
    for (int64_t n = 0; n < keys; n++)
      sum += weights[n] = __builtin_expf(weights[n] - most);
    for (int64_t n = 0; n < keys; n++)
      add_product(totals, weights[n] / sum, own_values + n * columns, columns);
    for (at[4] = 0; at[4] < columns; at[4]++)
      store(type, out, place_in(&of_out, at), totals[at[4]]);
  }
  free(values);
  free(of_keys);
  free(queries);
  free(weights);
  put_fault(call, fake_engine, type, out);
  return SUCCESS;
}

int cudnnBackendExecute(exclusive *handle, descriptor *plan, const descriptor *pack) {
  MAY_FAIL();
  begin_use(handle);
  begin_use(&plan->use);
  const descriptor *graph = get_descriptor(get_descriptor(plan, 401, CONFIG), 201, GRAPH);
  char call[CALL_BYTES];
  describe(call, graph);
  int status = NOT_SUPPORTED;
  if (has_fault("failing", call))
    status = EXECUTION_FAILED;
  else if (!get_one(graph, 801, MULTIPLY, count_operations(graph), 0))
    status = execute(handle, plan, pack, call);
  else if (can_execute(handle, handle->stream) && can_execute(&plan->use, handle->stream))
    status = execute_attention(graph, pack, call);
  end_use(&plan->use);
  end_use(handle);
  return status;
}
