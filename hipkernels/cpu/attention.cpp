// Attention forward over packed or paged keys, and the copy of new keys into pages. Order and layout: attention.h.
#include "cpu/attention.h"

namespace rlk {
namespace {

constexpr int kSliceVectors = 256;  // most query vectors of a task: they share one copy of each key block
constexpr long kParallelWork = 1 << 16;  // multiply-adds below which starting threads costs more than it saves

struct Shape { int H, G, E; };

struct Task { int segment, first_row, rows, first_head, heads; };  // heads: kv heads

// The softmax state of a task's vectors. o has E floats per vector.
struct State {
  float *o, *m, *l;
  void clear(int vectors, int E) {
    std::fill(o, o + size_t(vectors) * E, 0.0f);
    std::fill(m, m + vectors, kNegInf);
    std::fill(l, l + vectors, 0.0f);
  }
};

// In place: a row of `visible` raw dot products becomes probabilities relative to the new maximum, zeros up to the
// next multiple of 16. Updates m; returns the factor that brings the old state to the new maximum.
template <class T> inline float softmax_row(float* row, int visible, float scale, float& m) {
  int width = round_up(visible, kUnit);
  for (int j = 0; j < width; j++) row[j] = row[j] * scale;
  for (int j = visible; j < width; j++) row[j] = kNegInf;
  float largest[kUnit], old = m, top = m;  // a maximum is the same in any order
  std::copy(row, row + kUnit, largest);
  for (int j = kUnit; j < width; j += kUnit)
    for (int i = 0; i < kUnit; i++) largest[i] = row[j + i] > largest[i] ? row[j + i] : largest[i];
  for (int i = 0; i < kUnit; i++) top = largest[i] > top ? largest[i] : top;
  for (int j = 0; j < width; j++) row[j] = to_float(from_float<T>(exp2_f32(row[j] - top)));
  m = top;
  return old == top ? 1.0f : exp2_f32(old - top);
}

// MR vectors against one key block: count[r] >= 1 (ascending) of its keys are visible to vector r.
template <int MR, class T>
inline void attend_tile(const float* q, const float* k_EJ, const float* v_JE, int E, float scale, const int* count,
                        float* o, float* m, float* l) {
  alignas(64) float p[MR][kBlock];
  multiply_rows<MR>(q, E, 1, k_EJ, kBlock, E, p[0], kBlock, round_up(count[MR - 1], kUnit), false);
  for (int r = 0; r < MR; r++) {
    float factor = softmax_row<T>(p[r], count[r], scale, m[r]);
    if (factor == 1.0f) continue;
    for (int e = 0; e < E; e++) o[r * E + e] = o[r * E + e] * factor;
    l[r] = l[r] * factor;
  }
  int common = count[0];
  multiply_rows<MR, true>(p[0], kBlock, 1, v_JE, E, common, o, E, E, true, l);
  for (int r = 1; r < MR; r++)  // the diagonal: later vectors see a few keys more
    if (count[r] > common)
      multiply_rows<1, true>(p[r] + common, kBlock, 1, v_JE + common * E, E, count[r] - common, o + r * E, E, E, true,
                             l + r);
}

// Joins a chunk's state into the running one; `first` copies. Vectors that saw no key of the chunk stay as they are.
void merge(const State& chunk, State& all, int vectors, int E, bool first) {
  for (int i = 0; i < vectors; i++) {
    float *o = all.o + size_t(i) * E, *c = chunk.o + size_t(i) * E;
    if (chunk.l[i] == 0.0f) continue;  // no key seen: a seen key adds exp2(0) = 1 to l at its chunk's maximum
    if (first) {
      std::copy(c, c + E, o);
      all.m[i] = chunk.m[i], all.l[i] = chunk.l[i];
      continue;
    }
    float top = chunk.m[i] > all.m[i] ? chunk.m[i] : all.m[i];
    float a = exp2_f32(all.m[i] - top), b = exp2_f32(chunk.m[i] - top);
    for (int e = 0; e < E; e++) o[e] = __builtin_fmaf(c[e], b, o[e] * a);
    all.l[i] = __builtin_fmaf(chunk.l[i], b, all.l[i] * a);
    all.m[i] = top;
  }
}

struct Scratch { std::vector<float> q, k, v, chunk, all; };

State state_in(std::vector<float>& buffer, int vectors, int E) {
  float* p = grown(buffer, size_t(vectors) * (E + 2));
  return {p, p + size_t(vectors) * E, p + size_t(vectors) * (E + 1)};
}

template <class T, class Keys>
void run_task(const Task& task, const Segment& segment, Shape shape, Rows<T> q_rows, Rows<T> k_rows, Rows<T> v_rows,
              const Keys& keys, T* o_THE, float* lse_TH) {
  const int E = shape.E, group = shape.H / shape.G, vectors = task.rows * group, all_vectors = vectors * task.heads;
  const long row0 = segment.row_start + task.first_row;
  const int position0 = segment.position_start + task.first_row, length = position0 + task.rows;
  const float scale = logit_scale(E);
  static thread_local Scratch scratch;
  float* q = grown(scratch.q, size_t(all_vectors) * E);
  float* k_EJ = grown(scratch.k, size_t(E) * kBlock);
  float* v_JE = grown(scratch.v, size_t(E) * kBlock);
  State chunk = state_in(scratch.chunk, all_vectors, E);
  State all = length > kChunk ? state_in(scratch.all, all_vectors, E) : chunk;
  auto query_head = [&](int g) { return long(task.first_head + g) * group; };
  for (int i = 0; i < task.rows; i++) prefetch(q_rows.at(row0 + i, query_head(0), E), long(task.heads) * group * E);
  for (int g = 0; g < task.heads; g++)
    for (int i = 0; i < task.rows; i++)
      copy_row(q_rows.at(row0 + i, query_head(g), E), group * E, q + (size_t(g) * vectors + i * group) * E);

  for (int chunk0 = 0; chunk0 < length; chunk0 += kChunk) {
    chunk.clear(all_vectors, E);
    for (int block0 = chunk0; block0 < std::min(chunk0 + kChunk, length); block0 += kBlock) {
      const int keys_here = std::min(kBlock, length - block0);
      long key_row[kBlock];
      keys.rows(segment.source, block0, keys_here, key_row);
      for (Rows<T> x : {k_rows, v_rows})
        for (int j = 0; j < keys_here; j++) prefetch(x.at(key_row[j], task.first_head, E), long(task.heads) * E);
      for (int g = 0; g < task.heads; g++) {
        pack_transposed(k_rows, key_row, keys_here, task.first_head + g, E, k_EJ);
        pack_rows(v_rows, key_row, keys_here, task.first_head + g, E, v_JE);
        for (int i = std::max(0, block0 - position0) * group; i < vectors;) {
          with_tile_rows(vectors - i, [&](auto rows) {
            int count[rows];
            for (int r = 0; r < rows; r++) count[r] = std::min(position0 + (i + r) / group + 1 - block0, kBlock);
            const size_t at = size_t(g) * vectors + i;
            attend_tile<rows, T>(q + at * E, k_EJ, v_JE, E, scale, count, chunk.o + at * E, chunk.m + at,
                                 chunk.l + at);
            i += rows;
          });
        }
      }
    }
    if (length > kChunk) merge(chunk, all, all_vectors, E, chunk0 == 0);
  }

  for (int i = 0; i < all_vectors; i++) {
    long row = row0 + i % vectors / group, head = query_head(i / vectors) + i % group;
    T* o = o_THE + (row * shape.H + head) * E;
    for (int e = 0; e < E; e++) o[e] = from_float<T>(all.o[size_t(i) * E + e] / all.l[i]);
    if (lse_TH) lse_TH[row * shape.H + head] = __builtin_fmaf(log_f32(all.l[i]), float(kLog2E), all.m[i]);
  }
}

template <class T, class Keys>
int attend(Rows<T> q, Rows<T> k, Rows<T> v, const Keys& keys, const Segment* segments, int n, Shape shape, T* o,
           float* lse) {
  const int slice = std::max(1, kSliceVectors * shape.G / shape.H);
  std::vector<Task> tasks;
  long work = 0;
  for (int s = 0; s < n; s++) {
    const int count = segments[s].row_count;
    work += long(count) * (segments[s].position_start + count) * shape.H * shape.E;
    // A short segment's task takes all kv heads, which lie side by side; else each task takes one.
    const int heads = count * shape.H <= kSliceVectors && n >= omp_get_max_threads() ? shape.G : 1;
    for (int first = 0; first < count; first += slice)
      for (int head = 0; head < shape.G; head += heads)
        tasks.push_back({s, first, std::min(slice, count - first), head, heads});
  }
#pragma omp parallel for schedule(dynamic) if (work > kParallelWork)
  for (size_t i = 0; i < tasks.size(); i++)
    run_task(tasks[i], segments[tasks[i].segment], shape, q, k, v, keys, o, lse);
  return kOk;
}

}  // namespace

// Strides are of rows, in elements. segments [n, 4], starts [sources]; o [T, H, E], lse [T, H] or null.
RLK_EXPORT int rlk_attention_varlen(int dtype, const void* q, long T, long q_stride, const void* k, long k_stride,
                                    const void* v, long v_stride, long U, const int32_t* segments, int n,
                                    const int32_t* starts, int sources, int H, int G, int E, void* o, float* lse) {
  auto table = reinterpret_cast<const Segment*>(segments);
  if (!good_tables(table, n, T, U, starts, sources) || !good_heads(H, G, E)) return kBadShape;
  return with_dtype(dtype, [&](auto t) {
    using Real = decltype(t);
    return attend<Real>({static_cast<const Real*>(q), q_stride}, {static_cast<const Real*>(k), k_stride},
                      {static_cast<const Real*>(v), v_stride}, PackedKeys{starts}, table, n, {H, G, E},
                      static_cast<Real*>(o), lse);
  });
}

RLK_EXPORT int rlk_attention_paged(int dtype, const void* q, long T, long q_stride, const void* k_cache,
                                   const void* v_cache, long pages, int page_size, const int32_t* segments, int n,
                                   const int32_t* block_table, int B, int max_pages, int H, int G, int E, void* o) {
  auto table = reinterpret_cast<const Segment*>(segments);
  if (!good_heads(H, G, E) || page_size <= 0) return kBadShape;
  for (int s = 0; s < n; s++) {
    if (!good_rows(table[s], T, B)) return kBadShape;
    int used = round_up(table[s].position_start + table[s].row_count, page_size) / page_size;
    if (used > max_pages) return kBadShape;
    for (int i = 0; i < used; i++) {
      int page = block_table[long(table[s].source) * max_pages + i];
      if (page < 0 || page >= pages) return kBadShape;
    }
  }
  return with_dtype(dtype, [&](auto t) {
    using Real = decltype(t);
    const long stride = long(G) * E;
    return attend<Real>({static_cast<const Real*>(q), q_stride}, {static_cast<const Real*>(k_cache), stride},
                      {static_cast<const Real*>(v_cache), stride}, PagedKeys{block_table, max_pages, page_size}, table,
                      n, {H, G, E}, static_cast<Real*>(o), nullptr);
  });
}

// Rows of `row_bytes` bytes, `k_stride` and `v_stride` bytes apart, into slots of the same size; slot -1 is left out.
RLK_EXPORT int rlk_write_kv(const char* k, long k_stride, const char* v, long v_stride, char* k_cache, char* v_cache,
                            long cache_slots, const int64_t* slots, long T, long row_bytes) {
  for (long t = 0; t < T; t++)
    if (slots[t] < -1 || slots[t] >= cache_slots) return kBadShape;
  for (long t = 0; t < T; t++) {
    if (slots[t] < 0) continue;
    std::memcpy(k_cache + slots[t] * row_bytes, k + t * k_stride, row_bytes);
    std::memcpy(v_cache + slots[t] * row_bytes, v + t * v_stride, row_bytes);
  }
  return kOk;
}

// The constants of the contract that this object was built with: block, chunk, largest head dim.
RLK_EXPORT int rlk_attention_constants(int* out) {
  out[0] = kBlock;
  out[1] = kChunk;
  out[2] = kMaxHeadDim;
  return kOk;
}

}  // namespace rlk
