// Shared by every file of the CPU backend: the export macro, dtype codes, error codes, dtype dispatch.
#pragma once
#include <omp.h>

#include <cstddef>

#include "cpu/vector_math.h"

#define RLK_EXPORT extern "C" __attribute__((visibility("default")))

namespace rlk {

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1 };  // DTYPE_CODE in rlk/ops/cpu_library.py
enum Error : int { kOk = 0, kBadDtype = 1, kBadShape = 2, kTimeout = 3, kNoMemory = 4 };

// Calls fn(T{}) with T = float or bf16.
template <class Fn> int with_dtype(int dtype, Fn fn) {
  if (dtype == kFloat32) return fn(float{});
  if (dtype == kBfloat16) return fn(bf16{});
  return kBadDtype;
}

}  // namespace rlk
