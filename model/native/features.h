// What this machine's processor can do, found out once. Kernels ask has() and choose their path by it.
#pragma once
#include <cstdint>

// What Python may call: a C name, seen from outside.
#define FORKPOINT_EXPORT extern "C" __attribute__((visibility("default")))

namespace forkpoint {

enum Feature : std::uint32_t {
    kAvx2 = 1,          // with FMA and F16C
    kAvx512 = 2,        // F, BW, DQ and VL
    kAvx512Vnni = 4,
    kAvx512Bf16 = 8,
    kAmxBf16 = 16,      // allowed by the kernel, too
    kAmxInt8 = 32,
    kAvxVnni = 64,
};

// Whether the processor has the feature and it is not masked.
bool has(Feature feature);

}  // namespace forkpoint
