// Sixteen FP32 lanes as one value: a zmm register with AVX-512, two ymm with AVX2, an array that the compiler may
// vectorize elsewhere. Each operation rounds every lane on its own, so all three give the same bits.
#pragma once
#include <cstring>

#include "cpu/vector_math.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace rlk {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
  static Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
  static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }  // a > b ? a : b

#elif defined(__AVX2__) && defined(__FMA__)

struct Lanes {
  __m256 lo, hi;
  static Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  void store(float* p) const { _mm256_storeu_ps(p, lo), _mm256_storeu_ps(p + 8, hi); }
};
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }

#else

struct Lanes {
  float x[kLanes];
  static Lanes splat(float value) {
    Lanes r;
    for (float& lane : r.x) lane = value;
    return r;
  }
  static Lanes load(const float* p) {
    Lanes r;
    std::memcpy(r.x, p, sizeof r.x);
    return r;
  }
  void store(float* p) const { std::memcpy(p, x, sizeof x); }
};
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  for (int i = 0; i < kLanes; i++) c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
  return c;
}
inline Lanes mul(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.x[i] = a.x[i] * b.x[i];
  return a;
}
inline Lanes max(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; i++) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
  return a;
}

#endif

// C[r][x] (+)= sum over i of A[r * a_row + i * a_step] * B[i * b_row + x], for MR rows and 16 * NW columns: one FP32
// accumulator per element, i ascending, lanes across columns. With kSum, also sum[r] += A[r, i] in the same order.
template <int MR, int NW, bool kSum>
inline void multiply_tile(const float* a, long a_row, long a_step, const float* b, long b_row, int count, float* c,
                          long c_row, bool accumulate, float* sum) {
  Lanes acc[MR][NW];
  float total[MR];
  for (int r = 0; r < MR; r++) {
    if (kSum) total[r] = sum[r];
    for (int w = 0; w < NW; w++)
      acc[r][w] = accumulate ? Lanes::load(c + r * c_row + w * kLanes) : Lanes::splat(0.0f);
  }
  for (int i = 0; i < count; i++, a += a_step, b += b_row) {
    Lanes columns[NW];
    for (int w = 0; w < NW; w++) columns[w] = Lanes::load(b + w * kLanes);
    for (int r = 0; r < MR; r++) {
      float value = a[r * a_row];
      if (kSum) total[r] = total[r] + value;
      Lanes broadcast = Lanes::splat(value);
      for (int w = 0; w < NW; w++) acc[r][w] = fma(broadcast, columns[w], acc[r][w]);
    }
  }
  for (int r = 0; r < MR; r++) {
    if (kSum) sum[r] = total[r];
    for (int w = 0; w < NW; w++) acc[r][w].store(c + r * c_row + w * kLanes);
  }
}

// multiply_tile over `width` columns, a multiple of 16. Few rows take more columns at once, to fill the FMA pipeline.
template <int MR, bool kSum = false>
inline void multiply_rows(const float* a, long a_row, long a_step, const float* b, long b_row, int count, float* c,
                          long c_row, int width, bool accumulate, float* sum = nullptr) {
  constexpr int NW = MR == 1 ? 4 : MR == 2 ? 2 : 1;
  int x = 0;
  auto step = [&](auto tile, int columns) {
    tile(a, a_row, a_step, b + x, b_row, count, c + x, c_row, accumulate, sum);
    x += columns;
  };
  if (kSum) {
    if (width >= NW * kLanes) step(multiply_tile<MR, NW, true>, NW * kLanes);
    else step(multiply_tile<MR, 1, true>, kLanes);
  }
  while (width - x >= NW * kLanes) step(multiply_tile<MR, NW, false>, NW * kLanes);
  while (x < width) step(multiply_tile<MR, 1, false>, kLanes);
}

// Calls fn with an integral constant equal to min(rows, 4): the register tiles have 1 to 4 rows.
template <class Fn> inline void with_tile_rows(int rows, Fn fn) {
  if (rows >= 4) fn(std::integral_constant<int, 4>{});
  else if (rows == 3) fn(std::integral_constant<int, 3>{});
  else if (rows == 2) fn(std::integral_constant<int, 2>{});
  else fn(std::integral_constant<int, 1>{});
}

}  // namespace rlk
