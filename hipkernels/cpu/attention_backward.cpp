// Attention backward over packed keys. Data layout and the forward's order: attention.h.
//
// GRADIENTS, in FP32, for vector i (one query row and head) and key j it sees; t_ij as in the forward:
//   p_ij = exp2(t_ij - lse_i)    (not rounded to the activation dtype)
//   delta_i = sum over e of do_ie * o_ie          16 partial sums (element e goes to e % 16), combined 8, 4, 2, 1
//   ds_ij = p_ij * (sum over e of do_ie v_je - delta_i)                     e ascending
//   dv_je = sum over i of p_ij do_ie;  dk_je = (sum over i of ds_ij q_ie) / sqrt(E)      i ascending
//   dq_ie = (sum over j of ds_ij k_je) / sqrt(E)                                         j ascending
// Vectors of a source ascend by segment, row and head; pairs that a vector does not see count as zeros within a tile
// of 32 vectors x 64 keys, and tiles without a visible pair are skipped. Threads share out (source, kv head): each sum
// is one thread's, and a gradient depends on the rows of its own source alone.
#include "cpu/attention.h"

namespace rlk {
namespace {

constexpr int kVectorTile = 32;

template <class T> struct Inputs {
  int H, G, E;
  Rows<T> q, k, v, d_out, out;
  const float* lse_TH;
};

template <class T> struct Gradients { T *dq_THE, *dk_UGE, *dv_UGE; };

struct Group { const Segment* segments; int count; };  // adjacent segments of one source

struct Vector { long row; int head, position; };

struct Scratch { std::vector<float> dq, delta, tiles; std::vector<Vector> vectors; };

template <class T> float dot16(const T* a, const T* b, int E) {
  float partial[kUnit] = {};
  for (int e = 0; e < E; e += kUnit)
    for (int i = 0; i < kUnit; i++) partial[i] = __builtin_fmaf(to_float(a[e + i]), to_float(b[e + i]), partial[i]);
  for (int width = kUnit / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) partial[i] = partial[i] + partial[i + width];
  return partial[0];
}

// C[row] (+)= A[row, :] B for `rows` rows in register tiles.
inline void multiply(const float* a, long a_row, long a_step, const float* b, long b_row, int count, float* c,
                     long c_row, int rows, int width, bool accumulate) {
  for (int r = 0; r < rows;)
    with_tile_rows(rows - r, [&](auto tile) {
      multiply_rows<tile>(a + r * a_row, a_row, a_step, b, b_row, count, c + r * c_row, c_row, width, accumulate);
      r += tile;
    });
}

template <class T>
void run_group(const Group& group, int kv_head, PackedKeys keys, const Inputs<T>& in, Gradients<T> out) {
  const int E = in.E, share = in.H / in.G;
  static thread_local Scratch scratch;
  auto& vectors = scratch.vectors;
  vectors.clear();
  int length = 0;
  for (int s = 0; s < group.count; s++) {
    const Segment& segment = group.segments[s];
    for (int i = 0; i < segment.row_count; i++) {
      for (Rows<T> x : {in.d_out, in.out, in.q})
        prefetch(x.at(segment.row_start + long(i), kv_head * share, E), long(share) * E);
      for (int h = 0; h < share; h++)
        vectors.push_back({segment.row_start + long(i), kv_head * share + h, segment.position_start + i});
    }
    length = std::max(length, segment.position_start + segment.row_count);
  }
  const int n = int(vectors.size());
  float* dq = grown(scratch.dq, size_t(n) * E);
  float* delta = grown(scratch.delta, n);
  std::fill(dq, dq + size_t(n) * E, 0.0f);
  for (int i = 0; i < n; i++) {
    const Vector& at = vectors[i];
    delta[i] = dot16(in.d_out.at(at.row, at.head, E), in.out.at(at.row, at.head, E), E);
  }

  float* k_EJ = grown(scratch.tiles, size_t(5) * E * kBlock + size_t(2) * kVectorTile * (E + kBlock));
  float *v_EJ = k_EJ + E * kBlock, *k_JE = v_EJ + E * kBlock, *dk = k_JE + E * kBlock, *dv = dk + E * kBlock;
  float *q = dv + E * kBlock, *d_out = q + kVectorTile * E;
  float *p = d_out + kVectorTile * E, *ds = p + kVectorTile * kBlock;
  const float scale = logit_scale(E), softmax_scale = float(1.0 / std::sqrt(double(E)));

  for (int block0 = 0; block0 < length; block0 += kBlock) {
    const int count_J = std::min(kBlock, length - block0);
    long key_row[kBlock];
    keys.rows(group.segments->source, block0, count_J, key_row);
    pack_transposed(in.k, key_row, count_J, kv_head, E, k_EJ);
    pack_transposed(in.v, key_row, count_J, kv_head, E, v_EJ);
    pack_rows(in.k, key_row, count_J, kv_head, E, k_JE);
    std::fill(dk, dk + count_J * E, 0.0f);
    std::fill(dv, dv + count_J * E, 0.0f);
    for (int first = 0; first < n; first += kVectorTile) {
      const int rows = std::min(kVectorTile, n - first);
      int seen = 0, count[kVectorTile];  // keys of this block that a vector sees; the most of the tile
      for (int i = 0; i < rows; i++) {
        count[i] = std::clamp(vectors[first + i].position + 1 - block0, 0, count_J);
        seen = std::max(seen, count[i]);
      }
      if (seen == 0) continue;
      for (int i = 0; i < rows; i++) {
        const Vector& vector = vectors[first + i];
        copy_row(in.q.at(vector.row, vector.head, E), E, q + i * E);
        copy_row(in.d_out.at(vector.row, vector.head, E), E, d_out + i * E);
      }
      const int width = round_up(seen, kUnit);
      multiply(q, E, 1, k_EJ, kBlock, E, p, kBlock, rows, width, false);
      multiply(d_out, E, 1, v_EJ, kBlock, E, ds, kBlock, rows, width, false);
      for (int i = 0; i < rows; i++) {
        float *p_i = p + i * kBlock, *ds_i = ds + i * kBlock;
        const Vector& at = vectors[first + i];
        const float lse = in.lse_TH[at.row * in.H + at.head], delta_i = delta[first + i];
        for (int j = 0; j < width; j++) {
          p_i[j] = exp2_f32(p_i[j] * scale - lse);
          ds_i[j] = p_i[j] * (ds_i[j] - delta_i);
        }
        for (int j = count[i]; j < width; j++) p_i[j] = 0.0f, ds_i[j] = 0.0f;
      }
      multiply(p, 1, kBlock, d_out, E, rows, dv, E, seen, E, true);
      multiply(ds, 1, kBlock, q, E, rows, dk, E, seen, E, true);
      multiply(ds, kBlock, 1, k_JE, E, seen, dq + size_t(first) * E, E, rows, E, true);
    }
    for (int j = 0; j < count_J; j++)
      for (int e = 0; e < E; e++) {
        long at = (key_row[j] * in.G + kv_head) * E + e;
        out.dk_UGE[at] = from_float<T>(dk[j * E + e] * softmax_scale);
        out.dv_UGE[at] = from_float<T>(dv[j * E + e]);
      }
  }
  for (int i = 0; i < n; i++) {
    T* to = out.dq_THE + (vectors[i].row * in.H + vectors[i].head) * E;
    for (int e = 0; e < E; e++) to[e] = from_float<T>(dq[size_t(i) * E + e] * softmax_scale);
  }
}

}  // namespace

// The arguments of rlk_attention_varlen, with its results o and lse and the gradient d_out of o [T, H, E]; all three
// gradients are written for the rows of segments and keys only. A source's segments must be adjacent (else kBadShape).
RLK_EXPORT int rlk_attention_varlen_backward(int dtype, const void* d_out, const void* q, long T, long q_stride,
                                             const void* k, long k_stride, const void* v, long v_stride, long U,
                                             const void* out, const float* lse, const int32_t* segments, int n,
                                             const int32_t* starts, int sources, int H, int G, int E, void* dq,
                                             void* dk, void* dv) {
  auto table = reinterpret_cast<const Segment*>(segments);
  if (!good_tables(table, n, T, U, starts, sources) || !good_heads(H, G, E)) return kBadShape;
  std::vector<Group> groups;
  std::vector<bool> met(sources);
  for (int s = 0; s < n; s++) {
    if (s > 0 && table[s].source == table[s - 1].source) {
      groups.back().count++;
      continue;
    }
    if (met[table[s].source]) return kBadShape;
    met[table[s].source] = true;
    groups.push_back({table + s, 1});
  }
  return with_dtype(dtype, [&](auto t) {
    using Real = decltype(t);
    auto rows = [](const void* base, long stride) { return Rows<Real>{static_cast<const Real*>(base), stride}; };
    Inputs<Real> in{H, G, E, rows(q, q_stride), rows(k, k_stride), rows(v, v_stride), rows(d_out, long(H) * E),
                    rows(out, long(H) * E), lse};
    Gradients<Real> gradients{static_cast<Real*>(dq), static_cast<Real*>(dk), static_cast<Real*>(dv)};
#pragma omp parallel for schedule(dynamic)
    for (long i = 0; i < long(groups.size()) * G; i++)
      run_group(groups[i / G], int(i % G), PackedKeys{starts}, in, gradients);
    return int(kOk);
  });
}

}  // namespace rlk
