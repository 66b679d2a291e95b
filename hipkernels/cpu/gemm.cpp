// Matrix products: y = x w^T, dx = dy w, dw += dy^T x. Operands FP32 or BF16, row-major.
//
// REDUCTION ORDER: one FP32 accumulator per output element, starting at +0.0 (dw: at the gradient so far), one fused
// multiply-add per depth index, ascending; one rounding at the end. Where the depth is cut into blocks, the accumulator
// rests in FP32 memory, which changes nothing. BF16 operands are widened first, which is exact.
//
// DATA LAYOUT: every product is C[row, col] = sum_d S(row, d) * V(d, col). The micro-kernel keeps a tile of
// kTileRows x kTileCols accumulators in registers; at each d it loads kTileCols packed values of V (the vector
// lanes) and multiplies them by one broadcast value of S per row.
//   V is packed once per call into panels [d][kTileCols], zero-padded; a last panel of at most half that many columns
//   has half the width.
//   S is read in place when it is FP32 with contiguous d; else each thread packs its block of rows, as [row][d]
//   (widened BF16) or in panels [d][kTileRows] (the dy of dw).
// Which operand plays S is free, since the sum is the same chain either way: few rows of x against a large w take w as
// S, so that w is never repacked. Four rows or fewer take matrix-vector code, which transposes w in registers.
//
// THREADS share the packing of V, then own disjoint blocks of rows of C.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "cpu/common.h"
#include "cpu/simd.h"

