// Switching between the stacks of one thread: host_fibers.h runs the lanes of a workgroup on them.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace rlk::fibers {

#if defined(__x86_64__)

// A fiber that does not run is its stack pointer; on top of its stack lie the registers that a call preserves. This
// takes a few nanoseconds where swapcontext, with its system call for the signal mask, takes hundreds.
struct Context {
  void* stack_pointer = nullptr;
};

__attribute__((naked, noinline)) inline void switch_stack(void** /*save*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n\t"
      "ret");
}

inline void switch_context(Context& from, Context& to) { switch_stack(&from.stack_pointer, to.stack_pointer); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  constexpr int kSaved = 6;  // the registers that switch_stack pops
  auto* top = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
  *--top = 0;  // entry() never returns; at its first instruction the stack is 8 bytes off a multiple of 16
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < kSaved; ++i) *--top = 0;
  context.stack_pointer = top;
}

#else

struct Context {
  ucontext_t saved;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

#endif

}  // namespace rlk::fibers
