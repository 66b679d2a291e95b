// Operators over rows: RMS norm (alone, behind the residual addition, with rotary embedding), SwiGLU, embedding; and
// their backward. Activations FP32 or BF16, row-major; arithmetic in FP32, one rounding at the end.
//
// REDUCTION ORDER
//   Along a row: element i is added to partial sum i % 16 by a fused multiply-add, i ascending; the 16 partial sums are
//   added in the tree 8, 4, 2, 1 (partial j takes j + 8, then j + 4, ...).
//   Across rows (weight gradients): one accumulator per column, starting at the gradient so far, rows ascending.
// THREADS own disjoint rows; in sums across rows, disjoint blocks of columns.
#include <algorithm>
#include <memory>

#include "cpu/common.h"

namespace rlk {
namespace {

using Size = int64_t;

constexpr int kPartials = 16;
constexpr Size kSerialWork = 1 << 15;  // elements below which waking threads costs more than it saves
constexpr Size kColumnBlock = 16;      // columns of a weight gradient per thread's turn: one cache line of FP32

// Sum of term(i), i in [0, n), each given as a product a * b: `term` returns fma(a, b, accumulator).
template <class Term> inline float row_sum(Size n, Term term) {
  float partial[kPartials] = {};
  Size i = 0;
  for (; i + kPartials <= n; i += kPartials)
    for (int j = 0; j < kPartials; ++j) partial[j] = term(i + j, partial[j]);
  for (int j = 0; i + j < n; ++j) partial[j] = term(i + j, partial[j]);
  for (int half = kPartials / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) partial[j] += partial[j + half];
  return partial[0];
}

// 1 / sqrt(mean(x^2) + eps).
template <class T> inline float inverse_rms(const T* x, Size n, float eps) {
  float sum = row_sum(n, [x](Size i, float acc) { return __builtin_fmaf(to_float(x[i]), to_float(x[i]), acc); });
  return 1.0f / __builtin_sqrtf(sum / float(n) + eps);
}

template <class T> inline void norm_row(const T* x, const T* w, T* y, Size n, float eps) {
  float scale = inverse_rms(x, n, eps);
  for (Size i = 0; i < n; ++i) y[i] = from_float<T>(to_float(x[i]) * scale * to_float(w[i]));
}

template <class T> inline void add_row(const float* partial, const T* residual, T* hidden, Size n) {
  for (Size i = 0; i < n; ++i) hidden[i] = from_float<T>(to_float(residual[i]) + partial[i]);
}

// dx of y = normed * w, with normed = x * scale and scale = inverse_rms(x):
// scale * (dy * w - normed * mean(dy * w * normed)).
// dy(i) and addend(i) give FP32 values; the addend is the gradient of x used beside the norm.
template <class T, class Dy, class Addend>
inline void norm_row_backward(const T* x, const T* w, T* dx, Size n, float scale, Dy dy, Addend addend) {
  float dot = row_sum(n, [&](Size i, float acc) {
    return __builtin_fmaf(dy(i) * to_float(w[i]), to_float(x[i]) * scale, acc);
  });
  float mean = dot / float(n);
  for (Size i = 0; i < n; ++i) {
    float normed = to_float(x[i]) * scale;
    float centred = __builtin_fmaf(-normed, mean, dy(i) * to_float(w[i]));
    dx[i] = from_float<T>(__builtin_fmaf(scale, centred, addend(i)));
  }
}

// Rotates the pairs (i, i + half): (a, b) -> (a cos - b sin, b cos + a sin); `sign` -1 turns them back.
inline void rotate(const float* x, const float* cosine, const float* sine, float sign, float* y, Size half) {
  for (Size i = 0; i < half; ++i) {
    float a = x[i], b = x[i + half], s = sign * sine[i];
    y[i] = __builtin_fmaf(a, cosine[i], -(b * s));
    y[i + half] = __builtin_fmaf(b, cosine[i], a * s);
  }
}

constexpr Size kMostHeadDim = 512;

// dw[c] += sum over rows of dy(row, c) * x(row, c) * scale[row]. Rows are found by `dy` and `x`: pointers to a row.
template <class Dy, class X>
void norm_weight_gradient(Size rows, Size columns, const float* scale, Dy dy, X x, float* dw) {
#pragma omp parallel for schedule(static) if (rows * columns >= kSerialWork)
  for (Size first = 0; first < columns; first += kColumnBlock) {
    const int count = int(std::min(kColumnBlock, columns - first));
    float acc[kColumnBlock] = {};
    std::copy(dw + first, dw + first + count, acc);
    for (Size row = 0; row < rows; ++row) {
      auto* dy_row = dy(row) + first;
      auto* x_row = x(row) + first;
      for (int c = 0; c < count; ++c) {
        float normed = to_float(x_row[c]) * scale[row];
        acc[c] = __builtin_fmaf(to_float(dy_row[c]), normed, acc[c]);
      }
    }
    std::copy(acc, acc + count, dw + first);
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

}  // namespace
}  // namespace rlk

using namespace rlk;

// y = rms_norm(x) * w, x and y [rows, n]. With `partial` (FP32), x is the residual and hidden = x + partial is written
// and normalised in its place.
RLK_EXPORT int rlk_rms_norm(const float* partial, const void* x, const void* w, void* hidden, void* y, Size rows,
                            Size n, float eps, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) if (rows * n >= kSerialWork)
    for (Size row = 0; row < rows; ++row) {
      const T* input = static_cast<const T*>(x) + row * n;
      if (partial) {
        T* sum = static_cast<T*>(hidden) + row * n;
        add_row(partial + row * n, input, sum, n);
        input = sum;
      }
      norm_row(input, static_cast<const T*>(w), static_cast<T*>(y) + row * n, n, eps);
    }
    return int(kOk);
  });
}