namespace rlk {
namespace {

using Size = int64_t;

constexpr int kTileVecs = kLanes == 4 ? 4 : 2;
constexpr int kTileCols = kTileVecs * kLanes;
constexpr int kTileRows = kLanes == 16 ? 8 : 6;  // as many as leave a register for each row's address
constexpr int kNarrowRows = 12;  // a half-width tile needs more rows to hide the latency of the FMA
constexpr int kMostRows = std::max(kTileRows, kNarrowRows);
constexpr Size kDepthBlock = 256;        // a panel of V then fits the first-level cache, a block of S the second
constexpr Size kRowBlock = 192;          // rows of S that a thread multiplies with one panel while it is near
constexpr Size kPanelFloats = 1 << 20;   // most of V that is packed at a time: 4 MiB
constexpr Size kTokenChunk = 1024;       // tokens of dw's sum at a time, so that both packed operands stay in cache
constexpr Size kPrefetchDepths = 32;     // strided reads are beyond the hardware's prefetching
constexpr Size kSerialWork = 1 << 17;    // multiply-adds below which waking threads costs more than it saves

Size ceil_div(Size a, Size b) { return (a + b - 1) / b; }
Size round_up(Size a, Size b) { return ceil_div(a, b) * b; }

// Memory that grows and stays: a fresh allocation of megabytes would pay for its page faults at every call.
class Workspace {
 public:
  float* floats(Size count) {
    if (count > size_) {
      data_.reset(static_cast<float*>(operator new(size_t(count) * sizeof(float), std::align_val_t(64))));
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free { void operator()(float* p) const { operator delete(p, std::align_val_t(64)); } };
  std::unique_ptr<float, Free> data_;
  Size size_ = 0;
};
thread_local Workspace panels_space, rows_space, tiles_space, leaves_space;

// The operand whose values are broadcast. S(row, d) = data[row * row_stride + d * depth_stride]; one stride is 1.
template <class T> struct Broadcast { const T* data; Size row_stride, depth_stride; };

// The operand in the lanes. V(d, col) = data[col * col_stride + d * depth_stride]; one stride is 1.
template <class T> struct Lanes { const T* data; Size col_stride, depth_stride; };

// Where C goes: C(row, col) = data[row * row_stride + col * col_stride]. `accumulate`: start from what is there.
template <class T> struct Output { T* data; Size row_stride, col_stride; bool accumulate; };

// tile(r, c) += sum over d of S(r, d) * V(d, c); a fresh tile starts at +0.0. Rows of the tile lie `tile_stride` apart.
// S is [row][d] with `s_stride` between rows, or a panel [d][kTileRows].
template <int kRows, int kVecs, bool kPanel>
void multiply_tile(Size depth, const float* s, Size s_stride, const float* v, float* tile, Size tile_stride,
                   bool fresh) {
  Vec acc[kRows][kVecs];
  const float* row[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    row[r] = s + r * s_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc[r][j] = fresh ? broadcast(0.0f) : load(tile + r * tile_stride + j * kLanes);
  }
  for (Size d = 0; d < depth; ++d) {
    Vec lanes[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) lanes[j] = load(v + (d * kVecs + j) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Vec value = broadcast(kPanel ? s[d * kTileRows + r] : row[r][d]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[r][j] = fma(value, lanes[j], acc[r][j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) store(tile + r * tile_stride + j * kLanes, acc[r][j]);
}

using TileFunction = void (*)(Size, const float*, Size, const float*, float*, Size, bool);

// The micro-kernel for 1..sizeof...(R) rows.
template <int kVecs, bool kPanel, size_t... R>
TileFunction tile_function(int rows, std::index_sequence<R...>) {
  static constexpr TileFunction table[] = {multiply_tile<int(R) + 1, kVecs, kPanel>...};
  return table[rows - 1];
}

template <bool kPanel> TileFunction tile_function(int rows, bool narrow) {
  constexpr int kMost = kPanel ? kTileRows : kNarrowRows;
  if (narrow) return tile_function<kTileVecs / 2, kPanel>(rows, std::make_index_sequence<kMost>());
  return tile_function<kTileVecs, kPanel>(rows, std::make_index_sequence<kTileRows>());
}

// Packs V's columns [col, col + cols) into one panel [d][width], zeros beyond `cols`.
template <class T>
void pack_panel(const Lanes<T>& v, Size col, Size cols, Size width, Size depth, float* panel) {
  const T* data = v.data + col * v.col_stride;
  Size c = 0;
#ifdef RLK_HAS_TRANSPOSE
  if (v.depth_stride == 1)
    for (; c + 8 <= cols; c += 8) {
      const T* row[8];
      for (int i = 0; i < 8; ++i) row[i] = data + (c + i) * v.col_stride;
      Size d = 0;
      for (; d + 4 <= depth; d += 4) {
        __m256 block[4];
        transpose_8x4(row, d, block);
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(panel + (d + i) * width + c, block[i]);
      }
      for (; d < depth; ++d)
        for (int i = 0; i < 8; ++i) panel[d * width + c + i] = to_float(row[i][d]);
    }
#endif
  for (; c < width; ++c)
    for (Size d = 0; d < depth; ++d)
      panel[d * width + c] = c < cols ? to_float(data[c * v.col_stride + d * v.depth_stride]) : 0.0f;
}

// Packs V's columns [col, col + cols) into consecutive panels.
template <class T> void pack_panels(const Lanes<T>& v, Size col, Size cols, Size depth, float* panels) {
  Size c = 0;
  if (v.col_stride == 1) {  // whole panels side by side: each row of V is read once, in long pieces
    const Size whole = cols - cols % kTileCols;
    for (Size d = 0; d < depth; ++d) {
      const T* __restrict source = v.data + col + d * v.depth_stride;
      float* __restrict target = panels + d * kTileCols;
      for (c = 0; c < whole; c += kTileCols)
        for (int i = 0; i < kTileCols; ++i) target[c * depth + i] = to_float(source[c + i]);
    }
    c = whole;
  }
  for (; c < cols; c += kTileCols) {
    const Size count = std::min<Size>(kTileCols, cols - c);
    pack_panel(v, col + c, count, count <= kTileCols / 2 ? kTileCols / 2 : kTileCols, depth, panels + c * depth);
  }
}

// Floats from one panel [d][kTileRows] of S to the next. The padding keeps panels of 2^n depths out of one cache set.
Size panel_stride(Size depth) { return kTileRows * depth + 16; }

// Packs S's rows [row, row + rows) and depths [from, from + depth): in panels where rows are contiguous, else widened
// as [row][d].
template <class T>
void pack_rows(const Broadcast<T>& s, Size row, Size rows, Size from, Size depth, float* out) {
  const T* data = s.data + row * s.row_stride + from * s.depth_stride;
  if (s.depth_stride == 1) {
    for (Size r = 0; r < rows; ++r)
      for (Size d = 0; d < depth; ++d) out[r * depth + d] = to_float(data[r * s.row_stride + d]);
    return;
  }
  for (Size d = 0; d < depth; ++d) {
    const T* __restrict source = data + d * s.depth_stride;
    float* __restrict target = out + d * kTileRows;
    const T* ahead = source + kPrefetchDepths * s.depth_stride;
    for (Size i = 0; i < rows; i += Size(64 / sizeof(T))) __builtin_prefetch(ahead + i);
    Size r = 0;
    for (; r + kTileRows <= rows; r += kTileRows, target += panel_stride(depth))
      for (int i = 0; i < kTileRows; ++i) target[i] = to_float(source[r + i]);
    for (int i = 0; r + i < rows; ++i) target[i] = to_float(source[r + i]);
  }
}

// Tiles [row][width] that do not live in C itself are copied from and to it.
template <class T>
void read_tile(const Output<T>& out, Size row, Size rows, Size col, Size cols, Size width, float* tile) {
  for (Size r = 0; r < rows; ++r)
    for (Size c = 0; c < cols; ++c)
      tile[r * width + c] = to_float(out.data[(row + r) * out.row_stride + (col + c) * out.col_stride]);
}

template <class T>
void write_tile(const Output<T>& out, Size row, Size rows, Size col, Size cols, Size width, const float* tile) {
  if (out.col_stride == 1) {
    for (Size r = 0; r < rows; ++r) {
      T* target = out.data + (row + r) * out.row_stride + col;
      for (Size c = 0; c < cols; ++c) target[c] = from_float<T>(tile[r * width + c]);
    }
    return;
  }
  for (Size c = 0; c < cols; ++c) {
    T* target = out.data + (col + c) * out.col_stride + row;
    for (Size r = 0; r < rows; ++r) target[r] = from_float<T>(tile[r * width + c]);
  }
}

// C's rows [row, row + rows) and columns [col, col + cols), whose panels of V are packed at `panels`.
template <class S, class O>
void multiply_block(const Broadcast<S>& s, const Output<O>& out, Size row, Size rows, Size col, Size cols, Size depth,
                    const float* panels) {
  const bool by_panel = s.depth_stride != 1;
  const bool in_place = !by_panel && std::is_same_v<S, float>;
  const bool direct = out.col_stride == 1 && std::is_same_v<O, float>;  // whole tiles live in C itself
  const Size held_rows = round_up(rows, kMostRows);
  // The other tiles of a deep product are held in memory between depth blocks.
  float* held = depth > kDepthBlock ? tiles_space.floats(held_rows * round_up(cols, kTileCols)) : nullptr;
  alignas(64) float local[kMostRows * kTileCols];
  for (Size from = 0; from == 0 || from < depth; from += kDepthBlock) {
    const Size part = std::min(kDepthBlock, depth - from);
    const bool first = from == 0, last = from + part == depth;
    float* packed = nullptr;
    if (!in_place) {
      packed = rows_space.floats(ceil_div(rows, kTileRows) * panel_stride(kDepthBlock));
      pack_rows(s, row, rows, from, part, packed);
    }
    for (Size c = 0; c < cols; c += kTileCols) {
      const Size count = std::min<Size>(kTileCols, cols - c);
      const bool narrow = count <= kTileCols / 2;
      const Size width = narrow ? kTileCols / 2 : kTileCols;
      const Size step = narrow && !by_panel ? kNarrowRows : kTileRows;
      const float* panel = panels + c * depth + from * width;
      for (Size r = 0; r < rows; r += step) {
        const int height = int(std::min(step, rows - r));
        const bool in_c = direct && count == width;
        float* tile = held ? held + c * held_rows + r * width : local;
        Size tile_stride = width;
        if (in_c) {
          tile = reinterpret_cast<float*>(out.data) + (row + r) * out.row_stride + col + c;
          tile_stride = out.row_stride;
        } else if (first && out.accumulate) {
          read_tile(out, row + r, height, col + c, count, width, tile);
        }
        const bool fresh = first && !out.accumulate;
        if (by_panel) {
          const float* s_panel = packed + r / kTileRows * panel_stride(part);
          tile_function<true>(height, narrow)(part, s_panel, 0, panel, tile, tile_stride, fresh);
        } else {
          const Size s_stride = in_place ? s.row_stride : part;
          const float* s_rows =
              in_place ? reinterpret_cast<const float*>(s.data) + (row + r) * s_stride + from : packed + r * part;
          tile_function<false>(height, narrow)(part, s_rows, s_stride, panel, tile, tile_stride, fresh);
        }
        if (last && !in_c) write_tile(out, row + r, height, col + c, count, width, tile);
      }
    }
  }
}

// The whole product: the threads pack V together, then each multiplies its blocks of rows.
template <class S, class V, class O>
void multiply(const Broadcast<S>& s, const Lanes<V>& v, const Output<O>& out, Size rows, Size cols, Size depth) {
  if (rows == 0 || cols == 0) return;
  const int threads = rows * cols * depth < kSerialWork ? 1 : omp_get_max_threads();
  const Size cols_at_a_time = std::max<Size>(kPanelFloats / std::max<Size>(depth, 1) / kTileCols, 1) * kTileCols;
  const Size row_blocks = ceil_div(ceil_div(rows, threads), kRowBlock) * threads;
  const Size block = round_up(ceil_div(rows, row_blocks), kTileRows);
  const Size pack_cols = v.col_stride == 1 ? 4 * kTileCols : kTileCols;
  float* panels = panels_space.floats(std::min(round_up(cols, kTileCols), cols_at_a_time) * depth);
#pragma omp parallel num_threads(threads)
  for (Size col = 0; col < cols; col += cols_at_a_time) {
    const Size part = std::min(cols_at_a_time, cols - col);
#pragma omp for schedule(static)
    for (Size c = 0; c < part; c += pack_cols)
      pack_panels(v, col + c, std::min(pack_cols, part - c), depth, panels + c * depth);
#pragma omp for schedule(static)
    for (Size row = 0; row < rows; row += block)
      multiply_block(s, out, row, std::min(block, rows - row), col, part, depth, panels);
  }
}

#ifdef RLK_HAS_TRANSPOSE

constexpr Size kVectorRows = 4;  // rows of x up to which transposing w in registers beats idle lanes
constexpr int kBlocks = 2;       // blocks of 8 rows of w at a time: more would outrun the hardware's prefetching

// y[m][n .. n + 8 * kBlocks) for kM rows of x: lanes over n. Rows of w beyond `last` repeat it and are not stored.
template <int kM, class T, class O>
void vector_block(const T* x, const T* w, O* y, Size n, Size last, Size depth, Size x_stride, Size w_stride,
                  Size y_stride) {
  __m256 acc[kM][kBlocks];
  const T* row[kBlocks][8];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) acc[m][b] = _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) row[b][i] = w + std::min(n + b * 8 + i, last) * w_stride;
  }
  Size d = 0;
  for (; d + 4 <= depth; d += 4) {
    if (d % 16 == 0) {  // a cache line of each of the next rows
      const T* next = w + (n + 8 * kBlocks) * w_stride + d;
      for (int i = 0; i < 8 * kBlocks; ++i) __builtin_prefetch(next + i * w_stride);
    }
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      __m256 block[4];
      transpose_8x4(row[b], d, block);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m)
          acc[m][b] = _mm256_fmadd_ps(_mm256_set1_ps(to_float(x[m * x_stride + d + i])), block[i], acc[m][b]);
    }
  }
  for (; d < depth; ++d)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      float lanes[8];
      for (int i = 0; i < 8; ++i) lanes[i] = to_float(row[b][i][d]);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m)
        acc[m][b] = _mm256_fmadd_ps(_mm256_set1_ps(to_float(x[m * x_stride + d])), _mm256_loadu_ps(lanes), acc[m][b]);
    }
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      float lanes[8];
      _mm256_storeu_ps(lanes, acc[m][b]);
      for (Size i = 0; i < std::min<Size>(8, last + 1 - n - b * 8); ++i)
        y[m * y_stride + n + b * 8 + i] = from_float<O>(lanes[i]);
    }
}

