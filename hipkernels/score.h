// How a log-prob and an entropy come from sums of exponentials, for every backend (ops/logprob.py has the rule).
#pragma once
#include "vector_math.h"

namespace rlk {

// (max, sum e, sum e*x) over a run of logits, with x = logit * inv_t and e = exp(x - max).
struct State {
  float max, sum, weighted;
};

struct Score {
  float logprob, entropy, lse;
};

// x = logit / temperature. -0.0 becomes +0.0, as it does when ranks add up the logits that each of them picked.
RLK_DEVICE inline float scaled(float logit, float inv_t) { return (logit + 0.0f) * inv_t; }

// The target's x comes in as its unscaled logit.
RLK_DEVICE inline Score finish(State s, float target_logit, float inv_t) {
  const float lse = s.max + log_f32(s.sum);
  return {scaled(target_logit, inv_t) - lse, lse - s.weighted / s.sum, lse};
}

// scores is [3, rows]: logprob, entropy, lse.
RLK_DEVICE inline void store(float* scores, int64_t rows, int64_t r, Score s) {
  scores[r] = s.logprob;
  scores[rows + r] = s.entropy;
  scores[2 * rows + r] = s.lse;
}

}  // namespace rlk
