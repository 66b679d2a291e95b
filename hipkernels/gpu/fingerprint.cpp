// The fingerprint of the sources that this object was built from (set by rlk/build): the loader compares it.
#include "abi.h"
RLK_EXPORT const char* rlk_gpu_fingerprint() { return RLK_FINGERPRINT; }