template <int kM, class T, class O>
void multiply_vectors(const T* x, const T* w, O* y, Size N, Size depth, Size x_stride, Size w_stride,
                      Size y_stride) {
#pragma omp parallel for schedule(static) if (kM * N * depth >= kSerialWork)
  for (Size n = 0; n < N; n += 8 * kBlocks)
    vector_block<kM>(x, w, y, n, N - 1, depth, x_stride, w_stride, y_stride);
}

#endif

// y[M, N] = x[M, depth] w[N, depth]^T, with strides between rows.
template <class T, class O>
void linear(const T* x, const T* w, O* y, Size M, Size N, Size depth, Size x_stride, Size w_stride,
            Size y_stride) {
#ifdef RLK_HAS_TRANSPOSE
  switch (M) {
    case 1: return multiply_vectors<1>(x, w, y, N, depth, x_stride, w_stride, y_stride);
    case 2: return multiply_vectors<2>(x, w, y, N, depth, x_stride, w_stride, y_stride);
    case 3: return multiply_vectors<3>(x, w, y, N, depth, x_stride, w_stride, y_stride);
    case kVectorRows: return multiply_vectors<4>(x, w, y, N, depth, x_stride, w_stride, y_stride);
  }
#endif
  constexpr Size kFewRows = 128;  // below, repacking w would cost more than transposing the output
  if (M <= kFewRows)
    multiply(Broadcast<T>{w, w_stride, 1}, Lanes<T>{x, x_stride, 1}, Output<O>{y, 1, y_stride, false}, N, M, depth);
  else
    multiply(Broadcast<T>{x, x_stride, 1}, Lanes<T>{w, w_stride, 1}, Output<O>{y, y_stride, 1, false}, M, N, depth);
}