// hidden = residual + partial over `count` elements.
RLK_EXPORT int rlk_residual_add(const float* partial, const void* residual, void* hidden, Size count, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    constexpr Size block = 4096;
#pragma omp parallel for schedule(static) if (count >= kSerialWork)
    for (Size i = 0; i < count; i += block) {
      const Size part = std::min(block, count - i);
      add_row(partial + i, static_cast<const T*>(residual) + i, static_cast<T*>(hidden) + i, part);
    }
    return int(kOk);
  });
}

// dx = gradient of x through the norm, plus dhidden (may be null); dw (FP32, may be null) += the weight's gradient.
RLK_EXPORT int rlk_rms_norm_backward(const void* dy, const void* dhidden, const void* x, const void* w, void* dx,
                                     float* dw, Size rows, Size n, float eps, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    auto* dys = static_cast<const T*>(dy);
    auto* xs = static_cast<const T*>(x);
    std::unique_ptr<float[]> scale(new float[size_t(rows)]);
#pragma omp parallel for schedule(static) if (rows * n >= kSerialWork)
    for (Size row = 0; row < rows; ++row) {
      const T *dy_row = dys + row * n, *x_row = xs + row * n, *ws = static_cast<const T*>(w);
      T* dx_row = static_cast<T*>(dx) + row * n;
      scale[row] = inverse_rms(x_row, n, eps);
      auto gradient = [dy_row](Size i) { return to_float(dy_row[i]); };
      if (dhidden) {
        const T* beside = static_cast<const T*>(dhidden) + row * n;
        norm_row_backward(x_row, ws, dx_row, n, scale[row], gradient, [beside](Size i) { return to_float(beside[i]); });
      } else {
        norm_row_backward(x_row, ws, dx_row, n, scale[row], gradient, [](Size) { return 0.0f; });
      }
    }
    if (dw)
      norm_weight_gradient(rows, n, scale.get(), [=](Size row) { return dys + row * n; },
                           [=](Size row) { return xs + row * n; }, dw);
    return int(kOk);
  });
}

// y[T, H, E] = rope(rms_norm(x) * w). Token t's heads start at x + t * x_stride; cosine and sine are [T, E/2].
RLK_EXPORT int rlk_qk_norm_rope(const void* x, const void* w, const float* cosine, const float* sine, void* y,
                                Size x_stride, Size tokens, Size heads, Size head_dim, float eps, int dtype) {
  if (head_dim % 2 || head_dim > kMostHeadDim) return kBadShape;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const Size half = head_dim / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * head_dim >= kSerialWork)
    for (Size row = 0; row < tokens * heads; ++row) {
      const Size token = row / heads;
      const T* input = static_cast<const T*>(x) + token * x_stride + row % heads * head_dim;
      const T* ws = static_cast<const T*>(w);
      T* output = static_cast<T*>(y) + row * head_dim;
      float scale = inverse_rms(input, head_dim, eps), normed[kMostHeadDim], rotated[kMostHeadDim];
      for (Size i = 0; i < head_dim; ++i) normed[i] = to_float(input[i]) * scale * to_float(ws[i]);
      rotate(normed, cosine + token * half, sine + token * half, 1.0f, rotated, half);
      for (Size i = 0; i < head_dim; ++i) output[i] = from_float<T>(rotated[i]);
    }
    return int(kOk);
  });
}

