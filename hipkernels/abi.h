// What every backend's C functions share with Python: the export macro, dtype codes, error codes.
#pragma once

#define RLK_EXPORT extern "C" __attribute__((visibility("default")))

namespace rlk {

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };  // DTYPE_CODE in rlk/ops/cpu_library.py
enum Error : int {
  kOk = 0,
  kBadDtype = 1,
  kBadShape = 2,
  kTimeout = 3,
  kNoMemory = 4,
  kMisaligned = 5,    // a pointer or a size that 128-bit loads cannot take
  kLaunchFailed = 6,  // the GPU runtime refused a launch
  kDeadlock = 7,      // host fibers: every lane waits for another
  kMemoryFailed = 8,  // the GPU runtime refused to allocate, share or map memory
};

}  // namespace rlk
