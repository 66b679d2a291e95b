// What a kernel may call is marked RLK_DEVICE, a loop whose arrays must stay in registers RLK_UNROLL; on the host both
// say nothing.
#pragma once

#if (defined(__HIP__) || defined(__CUDACC__)) && !defined(RLK_HOST_FIBERS)
#define RLK_DEVICE __device__
#define RLK_UNROLL _Pragma("unroll")
#else
#define RLK_DEVICE
#define RLK_UNROLL
#endif
