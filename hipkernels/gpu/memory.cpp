// Memory that GPUs and processes share, by the GPU's own runtime: outside torch's caching allocator, so that one
// allocation is one IPC handle. All functions work on the current device.
#if defined(RLK_HOST_FIBERS)
#include "gpu/memory_host.h"
#else
#include "gpu/gpu.h"

#if defined(__HIP__)
#define RLK_RUNTIME(name) hip##name
#else
#define RLK_RUNTIME(name) cuda##name
#endif

namespace rlk {
namespace {

constexpr int kHandleBytes = 64;
using Handle = RLK_RUNTIME(IpcMemHandle_t);
static_assert(sizeof(Handle) == kHandleBytes, "handles travel as 64 bytes");

int checked(RLK_RUNTIME(Error_t) error) {
  if (error == RLK_RUNTIME(Success)) return kOk;
  (void)RLK_RUNTIME(GetLastError)();  // else the next launch would report it
  return kMemoryFailed;
}

#if defined(__HIP__)
// Peers write into this memory while kernels here poll it, and the reverse: plain memory would stay in a GPU's own L2.
int allocate(void** address, int64_t bytes) {
  return checked(hipExtMallocWithFlags(address, size_t(bytes), hipDeviceMallocUncached));
}
#else
int allocate(void** address, int64_t bytes) { return checked(cudaMalloc(address, size_t(bytes))); }
#endif

}  // namespace
}  // namespace rlk

using namespace rlk;

// `bytes` of device memory, zeroed when this returns.
RLK_EXPORT int rlk_gpu_memory_create(int64_t bytes, void** address) {
  if (bytes <= 0) return kBadShape;
  if (int code = allocate(address, bytes)) return code;
  if (checked(RLK_RUNTIME(Memset)(*address, 0, size_t(bytes))) || checked(RLK_RUNTIME(DeviceSynchronize)())) {
    (void)RLK_RUNTIME(Free)(*address);
    return kMemoryFailed;
  }
  return kOk;
}

RLK_EXPORT int rlk_gpu_memory_free(void* address) { return checked(RLK_RUNTIME(Free)(address)); }

// `bytes` of zeroed host memory that kernels can write, by its address here and on the device.
RLK_EXPORT int rlk_gpu_pinned_create(int64_t bytes, void** host, void** device) {
  if (bytes <= 0) return kBadShape;
#if defined(__HIP__)
  const unsigned flags = hipHostMallocMapped | hipHostMallocCoherent;
  if (int code = checked(hipHostMalloc(host, size_t(bytes), flags))) return code;
#else
  if (int code = checked(cudaHostAlloc(host, size_t(bytes), cudaHostAllocMapped))) return code;
#endif
  memset(*host, 0, size_t(bytes));
  return checked(RLK_RUNTIME(HostGetDevicePointer)(device, *host, 0));
}

RLK_EXPORT int rlk_gpu_pinned_free(void* host) {
#if defined(__HIP__)
  return checked(hipHostFree(host));
#else
  return checked(cudaFreeHost(host));
#endif
}

// The 64 bytes by which another process opens what memory_create made.
RLK_EXPORT int rlk_gpu_ipc_export(void* address, void* handle) {
  return checked(RLK_RUNTIME(IpcGetMemHandle)(static_cast<Handle*>(handle), address));
}

// Maps another process's memory, on this GPU or a peer, for the current device.
RLK_EXPORT int rlk_gpu_ipc_open(const void* handle, void** address) {
  Handle copy;
  memcpy(&copy, handle, sizeof copy);
  return checked(RLK_RUNTIME(IpcOpenMemHandle)(address, copy, RLK_RUNTIME(IpcMemLazyEnablePeerAccess)));
}

RLK_EXPORT int rlk_gpu_ipc_close(void* address) { return checked(RLK_RUNTIME(IpcCloseMemHandle)(address)); }

// Whether `device` can read and write the memory of `peer`.
RLK_EXPORT int rlk_gpu_can_access_peer(int device, int peer, int* yes) {
  return checked(RLK_RUNTIME(DeviceCanAccessPeer)(yes, device, peer));
}
#endif
