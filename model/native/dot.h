// Dot products of up to 16 outputs with a few rows, without tiles: one accumulator for each pair of output and row.
#pragma once
#include "numbers.h"
#include "targets.h"

#include <type_traits>

namespace forkpoint {

constexpr Index kSlab = 16;      // outputs that are computed together
constexpr Index kRowBlock = 16;  // rows of one block of results
constexpr Index kStep = 32;      // inputs that x is padded to

// `count` <= 16 rows of weights, one after another.
struct SlabOf {
    const char* start;
    Index inputs, count;
};

namespace dot {

// Call kernel(number of rows as a type, first row) for pieces of at most kMost rows, the last two alike.
template <int kMost, typename Kernel>
FORKPOINT_INLINE void in_pieces(Index rows, Kernel kernel) {
    static_assert(kMost == 4 || kMost == 6);
    Index row = 0;
    while (row < rows) {
        const Index left = rows - row;
        const Index count = left <= kMost ? left : left >= 2 * kMost ? kMost : (left + 1) / 2;
        if (count == 1) kernel(std::integral_constant<int, 1>(), row);
        if (count == 2) kernel(std::integral_constant<int, 2>(), row);
        if (count == 3) kernel(std::integral_constant<int, 3>(), row);
        if (count == 4) kernel(std::integral_constant<int, 4>(), row);
        if constexpr (kMost == 6) {
            if (count == 5) kernel(std::integral_constant<int, 5>(), row);
            if (count == 6) kernel(std::integral_constant<int, 6>(), row);
        }
        row += count;
    }
}

// Outputs whose sums share the loads of x, as many as registers hold: 6 rows by 4 outputs of 32 registers, 4 by 2 or
// 2 by 4 of 16.
constexpr int kOutputsAvx512 = 4;
constexpr int outputs_avx2_at_once(int rows) { return rows <= 2 ? 4 : 2; }

// The next slab is read while this one is computed; only the first piece of rows asks for it.
inline void prefetch(const void* weights, Index slab_bytes) {
    __builtin_prefetch(static_cast<const char*>(weights) + slab_bytes, 0, 2);
}

template <int kOutputs, typename Number>
struct Pointers {
    // Outputs beyond the last are the last one again; what comes of them is not used.
    Pointers(const SlabOf& slab, Index output) {
        for (int o = 0; o < kOutputs; ++o) {
            const Index at = output + o < slab.count ? output + o : slab.count - 1;
            of[o] = reinterpret_cast<const Number*>(slab.start) + at * slab.inputs;
        }
    }
    // The inputs from `done` on, followed by zeros.
    void copy_tail(Index done, Index inputs, Number (*into)[kStep]) const {
        std::memset(into, 0, kOutputs * sizeof *into);
        for (int o = 0; o < kOutputs; ++o) std::memcpy(into[o], of[o] + done, (inputs - done) * sizeof(Number));
    }
    const Number* of[kOutputs];
};

FORKPOINT_AVX512 inline __m512 load_avx512(const float* from) { return _mm512_loadu_ps(from); }
FORKPOINT_AVX512 inline __m512 load_avx512(const std::uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
FORKPOINT_AVX2 inline __m256 load_avx2(const float* from) { return _mm256_loadu_ps(from); }
FORKPOINT_AVX2 inline __m256 load_avx2(const std::uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
FORKPOINT_AVX2 inline float sum_of(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// The sum of each of 16 registers, each in the order of _mm512_reduce_add_ps.
FORKPOINT_AVX512 inline __m512 sums_of_16(__m512 (&v)[16]) {
    for (int i = 0; i < 8; ++i) {
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 mixed = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, mixed);
}

template <int kRows, int kOutputs>
FORKPOINT_AVX512 inline void add_up_avx512(const __m512 (&totals)[kOutputs][kRows], Index count,
                                           float (*sums)[kRowBlock]) {
    constexpr int kNumSums = kOutputs * kRows;
    alignas(64) float results[round_up(kNumSums, 16)];
    if (kNumSums <= 4) {
        for (int i = 0; i < kNumSums; ++i) results[i] = _mm512_reduce_add_ps(totals[i / kRows][i % kRows]);
    } else {
        for (int first = 0; first < kNumSums; first += 16) {
            __m512 some[16];
            for (int i = 0; i < 16; ++i) {
                const int at = first + i;
                some[i] = at < kNumSums ? totals[at / kRows][at % kRows] : _mm512_setzero_ps();
            }
            _mm512_store_ps(results + first, sums_of_16(some));
        }
    }
    for (int o = 0; o < kOutputs && o < count; ++o) std::memcpy(sums[o], results + o * kRows, kRows * sizeof(float));
}

// ---- AVX-512 BF16: 32 inputs at a time.

template <int kRows, int kOutputs>
FORKPOINT_AVX512_BF16 inline void step_avx512_bf16(const std::uint16_t* const* weights, Index at,
                                                   const std::uint16_t* x, Index stride,
                                                   __m512 (&totals)[kOutputs][kRows]) {
    __m512bh w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) w[o] = (__m512bh)_mm512_loadu_si512(weights[o] + at);
    for (int r = 0; r < kRows; ++r) {
        const auto values = (__m512bh)_mm512_loadu_si512(x + r * stride);
        for (int o = 0; o < kOutputs; ++o) totals[o][r] = _mm512_dpbf16_ps(totals[o][r], w[o], values);
    }
}

template <int kRows, bool kPrefetches>
FORKPOINT_AVX512_BF16 void outputs_avx512_bf16(const SlabOf& slab, const std::uint16_t* x, Index stride,
                                               float (*sums)[kRowBlock]) {
    constexpr int kOutputs = kOutputsAvx512;
    const Index done = slab.inputs / 32 * 32;
    for (Index output = 0; output < slab.count; output += kOutputs) {
        const Pointers<kOutputs, std::uint16_t> weights(slab, output);
        __m512 totals[kOutputs][kRows];
        for (int o = 0; o < kOutputs; ++o) {
            for (int r = 0; r < kRows; ++r) totals[o][r] = _mm512_setzero_ps();
        }
        for (Index i = 0; i < done; i += 32) {
            if (kPrefetches) {
                for (int o = 0; o < kOutputs; ++o) prefetch(weights.of[o] + i, kSlab * slab.inputs * 2);
            }
            step_avx512_bf16<kRows, kOutputs>(weights.of, i, x + i, stride, totals);
        }
        if (done < slab.inputs) {
            std::uint16_t tails[kOutputs][kStep];
            weights.copy_tail(done, slab.inputs, tails);
            const std::uint16_t* starts[kOutputs];
            for (int o = 0; o < kOutputs; ++o) starts[o] = tails[o];
            step_avx512_bf16<kRows, kOutputs>(starts, 0, x + done, stride, totals);
        }
        add_up_avx512<kRows, kOutputs>(totals, slab.count - output, sums + output);
    }
}

// ---- AVX-512: 16 inputs at a time; x is float32, weights become so.

template <int kRows, int kOutputs, typename Number>
FORKPOINT_AVX512 inline void step_avx512(const Number* const* weights, Index at, const float* x, Index stride,
                                         __m512 (&totals)[kOutputs][kRows]) {
    __m512 w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) w[o] = load_avx512(weights[o] + at);
    for (int r = 0; r < kRows; ++r) {
        const __m512 values = _mm512_loadu_ps(x + r * stride);
        for (int o = 0; o < kOutputs; ++o) totals[o][r] = _mm512_fmadd_ps(w[o], values, totals[o][r]);
    }
}

template <int kRows, bool kPrefetches, typename Number>
FORKPOINT_AVX512 void outputs_avx512(const SlabOf& slab, const float* x, Index stride, float (*sums)[kRowBlock]) {
    constexpr int kOutputs = kOutputsAvx512;
    const Index done = slab.inputs / 16 * 16;
    for (Index output = 0; output < slab.count; output += kOutputs) {
        const Pointers<kOutputs, Number> weights(slab, output);
        __m512 totals[kOutputs][kRows];
        for (int o = 0; o < kOutputs; ++o) {
            for (int r = 0; r < kRows; ++r) totals[o][r] = _mm512_setzero_ps();
        }
        for (Index i = 0; i < done; i += 16) {
            if (kPrefetches) {
                for (int o = 0; o < kOutputs; ++o) {
                    prefetch(weights.of[o] + i, kSlab * slab.inputs * Index{sizeof(Number)});
                }
            }
            step_avx512<kRows, kOutputs>(weights.of, i, x + i, stride, totals);
        }
        if (done < slab.inputs) {
            Number tails[kOutputs][kStep];
            weights.copy_tail(done, slab.inputs, tails);
            const Number* starts[kOutputs];
            for (int o = 0; o < kOutputs; ++o) starts[o] = tails[o];
            step_avx512<kRows, kOutputs>(starts, 0, x + done, stride, totals);
        }
        add_up_avx512<kRows, kOutputs>(totals, slab.count - output, sums + output);
    }
}

// ---- AVX2: 8 inputs at a time.

template <int kRows, int kOutputs, typename Number>
FORKPOINT_AVX2 inline void step_avx2(const Number* const* weights, Index at, const float* x, Index stride,
                                     __m256 (&totals)[kOutputs][kRows]) {
    __m256 w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) w[o] = load_avx2(weights[o] + at);
    for (int r = 0; r < kRows; ++r) {
        const __m256 values = _mm256_loadu_ps(x + r * stride);
        for (int o = 0; o < kOutputs; ++o) totals[o][r] = _mm256_fmadd_ps(w[o], values, totals[o][r]);
    }
}

template <int kRows, bool kPrefetches, typename Number>
FORKPOINT_AVX2 void outputs_avx2(const SlabOf& slab, const float* x, Index stride, float (*sums)[kRowBlock]) {
    constexpr int kOutputs = outputs_avx2_at_once(kRows);
    const Index done = slab.inputs / 8 * 8;
    for (Index output = 0; output < slab.count; output += kOutputs) {
        const Pointers<kOutputs, Number> weights(slab, output);
        __m256 totals[kOutputs][kRows];
        for (int o = 0; o < kOutputs; ++o) {
            for (int r = 0; r < kRows; ++r) totals[o][r] = _mm256_setzero_ps();
        }
        for (Index i = 0; i < done; i += 8) {
            if (kPrefetches && i % 16 == 0) {
                for (int o = 0; o < kOutputs; ++o) {
                    prefetch(weights.of[o] + i, kSlab * slab.inputs * Index{sizeof(Number)});
                }
            }
            step_avx2<kRows, kOutputs>(weights.of, i, x + i, stride, totals);
        }
        if (done < slab.inputs) {
            Number tails[kOutputs][kStep];
            weights.copy_tail(done, slab.inputs, tails);
            const Number* starts[kOutputs];
            for (int o = 0; o < kOutputs; ++o) starts[o] = tails[o];
            step_avx2<kRows, kOutputs>(starts, 0, x + done, stride, totals);
        }
        for (int o = 0; o < kOutputs && output + o < slab.count; ++o) {
            for (int r = 0; r < kRows; ++r) sums[output + o][r] = sum_of(totals[o][r]);
        }
    }
}

}  // namespace dot

// sums[output][row] of `rows` <= 16 rows of x, `stride` numbers apart, padded with zeros.

inline void dot_rows_avx512_bf16(const SlabOf& slab, const std::uint16_t* x, Index stride, Index rows,
                                 float (*sums)[kRowBlock]) {
    dot::in_pieces<6>(rows, [&](auto count, Index row) {
        const auto outputs =
            row == 0 ? dot::outputs_avx512_bf16<count, true> : dot::outputs_avx512_bf16<count, false>;
        outputs(slab, x + row * stride, stride, reinterpret_cast<float(*)[kRowBlock]>(&sums[0][row]));
    });
}

template <typename Number>
void dot_rows_avx512(const SlabOf& slab, const float* x, Index stride, Index rows, float (*sums)[kRowBlock]) {
    dot::in_pieces<6>(rows, [&](auto count, Index row) {
        const auto outputs =
            row == 0 ? dot::outputs_avx512<count, true, Number> : dot::outputs_avx512<count, false, Number>;
        outputs(slab, x + row * stride, stride, reinterpret_cast<float(*)[kRowBlock]>(&sums[0][row]));
    });
}

template <typename Number>
void dot_rows_avx2(const SlabOf& slab, const float* x, Index stride, Index rows, float (*sums)[kRowBlock]) {
    dot::in_pieces<4>(rows, [&](auto count, Index row) {
        const auto outputs =
            row == 0 ? dot::outputs_avx2<count, true, Number> : dot::outputs_avx2<count, false, Number>;
        outputs(slab, x + row * stride, stride, reinterpret_cast<float(*)[kRowBlock]>(&sums[0][row]));
    });
}

}  // namespace forkpoint
