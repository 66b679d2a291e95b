// AdamW over a slice of FP32 masters, and the sum of squares for the gradient norm.
//
// Layout: flat arrays. AdamW is elementwise. The sum of squares is taken over blocks of 4096 elements: within a block
// 16 double partial sums (element i in partial i % 16) are combined by the tree (8, 4, 2, 1); block sums are added in
// ascending order. Threads split blocks and elements, so their number changes no bit.
#include <vector>

#include "cpu/common.h"

using namespace rlk;

RLK_EXPORT int rlk_adamw(float* master, float* moment1, float* moment2, const float* grad, void* weight, int dtype,
                         int64_t n, float grad_scale, float lr, float beta1, float beta2, float eps, float decay,
                         float bias1, float bias2) {
  return with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(weight);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float g = grad[i] * grad_scale;
      float m = __builtin_fmaf(beta1, moment1[i], (1.0f - beta1) * g);
      float v = __builtin_fmaf(beta2, moment2[i], ((1.0f - beta2) * g) * g);
      float update = (m / bias1) / (__builtin_sqrtf(v / bias2) + eps);
      float w = master[i] * (1.0f - lr * decay);
      w = __builtin_fmaf(-lr, update, w);
      moment1[i] = m;
      moment2[i] = v;
      master[i] = w;
      out[i] = from_float<T>(w);
    }
    return int(kOk);
  });
}

RLK_EXPORT int rlk_sum_squares(const float* x, int64_t n, double* out) {
  constexpr int64_t kBlock = 4096;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<double> sums(blocks);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    double partial[16] = {};
    const int64_t begin = b * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16)
      for (int lane = 0; lane < 16; lane++) {
        double value = x[i + lane];
        partial[lane] = __builtin_fma(value, value, partial[lane]);
      }
    for (int lane = 0; i + lane < end; lane++) {
      double value = x[i + lane];
      partial[lane] = __builtin_fma(value, value, partial[lane]);
    }
    for (int width = 8; width; width /= 2)
      for (int lane = 0; lane < width; lane++) partial[lane] += partial[lane + width];
    sums[b] = partial[0];
  }
  double total = 0;
  for (double s : sums) total += s;
  *out = total;
  return kOk;
}
