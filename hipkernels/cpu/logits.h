// Shared by the log-prob and the sampler: how a row of logits is read.
#pragma once
#include "cpu/common.h"
#include "score.h"

namespace rlk {

constexpr long kPartials = 16;

// Calls fn(block) for every 16 logits of a run; the last block is filled up with -inf, whose weight is exactly zero.
template <class Fn> inline void for_blocks(const float* logits, long count, Fn fn) {
  long i = 0;
  for (; i + kPartials <= count; i += kPartials) fn(logits + i);
  if (i == count) return;
  float last[kPartials];
  for (long l = 0; l < kPartials; ++l) last[l] = i + l < count ? logits[i + l] : kNegInf;
  fn(last);
}

// The largest x of a run; -inf for an empty one. NaN is passed over.
inline float max_of(const float* logits, long count, float inv_t) {
  float top[kPartials];
  for (long l = 0; l < kPartials; ++l) top[l] = kNegInf;
  for_blocks(logits, count, [&](const float* block) {
    for (long l = 0; l < kPartials; ++l) {
      const float x = scaled(block[l], inv_t);
      top[l] = x > top[l] ? x : top[l];
    }
  });
  for (long half = kPartials / 2; half > 0; half /= 2)
    for (long l = 0; l < half; ++l) top[l] = top[l + half] > top[l] ? top[l + half] : top[l];
  return top[0];
}

}  // namespace rlk
