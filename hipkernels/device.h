// RLK_DEVICE marks what a kernel may call; on the host it says nothing.
#pragma once

#if (defined(__HIP__) || defined(__CUDACC__)) && !defined(RLK_HOST_FIBERS)
#define RLK_DEVICE __device__
#else
#define RLK_DEVICE
#endif
