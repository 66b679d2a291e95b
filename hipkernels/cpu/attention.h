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
// Vector lanes run across keys (logits) or across E (outputs), never along a sum. Threads share out (segment, kv head,
// slice of its rows); no sum crosses a slice. So a row's bits depend on its q and its keys alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/common.h"
#include "cpu/lanes.h"

namespace rlk {

constexpr int kBlock = 64, kChunk = 512;  // ATTENTION_BLOCK and ATTENTION_CHUNK in rlk/contract.py
constexpr int kMaxHeadDim = 128;
constexpr double kLog2E = 1.44269504088896340736;

struct Segment { int32_t row_start, row_count, position_start, source; };

inline bool good_heads(int H, int G, int E) {
  return G > 0 && H > 0 && H % G == 0 && E > 0 && E % kLanes == 0 && E <= kMaxHeadDim;
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

// ---- where keys lie: row(source, j) is the row of the key and value at position j of `source`

struct PackedKeys {
  const int32_t* starts;
  long row(int source, int j) const { return long(starts[source]) + j; }
};

struct PagedKeys {
  const int32_t* block_table;
  long max_pages;
  int page_size;
  long row(int source, int j) const {
    return block_table[source * max_pages + j / page_size] * long(page_size) + j % page_size;
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

typedef float Float8 __attribute__((vector_size(32)));
typedef uint32_t Uint8 __attribute__((vector_size(32)));
typedef uint16_t Short8 __attribute__((vector_size(16)));

inline Float8 load8(const float* p) { Float8 r; std::memcpy(&r, p, sizeof r); return r; }
inline Float8 load8(const bf16* p) {
  Short8 half;
  std::memcpy(&half, p, sizeof half);
  return (Float8)(__builtin_convertvector(half, Uint8) << 16);
}

template <class T> inline void copy_row(const T* from, int n, float* to) {
  for (int i = 0; i < n; i++) to[i] = to_float(from[i]);
}

// to[e * kBlock + j] = rows[j][e] for 8 rows: an 8 x 8 transpose in registers per step.
template <class T> inline void transpose8(const T* const rows[8], int E, float* to) {
  for (int e = 0; e < E; e += 8) {
    Float8 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load8(rows[i] + e);
    for (int i = 0; i < 8; i += 2) {  // pairs of rows
      b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
      b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
      for (int k = 0; k < 2; k++) {  // quadruples
        a[i + k] = __builtin_shufflevector(b[i + k], b[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + k + 2] = __builtin_shufflevector(b[i + k], b[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
    for (int k = 0; k < 4; k++) {
      b[k] = __builtin_shufflevector(a[k], a[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      b[k + 4] = __builtin_shufflevector(a[k], a[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int k = 0; k < 8; k++) std::memcpy(to + (e + k) * kBlock, &b[k], sizeof b[k]);
  }
}

// `count` keys of one block, transposed: to[e * kBlock + j]; the columns up to the next multiple of 16 are zeros.
template <class T, class RowOf> inline void pack_transposed(RowOf row_of, int count, int E, float* to) {
  static const T zeros[kMaxHeadDim] = {};
  for (int j = 0; j < round_up(count, kLanes); j += 8) {
    const T* rows[8];
    for (int i = 0; i < 8; i++) rows[i] = j + i < count ? row_of(j + i) : zeros;
    transpose8(rows, E, to + j);
  }
}

template <class T, class RowOf> inline void pack_rows(RowOf row_of, int count, int E, float* to) {
  for (int j = 0; j < count; j++) copy_row(row_of(j), E, to + j * E);
}

// A buffer of this thread's that only grows, so that a call costs no allocation.
inline float* grown(std::vector<float>& buffer, size_t n) {
  if (buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

inline float logit_scale(int E) { return float(kLog2E / std::sqrt(double(E))); }

}  // namespace rlk
