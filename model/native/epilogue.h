// What follows the products of a slab: bias, the activation that joins gate and up, rounding, storing.
//
// AVX-512 has code of its own; AVX2's is plain C++.
#pragma once
#include "activations.h"
#include "layout.h"

namespace forkpoint::linear {

// Results of a unit for one block of rows: slab, output, row.
using Sums = float[2][kSlab][kRowBlock];

struct Epilogues {
    // Write a slab's results to rows of y, plus bias.
    void (*store)(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y);
    // Put activation(gate) * up where the next product looks for its inputs.
    void (*join)(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums, const Activations& into,
                 Index block);
};

namespace avx512 {

// Of fewer rows one register holds 16 outputs of one row; of more, 16 rows of one output.
constexpr Index kFewRows = 4;

FORKPOINT_AVX512 inline __mmask16 first(Index count) { return static_cast<__mmask16>((1u << count) - 1); }

FORKPOINT_AVX512 inline __m512 bias_of(const Slab& slab) {
    if (slab.matrix.bias == nullptr) return _mm512_setzero_ps();
    const __mmask16 mask = first(slab.count());
    if (!slab.matrix.is_bfloat16) {
        return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(slab.matrix.bias) + slab.first);
    }
    const auto* halves = static_cast<const std::uint16_t*>(slab.matrix.bias) + slab.first;
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, halves));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

// As to_bfloat16.
FORKPOINT_AVX512 inline __m256i to_bfloat16(__m512 numbers) {
    const __m512i bits = _mm512_castps_si512(numbers);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_set1_epi32(rounded, is_nan, 0x7fc00000);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

// All outputs of one row.
FORKPOINT_AVX512 inline __m512 gather(float (*sums)[kRowBlock], Index row) {
    const __m512i steps = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    return _mm512_i32gather_ps(steps, &sums[0][row], 4);
}

// e^x; NaN stays NaN.
FORKPOINT_AVX512 inline __m512 exponential(__m512 x) {
    // Beyond these, sigmoids cannot tell it from 0 or infinity. min and max give the second where one is NaN.
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    // ln 2 in two parts (Cody and Waite).
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    constexpr float kTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (const float term : kTerms) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-u)
FORKPOINT_AVX512 inline __m512 times_sigmoid(__m512 x, __m512 u) {
    const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), u));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

FORKPOINT_AVX512 inline __m512 joined(const Gate& kind, __m512 gate, __m512 up) {
    if (kind.kind == kClampedSwiglu) {
        // In this order NaN stays NaN.
        const __m512 limit = _mm512_set1_ps(kind.limit);
        gate = _mm512_min_ps(limit, gate);
        up = _mm512_max_ps(_mm512_set1_ps(-kind.limit), _mm512_min_ps(limit, up));
        const __m512 swish = times_sigmoid(gate, _mm512_mul_ps(gate, _mm512_set1_ps(kind.alpha)));
        return _mm512_mul_ps(_mm512_add_ps(up, _mm512_set1_ps(1.0f)), swish);
    }
    if (kind.kind == kSilu) return _mm512_mul_ps(times_sigmoid(gate, gate), up);
    // x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
    const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), gate);
    const __m512 u = _mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f));
    return _mm512_mul_ps(times_sigmoid(gate, u), up);
}

FORKPOINT_AVX512 inline void store(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y) {
    const __m512 bias = bias_of(slab);
    const __mmask16 mask = first(slab.count());
    alignas(64) float turned[kRowBlock][kSlab];
    if (rows > kFewRows) turn_avx512(sums, sizeof *sums, kSlab, turned);
    for (Index r = 0; r < rows; ++r) {
        const __m512 found = rows > kFewRows ? _mm512_load_ps(turned[r]) : gather(sums, r);
        const __m512 result = _mm512_add_ps(found, bias);
        const Index start = (first_row + r) * slab.matrix.outputs + slab.first;
        if (slab.matrix.is_bfloat16) {
            _mm256_mask_storeu_epi16(static_cast<std::uint16_t*>(y) + start, mask, to_bfloat16(result));
        } else {
            _mm512_mask_storeu_ps(static_cast<float*>(y) + start, mask, result);
        }
    }
}

// 16 inputs of one row of the next product.
FORKPOINT_AVX512 inline void place_row(__m512 numbers, Index input, const Activations& into, Index block, Index r) {
    const Index row = block * kRowBlock + r;
    if (into.path == Path::kAmx) {
        alignas(32) std::uint32_t pairs[kSlab / 2];
        _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), to_bfloat16(numbers));
        std::uint32_t* tile = into.tiles(block) + input / 2 * kRowBlock + r;
        for (Index i = 0; i < kSlab / 2; ++i) tile[i * kRowBlock] = pairs[i];
    } else if (into.is_narrow()) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(into.narrow(row) + input), to_bfloat16(numbers));
    } else {
        _mm512_storeu_ps(into.wide(row) + input, numbers);
    }
}

