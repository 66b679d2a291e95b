// The functions of memory.cpp where the kernels run on the host: memory of this process, which others can map by its
// file descriptor. It goes with the process, also when that dies.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>

#include "abi.h"

namespace rlk {

// What IPC handles hold here; the rest of their 64 bytes is zero.
struct HostHandle {
  int32_t process, descriptor;
};

struct HostMapping {
  size_t bytes;
  int descriptor;  // -1: another process's memory
};
inline std::map<void*, HostMapping> host_mappings;

inline int map_host_memory(int descriptor, size_t bytes, bool own, void** address) {
  *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (*address == MAP_FAILED) return kMemoryFailed;
  host_mappings[*address] = {bytes, own ? descriptor : -1};
  return kOk;
}

inline int unmap_host_memory(void* address, bool own) {
  const auto found = host_mappings.find(address);
  if (found == host_mappings.end() || (found->second.descriptor >= 0) != own) return kMemoryFailed;
  munmap(address, found->second.bytes);
  if (own) close(found->second.descriptor);
  host_mappings.erase(found);
  return kOk;
}

}  // namespace rlk

using namespace rlk;

RLK_EXPORT int rlk_gpu_memory_create(int64_t bytes, void** address) {
  if (bytes <= 0) return kBadShape;
  const int descriptor = memfd_create("rlk", MFD_CLOEXEC);
  if (descriptor < 0) return kMemoryFailed;
  if (ftruncate(descriptor, bytes) || map_host_memory(descriptor, size_t(bytes), true, address)) {
    close(descriptor);
    return kMemoryFailed;
  }
  return kOk;
}

RLK_EXPORT int rlk_gpu_memory_free(void* address) { return unmap_host_memory(address, true); }

RLK_EXPORT int rlk_gpu_pinned_create(int64_t bytes, void** host, void** device) {
  const int code = rlk_gpu_memory_create(bytes, host);
  *device = *host;
  return code;
}

RLK_EXPORT int rlk_gpu_pinned_free(void* host) { return rlk_gpu_memory_free(host); }

RLK_EXPORT int rlk_gpu_ipc_export(void* address, void* handle) {
  const auto found = host_mappings.find(address);
  if (found == host_mappings.end() || found->second.descriptor < 0) return kMemoryFailed;
  const HostHandle made = {getpid(), found->second.descriptor};
  memset(handle, 0, 64);
  memcpy(handle, &made, sizeof made);
  return kOk;
}

RLK_EXPORT int rlk_gpu_ipc_open(const void* handle, void** address) {
  HostHandle made;
  memcpy(&made, handle, sizeof made);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", made.process, made.descriptor);
  const int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return kMemoryFailed;
  struct stat status;
  int code = fstat(descriptor, &status) ? int(kMemoryFailed) : int(kOk);
  if (code == kOk) code = map_host_memory(descriptor, size_t(status.st_size), false, address);
  close(descriptor);
  return code;
}

RLK_EXPORT int rlk_gpu_ipc_close(void* address) { return unmap_host_memory(address, false); }

RLK_EXPORT int rlk_gpu_can_access_peer(int, int, int* yes) {
  *yes = 1;
  return kOk;
}
