// Stands in for libamdhip64.so where there is no GPU: it prints what the object registers and launches, one line each.
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))
typedef struct { unsigned x, y, z; } dim3;

static dim3 pushed_grid, pushed_block;
static size_t pushed_shared;
static void* pushed_stream;
static const void* functions[1024];
static const char* names[1024];
static int registered, next_error;

EXPORT void** __hipRegisterFatBinary(const void* wrapper) {
  static void* module;
  const unsigned magic = *(const unsigned*)wrapper;  // "HIPF": the wrapper of an embedded code object
  printf("module %x\n", magic);
  return &module;
}
EXPORT void __hipUnregisterFatBinary(void** module) { (void)module; }
EXPORT void __hipRegisterFunction(void** module, const void* function, char* device_function, const char* name) {
  (void)module, (void)device_function;
  functions[registered] = function, names[registered++] = name;
  printf("register %s\n", name);
}
EXPORT void __hipRegisterVar(void) {}

EXPORT int __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed_grid = grid, pushed_block = block, pushed_shared = shared, pushed_stream = stream;
  return 0;
}
EXPORT int __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void** stream) {
  *grid = pushed_grid, *block = pushed_block, *shared = pushed_shared, *stream = pushed_stream;
  return 0;
}
EXPORT int hipLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
  (void)arguments;
  const char* name = "not registered";
  for (int i = 0; i < registered; ++i)
    if (functions[i] == function) name = names[i];
  printf("launch %s grid %u %u %u block %u %u %u shared %zu stream %p\n", name, grid.x, grid.y, grid.z, block.x,
         block.y, block.z, shared, stream);
  fflush(stdout);
  return 0;
}
EXPORT void stub_fail_next(int error) { next_error = error; }
EXPORT int hipGetLastError(void) {
  const int error = next_error;
  next_error = 0;
  return error;
}

// What hipkernels/gpu/memory.cpp calls: there is no device, so everything fails.
#define FAILS(name) EXPORT int name(void) { return 100; }
FAILS(hipExtMallocWithFlags)
FAILS(hipMemset)
FAILS(hipDeviceSynchronize)
FAILS(hipFree)
FAILS(hipHostMalloc)
FAILS(hipHostGetDevicePointer)
FAILS(hipHostFree)
FAILS(hipIpcGetMemHandle)
FAILS(hipIpcOpenMemHandle)
FAILS(hipIpcCloseMemHandle)
FAILS(hipDeviceCanAccessPeer)
