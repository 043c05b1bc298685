#include "features.h"

#include <atomic>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace forkpoint {
namespace {

bool bit(std::uint32_t word, int index) { return (word >> index) & 1; }

std::uint64_t enabled_states() {
    std::uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (std::uint64_t{high} << 32) | low;
}

// Linux hands out the tile registers on request only.
bool tiles_are_allowed() {
    constexpr int kArchRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
}

std::uint32_t detect() {
    std::uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return 0;
    const bool has_fma = bit(c, 12) && bit(c, 29);
    const std::uint64_t states = enabled_states();
    const bool has_ymm = (states & 0x6) == 0x6, has_zmm = (states & 0xe6) == 0xe6;
    const bool has_tiles = (states & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    std::uint32_t found = 0;
    if (has_ymm && has_fma && bit(b, 5)) found |= kAvx2;
    const bool has_avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
    if (has_zmm && has_avx512 && (found & kAvx2)) found |= kAvx512;
    if ((found & kAvx512) && bit(c, 11)) found |= kAvx512Vnni;
    const bool has_amx_bf16 = bit(d, 22), has_amx_int8 = bit(d, 25), has_amx = bit(d, 24);
    std::uint32_t a1, b1, c1, d1;
    if (__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) {
        if ((found & kAvx512) && bit(a1, 5)) found |= kAvx512Bf16;
        if ((found & kAvx2) && bit(a1, 4)) found |= kAvxVnni;
    }
    if ((found & kAvx512Bf16) && has_tiles && has_amx && tiles_are_allowed()) {
        if (has_amx_bf16) found |= kAmxBf16;
        if (has_amx_int8) found |= kAmxInt8;
    }
    return found;
}

const std::uint32_t detected = detect();
std::atomic<std::uint32_t> allowed{~0u};

}  // namespace

bool has(Feature feature) { return detected & allowed.load(std::memory_order_relaxed) & feature; }

}  // namespace forkpoint

// The features found, as a bit set, less those that are masked.
FORKPOINT_EXPORT std::uint32_t forkpoint_features() {
    return forkpoint::detected & forkpoint::allowed.load(std::memory_order_relaxed);
}

// Use no feature outside `mask` from now on: tests run every path that the machine can.
FORKPOINT_EXPORT void forkpoint_allow_features(std::uint32_t mask) { forkpoint::allowed.store(mask); }
