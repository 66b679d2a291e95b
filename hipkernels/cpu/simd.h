// Vectors of the host's width, for kernels that must keep their accumulators in registers. Lanes hold independent
// outputs, and fma() rounds once on every instruction set, so that the width never shows in the bits.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vector_math.h"

namespace rlk {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

#elif defined(__AVX2__) && defined(__FMA__)

using Vec = __m256;
constexpr int kLanes = 8;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#elif defined(__aarch64__)

using Vec = float32x4_t;
constexpr int kLanes = 4;
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

#else  // any host: correct, but slow where fmaf is a library call

struct Vec { float lane[4]; };
constexpr int kLanes = 4;
inline Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline void store(float* p, Vec v) { for (int i = 0; i < 4; ++i) p[i] = v.lane[i]; }
inline Vec broadcast(float x) { return {{x, x, x, x}}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}

#endif

#if defined(__AVX2__) && defined(__FMA__)
#define RLK_HAS_TRANSPOSE 1

// [a[0..4) | b[0..4)] in FP32.
inline __m256 two_quads(const float* a, const float* b) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}
inline __m256 two_quads(const bf16* a, const bf16* b) {
  __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a));
  __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_unpacklo_epi64(low, high)), 16));
}

// Transposes eight rows by four columns in registers: out[i] holds column d + i of rows 0..7.
template <class T> inline void transpose_8x4(const T* const (&row)[8], int64_t d, __m256 (&out)[4]) {
  __m256 r0 = two_quads(row[0] + d, row[4] + d), r1 = two_quads(row[1] + d, row[5] + d);
  __m256 r2 = two_quads(row[2] + d, row[6] + d), r3 = two_quads(row[3] + d, row[7] + d);
  __m256 low01 = _mm256_unpacklo_ps(r0, r1), high01 = _mm256_unpackhi_ps(r0, r1);
  __m256 low23 = _mm256_unpacklo_ps(r2, r3), high23 = _mm256_unpackhi_ps(r2, r3);
  out[0] = _mm256_shuffle_ps(low01, low23, 0x44);
  out[1] = _mm256_shuffle_ps(low01, low23, 0xee);
  out[2] = _mm256_shuffle_ps(high01, high23, 0x44);
  out[3] = _mm256_shuffle_ps(high01, high23, 0xee);
}

#endif

}  // namespace rlk
