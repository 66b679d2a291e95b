// GPU kernels on the host: every lane of a workgroup is a fiber, and all of them share one thread.
//
// A fiber runs until it has to wait: at a barrier, in a shuffle, or between two polls (`pause`). Then the scheduler
// switches to the next lane, in forward or reverse order, or in a random one that leaves lanes behind. A kernel whose
// result depends on how its lanes interleave shows it there.
//
// A launch runs at once, its workgroups one after another. Between rlk_fibers_hold() and rlk_fibers_run() launches
// wait: run() then takes all streams forward together, as ranks on GPUs of their own. Launches of one stream follow
// each other; the workgroups of a launch take turns.
//
// When every lane waits for another lane, nothing can go on: the launch says so on stderr and ends with kDeadlock.
#pragma once
#include <time.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "abi.h"
#include "gpu/fiber_switch.h"

#ifndef RLK_WAVE
#error "define RLK_WAVE as 32 or 64"
#endif

#define __global__
#define RLK_SHARED(Type, name)   \
  static const char name##_key{}; \
  Type& name = rlk::fibers::shared<Type>(&name##_key)
#define RLK_LAUNCH(kernel, grid, block, stream, ...) \
  rlk::fibers::launch(grid, block, stream, rlk::fibers::bind_arguments(kernel, __VA_ARGS__))

namespace rlk::fibers {

constexpr size_t kStackBytes = 1 << 16;
constexpr int kPoison = 0xa5;  // LDS before anybody wrote it

// A place where `expected` lanes wait for each other, again and again.
struct Meeting {
  int expected = 0, arrived = 0;
  uint64_t round = 0;
};

struct Lane {
  Context context;
  std::unique_ptr<char[]> stack;
  const Meeting* meeting = nullptr;  // what it waits for, and the round that has to end
  uint64_t round = 0;
  uint32_t offered = 0;  // its value in a shuffle
  int naps = 0;          // turns that it has yet to miss
  bool ended = false;

  bool can_run() const { return !ended && !(meeting && meeting->round == round); }
};

struct Launch {
  std::function<void()> body;
  int grid, block;
};

struct Workgroup {
  const Launch* launch;
  int index;
  std::vector<Lane> lanes;
  std::vector<Meeting> waves;
  Meeting barrier;
  std::vector<std::pair<const void*, std::unique_ptr<char[]>>> shared;
  int running;
};

struct Stream {
  explicit Stream(void* name) : id(name) {}
  Stream(Stream&&) = default;
  Stream(const Stream&) = delete;

  void* id;
  std::deque<Launch> launches;
  std::vector<std::unique_ptr<Workgroup>> groups;  // of the first launch
};

struct Scheduler {
  bool reverse = false;
  uint64_t random = 0;  // state of the generator; 0: every lane has its turn
  bool held = false;
  std::vector<Stream> streams;  // what waits for run()
  Workgroup* group = nullptr;   // whose lane runs now
  int lane = 0;
  Context main;
  std::vector<std::unique_ptr<char[]>> stacks;  // for the next workgroups
};
inline Scheduler scheduler;  // kernels are launched by one thread at a time

inline Lane& current() { return scheduler.group->lanes[scheduler.lane]; }
inline void yield() { switch_context(current().context, scheduler.main); }
inline void pause() { yield(); }  // whoever polls has a time-out, so this is not waiting for a lane

inline uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
}

inline void meet(Meeting& meeting) {
  Lane& lane = current();
  lane.round = meeting.round;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  lane.meeting = &meeting;
  yield();
  lane.meeting = nullptr;
}

// x of the lane `source` of the workgroup, if that is one of this lane's wave.
inline uint32_t shuffle(uint32_t x, int source) {
  Workgroup& group = *scheduler.group;
  const int first = scheduler.lane / RLK_WAVE * RLK_WAVE;
  Meeting& wave = group.waves[scheduler.lane / RLK_WAVE];
  current().offered = x;
  meet(wave);
  if (source >= first && source < first + wave.expected) x = group.lanes[source].offered;
  meet(wave);
  return x;
}

// The workgroup's object of that name; `key` is an address that belongs to the name alone.
template <class T> T& shared(const void* key) {
  auto& objects = scheduler.group->shared;
  for (auto& [known, bytes] : objects)
    if (known == key) return *reinterpret_cast<T*>(bytes.get());
  objects.emplace_back(key, new char[sizeof(T)]);
  memset(objects.back().second.get(), kPoison, sizeof(T));
  return *reinterpret_cast<T*>(objects.back().second.get());
}

inline void run_lane() {
  scheduler.group->launch->body();
  current().ended = true;
  --scheduler.group->running;
  yield();
}

inline std::unique_ptr<Workgroup> make_workgroup(const Launch& launch, int index) {
  auto group = std::make_unique<Workgroup>();
  group->launch = &launch;
  group->index = index;
  group->running = group->barrier.expected = launch.block;
  group->lanes.resize(launch.block);
  group->waves.resize((launch.block + RLK_WAVE - 1) / RLK_WAVE);
  for (int i = 0; i < launch.block; ++i) {
    ++group->waves[i / RLK_WAVE].expected;
    Lane& lane = group->lanes[i];
    if (!scheduler.stacks.empty()) {
      lane.stack = std::move(scheduler.stacks.back());
      scheduler.stacks.pop_back();
    } else {
      lane.stack.reset(new char[kStackBytes]);
    }
    make_context(lane.context, lane.stack.get(), kStackBytes, run_lane);
  }
  return group;
}

// In a random schedule one lane of a workgroup falls far behind the others every few turns.
inline bool left_behind(Lane& lane) {
  uint64_t& x = scheduler.random;
  if (x == 0) return false;
  if (lane.naps > 0) return --lane.naps, true;
  x ^= x << 13;  // xorshift64
  x ^= x >> 7;
  x ^= x << 17;
  if (x >> 54 == 0) lane.naps = int(x % 64);
  return lane.naps > 0;
}

// A turn for every lane that can run. False when none can.
inline bool take_turns(Workgroup& group) {
  const int lanes = int(group.lanes.size());
  bool any = false;
  scheduler.group = &group;
  for (int i = 0; i < lanes; ++i) {
    scheduler.lane = scheduler.reverse ? lanes - 1 - i : i;
    if (!current().can_run()) continue;
    any = true;
    if (!left_behind(current())) switch_context(scheduler.main, current().context);
  }
  return any;
}

inline void describe(const Workgroup& group) {
  int at_barrier = 0, in_shuffle = 0;
  for (const Lane& lane : group.lanes)
    if (!lane.ended) ++(lane.meeting == &group.barrier ? at_barrier : in_shuffle);
  fprintf(stderr, "workgroup %d of %d cannot go on: of its %d lanes %d wait at a barrier, %d in a shuffle, %d ended\n",
          group.index, group.launch->grid, group.launch->block, at_barrier, in_shuffle,
          group.launch->block - group.running);
}

// A turn for the workgroups of the stream's first launch; those that have ended leave. False when no lane can run.
inline bool take_turns(Stream& stream) {
  bool any = false;
  auto& groups = stream.groups;
  for (size_t i = 0; i < groups.size(); ++i) any |= take_turns(*groups[scheduler.reverse ? groups.size() - 1 - i : i]);
  for (size_t i = groups.size(); i-- > 0;) {
    if (groups[i]->running) continue;
    for (Lane& lane : groups[i]->lanes) scheduler.stacks.push_back(std::move(lane.stack));
    groups.erase(groups.begin() + long(i));
  }
  return any;
}

// Runs a launch that depends on no other one.
inline int run_alone(Launch launch) {
  Stream stream(nullptr);
  for (int i = 0; i < launch.grid; ++i) {
    stream.groups.push_back(make_workgroup(launch, scheduler.reverse ? launch.grid - 1 - i : i));
    while (!stream.groups.empty())
      if (!take_turns(stream)) return describe(*stream.groups[0]), kDeadlock;
  }
  return kOk;
}

// Runs everything that was held.
inline int run_together() {
  auto streams = std::exchange(scheduler.streams, {});
  for (bool busy = true; busy;) {
    busy = false;
    bool any = false;
    for (Stream& stream : streams) {
      if (stream.launches.empty()) continue;
      busy = true;
      if (stream.groups.empty())
        for (int i = 0; i < stream.launches.front().grid; ++i)
          stream.groups.push_back(make_workgroup(stream.launches.front(), i));
      any |= take_turns(stream);
      if (stream.groups.empty()) stream.launches.pop_front();
    }
    if (any || !busy) continue;
    for (const Stream& stream : streams)
      for (const auto& group : stream.groups) describe(*group);
    return kDeadlock;
  }
  return kOk;
}

// The kernel with copies of its arguments: a launch may run after its caller has returned.
template <class Kernel, class... Arguments> auto bind_arguments(Kernel kernel, Arguments... arguments) {
  return [=] { kernel(arguments...); };
}

inline int launch(int64_t grid, int block, void* stream, std::function<void()> body) {
  Launch launch{std::move(body), int(grid), block};
  if (!scheduler.held) return run_alone(std::move(launch));
  for (Stream& known : scheduler.streams)
    if (known.id == stream) return known.launches.push_back(std::move(launch)), kOk;
  scheduler.streams.emplace_back(stream);
  scheduler.streams.back().launches.push_back(std::move(launch));
  return kOk;
}

}  // namespace rlk::fibers

inline void __syncthreads() { rlk::fibers::meet(rlk::fibers::scheduler.group->barrier); }

// Lanes take their turns from the last to the first, if `reverse`; a seed that is not 0 leaves some of them behind.
extern "C" __attribute__((visibility("default"), used)) inline int rlk_fibers_order(int reverse, uint64_t seed) {
  rlk::fibers::scheduler.reverse = reverse;
  rlk::fibers::scheduler.random = seed;
  return rlk::kOk;
}

extern "C" __attribute__((visibility("default"), used)) inline int rlk_fibers_hold() {
  rlk::fibers::scheduler.held = true;
  return rlk::kOk;
}

extern "C" __attribute__((visibility("default"), used)) inline int rlk_fibers_run() {
  rlk::fibers::scheduler.held = false;
  return rlk::fibers::run_together();
}