// dx[T, H, E]; dw (FP32, may be null) += the weight's gradient, rows in (token, head) order.
RLK_EXPORT int rlk_qk_norm_rope_backward(const void* dy, const void* x, const void* w, const float* cosine,
                                         const float* sine, void* dx, float* dw, Size x_stride, Size tokens,
                                         Size heads, Size head_dim, float eps, int dtype) {
  if (head_dim % 2 || head_dim > kMostHeadDim) return kBadShape;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const Size half = head_dim / 2, rows = tokens * heads;
    auto x_row = [=](Size row) {
      return static_cast<const T*>(x) + row / heads * x_stride + row % heads * head_dim;
    };
    std::unique_ptr<float[]> scale(new float[size_t(rows)]);
    std::unique_ptr<float[]> dnormed(new float[size_t(dw ? rows * head_dim : 0)]);  // dy turned back, for dw
#pragma omp parallel for schedule(static) if (rows * head_dim >= kSerialWork)
    for (Size row = 0; row < rows; ++row) {
      const Size angle = row / heads * half;
      const T* dy_row = static_cast<const T*>(dy) + row * head_dim;
      float upstream[kMostHeadDim], local[kMostHeadDim];
      float* back = dw ? dnormed.get() + row * head_dim : local;
      for (Size i = 0; i < head_dim; ++i) upstream[i] = to_float(dy_row[i]);
      rotate(upstream, cosine + angle, sine + angle, -1.0f, back, half);
      scale[row] = inverse_rms(x_row(row), head_dim, eps);
      T* dx_row = static_cast<T*>(dx) + row * head_dim;
      norm_row_backward(x_row(row), static_cast<const T*>(w), dx_row, head_dim, scale[row],
                        [back](Size i) { return back[i]; }, [](Size) { return 0.0f; });
    }
    if (dw)
      norm_weight_gradient(rows, head_dim, scale.get(), [&](Size row) { return dnormed.get() + row * head_dim; }, x_row,
                           dw);
    return int(kOk);
  });
}

// y[rows, n] = gate * sigmoid(gate) * up, with gate and up the halves of a row of gate_up[rows, 2n].
RLK_EXPORT int rlk_swiglu(const void* gate_up, void* y, Size rows, Size n, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) if (rows * n >= kSerialWork / 4)
    for (Size row = 0; row < rows; ++row) {
      const T *gate = static_cast<const T*>(gate_up) + row * 2 * n, *up = gate + n;
      T* out = static_cast<T*>(y) + row * n;
      for (Size i = 0; i < n; ++i) {
        float g = to_float(gate[i]);
        out[i] = from_float<T>(g * sigmoid(g) * to_float(up[i]));
      }
    }
    return int(kOk);
  });
}

// dgate = dy up s (1 + gate (1 - s)) and dup = dy gate s, with s = sigmoid(gate).
RLK_EXPORT int rlk_swiglu_backward(const void* dy, const void* gate_up, void* dgate_up, Size rows, Size n, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) if (rows * n >= kSerialWork / 4)
    for (Size row = 0; row < rows; ++row) {
      const T *gate = static_cast<const T*>(gate_up) + row * 2 * n, *up = gate + n;
      const T* upstream = static_cast<const T*>(dy) + row * n;
      T *dgate = static_cast<T*>(dgate_up) + row * 2 * n, *dup = dgate + n;
      for (Size i = 0; i < n; ++i) {
        float g = to_float(gate[i]), s = sigmoid(g), d = to_float(upstream[i]);
        dgate[i] = from_float<T>(d * to_float(up[i]) * s * __builtin_fmaf(g, 1.0f - s, 1.0f));
        dup[i] = from_float<T>(d * g * s);
      }
    }
    return int(kOk);
  });
}

// x[tokens, n] = row (token - first_row) of w[vocabulary, n], plus +0.0; zeros where w does not hold the token.
RLK_EXPORT int rlk_embedding(const Size* ids, const void* w, void* x, Size tokens, Size first_row, Size vocabulary,
                             Size n, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) if (tokens * n >= kSerialWork)
    for (Size t = 0; t < tokens; ++t) {
      T* out = static_cast<T*>(x) + t * n;
      const Size row = ids[t] - first_row;
      if (row < 0 || row >= vocabulary) {
        std::fill(out, out + n, T(0));
        continue;
      }
      const T* in = static_cast<const T*>(w) + row * n;
      for (Size i = 0; i < n; ++i) out[i] = from_float<T>(to_float(in[i]) + 0.0f);
    }
    return int(kOk);
  });
}

// dw[token - first_row] += dx[t], tokens ascending; dw in FP32.
RLK_EXPORT int rlk_embedding_backward(const void* dx, const Size* ids, float* dw, Size tokens, Size first_row,
                                      Size vocabulary, Size n, int dtype) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static) if (tokens * n >= kSerialWork)
    for (Size first = 0; first < n; first += kColumnBlock * 4) {
      const Size end = std::min(first + kColumnBlock * 4, n);
      for (Size t = 0; t < tokens; ++t) {
        const Size row = ids[t] - first_row;
        if (row < 0 || row >= vocabulary) continue;
        for (Size i = first; i < end; ++i) dw[row * n + i] += to_float(static_cast<const T*>(dx)[t * n + i]);
      }
    }
    return int(kOk);
  });
}
