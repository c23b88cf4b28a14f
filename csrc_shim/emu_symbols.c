/* The functions that a kernel object may call: the emulator's intrinsics, libm, a little of libc, and what compilers
 * emit calls to. */
#define _GNU_SOURCE /* sincos */
#include "emu_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- device functions of libdevice that libm lacks ---- */
static float rsqrt_f32(float x) { return 1.0f / sqrtf(x); }
static double rsqrt_f64(double x) { return 1.0 / sqrt(x); }
static float rcbrt_f32(float x) { return 1.0f / cbrtf(x); }
static double rcbrt_f64(double x) { return 1.0 / cbrt(x); }
static float exp10_f32(float x) { return (float)pow(10.0, x); }
static double exp10_f64(double x) { return pow(10.0, x); }
static float sinpi_f32(float x) { return (float)sin(M_PI * fmod(x, 2.0)); }
static double sinpi_f64(double x) { return sin(M_PI * fmod(x, 2.0)); }
static float cospi_f32(float x) { return (float)cos(M_PI * fmod(x, 2.0)); }
static double cospi_f64(double x) { return cos(M_PI * fmod(x, 2.0)); }
static float erfcx_f32(float x) { return (float)(exp((double)x * x) * erfc(x)); }
static float saturate_f32(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
static float normcdf_f32(float x) { return (float)(0.5 * erfc(-(double)x * M_SQRT1_2)); }
static double normcdf_f64(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static float powi_f32(float x, int n) { return powf(x, (float)n); }
static double powi_f64(double x, int n) { return pow(x, n); }

/* ---- half precision, by what hosts without F16C call ---- */
static float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float magnitude = (float)fraction * 0x1p-24f;
    memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Rounds to nearest, ties to even. */
static uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000)
    return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) /* 65520 and above round to infinity */
    return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) { /* subnormal: units of 2^-24, rounded by the addition */
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    return (uint16_t)(sign | (uint16_t)lrintf(magnitude * 0x1p24f));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (uint16_t)((bits - 0x38000000) >> 13));
}

typedef struct entry {
  const char *name;
  const void *address;
} entry;

#define SAME(name) {#name, (const void *)name}

