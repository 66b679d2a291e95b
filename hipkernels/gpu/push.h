// Messages that are pushed: vectors stored into the peers' receive areas, each 32 bits beside a tag.
//
// LAYOUT. A workgroup's message of `vectors` vectors is, in a receive area, two planes of packets, one after the other:
// packet i of the first holds words 0 and 1 of vector i, that of the second words 2 and 3. A packet is two 64-bit words
// {tag, data}; neighbouring lanes store neighbouring packets. Receive areas: segment.h. Of more than two, a rank pushes
// to itself as well, so that its vectors are where those of the others are; of two, it keeps them.
//
// REDUCTION ORDER. None here.
#pragma once
#include "gpu/transfer.h"

namespace rlk {

constexpr uint32_t kPacket = sizeof(Pair64);
constexpr uint32_t kNoVector = ~0u;

// Where a workgroup's pushed data lie in this push.
template <int World> class Pushing {
 public:
  RLK_DEVICE Pushing(const Ranks& ranks, const Exchange& exchange, uint64_t receive, uint32_t vectors)
      : ranks_(ranks), exchange_(exchange), plane_(vectors * kPacket) {
    group_ = receive + (uint64_t(group_index()) * 2 + exchange.pushes() % 2) * (World * area());
  }

  // Vector i of this rank's message, to all that want it.
  RLK_DEVICE void send(const Board& board, uint32_t i, const Vector16& v) const {
    const uint64_t n = exchange_.pushes();
    const Pair64 low = {tagged(n, v.word[0]), tagged(n, v.word[1])};
    const Pair64 high = {tagged(n, v.word[2]), tagged(n, v.word[3])};
    RLK_UNROLL
    for (int step = 1; step <= (kKeeps ? 1 : World); ++step) {  // no two ranks begin with the same one
      const int rank = (ranks_.rank + step) % World;
      char* to = board.segment[rank] + (group_ + ranks_.rank * area() + i * kPacket);
      memory_.store_pair(reinterpret_cast<uint64_t*>(to), low);
      memory_.store_pair(reinterpret_cast<uint64_t*>(to + plane_), high);
    }
  }

  // The vectors index(0), .., index(kRows - 1) of the ranks [kFirst, kFirst + kRanks), where `mine` are this rank's;
  // kNoVector stands for none. False when they do not come.
  template <int kRows, int kFirst, int kRanks, class Index>
  RLK_DEVICE bool receive(const Board& board, Index index, const Vector16* mine, Terms<kRanks>* terms) const {
    const char* own = board.segment[ranks_.rank] + group_;
    const uint64_t tag = tagged(exchange_.pushes(), 0);
    int late = 0;
    const auto arrived = [&] {
      bool whole = true;
      RLK_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if (index(row) == kNoVector) continue;
        RLK_UNROLL
        for (int term = 0; term < (kKeeps ? 1 : kRanks); ++term) {
          const int rank = kKeeps ? 1 - ranks_.rank : kFirst + term;
          const char* from = own + (rank * area() + index(row) * kPacket);
          const Pair64 low = memory_.load_pair(reinterpret_cast<const uint64_t*>(from));
          const Pair64 high = memory_.load_pair(reinterpret_cast<const uint64_t*>(from + plane_));
          terms[row].of_rank[term] = {
              {uint32_t(low.first), uint32_t(low.second), uint32_t(high.first), uint32_t(high.second)}};
          const uint64_t wrong = (low.first ^ tag) | (low.second ^ tag) | (high.first ^ tag) | (high.second ^ tag);
          late = wrong >> 32 ? rank : late;
          whole &= wrong >> 32 == 0;
        }
      }
      return whole;
    };
    const bool came = exchange_.wait_for_data(arrived, [&] { return late; });
    RLK_UNROLL
    for (int row = 0; kKeeps && row < kRows; ++row) {  // in the order of ranks
      const Vector16 theirs = terms[row].of_rank[0];
      terms[row].of_rank[0] = ranks_.rank == 0 ? mine[row] : theirs;
      terms[row].of_rank[kRanks - 1] = ranks_.rank == 0 ? theirs : mine[row];
    }
    return came;
  }

  // Before tags repeat: clear this workgroup's receive areas of this push's kind, after the last read of them. No peer
  // stores there before it has heard this rank in the next push.
  RLK_DEVICE void sweep(const Board& board) const {
    if (exchange_.pushes() % kSweep > 1) return;
    char* own = board.segment[ranks_.rank] + group_;
    for (uint32_t at = lane_index() * kVector; at < World * area(); at += lane_count() * kVector)
      store16(own + at, Vector16{});
  }

 private:
  static constexpr bool kKeeps = World == 2;
  RLK_DEVICE uint32_t area() const { return uint32_t(2 * ranks_.push_bytes); }

  const Ranks& ranks_;
  const Exchange& exchange_;
  const SystemMemory memory_ = {};
  uint64_t group_;
  uint32_t plane_;
};

}  // namespace rlk
