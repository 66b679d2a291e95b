// Shared by every file of the CPU backend: dtype dispatch, and the headers that all need.
#pragma once
#include <omp.h>

#include <cstddef>

#include "abi.h"
#include "vector_math.h"

namespace rlk {

// Calls fn(T{}) with T = float or bf16.
template <class Fn> int with_dtype(int dtype, Fn fn) {
  if (dtype == kFloat32) return fn(float{});
  if (dtype == kBfloat16) return fn(bf16{});
  return kBadDtype;
}

}  // namespace rlk