/* Sorted by name: emu_symbol searches it, and a test compares neighbours. */
static const entry table[] = {
    {"__extendhfsf2", (const void *)half_to_float},
    {"__gnu_f2h_ieee", (const void *)float_to_half},
    {"__gnu_h2f_ieee", (const void *)half_to_float},
    {"__nv_acos", (const void *)acos},
    {"__nv_acosf", (const void *)acosf},
    {"__nv_acosh", (const void *)acosh},
    {"__nv_acoshf", (const void *)acoshf},
    {"__nv_asin", (const void *)asin},
    {"__nv_asinf", (const void *)asinf},
    {"__nv_asinh", (const void *)asinh},
    {"__nv_asinhf", (const void *)asinhf},
    {"__nv_atan", (const void *)atan},
    {"__nv_atan2", (const void *)atan2},
    {"__nv_atan2f", (const void *)atan2f},
    {"__nv_atanf", (const void *)atanf},
    {"__nv_atanh", (const void *)atanh},
    {"__nv_atanhf", (const void *)atanhf},
    {"__nv_cbrt", (const void *)cbrt},
    {"__nv_cbrtf", (const void *)cbrtf},
    {"__nv_ceil", (const void *)ceil},
    {"__nv_ceilf", (const void *)ceilf},
    {"__nv_copysign", (const void *)copysign},
    {"__nv_copysignf", (const void *)copysignf},
    {"__nv_cos", (const void *)cos},
    {"__nv_cosf", (const void *)cosf},
    {"__nv_cosh", (const void *)cosh},
    {"__nv_coshf", (const void *)coshf},
    {"__nv_cospi", (const void *)cospi_f64},
    {"__nv_cospif", (const void *)cospi_f32},
    {"__nv_erf", (const void *)erf},
    {"__nv_erfc", (const void *)erfc},
    {"__nv_erfcf", (const void *)erfcf},
    {"__nv_erfcxf", (const void *)erfcx_f32},
    {"__nv_erff", (const void *)erff},
    {"__nv_exp", (const void *)exp},
    {"__nv_exp10", (const void *)exp10_f64},
    {"__nv_exp10f", (const void *)exp10_f32},
    {"__nv_exp2", (const void *)exp2},
    {"__nv_exp2f", (const void *)exp2f},
    {"__nv_expf", (const void *)expf},
    {"__nv_expm1", (const void *)expm1},
    {"__nv_expm1f", (const void *)expm1f},
    {"__nv_fabs", (const void *)fabs},
    {"__nv_fabsf", (const void *)fabsf},
    {"__nv_fast_cosf", (const void *)cosf},
    {"__nv_fast_exp10f", (const void *)exp10_f32},
    {"__nv_fast_expf", (const void *)expf},
    {"__nv_fast_log10f", (const void *)log10f},
    {"__nv_fast_log2f", (const void *)log2f},
    {"__nv_fast_logf", (const void *)logf},
    {"__nv_fast_powf", (const void *)powf},
    {"__nv_fast_sincosf", (const void *)sincosf},
    {"__nv_fast_sinf", (const void *)sinf},
    {"__nv_fast_tanf", (const void *)tanf},
    {"__nv_fdim", (const void *)fdim},
    {"__nv_fdimf", (const void *)fdimf},
    {"__nv_floor", (const void *)floor},
    {"__nv_floorf", (const void *)floorf},
    {"__nv_fma", (const void *)fma},
    {"__nv_fmaf", (const void *)fmaf},
    {"__nv_fmax", (const void *)fmax},
    {"__nv_fmaxf", (const void *)fmaxf},
    {"__nv_fmin", (const void *)fmin},
    {"__nv_fminf", (const void *)fminf},
    {"__nv_fmod", (const void *)fmod},
    {"__nv_fmodf", (const void *)fmodf},
    {"__nv_frexp", (const void *)frexp},
    {"__nv_frexpf", (const void *)frexpf},
    {"__nv_fsaturate", (const void *)saturate_f32},
    {"__nv_hypot", (const void *)hypot},
    {"__nv_hypotf", (const void *)hypotf},
    {"__nv_ilogb", (const void *)ilogb},
    {"__nv_ilogbf", (const void *)ilogbf},
    {"__nv_j0", (const void *)j0},
    {"__nv_j0f", (const void *)j0f},
    {"__nv_j1", (const void *)j1},
    {"__nv_j1f", (const void *)j1f},
    {"__nv_jn", (const void *)jn},
    {"__nv_jnf", (const void *)jnf},
    {"__nv_ldexp", (const void *)ldexp},
    {"__nv_ldexpf", (const void *)ldexpf},
    {"__nv_lgamma", (const void *)lgamma},
    {"__nv_lgammaf", (const void *)lgammaf},
    {"__nv_llrint", (const void *)llrint},
    {"__nv_llrintf", (const void *)llrintf},
    {"__nv_llround", (const void *)llround},
    {"__nv_llroundf", (const void *)llroundf},
    {"__nv_log", (const void *)log},
    {"__nv_log10", (const void *)log10},
    {"__nv_log10f", (const void *)log10f},
    {"__nv_log1p", (const void *)log1p},
    {"__nv_log1pf", (const void *)log1pf},
    {"__nv_log2", (const void *)log2},
    {"__nv_log2f", (const void *)log2f},
    {"__nv_logb", (const void *)logb},
    {"__nv_logbf", (const void *)logbf},
    {"__nv_logf", (const void *)logf},
    {"__nv_modf", (const void *)modf},
    {"__nv_modff", (const void *)modff},
    {"__nv_nearbyint", (const void *)nearbyint},
    {"__nv_nearbyintf", (const void *)nearbyintf},
    {"__nv_nextafter", (const void *)nextafter},
    {"__nv_nextafterf", (const void *)nextafterf},
    {"__nv_normcdf", (const void *)normcdf_f64},
    {"__nv_normcdff", (const void *)normcdf_f32},
    {"__nv_pow", (const void *)pow},
    {"__nv_powf", (const void *)powf},
    {"__nv_powi", (const void *)powi_f64},
    {"__nv_powif", (const void *)powi_f32},
    {"__nv_rcbrt", (const void *)rcbrt_f64},
    {"__nv_rcbrtf", (const void *)rcbrt_f32},
    {"__nv_remainder", (const void *)remainder},
    {"__nv_remainderf", (const void *)remainderf},
    {"__nv_remquo", (const void *)remquo},
    {"__nv_remquof", (const void *)remquof},
    {"__nv_rint", (const void *)rint},
    {"__nv_rintf", (const void *)rintf},
    {"__nv_round", (const void *)round},
    {"__nv_roundf", (const void *)roundf},
    {"__nv_rsqrt", (const void *)rsqrt_f64},
    {"__nv_rsqrtf", (const void *)rsqrt_f32},
    {"__nv_saturatef", (const void *)saturate_f32},
    {"__nv_scalbn", (const void *)scalbn},
    {"__nv_scalbnf", (const void *)scalbnf},
    {"__nv_sin", (const void *)sin},
    {"__nv_sincos", (const void *)sincos},
    {"__nv_sincosf", (const void *)sincosf},
    {"__nv_sinf", (const void *)sinf},
    {"__nv_sinh", (const void *)sinh},
    {"__nv_sinhf", (const void *)sinhf},
    {"__nv_sinpi", (const void *)sinpi_f64},
    {"__nv_sinpif", (const void *)sinpi_f32},
    {"__nv_sqrt", (const void *)sqrt},
    {"__nv_sqrtf", (const void *)sqrtf},
    {"__nv_tan", (const void *)tan},
    {"__nv_tanf", (const void *)tanf},
    {"__nv_tanh", (const void *)tanh},
    {"__nv_tanhf", (const void *)tanhf},
    {"__nv_tgamma", (const void *)tgamma},
    {"__nv_tgammaf", (const void *)tgammaf},
    {"__nv_trunc", (const void *)trunc},
    {"__nv_truncf", (const void *)truncf},
    {"__nv_y0", (const void *)y0},
    {"__nv_y0f", (const void *)y0f},
    {"__nv_y1", (const void *)y1},
    {"__nv_y1f", (const void *)y1f},
    {"__nv_yn", (const void *)yn},
    {"__nv_ynf", (const void *)ynf},
    {"__powidf2", (const void *)powi_f64},
    {"__powisf2", (const void *)powi_f32},
    {"__truncsfhf2", (const void *)float_to_half},
    SAME(abs),
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
    {"bcmp", (const void *)memcmp},
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
    SAME(erf),
    SAME(erfc),
    SAME(erfcf),
    SAME(erff),
    SAME(exp),
    {"exp10", (const void *)exp10_f64},
    {"exp10f", (const void *)exp10_f32},
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
    SAME(ilogb),
    SAME(ilogbf),
    SAME(j0),
    SAME(j0f),
    SAME(j1),
    SAME(j1f),
    SAME(jn),
    SAME(jnf),
    SAME(labs),
    SAME(ldexp),
    SAME(ldexpf),
    SAME(lgamma),
    SAME(lgammaf),
    SAME(llabs),
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
    SAME(logb),
    SAME(logbf),
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
    SAME(ocp_emu_barrier),
    SAME(ocp_emu_check_atomic),
    SAME(ocp_emu_check_load),
    SAME(ocp_emu_check_store),
    SAME(ocp_emu_shfl),
    SAME(ocp_emu_vote),
    SAME(ocp_emu_warp_barrier),
    SAME(pow),
    SAME(powf),
    SAME(remainder),
    SAME(remainderf),
    SAME(remquo),
    SAME(remquof),
    SAME(rint),
    SAME(rintf),
    SAME(round),
    SAME(roundf),
    SAME(scalbln),
    SAME(scalblnf),
    SAME(scalbn),
    SAME(scalbnf),
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
    SAME(y0),
    SAME(y0f),
    SAME(y1),
    SAME(y1f),
    SAME(yn),
    SAME(ynf),
};

static int compare(const void *name, const void *candidate) { return strcmp(name, ((const entry *)candidate)->name); }

const void *emu_symbol(const char *name) {
  const entry *found = bsearch(name, table, sizeof table / sizeof *table, sizeof *table, compare);
  return found ? found->address : NULL;
}
