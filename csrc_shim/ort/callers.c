#include "ort/callers.h"

#include <dlfcn.h>
#include <stdint.h>
#include <unwind.h>

/* Functions of libgcc_s for unwinding the stack; every process with ONNX Runtime has loaded it. */
typedef struct unwinder {
  _Unwind_Reason_Code (*walk)(_Unwind_Trace_Fn, void *);
  _Unwind_Ptr (*address)(struct _Unwind_Context *);
  void *(*function_at)(void *);
} unwinder;

typedef struct search {
  const unwinder *unwinder;
  void *const *functions;
  size_t count;
  bool found;
} search;

static _Unwind_Reason_Code look(struct _Unwind_Context *frame, void *state) {
  search *s = state;
  const uintptr_t after_call = s->unwinder->address(frame);
  void *function = after_call ? s->unwinder->function_at((void *)(after_call - 1)) : NULL;
  for (size_t i = 0; i < s->count && function; i++)
    s->found |= function == s->functions[i];
  return s->found ? _URC_END_OF_STACK : _URC_NO_REASON;
}

bool ocp_called_from(void *const *functions, size_t count) {
  void *library = dlopen("libgcc_s.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library)
    return false;
  unwinder unwinder;
  *(void **)&unwinder.walk = dlsym(library, "_Unwind_Backtrace");
  *(void **)&unwinder.address = dlsym(library, "_Unwind_GetIP");
  *(void **)&unwinder.function_at = dlsym(library, "_Unwind_FindEnclosingFunction");
  search s = {&unwinder, functions, count, false};
  if (unwinder.walk && unwinder.address && unwinder.function_at)
    unwinder.walk(look, &s);
  dlclose(library);
  return s.found;
}
