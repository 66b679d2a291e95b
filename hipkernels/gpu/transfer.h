// Moving and summing 128 bits at a time: what the collectives' kernels do between two waits.
//
// LAYOUT. A piece of a message is a row of vectors, of which lane l of kLanes takes l, l + kLanes, ..; several loads
// are on their way at a time, since a peer's memory is a microsecond away. The piece may end within a vector: that one
// is lane 0's, which loads it whole from staging, whose pieces have room for it, and stores its first bytes.
//
// REDUCTION ORDER. FP32, over ranks, per element: ((0+1)+(2+3))+((4+5)+(6+7)), as in rlk/collectives/tree.py. 16-bit
// inputs are widened first and the root is rounded once.
#pragma once
#include <type_traits>

#include "gpu/segment.h"
#include "vector_math.h"

namespace rlk {

enum Route : int { kOneShot = 0, kTwoShots = 1, kPushed = 2 };

constexpr uint32_t kVector = sizeof(Vector16);  // 32 bits: no piece has 4 GiB

// Loads of one lane that are on their way at a time, in rows of kLanes vectors, when each row asks `ranks` memories.
template <int Ranks> RLK_DEVICE constexpr int rows_at_a_time() { return Ranks <= 2 ? 4 : 8 / Ranks; }

// use(i, load(i)) for every i in [first, vectors), kRows loads before their uses.
template <int kRows, class Load, class Use>
RLK_DEVICE inline void for_vectors(uint32_t first, uint32_t vectors, Load load, Use use) {
  for (uint32_t row = first + lane_index(); row < vectors; row += kRows * kLanes) {
    decltype(load(uint32_t())) loaded[kRows] RLK_UNSET;
    RLK_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const uint32_t i = row + k * kLanes;
      if (i < vectors) loaded[k] = load(i);
    }
    RLK_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const uint32_t i = row + k * kLanes;
      if (i < vectors) use(i, loaded[k]);
    }
  }
}

// Copies an input to the staging area. The first loads are made before the lanes wait for the area, so that they are on
// their way meanwhile.
class Staging {
 public:
  RLK_DEVICE Staging(const char* x, uint32_t bytes) : x_(x), bytes_(bytes) {
    const uint32_t vectors = bytes / kVector;
    RLK_UNROLL
    for (int k = 0; k < kEarly; ++k) {
      const uint32_t i = k * kLanes + lane_index();
      if (i < vectors) early_[k] = load16(x_ + i * kVector);
    }
  }
  RLK_DEVICE void store(char* staging) const {
    const uint32_t vectors = bytes_ / kVector;
    RLK_UNROLL
    for (int k = 0; k < kEarly; ++k) {
      const uint32_t i = k * kLanes + lane_index();
      if (i < vectors) store16(staging + i * kVector, early_[k]);
    }
    const auto load = [&](uint32_t i) { return load16(x_ + i * kVector); };
    for_vectors<4>(kEarly * kLanes, vectors, load,
                   [&](uint32_t i, const Vector16& v) { store16(staging + i * kVector, v); });
    const uint32_t at = vectors * kVector + lane_index();
    if (at < bytes_) staging[at] = x_[at];
  }

 private:
  static constexpr int kEarly = 4;
  const char* x_;
  uint32_t bytes_;
  Vector16 early_[kEarly] RLK_UNSET;
};

// The first n bytes of v, in units; both `to` and n are multiples of one.
template <class Unit> RLK_DEVICE inline void store_units(char* to, const Vector16& v, uint32_t n) {
  constexpr uint32_t kSize = sizeof(Unit);
  RLK_UNROLL
  for (uint32_t i = 0; i < kVector / kSize; ++i)
    if (i * kSize < n) reinterpret_cast<Unit*>(to)[i] = Unit(v.word[i * kSize / 4] >> 8 * (i * kSize % 4));
}

// The unsigned integer of the same size.
template <class T> using BitsOf = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint16_t>;

template <class T> RLK_DEVICE constexpr Dtype dtype_of() {
  return sizeof(T) == sizeof(float) ? kFloat32 : std::is_same<T, half>::value ? kFloat16 : kBfloat16;
}

