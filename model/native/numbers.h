// What all kernels share: sizes, bfloat16, memory for one call.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace forkpoint {

using Index = std::int64_t;

inline float from_bfloat16(std::uint16_t value) {
    const std::uint32_t bits = std::uint32_t{value} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// To the nearest, ties to even; NaN stays NaN.
inline std::uint16_t to_bfloat16(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<std::uint16_t>(number != number ? 0x7fc0u : rounded);
}

constexpr Index round_up(Index number, Index multiple) { return (number + multiple - 1) / multiple * multiple; }

// Memory for one call, aligned to cache lines, not initialised.
template <typename T>
class Scratch {
public:
    explicit Scratch(Index count)
        : start_(static_cast<T*>(std::aligned_alloc(64, round_up(count * Index{sizeof(T)} + 1, 64)))) {
        if (start_ == nullptr) throw std::bad_alloc();
    }
    ~Scratch() { std::free(start_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return start_; }

private:
    T* start_;
};

}  // namespace forkpoint
