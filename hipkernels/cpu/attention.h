// Causal attention on the CPU: what the forward (attention.cpp) and the backward (attention_backward.cpp) share.
//
// DATA LAYOUT. q [T, H, E], k and v [U, G, E] or pages [P, S, G, E]; rows may be strided, a row's heads are contiguous.
// E is a multiple of 16 up to 128. The H/G query heads of one kv head are worked on together: a query VECTOR is one
// (row, head), and vectors are ordered by row, then head, so that their positions ascend. A block of 64 keys is copied
// to FP32 once for all vectors: K transposed [E, 64], V [64, E]; the copy is the only code that knows where keys lie.
//
// REDUCTION ORDER (forward), for one vector at absolute position p:
//   logit   t_j = (sum over e of q_e k_je) * scale; one FP32 accumulator, FMA, e ascending; scale = log2(e) / sqrt(E)
//           rounded once to FP32, so that softmax is taken in base 2
//   block   64 keys at absolute positions; only keys j <= p take part, and a block without such keys changes nothing
//   chunk   512 keys at absolute positions: an online softmax from the empty state, blocks ascending:
//             m' = max(m, max t_j);  (o, l) *= exp2(m - m');  p_j = exp2(t_j - m') rounded to the activation dtype
//             o_e = fma(p_j, v_je, o_e) and l = l + p_j, j ascending
//   merge   the first chunk's state is copied; chunk c then joins, ascending:
//             m' = max(m, m_c);  o = fma(o_c, exp2(m_c - m'), o * exp2(m - m')), l likewise
//   result  o / l, rounded once to the activation dtype
// Vector lanes run across keys (logits) or across E (outputs), never along a sum. Threads share out (segment, slice of
// its rows, kv heads); no sum crosses such a task. So a row's bits depend on its q and its keys alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/common.h"
#include "cpu/simd.h"