// Elements of a vector, by shifts: from arrays that are copied to vectors byte by byte, clang 19 made wrong code for
// gfx942 (it took the words apart into bytes, by packed shifts of which one was out of range and yet used).
template <class T> constexpr int kPerVector = int(sizeof(Vector16) / sizeof(T));

RLK_DEVICE inline uint32_t bits_of(bf16 x) { return x; }
RLK_DEVICE inline uint32_t bits_of(half x) { return x.bits; }

template <class T> RLK_DEVICE inline float element(const Vector16& v, int j) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return float_of(v.word[j]);
  } else {
    return to_float(T{uint16_t(v.word[j / 2] >> 16 * (j % 2))});
  }
}

// What lies at `at`, of a multiple of T's size, as a vector; zeroes where there is nothing.
template <class T> RLK_DEVICE inline Vector16 load_elements(const char* at, int elements) {
  if (elements == kPerVector<T> && reinterpret_cast<uintptr_t>(at) % kVector == 0) return load16(at);
  Vector16 v = {};
  RLK_UNROLL
  for (int j = 0; j < kPerVector<T>; ++j)
    if (j < elements)
      v.word[j * sizeof(T) / 4] |= uint32_t(reinterpret_cast<const BitsOf<T>*>(at)[j]) << 8 * (j * sizeof(T) % 4);
  return v;
}

// The vector of the elements fn(0), fn(1), .., each rounded to T.
template <class T, class Fn> RLK_DEVICE inline Vector16 make_vector(Fn fn) {
  Vector16 v;
  RLK_UNROLL
  for (int word = 0; word < 4; ++word) {
    if constexpr (sizeof(T) == sizeof(float)) {
      v.word[word] = bits_of(fn(word));
    } else {
      v.word[word] = bits_of(from_float<T>(fn(2 * word))) | bits_of(from_float<T>(fn(2 * word + 1))) << 16;
    }
  }
  return v;
}

// One vector of each rank.
template <int World> struct Terms {
  Vector16 of_rank[World];
};

// Element j of the ranks [first, first + Count), added up in the order above.
template <class T, int Count, int World> RLK_DEVICE inline float sum_element(const Terms<World>& in, int first, int j) {
  if constexpr (Count == 1) {
    return element<T>(in.of_rank[first], j);
  } else {
    return sum_element<T, Count / 2>(in, first, j) + sum_element<T, Count / 2>(in, first + Count / 2, j);
  }
}

template <class T, int World> RLK_DEVICE inline Vector16 sum_vectors(const Terms<World>& in) {
  return make_vector<T>([&](int j) { return sum_element<T, World>(in, 0, j); });
}

// The same place in the segment of each rank.
template <int World> class Places {
 public:
  RLK_DEVICE Places(const Board& board, uint64_t offset) {
    RLK_UNROLL
    for (int rank = 0; rank < World; ++rank) at_[rank] = board.segment[rank] + offset;
  }
  RLK_DEVICE Terms<World> load(uint32_t byte) const {
    Terms<World> terms;
    RLK_UNROLL
    for (int rank = 0; rank < World; ++rank) terms.of_rank[rank] = load16(at_[rank] + byte);
    return terms;
  }

 private:
  const char* at_[World];
};

// Calls fn(std::integral_constant<int, world>()), for a kernel of each world.
template <class Fn> int with_world(int world, Fn fn) {
  if (world == 8) return fn(std::integral_constant<int, 8>());
  if (world == 4) return fn(std::integral_constant<int, 4>());
  if (world == 2) return fn(std::integral_constant<int, 2>());
  return fn(std::integral_constant<int, 1>());
}

// Calls fn(T()) for the element type of a sum.
template <class Fn> int with_sum_dtype(int dtype, Fn fn) {
  if (dtype == kFloat32) return fn(float());
  if (dtype == kBfloat16) return fn(bf16());
  if (dtype == kFloat16) return fn(half());
  return kBadDtype;
}

}  // namespace rlk
