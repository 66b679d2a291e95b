// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//
// One source for the host and the GPU: plain inline functions without state.
#pragma once
#include <cstdint>

#include "device.h"

namespace rlk {

struct Words4 {
  uint32_t w[4];
};

RLK_DEVICE inline Words4 philox4x32(Words4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.w[0], b = uint64_t(0xCD9E8D57u) * c.w[2];
    c = {{uint32_t(b >> 32) ^ c.w[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.w[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The sampler's noise: a number in [0, 1) made of the first 53 bits under key = seed, counter = (position, uid, 0).
RLK_DEVICE inline double sampling_uniform(uint64_t seed, uint64_t uid, uint64_t position) {
  const Words4 counter = {{uint32_t(position), uint32_t(uid), uint32_t(uid >> 32), 0u}};
  const Words4 random = philox4x32(counter, uint32_t(seed), uint32_t(seed >> 32));
  const uint64_t bits = (uint64_t(random.w[0] >> 5) << 26) | (random.w[1] >> 6);
  return double(bits) * 0x1p-53;
}

}  // namespace rlk
