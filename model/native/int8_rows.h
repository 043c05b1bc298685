// The two sides of a product with int8 weights: the weights as they lie, and x in int8 as each path wants it.
#pragma once
#include "numbers.h"
#include "targets.h"

namespace forkpoint::int8 {

constexpr Index kGroup = 64;
constexpr Index kOutputs = 16;  // outputs that a thread computes at a time
constexpr Index kMaxBlockRows = 16;

inline Index groups_of(Index inputs) { return (inputs + kGroup - 1) / kGroup; }

// Rows of activations or results: float32 or bfloat16, contiguous.
struct Rows {
    const void* start;
    Index width;
    bool is_bfloat16;
};

struct Matrix {
    const std::int8_t* values;
    const std::uint16_t* scales;
    Index outputs, groups;
};

// One way to multiply. Activations lie in blocks of `block_rows` rows; within a block group by group, in a group
// row by row, or four inputs of all rows at a time where `is_interleaved` (AMX).
//
// outputs_of: results of `count` <= 16 outputs for the first `rows` rows of a block, sums[row * 16 + output].
struct Path {
    Index block_rows;
    bool is_interleaved;
    Index lanes;  // of int32, over which the sum that corrects unsigned weights is spread; 0: none is needed
    void (*outputs_of)(const Matrix& matrix, Index first, Index count, const struct Quantised& x, Index block,
                       Index rows, float* sums);
    void (*begin)();  // in each thread, before its first product and after its last
    void (*end)();
};

// Activations in int8. values: [blocks, groups, block_rows, 64]; scales, corrections: [blocks, groups, block_rows].
// A correction is -128 times the sum of a group's values, divided by the path's lanes.
struct Quantised {
    Quantised(const Path& path, Index num_rows, Index num_inputs)
        : path(path),
          rows(num_rows),
          groups(groups_of(num_inputs)),
          blocks((num_rows + path.block_rows - 1) / path.block_rows),
          values(blocks * groups * path.block_rows * kGroup),
          scales(blocks * groups * path.block_rows),
          corrections(blocks * groups * path.block_rows) {}

    Index rows_of(Index block) const {
        const Index left = rows - block * path.block_rows;
        return left < path.block_rows ? left : path.block_rows;
    }

    const Path& path;
    const Index rows, groups, blocks;
    const Scratch<std::int8_t> values;
    const Scratch<float> scales;
    const Scratch<std::int32_t> corrections;
};

// Where a block's activations lie.
struct BlockOf {
    BlockOf(const Quantised& x, Index block)
        : values(x.values.get() + block * x.groups * x.path.block_rows * kGroup),
          scales(x.scales.get() + block * x.groups * x.path.block_rows),
          corrections(x.corrections.get() + block * x.groups * x.path.block_rows) {}
    const std::int8_t* values;
    const float* scales;
    const std::int32_t* corrections;
};

FORKPOINT_AVX2 inline __m256 load_floats(const Rows& x, Index offset) {
    if (!x.is_bfloat16) return _mm256_loadu_ps(static_cast<const float*>(x.start) + offset);
    const auto* source = static_cast<const std::uint16_t*>(x.start) + offset;
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

FORKPOINT_AVX2 inline float largest(__m256 v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// Quantise one group of one row into 64 bytes. Returns the scale: NaN if a number is not finite, so that the results
// are not either.
FORKPOINT_AVX2 inline float quantise_group(const Rows& x, Index row, Index group, std::int8_t* values,
                                           std::int32_t* sum) {
    __m256 parts[8];
    const Index start = group * kGroup;
    if (start + kGroup <= x.width) {
        for (int i = 0; i < 8; ++i) parts[i] = load_floats(x, row * x.width + start + 8 * i);
    } else {
        float padded[kGroup] = {};
        for (Index i = start; i < x.width; ++i) {
            const Index offset = row * x.width + i;
            padded[i - start] = x.is_bfloat16 ? from_bfloat16(static_cast<const std::uint16_t*>(x.start)[offset])
                                              : static_cast<const float*>(x.start)[offset];
        }
        for (int i = 0; i < 8; ++i) parts[i] = _mm256_loadu_ps(padded + 8 * i);
    }
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 infinity = _mm256_set1_ps(__builtin_inff());
    __m256 most = _mm256_setzero_ps(), strange = _mm256_setzero_ps();
    for (int i = 0; i < 8; ++i) {
        const __m256 size = _mm256_and_ps(parts[i], magnitude);
        most = _mm256_max_ps(most, size);
        strange = _mm256_or_ps(strange, _mm256_cmp_ps(size, infinity, _CMP_NLT_UQ));
    }
    const float top = largest(most);
    const bool is_finite = _mm256_movemask_ps(strange) == 0;
    // Below the smallest normal number the reciprocal would not be finite.
    const bool is_zero = !is_finite || top < 1e-36f;
    const __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : 127.0f / top);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
        const __m256i whole = is_zero ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(parts[i], inverse));
        total = _mm256_add_epi32(total, whole);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(values + 8 * i), _mm_packs_epi16(words, words));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    *sum = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
    if (!is_finite) return __builtin_nanf("");
    return is_zero ? 0.0f : top / 127.0f;
}

// Quantise all rows; call it from every thread of a parallel region. Rows that fill up a block are zeros.
inline void quantise(const Rows& x, const Quantised& into) {
    const Index block_rows = into.path.block_rows;
#pragma omp for schedule(static)
    for (Index row = 0; row < into.blocks * block_rows; ++row) {
        const Index block = row / block_rows, place = row % block_rows;
        for (Index group = 0; group < into.groups; ++group) {
            const Index at = (block * into.groups + group) * block_rows;
            alignas(64) std::int8_t values[kGroup] = {};
            std::int32_t sum = 0;
            into.scales.get()[at + place] = row < into.rows ? quantise_group(x, row, group, values, &sum) : 0.0f;
            into.corrections.get()[at + place] = into.path.lanes ? -sum * (128 / std::int32_t(into.path.lanes)) : 0;
            std::int8_t* group_start = into.values.get() + at * kGroup;
            if (into.path.is_interleaved) {
                for (Index i = 0; i < kGroup / 4; ++i) {
                    std::memcpy(group_start + (i * block_rows + place) * 4, values + 4 * i, 4);
                }
            } else {
                std::memcpy(group_start + place * kGroup, values, kGroup);
            }
        }
    }
}

}  // namespace forkpoint::int8