FORKPOINT_AVX512 inline void join(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums,
                                  const Activations& into, Index block) {
    const Index rows = into.rows_of(block), first_output = gates.first;
    const __mmask16 mask = first(gates.count());
    const __m512 gate_bias = bias_of(gates), up_bias = bias_of(ups);
    if (rows <= kFewRows) {
        for (Index r = 0; r < rows; ++r) {
            const __m512 g = _mm512_add_ps(gather(sums[0], r), gate_bias);
            const __m512 u = _mm512_add_ps(gather(sums[1], r), up_bias);
            // Beyond the last output there is room: the next product multiplies it with zeros, so it must be finite.
            place_row(_mm512_maskz_mov_ps(mask, joined(gate, g, u)), first_output, into, block, r);
        }
        return;
    }
    alignas(64) float gate_biases[kSlab], up_biases[kSlab];
    _mm512_store_ps(gate_biases, gate_bias);
    _mm512_store_ps(up_biases, up_bias);
    for (Index i = 0; i < kSlab; ++i) {
        const __m512 g = _mm512_add_ps(_mm512_load_ps(sums[0][i]), _mm512_set1_ps(gate_biases[i]));
        const __m512 u = _mm512_add_ps(_mm512_load_ps(sums[1][i]), _mm512_set1_ps(up_biases[i]));
        _mm512_store_ps(sums[0][i], i < gates.count() ? joined(gate, g, u) : _mm512_setzero_ps());
    }
    if (into.path == Path::kAmx) {
        std::uint32_t* pairs = into.tiles(block) + first_output / 2 * kRowBlock;
        for (Index i = 0; i < kSlab / 2; ++i) {
            const __m512i low = _mm512_cvtepu16_epi32(to_bfloat16(_mm512_load_ps(sums[0][2 * i])));
            const __m512i high = _mm512_cvtepu16_epi32(to_bfloat16(_mm512_load_ps(sums[0][2 * i + 1])));
            _mm512_storeu_si512(pairs + i * kRowBlock, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
        return;
    }
    alignas(64) float turned[kRowBlock][kSlab];
    turn_avx512(sums[0], sizeof *sums[0], kSlab, turned);
    for (Index r = 0; r < rows; ++r) place_row(_mm512_load_ps(turned[r]), first_output, into, block, r);
}

}  // namespace avx512

namespace avx2 {

FORKPOINT_AVX2 inline void bias_of(const Slab& slab, float* into) {
    std::memset(into, 0, kSlab * sizeof(float));
    if (slab.matrix.bias != nullptr) {
        widen({slab.matrix.bias, slab.matrix.is_bfloat16}, slab.first, slab.count(), into);
    }
}

FORKPOINT_AVX2 inline void store(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y) {
    float bias[kSlab], results[kSlab];
    bias_of(slab, bias);
    const Index count = slab.count();
    for (Index r = 0; r < rows; ++r) {
        const Index start = (first_row + r) * slab.matrix.outputs + slab.first;
        for (Index i = 0; i < kSlab; ++i) results[i] = sums[i][r] + bias[i];
        if (slab.matrix.is_bfloat16) {
            std::uint16_t rounded[kSlab];
            for (Index i = 0; i < kSlab; ++i) rounded[i] = to_bfloat16(results[i]);
            std::memcpy(static_cast<std::uint16_t*>(y) + start, rounded, count * 2);
        } else {
            std::memcpy(static_cast<float*>(y) + start, results, count * 4);
        }
    }
}

// The activations of 16 outputs of one row, in a loop that becomes vectors.
FORKPOINT_AVX2 inline void joined(const Gate& gate, const float* gates, const float* ups, float* into) {
    switch (gate.kind) {
        case kSilu:
            for (Index i = 0; i < kSlab; ++i) into[i] = gated_silu(gates[i], ups[i]);
            break;
        case kGeluTanh:
            for (Index i = 0; i < kSlab; ++i) into[i] = gated_gelu_tanh(gates[i], ups[i]);
            break;
        case kClampedSwiglu:
            for (Index i = 0; i < kSlab; ++i) {
                into[i] = gated_clamped_swiglu(gates[i], ups[i], gate.alpha, gate.limit);
            }
            break;
    }
}

// Never for tiles, which come with AVX-512.
FORKPOINT_AVX2 inline void join(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums,
                                const Activations& into, Index block) {
    float gate_bias[kSlab], up_bias[kSlab];
    bias_of(gates, gate_bias);
    bias_of(ups, up_bias);
    for (Index r = 0; r < into.rows_of(block); ++r) {
        float g[kSlab], u[kSlab], results[kSlab];
        for (Index i = 0; i < kSlab; ++i) {
            g[i] = sums[0][i][r] + gate_bias[i];
            u[i] = sums[1][i][r] + up_bias[i];
        }
        joined(gate, g, u, results);
        // Beyond the last output there is room: the next product multiplies it with zeros, so it must be finite.
        for (Index i = gates.count(); i < kSlab; ++i) results[i] = 0;
        std::memcpy(into.wide(block * kRowBlock + r) + gates.first, results, sizeof results);
    }
}

}  // namespace avx2

inline Epilogues epilogues_of(Path path) {
    if (path == Path::kAvx2) return {avx2::store, avx2::join};
    return {avx512::store, avx512::join};
}

}  // namespace forkpoint::linear