namespace rlk {

constexpr int kBlock = 64, kChunk = 512;  // ATTENTION_BLOCK and ATTENTION_CHUNK in rlk/contract.py
constexpr int kMaxHeadDim = 128;
constexpr int kUnit = 16;  // columns that register tiles come in, whatever the host's vector width
constexpr double kLog2E = 1.44269504088896340736;

struct Segment { int32_t row_start, row_count, position_start, source; };

inline bool good_heads(int H, int G, int E) {
  return G > 0 && H > 0 && H % G == 0 && E > 0 && E % kUnit == 0 && E <= kMaxHeadDim;
}

// The segment's rows lie within q's T rows, and its source is one of `sources`.
inline bool good_rows(const Segment& s, long T, long sources) {
  return s.row_start >= 0 && s.row_count > 0 && s.row_start + long(s.row_count) <= T && s.position_start >= 0 &&
         s.source >= 0 && s.source < sources;
}

inline bool good_tables(const Segment* segments, int n, long T, long U, const int32_t* starts, int sources) {
  return std::all_of(segments, segments + n, [&](const Segment& s) {
    return good_rows(s, T, sources) && starts[s.source] >= 0 &&
           starts[s.source] + long(s.position_start) + s.row_count <= U;
  });
}

// ---- where keys lie: rows() gives the rows of the keys (and values) at `count` positions of `source` from `first`

struct PackedKeys {
  const int32_t* starts;
  void rows(int source, int first, int count, long* row) const {
    for (int j = 0; j < count; j++) row[j] = long(starts[source]) + first + j;
  }
};

struct PagedKeys {
  const int32_t* block_table;
  long max_pages;
  int page_size;
  void rows(int source, int first, int count, long* row) const {
    const int32_t* page = block_table + source * max_pages + first / page_size;
    int slot = first % page_size;
    for (int j = 0; j < count; j++, slot++) {
      if (slot == page_size) page++, slot = 0;
      row[j] = long(*page) * page_size + slot;
    }
  }
};

// Rows of heads, `stride` elements apart.
template <class T> struct Rows {
  const T* base;
  long stride;
  const T* at(long row, long head, int E) const { return base + row * stride + head * E; }
};

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// ---- copies to FP32

// Heads of rows are spread over memory: ask for the `n` elements from p before they are waited for one by one.
template <class T> inline void prefetch(const T* p, long n) {
  auto line = reinterpret_cast<const char*>(p);
  for (size_t byte = 0; byte < n * sizeof(T); byte += 64) __builtin_prefetch(line + byte);
}

// n is a multiple of 16.
template <class T> inline void copy_row(const T* __restrict from, int n, float* __restrict to) {
  for (int i = 0; i < n; i += kUnit)
    for (int x = 0; x < kUnit; x++) to[i + x] = to_float(from[i + x]);
}

// to[e * kBlock + i] = rows[i][e] for 8 rows.
template <class T> inline void transpose_rows(const T* const (&rows)[8], int E, float* to) {
#ifdef RLK_HAS_TRANSPOSE
  for (int e = 0; e < E; e += 4) {
    __m256 columns[4];
    transpose_8x4(rows, e, columns);
    for (int i = 0; i < 4; i++) _mm256_storeu_ps(to + (e + i) * kBlock, columns[i]);
  }
#else
  for (int e = 0; e < E; e++)
    for (int i = 0; i < 8; i++) to[e * kBlock + i] = to_float(rows[i][e]);
#endif
}

// Head `head` of `count` rows of one block, transposed: to[e * kBlock + j]; columns up to a multiple of 16 are zeros.
template <class T>
inline void pack_transposed(Rows<T> x, const long* row, int count, int head, int E, float* to) {
  static const T zeros[kMaxHeadDim] = {};
  for (int j = 0; j < round_up(count, kUnit); j += 8) {
    const T* rows[8];
    for (int i = 0; i < 8; i++) rows[i] = j + i < count ? x.at(row[j + i], head, E) : zeros;
    transpose_rows(rows, E, to + j);
  }
}

template <class T> inline void pack_rows(Rows<T> x, const long* row, int count, int head, int E, float* to) {
  for (int j = 0; j < count; j++) copy_row(x.at(row[j], head, E), E, to + j * E);
}

// A buffer of this thread's that only grows, so that a call costs no allocation.
inline float* grown(std::vector<float>& buffer, size_t n) {
  if (buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

// ---- products, in register tiles

// C[r][x] (+)= sum over i of A[r * a_row + i * a_step] * B[i * b_row + x], for MR rows and 16 * NU columns: one FP32
// accumulator per element, i ascending, lanes across columns. With kSum, also sum[r] += A[r, i] in the same order.
template <int MR, int NU, bool kSum>
inline void multiply_tile(const float* a, long a_row, long a_step, const float* b, long b_row, int count, float* c,
                          long c_row, bool accumulate, float* sum) {
  constexpr int NV = NU * kUnit / kLanes;
  Vec acc[MR][NV];
  float total[MR];
  for (int r = 0; r < MR; r++) {
    if (kSum) total[r] = sum[r];
    for (int w = 0; w < NV; w++) acc[r][w] = accumulate ? load(c + r * c_row + w * kLanes) : broadcast(0.0f);
  }
  for (int i = 0; i < count; i++, a += a_step, b += b_row) {
    Vec columns[NV];
    for (int w = 0; w < NV; w++) columns[w] = load(b + w * kLanes);
    for (int r = 0; r < MR; r++) {
      float value = a[r * a_row];
      if (kSum) total[r] = total[r] + value;
      for (int w = 0; w < NV; w++) acc[r][w] = fma(broadcast(value), columns[w], acc[r][w]);
    }
  }
  for (int r = 0; r < MR; r++) {
    if (kSum) sum[r] = total[r];
    for (int w = 0; w < NV; w++) store(c + r * c_row + w * kLanes, acc[r][w]);
  }
}

// multiply_tile over `width` columns, a multiple of 16. Few rows take more columns at once, to fill the FMA pipeline.
template <int MR, bool kSum = false>
inline void multiply_rows(const float* a, long a_row, long a_step, const float* b, long b_row, int count, float* c,
                          long c_row, int width, bool accumulate, float* sum = nullptr) {
  constexpr int NU = MR == 1 ? 4 : MR == 2 ? 2 : 1;
  int x = 0;
  auto step = [&](auto tile, int columns) {
    tile(a, a_row, a_step, b + x, b_row, count, c + x, c_row, accumulate, sum);
    x += columns;
  };
  if (kSum) {
    if (width >= NU * kUnit) step(multiply_tile<MR, NU, true>, NU * kUnit);
    else step(multiply_tile<MR, 1, true>, kUnit);
  }
  while (width - x >= NU * kUnit) step(multiply_tile<MR, NU, false>, NU * kUnit);
  while (x < width) step(multiply_tile<MR, 1, false>, kUnit);
}

// Calls fn with an integral constant equal to min(rows, 4): the register tiles have 1 to 4 rows.
template <class Fn> inline void with_tile_rows(int rows, Fn fn) {
  if (rows >= 4) fn(std::integral_constant<int, 4>{});
  else if (rows == 3) fn(std::integral_constant<int, 3>{});
  else if (rows == 2) fn(std::integral_constant<int, 2>{});
  else fn(std::integral_constant<int, 1>{});
}

inline float logit_scale(int E) { return float(kLog2E / std::sqrt(double(E))); }

}  // namespace rlk
