/* The functions that a kernel object may call: the emulator's intrinsics, libm, and functions such as memcpy that
 * compilers call on their own. The compile pipeline inlines libdevice functions that libm lacks into the kernel. */
#define _GNU_SOURCE /* exp10, sincos */
#include "emulator/calls/symbols.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/blocks/check.h"
#include "emulator/blocks/count.h"
#include "emulator/blocks/fiber.h"
#include "emulator/blocks/global_order.h"
#include "emulator/blocks/order.h"
#include "emulator/blocks/warp.h"
#include "emulator/calls/device_functions.h"
#include "emulator/work/conditional.h"

#ifdef __FLT16_MAX__
/* Conversions of float16, for CPUs without such instructions; the C compiler's runtime library implements them. */
static float extend_half(_Float16 value) { return (float)value; }
static _Float16 round_to_half(float value) { return (_Float16)value; }
static _Float16 round_double_to_half(double value) { return (_Float16)value; }
#endif

typedef struct entry {
  const char *name;
  const void *address;
} entry;

#define SAME(name) {#name, (const void *)name}

/* Sorted by name: emu_symbol searches it. */
static const entry table[] = {
#ifdef __FLT16_MAX__
    {"__extendhfsf2", (const void *)extend_half},
    {"__truncdfhf2", (const void *)round_double_to_half},
    {"__truncsfhf2", (const void *)round_to_half},
#endif
    SAME(acos),
    SAME(acosf),
    SAME(acosh),
    SAME(acoshf),
    SAME(asin),
    SAME(asinf),
    SAME(asinh),
    SAME(asinhf),
    SAME(atan),
    SAME(atan2),
    SAME(atan2f),
    SAME(atanf),
    SAME(atanh),
    SAME(atanhf),
    SAME(cbrt),
    SAME(cbrtf),
    SAME(ceil),
    SAME(ceilf),
    SAME(copysign),
    SAME(copysignf),
    SAME(cos),
    SAME(cosf),
    SAME(cosh),
    SAME(coshf),
    {"cudaGraphSetConditional", (const void *)emu_set_conditional},
    SAME(erf),
    SAME(erfc),
    SAME(erfcf),
    SAME(erff),
    SAME(exp),
    SAME(exp10),
    SAME(exp10f),
    SAME(exp2),
    SAME(exp2f),
    SAME(expf),
    SAME(expm1),
    SAME(expm1f),
    SAME(fabs),
    SAME(fabsf),
    SAME(fdim),
    SAME(fdimf),
    SAME(floor),
    SAME(floorf),
    SAME(fma),
    SAME(fmaf),
    SAME(fmax),
    SAME(fmaxf),
    SAME(fmin),
    SAME(fminf),
    SAME(fmod),
    SAME(fmodf),
    SAME(frexp),
    SAME(frexpf),
    SAME(hypot),
    SAME(hypotf),
    SAME(ldexp),
    SAME(ldexpf),
    SAME(lgamma),
    SAME(lgammaf),
    SAME(llrint),
    SAME(llrintf),
    SAME(llround),
    SAME(llroundf),
    SAME(log),
    SAME(log10),
    SAME(log10f),
    SAME(log1p),
    SAME(log1pf),
    SAME(log2),
    SAME(log2f),
    SAME(logf),
    SAME(lrint),
    SAME(lrintf),
    SAME(lround),
    SAME(lroundf),
    SAME(memcmp),
    SAME(memcpy),
    SAME(memmove),
    SAME(memset),
    SAME(modf),
    SAME(modff),
    SAME(nearbyint),
    SAME(nearbyintf),
    SAME(nextafter),
    SAME(nextafterf),
    {"ocp_emu_alias", (const void *)&emu.alias},
    SAME(ocp_emu_assert_fail),
    SAME(ocp_emu_barrier),
    SAME(ocp_emu_check_access),
    SAME(ocp_emu_check_atomic),
    SAME(ocp_emu_check_load),
    SAME(ocp_emu_check_store),
    SAME(ocp_emu_clock),
    SAME(ocp_emu_copy_begun),
    SAME(ocp_emu_copy_commit),
    SAME(ocp_emu_copy_wait),
    SAME(ocp_emu_count_access),
    SAME(ocp_emu_count_part),
    SAME(ocp_emu_directed),
    SAME(ocp_emu_exit),
    SAME(ocp_emu_fence),
    SAME(ocp_emu_load_matrix),
    SAME(ocp_emu_local_begin),
    SAME(ocp_emu_match),
    SAME(ocp_emu_mbarrier),
    SAME(ocp_emu_mma),
    SAME(ocp_emu_numbered_barrier),
    SAME(ocp_emu_printf),
    SAME(ocp_emu_reduce),
    SAME(ocp_emu_shfl),
    SAME(ocp_emu_store_matrix),
    SAME(ocp_emu_trap),
    SAME(ocp_emu_vote),
    SAME(ocp_emu_warp_barrier),
    SAME(pow),
    SAME(powf),
    SAME(remainder),
    SAME(remainderf),
    SAME(rint),
    SAME(rintf),
    SAME(round),
    SAME(roundf),
    SAME(scalbn),
    SAME(scalbnf),
    SAME(sched_yield),
    SAME(sin),
    SAME(sincos),
    SAME(sincosf),
    SAME(sinf),
    SAME(sinh),
    SAME(sinhf),
    SAME(sqrt),
    SAME(sqrtf),
    SAME(tan),
    SAME(tanf),
    SAME(tanh),
    SAME(tanhf),
    SAME(tgamma),
    SAME(tgammaf),
    SAME(trunc),
    SAME(truncf),
};

static int compare(const void *name, const void *candidate) { return strcmp(name, ((const entry *)candidate)->name); }

const void *emu_symbol(const char *name) {
  const entry *found = bsearch(name, table, sizeof table / sizeof *table, sizeof *table, compare);
  return found ? found->address : NULL;
}
