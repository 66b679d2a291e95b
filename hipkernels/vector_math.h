// Elementary functions and 16-bit formats of every backend: the host's, gfx942's and sm_90a's.
//
// Every function is branch-free scalar code over explicit fused multiply-adds, so that the compiler may run it in
// vector lanes of any width (AVX2, AVX-512, NEON, a GPU's waves) without changing one bit: an FMA is exactly rounded
// everywhere, and the builds forbid contraction (-ffp-contract=off, nvcc's -fmad=false) and reassociation. Nothing here
// calls libm or a GPU's intrinsics, whose results depend on the hardware.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

#include "device.h"

namespace rlk {

// Constants, because a GPU build cannot call std::numeric_limits in a kernel.
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNegInf = -kInf;

RLK_DEVICE inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
RLK_DEVICE inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

// BF16 is stored as its 16 bits. Rounding is to nearest, ties to even; a NaN becomes the quiet NaN 0x7fc0, as in torch.
using bf16 = uint16_t;
RLK_DEVICE inline float to_float(bf16 x) { return float_of(uint32_t(x) << 16); }
RLK_DEVICE inline float to_float(float x) { return x; }
RLK_DEVICE inline bf16 round_bf16(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16(x != x ? 0x7fc0u : rounded);
}
template <class T> RLK_DEVICE inline T from_float(float x);
template <> RLK_DEVICE inline float from_float<float>(float x) { return x; }
template <> RLK_DEVICE inline bf16 from_float<bf16>(float x) { return round_bf16(x); }

// IEEE half precision: exact to FP32; back with rounding to nearest, ties to even; a NaN becomes the quiet NaN of its
// sign. GPUs convert by an instruction, to the same bits.
struct half { uint16_t bits; };
#if defined(__HIP_DEVICE_COMPILE__)
RLK_DEVICE inline float to_float(half x) { _Float16 h; memcpy(&h, &x, 2); return float(h); }
RLK_DEVICE inline uint32_t round_half(float x) { _Float16 h = _Float16(x); uint16_t u; memcpy(&u, &h, 2); return u; }
#elif defined(__CUDA_ARCH__)
RLK_DEVICE inline float to_float(half x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
RLK_DEVICE inline uint32_t round_half(float x) {
  uint16_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}
#else
RLK_DEVICE inline float to_float(half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude << 13 | 0x7f800000u;
  return float_of((magnitude >= 0x7c00u ? special : finite) | uint32_t(x.bits & 0x8000u) << 16);
}
RLK_DEVICE inline uint32_t round_half(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // the addition rounds to 2**-24
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return sign | (magnitude >= 0x47800000u ? 0x7c00u : finite);
}
#endif
template <> RLK_DEVICE inline half from_float<half>(float x) {
  const uint32_t quiet = (bits_of(x) >> 16 & 0x8000u) | 0x7e00u;
  return half{uint16_t(x != x ? quiet : round_half(x))};
}

// 2**x for x in [-126, 127]; 0 below (also for -inf), +inf above 128, NaN for NaN. Relative error < 2e-7.
// Degree-6 Taylor polynomial of 2**f on [-1/2, 1/2], after subtracting the nearest integer. Between 127.5 and 128 the
// result is that of 127.5: attention never asks for a positive power.
RLK_DEVICE inline float exp2_f32(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to the nearest integer, left in the low bits
  float clamped = x < -126.0f ? -126.0f : x;
  clamped = clamped > 127.5f ? 127.5f : clamped;
  float shifted = clamped + magic;
  float f = clamped - (shifted - magic);
  float p = 1.5403530393381609954e-4f;
  p = __builtin_fmaf(p, f, 1.3333558146428443423e-3f);
  p = __builtin_fmaf(p, f, 9.6181291076284771619e-3f);
  p = __builtin_fmaf(p, f, 5.5504108664821579953e-2f);
  p = __builtin_fmaf(p, f, 2.4022650695910071233e-1f);
  p = __builtin_fmaf(p, f, 6.9314718055994530942e-1f);
  p = __builtin_fmaf(p, f, 1.0f);
  float r = float_of(bits_of(p) + (bits_of(shifted) << 23));
  r = x < -126.0f ? 0.0f : r;
  r = x >= 128.0f ? kInf : r;
  return x != x ? x : r;
}

// e**x: the integer part of x*log2(e) goes to the exponent, the remainder (two-part ln 2) to the polynomial of 2**f.
// 0 below -87.3 (no denormal results). Relative error < 3e-7.
RLK_DEVICE inline float exp_f32(float x) {
  const float magic = 12582912.0f, log2e = 1.44269504088896340736f;
  const float ln2_hi = 0.693145751953125f, ln2_lo = 1.42860682030941723212e-6f;
  float clamped = x < -87.3f ? -87.3f : x;
  clamped = clamped > 88.7f ? 88.7f : clamped;
  float shifted = __builtin_fmaf(clamped, log2e, magic);
  float n = shifted - magic;
  float r = __builtin_fmaf(-n, ln2_hi, clamped);
  r = __builtin_fmaf(-n, ln2_lo, r);
  float p = 1.3888888888888889e-3f;
  p = __builtin_fmaf(p, r, 8.3333333333333333e-3f);
  p = __builtin_fmaf(p, r, 4.1666666666666667e-2f);
  p = __builtin_fmaf(p, r, 1.6666666666666667e-1f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  float e = float_of(bits_of(p) + (bits_of(shifted) << 23));
  e = x < -87.3f ? 0.0f : e;
  e = x > 88.7f ? kInf : e;
  return x != x ? x : e;
}

// Natural logarithm of a positive, finite, normal float, correctly rounded in nearly every case: computed in double
// as 2*atanh((m-1)/(m+1)) + n*ln 2 with m in [sqrt(1/2), sqrt(2)). log(0) = -inf, log(NaN) = NaN.
RLK_DEVICE inline float log_f32(float x) {
  if (x == 0.0f) return kNegInf;
  if (x != x) return x;
  uint32_t u = bits_of(x);
  int n = int((u - 0x3f3504f3u) >> 23);
  n = (n & 0x100) ? n - 0x200 : n;  // sign-extend the 9-bit difference of exponents
  double m = float_of(u - (uint32_t(n) << 23));
  double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 1.0 / 15;
  p = __builtin_fma(p, z, 1.0 / 13);
  p = __builtin_fma(p, z, 1.0 / 11);
  p = __builtin_fma(p, z, 1.0 / 9);
  p = __builtin_fma(p, z, 1.0 / 7);
  p = __builtin_fma(p, z, 1.0 / 5);
  p = __builtin_fma(p, z, 1.0 / 3);
  p = __builtin_fma(p, z, 1.0);
  return float(__builtin_fma(2.0 * s, p, n * 0.69314718055994530942));
}

}  // namespace rlk
