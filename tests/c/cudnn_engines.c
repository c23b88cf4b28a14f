/* Asks cuDNN for the execution plan of every form of many convolutions, through the code that Runs use, for a device
 * that need not be there:
 *
 *   cudnn_engines LIBCUDNN DEVICE.json
 *
 * Prints the problems that have none, and how many were asked for. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "vendor/cudnn.c"

enum { CUDNN_TYPE_CHAR = 24, CUDNN_ATTR_DEVICEPROP_JSON = 2702 };

static char json[1 << 16];
static cudnnStatus_t (*set_attribute)(cudnnBackendDescriptor_t, int, int, int64_t, const void *);

/* Describes the device where its number would stand. */
static cudnnStatus_t set_for_device(cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                                    const void *elements) {
  if (attribute == CUDNN_ATTR_DEVICEPROP_DEVICE_ID)
    return set_attribute(descriptor, CUDNN_ATTR_DEVICEPROP_JSON, CUDNN_TYPE_CHAR, (int64_t)strlen(json), json);
  return set_attribute(descriptor, attribute, type, count, elements);
}

static bool open_library(const char *path, const char *json_path) {
  void *library = dlopen(path, RTLD_NOW);
  if (!library) {
    puts(dlerror());
    return false;
  }
  for (uint32_t i = 0; i < ocp_cudnn.num_symbols; i++)
    ocp_cudnn.functions[i] = dlsym(library, ocp_cudnn.symbols[i]);
  FILE *file = fopen(json_path, "r");
  const size_t length = file ? fread(json, 1, sizeof json - 1, file) : 0;
  set_attribute = dnn.BackendSetAttribute;
  dnn.BackendSetAttribute = set_for_device;
  ocp_error error = {0};
  return length && !fclose(file) && check(&error) == ORT_OK;
}

/* Images, channels, rows, groups, then size, kernel, stride, dilation and pad along each dimension. */
static const int64_t convolutions[][9] = {
    {1, 3, 64, 1, 224, 7, 2, 1, 3},   {32, 256, 512, 1, 56, 1, 2, 1, 0}, {1, 512, 512, 1, 7, 3, 1, 1, 1},
    {1, 32, 32, 32, 112, 3, 1, 1, 1}, {8, 96, 96, 96, 56, 3, 2, 1, 1},   {1, 128, 128, 32, 28, 3, 1, 1, 1},
    {2, 5, 7, 1, 9, 3, 1, 2, 2},      {1, 1, 1, 1, 5, 5, 1, 1, 2},       {3, 6, 9, 3, 17, 4, 3, 1, 0},
    {64, 12, 24, 2, 65, 5, 2, 3, 4},  {1, 1024, 1000, 1, 1, 1, 1, 1, 0}, {4, 384, 384, 384, 31, 7, 1, 1, 3},
};
enum { NONE = 0, FINISHED = OCP_PROBLEM_BIAS | OCP_PROBLEM_RELU, ADDED = OCP_PROBLEM_BIAS | OCP_PROBLEM_RESIDUAL };
static const uint32_t forms[] = {NONE, OCP_PROBLEM_BIAS, FINISHED, ADDED, ADDED | OCP_PROBLEM_RELU};
static const struct {
  uint32_t dtype;
  int64_t bytes;
} types[] = {{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
             {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
             {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
             {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8}};

/* Whether there is a plan; `loose`: the result's images are apart, and its place is not one for vectors. */
static bool has_plan(const ocp_problem_spec *spec, const int64_t *sizes, int64_t bytes, bool loose) {
  int64_t key[OCP_MAX_KEY] = {sizes[0], sizes[1], sizes[2], sizes[3], loose ? 3 * sizes[2] : sizes[2]}, *next = key + 5;
  for (uint32_t i = 0; i < spec->rank; i++) {
    const int64_t places = (sizes[4] + 2 * sizes[8] - (sizes[5] - 1) * sizes[7] - 1) / sizes[6] + 1;
    const int64_t dimension[] = {sizes[4], sizes[5], places, sizes[6], sizes[7], sizes[8], sizes[8]};
    memcpy(next, dimension, sizeof dimension);
    next += PER_DIMENSION;
    key[OUT_STRIDE] *= places;
  }
  *next++ = 32 << 20;
  void *pointers[FIRST_VIRTUAL] = {(void *)(uintptr_t)(loose ? bytes : 256), (void *)256, (void *)256, (void *)256,
                                   (void *)256};
  extend_key(spec, pointers, next);
  const ocp_library_handle none = {0};
  void *algorithm = NULL;
  ocp_error error = {0};
  const int code = valid(spec, key) ? prepare(spec, &none, key, 0, &algorithm, &error) : ORT_FAIL;
  if (code)
    printf("%lld channels, %lld rows, kernel %lld, rank %u, type %u, flags %u: %s\n", (long long)sizes[1],
           (long long)sizes[2], (long long)sizes[5], spec->rank, spec->dtype, spec->flags, error.text);
  release(algorithm);
  return code == ORT_OK;
}

int main(int argc, char **argv) {
  if (argc != 3 || !open_library(argv[1], argv[2]))
    return 2;
  int asked = 0, found = 0;
  for (size_t c = 0; c < sizeof convolutions / sizeof *convolutions; c++)
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
      for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
        for (uint32_t rank = 2; rank <= 3; rank++)
          for (uint32_t variant = 0; variant < 4; variant++) {
            const uint32_t flags = forms[f] | (variant & 1 ? OCP_PROBLEM_TF32 : OCP_PROBLEM_DETERMINISTIC);
            const bool loose = variant & 2, residual = forms[f] & OCP_PROBLEM_RESIDUAL, large = convolutions[c][4] > 20;
            if ((types[t].bytes == 8 && forms[f]) || (loose && residual) || (rank == 3 && large))
              continue;
            const ocp_problem_spec spec = {OCP_PROBLEM_CONV, types[t].dtype, flags, rank, 1, residual};
            asked++;
            found += has_plan(&spec, convolutions[c], types[t].bytes, loose);
          }
  printf("%d of %d\n", found, asked);
  return found == asked ? 0 : 1;
}
