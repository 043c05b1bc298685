// Activations of gated MLPs in float32, without branches or calls, so that a loop over them is vectorised.
#pragma once
#include <cstdint>
#include <cstring>

namespace forkpoint {

// What joins gate and up; the numbers that Python passes.
enum GateKind : std::int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

struct Gate {
    GateKind kind;
    float alpha, limit;  // of kClampedSwiglu
};

// e^x to about 2 ulp. Beyond float32 it stays at e^-87 or e^88, which a sigmoid cannot tell from 0 or infinity.
// NaN stays NaN.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    // Adding 1.5 * 2^23 rounds to a whole number, which then lies in the low bits.
    constexpr float kRound = 12582912.0f;
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts (Cody and Waite)
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float gated_silu(float gate, float up) { return gate / (1.0f + exponential(-gate)) * up; }

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
inline float gated_gelu_tanh(float gate, float up) {
    const float u = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + exponential(-2.0f * u)) * up;
}

inline float gated_clamped_swiglu(float gate, float up, float alpha, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + 1.0f) * (gate / (1.0f + exponential(-alpha * gate)));
}

}  // namespace forkpoint
