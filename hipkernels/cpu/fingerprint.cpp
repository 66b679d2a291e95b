// The fingerprint of the sources that this object was built from (set by rlk/build).
#include "cpu/common.h"
RLK_EXPORT const char* rlk_fingerprint() { return RLK_FINGERPRINT; }
