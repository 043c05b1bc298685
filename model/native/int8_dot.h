// Dot products of int8 weights with int8 rows of x, for a block of at most 8 rows: AVX2, AVX-VNNI, AVX-512 VNNI.
#pragma once
#include "int8_rows.h"

#include <type_traits>

#define FORKPOINT_AVX_VNNI __attribute__((target("avx2,fma,avxvnni")))
#define FORKPOINT_AVX512_VNNI __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

namespace forkpoint::int8 {

// ---- AVX2: |w| times x with w's sign, so that two products fit into 16 bits (2 * 127 * 127 < 2^15).

FORKPOINT_AVX2 inline float sum_of(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

template <int kRows>
FORKPOINT_AVX2 void dot_avx2(const std::int8_t* weights, const std::uint16_t* weight_scales, Index groups,
                             const std::int8_t* values, const float* scales, float* sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 totals[kRows];
    for (int r = 0; r < kRows; ++r) totals[r] = _mm256_setzero_ps();
    for (Index g = 0; g < groups; ++g) {
        const auto* w = reinterpret_cast<const __m256i*>(weights + g * kGroup);
        const __m256i w0 = _mm256_loadu_si256(w), w1 = _mm256_loadu_si256(w + 1);
        const __m256i a0 = _mm256_abs_epi8(w0), a1 = _mm256_abs_epi8(w1);
        const float weight_scale = from_bfloat16(weight_scales[g]);
        for (int r = 0; r < kRows; ++r) {
            const auto* x = reinterpret_cast<const __m256i*>(values + (g * 8 + r) * kGroup);
            const __m256i p0 = _mm256_maddubs_epi16(a0, _mm256_sign_epi8(_mm256_load_si256(x), w0));
            const __m256i p1 = _mm256_maddubs_epi16(a1, _mm256_sign_epi8(_mm256_load_si256(x + 1), w1));
            const __m256i p = _mm256_add_epi32(_mm256_madd_epi16(p0, ones), _mm256_madd_epi16(p1, ones));
            const __m256 scale = _mm256_set1_ps(weight_scale * scales[g * 8 + r]);
            totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), scale, totals[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) sums[r * kOutputs] = sum_of(totals[r]);
}

// ---- AVX-VNNI: w + 128 as unsigned; the correction is where the sum begins.

template <int kRows>
FORKPOINT_AVX_VNNI void dot_avx_vnni(const std::int8_t* weights, const std::uint16_t* weight_scales, Index groups,
                                     const std::int8_t* values, const float* scales,
                                     const std::int32_t* corrections, float* sums) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256 totals[kRows];
    for (int r = 0; r < kRows; ++r) totals[r] = _mm256_setzero_ps();
    for (Index g = 0; g < groups; ++g) {
        const auto* w = reinterpret_cast<const __m256i*>(weights + g * kGroup);
        const __m256i w0 = _mm256_xor_si256(_mm256_loadu_si256(w), flip);
        const __m256i w1 = _mm256_xor_si256(_mm256_loadu_si256(w + 1), flip);
        const float weight_scale = from_bfloat16(weight_scales[g]);
        for (int r = 0; r < kRows; ++r) {
            const auto* x = reinterpret_cast<const __m256i*>(values + (g * 8 + r) * kGroup);
            __m256i p = _mm256_set1_epi32(corrections[g * 8 + r]);
            p = _mm256_dpbusd_avx_epi32(p, w0, _mm256_load_si256(x));
            p = _mm256_dpbusd_avx_epi32(p, w1, _mm256_load_si256(x + 1));
            const __m256 scale = _mm256_set1_ps(weight_scale * scales[g * 8 + r]);
            totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), scale, totals[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(totals[r]), _mm256_extractf128_ps(totals[r], 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        sums[r * kOutputs] = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
}

// ---- AVX-512 VNNI: the same with one register for a group; kAtOnce outputs share the loads of x.

template <int kRows, int kAtOnce>
FORKPOINT_AVX512_VNNI void dot_avx512_vnni(const Matrix& matrix, Index output, const std::int8_t* values,
                                           const float* scales, const std::int32_t* corrections, float* sums) {
    const Index groups = matrix.groups;
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512 totals[kAtOnce][kRows];
    for (int o = 0; o < kAtOnce; ++o) {
        for (int r = 0; r < kRows; ++r) totals[o][r] = _mm512_setzero_ps();
    }
    for (Index g = 0; g < groups; ++g) {
        for (int o = 0; o < kAtOnce; ++o) {
            const Index at = (output + o) * groups + g;
            const __m512i w = _mm512_xor_si512(_mm512_loadu_si512(matrix.values + at * kGroup), flip);
            // Scales of all rows at once; from memory each is broadcast for free.
            alignas(32) float products[8];
            const __m256 weight_scale = _mm256_set1_ps(from_bfloat16(matrix.scales[at]));
            _mm256_store_ps(products, _mm256_mul_ps(weight_scale, _mm256_load_ps(scales + g * 8)));
            // The compiler would keep them in a register and shuffle, on the port that multiplies.
            __asm__ volatile("" : "+m"(products));
            for (int r = 0; r < kRows; ++r) {
                const __m512i x = _mm512_load_si512(values + (g * 8 + r) * kGroup);
                const __m512i p = _mm512_dpbusd_epi32(_mm512_set1_epi32(corrections[g * 8 + r]), w, x);
                totals[o][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(p), _mm512_set1_ps(products[r]), totals[o][r]);
            }
        }
    }
    for (int o = 0; o < kAtOnce; ++o) {
        for (int r = 0; r < kRows; ++r) sums[r * kOutputs + o] = _mm512_reduce_add_ps(totals[o][r]);
    }
}

// Rows of a block are padded to the next of 1, 2, 4, 8: what is computed for zeros is not used.
template <typename Kernel>
inline void for_row_count(Index rows, Kernel kernel) {
    if (rows == 1) return kernel(std::integral_constant<int, 1>());
    if (rows == 2) return kernel(std::integral_constant<int, 2>());
    if (rows <= 4) return kernel(std::integral_constant<int, 4>());
    return kernel(std::integral_constant<int, 8>());
}

inline void outputs_avx2(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block,
                         Index rows, float* sums) {
    const BlockOf at(x, block);
    for_row_count(rows, [&](auto num_rows) {
        for (Index i = 0; i < count; ++i) {
            const Index start = (first + i) * matrix.groups;
            dot_avx2<num_rows>(matrix.values + start * kGroup, matrix.scales + start, matrix.groups, at.values,
                               at.scales, sums + i);
        }
    });
}

inline void outputs_avx_vnni(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block,
                             Index rows, float* sums) {
    const BlockOf at(x, block);
    for_row_count(rows, [&](auto num_rows) {
        for (Index i = 0; i < count; ++i) {
            const Index start = (first + i) * matrix.groups;
            dot_avx_vnni<num_rows>(matrix.values + start * kGroup, matrix.scales + start, matrix.groups, at.values,
                                   at.scales, at.corrections, sums + i);
        }
    });
}

inline void outputs_avx512_vnni(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block,
                                Index rows, float* sums) {
    const BlockOf at(x, block);
    for_row_count(rows, [&](auto num_rows) {
        constexpr int kAtOnce = num_rows == 8 ? 2 : 4;
        Index i = 0;
        for (; i + kAtOnce <= count; i += kAtOnce) {
            dot_avx512_vnni<num_rows, kAtOnce>(matrix, first + i, at.values, at.scales, at.corrections, sums + i);
        }
        for (; i < count; ++i) {
            dot_avx512_vnni<num_rows, 1>(matrix, first + i, at.values, at.scales, at.corrections, sums + i);
        }
    });
}

}  // namespace forkpoint::int8