// parts[0] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ..., each `count` floats after the other.
void tree_sum(float* parts, Size leaves, Size count, float* out) {
#pragma omp parallel for schedule(static) if (leaves * count >= kSerialWork)
  for (Size block = 0; block < count; block += 1024) {
    const Size end = std::min(block + 1024, count);
    for (Size step = 1; step < leaves; step *= 2)
      for (Size leaf = 0; leaf < leaves; leaf += 2 * step)
        for (Size i = block; i < end; ++i) parts[leaf * count + i] += parts[(leaf + step) * count + i];
    for (Size i = block; i < end; ++i) out[i] = parts[i];
  }
}

}  // namespace
}  // namespace rlk

using rlk::Size;

// y[M, N] = x[M, K] w[N, K]^T; with leaves > 1 (y in FP32) as a tree sum over equal parts of K.
RLK_EXPORT int rlk_linear(const void* x, const void* w, void* y, Size M, Size N, Size K, Size leaves, int dtype,
                          int out_dtype) {
  using namespace rlk;
  if (leaves < 1 || K % leaves || (leaves > 1 && out_dtype != kFloat32)) return kBadShape;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    auto* xs = static_cast<const T*>(x);
    auto* ws = static_cast<const T*>(w);
    if (leaves == 1)
      return with_dtype(out_dtype, [&](auto out_type) {
        linear(xs, ws, static_cast<decltype(out_type)*>(y), M, N, K, K, K, N);
        return int(kOk);
      });
    const Size part = K / leaves;
    float* parts = leaves_space.floats(leaves * M * N);
    for (Size leaf = 0; leaf < leaves; ++leaf)
      linear(xs + leaf * part, ws + leaf * part, parts + leaf * M * N, M, N, part, K, K, N);
    tree_sum(parts, leaves, M * N, static_cast<float*>(y));
    return int(kOk);
  });
}

// dx[M, K] = dy[M, N] w[N, K].
RLK_EXPORT int rlk_gemm_dx(const void* dy, const void* w, void* dx, Size M, Size N, Size K, int dtype) {
  using namespace rlk;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    multiply(Broadcast<T>{static_cast<const T*>(dy), N, 1}, Lanes<T>{static_cast<const T*>(w), 1, K},
             Output<T>{static_cast<T*>(dx), K, 1, false}, M, K, N);
    return int(kOk);
  });
}

// dw[N, K] += dy[M, N]^T x[M, K], dw in FP32.
RLK_EXPORT int rlk_gemm_dw(const void* dy, const void* x, float* dw, Size M, Size N, Size K, int dtype) {
  using namespace rlk;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    for (Size m = 0; m < M; m += kTokenChunk)
      multiply(Broadcast<T>{static_cast<const T*>(dy) + m * N, 1, N}, Lanes<T>{static_cast<const T*>(x) + m * K, 1, K},
               Output<float>{dw, K, 1, true}, N, K, std::min(kTokenChunk, M - m));
    return int(kOk);
  });
}
