// Weights into int8 and back, once each: when a model is read, and where a step computes with floats.
#pragma once
#include "features.h"
#include "int8_rows.h"

namespace forkpoint::int8 {

template <typename Number>
FORKPOINT_INLINE void dequantise_row(const std::int8_t* values, const std::uint16_t* scales, Index inputs,
                                     Number* into) {
    for (Index start = 0; start < inputs; start += kGroup) {
        const float scale = from_bfloat16(scales[start / kGroup]);
        const Index end = start + kGroup < inputs ? start + kGroup : inputs;
        for (Index i = start; i < end; ++i) {
            const float number = static_cast<float>(values[i]) * scale;
            if constexpr (sizeof(Number) == 2) {
                into[i] = to_bfloat16(number);
            } else {
                into[i] = number;
            }
        }
    }
}

template <typename Number>
FORKPOINT_AVX2 void dequantise_row_avx2(const std::int8_t* values, const std::uint16_t* scales, Index inputs,
                                        Number* into) {
    dequantise_row(values, scales, inputs, into);
}

template <typename Number>
FORKPOINT_AVX512 void dequantise_row_avx512(const std::int8_t* values, const std::uint16_t* scales, Index inputs,
                                            Number* into) {
    dequantise_row(values, scales, inputs, into);
}

template <typename Number>
void dequantise(const Matrix& matrix, Index inputs, Number* into) {
    const auto row = has(kAvx512) ? dequantise_row_avx512<Number> : dequantise_row_avx2<Number>;
#pragma omp parallel for schedule(static)
    for (Index output = 0; output < matrix.outputs; ++output) {
        const Index start = output * matrix.groups;
        row(matrix.values + start * kGroup, matrix.scales + start, inputs, into + output * inputs);
    }
}

// The nearest bfloat16 that is not smaller, of a number >= 0.
inline std::uint16_t to_bfloat16_up(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0xffffu) >> 16);
}

template <typename Number>
FORKPOINT_INLINE void quantise_weight_row(const Number* row, Index inputs, std::int8_t* values,
                                          std::uint16_t* scales) {
    for (Index start = 0; start < inputs; start += kGroup) {
        const Index count = start + kGroup < inputs ? kGroup : inputs - start;
        float numbers[kGroup] = {};
        for (Index i = 0; i < count; ++i) {
            if constexpr (sizeof(Number) == 2) {
                numbers[i] = from_bfloat16(row[start + i]);
            } else {
                numbers[i] = row[start + i];
            }
        }
        // As whole numbers magnitudes compare like floats, and what is not finite comes last.
        std::int32_t most = 0;
        for (Index i = 0; i < kGroup; ++i) {
            std::int32_t bits;
            std::memcpy(&bits, numbers + i, sizeof bits);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
        float largest;
        std::memcpy(&largest, &most, sizeof largest);
        const bool is_finite = most < 0x7f800000;
        const std::uint16_t scale = is_finite ? to_bfloat16_up(largest / 127.0f) : 0x7fc0u;
        scales[start / kGroup] = scale;
        const float divisor = is_finite && scale != 0 ? from_bfloat16(scale) : __builtin_inff();
        constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
        for (Index i = 0; i < kGroup; ++i) {
            const float shifted = (is_finite ? numbers[i] : 0.0f) / divisor + kRound;
            std::int32_t bits;
            std::memcpy(&bits, &shifted, sizeof bits);
            values[start + i] = static_cast<std::int8_t>(bits - 0x4b400000);
        }
    }
}

template <typename Number>
FORKPOINT_AVX2 void quantise_weight_row_avx2(const Number* row, Index inputs, std::int8_t* values,
                                             std::uint16_t* scales) {
    quantise_weight_row(row, inputs, values, scales);
}

template <typename Number>
void quantise_weight(const Number* weight, Index outputs, Index inputs, Index groups, std::int8_t* values,
                     std::uint16_t* scales) {
#pragma omp parallel for schedule(static)
    for (Index output = 0; output < outputs; ++output) {
        quantise_weight_row_avx2(weight + output * inputs, inputs, values + output * groups * kGroup,
                                 scales + output * groups);
    }
}

}  // namespace forkpoint::int8
