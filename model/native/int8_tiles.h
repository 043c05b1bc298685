// Products of int8 weights on AMX tiles: 16 outputs by 16 rows of x by a group of inputs at a time.
#pragma once
#include "int8_rows.h"

#include <memory>

#define FORKPOINT_AMX_INT8                                                                                         \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-int8")))

namespace forkpoint::int8 {

// Fetch the next block of outputs while this one is computed: `group` of `groups` parts of it.
inline void prefetch_next(const Matrix& matrix, Index first, Index group) {
    const std::int8_t* next = matrix.values + ((first + kOutputs) * matrix.groups + group * kOutputs) * kGroup;
    for (Index line = 0; line < kOutputs; ++line) __builtin_prefetch(next + line * kGroup, 0, 2);
}

// W's rows are A's as they lie; x is B, interleaved.
struct TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that LDTILECFG reads");
// Not on a stack: to the compiler _tile_loadconfig reads 8 bytes, and the others would not be written.
alignas(64) inline const TileConfig kTileConfig;

FORKPOINT_AMX_INT8 inline void outputs_amx(const Matrix& matrix, Index first, Index count, const Quantised& x,
                                           Index block, Index rows, float* sums) {
    const BlockOf at(x, block);
    const Index groups = matrix.groups;
    const std::int8_t* weights = matrix.values + first * groups * kGroup;
    Index stride = groups * kGroup;
    // A tile has 16 rows: outputs that are not there are read from a copy of zeros.
    std::unique_ptr<Scratch<std::int8_t>> padded;
    if (count < kOutputs) {
        padded = std::make_unique<Scratch<std::int8_t>>(kOutputs * stride);
        std::memset(padded->get(), 0, kOutputs * stride);
        std::memcpy(padded->get(), weights, count * stride);
        weights = padded->get();
        // To the compiler _tile_loadd reads no memory, so the copy could come after it.
        __asm__ volatile("" ::: "memory");
    }
    // [groups, 16]: each is broadcast from memory.
    alignas(64) float near[kOutputs * 64];
    std::unique_ptr<Scratch<float>> far;
    float* weight_scales = near;
    if (groups > 64) {
        far = std::make_unique<Scratch<float>>(kOutputs * groups);
        weight_scales = far->get();
    }
    for (Index i = 0; i < kOutputs; ++i) {
        const std::uint16_t* of_output = matrix.scales + (i < count ? first + i : first) * groups;
        for (Index g = 0; g < groups; ++g) weight_scales[g * kOutputs + i] = from_bfloat16(of_output[g]);
    }
    __m512 totals[kOutputs];
    for (auto& total : totals) total = _mm512_setzero_ps();
    alignas(64) std::int32_t products[2][kOutputs][16];
    const auto add = [&](Index group, const std::int32_t (*product)[16]) FORKPOINT_AMX_INT8 {
        const __m512 scales = _mm512_load_ps(at.scales + group * 16);
        const float* of_group = weight_scales + group * kOutputs;
        for (Index i = 0; i < kOutputs; ++i) {
            const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(of_group[i]));
            totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(product[i])), scale, totals[i]);
        }
    };
    // Two groups in flight: the second one's tiles are loaded while the first one's products are scaled.
    Index g = 0;
    for (; g + 2 <= groups; g += 2) {
        prefetch_next(matrix, first, g);
        prefetch_next(matrix, first, g + 1);
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(2, weights + g * kGroup, stride);
        _tile_loadd(3, at.values + g * 16 * kGroup, kGroup);
        _tile_dpbssd(0, 2, 3);
        _tile_loadd(4, weights + (g + 1) * kGroup, stride);
        _tile_loadd(5, at.values + (g + 1) * 16 * kGroup, kGroup);
        _tile_dpbssd(1, 4, 5);
        _tile_stored(0, products[0], 64);
        _tile_stored(1, products[1], 64);
        add(g, products[0]);
        add(g + 1, products[1]);
    }
    if (g < groups) {
        prefetch_next(matrix, first, g);
        _tile_zero(0);
        _tile_loadd(2, weights + g * kGroup, stride);
        _tile_loadd(3, at.values + g * 16 * kGroup, kGroup);
        _tile_dpbssd(0, 2, 3);
        _tile_stored(0, products[0], 64);
        add(g, products[0]);
    }
    alignas(64) float by_output[kOutputs][16];
    for (Index i = 0; i < kOutputs; ++i) _mm512_store_ps(by_output[i], totals[i]);
    for (Index r = 0; r < rows; ++r) {
        for (Index i = 0; i < kOutputs; ++i) sums[r * kOutputs + i] = by_output[i][r];
    }
}

FORKPOINT_AMX_INT8 inline void begin_amx() { _tile_loadconfig(&kTileConfig); }

FORKPOINT_AMX_INT8 inline void end_amx() { _tile_release(); }

}  // namespace forkpoint::int8
