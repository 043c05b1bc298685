// Products with int8 weights, y = x W^T, for the few rows of a decode step.
//
// W is row-major, [outputs, groups * 64] int8, with one bfloat16 scale per output and group of 64 inputs; inputs
// beyond the last are zeros. x is quantised on the fly in the same groups, so that all products are whole numbers,
// exact on every path; then each group's sum is scaled and added in float32. A row's result does not depend on how
// many rows there are. One group is one cache line, one register of AVX-512, and one row of an AMX tile.
#include "activations.h"
#include "features.h"

// GCC 12 warns of its own intrinsics where a result is left undefined on purpose (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#define FORKPOINT_AVX2 __attribute__((target("avx2,fma")))
#define FORKPOINT_AVX_VNNI __attribute__((target("avx2,fma,avxvnni")))
#define FORKPOINT_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define FORKPOINT_AVX512_VNNI __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define FORKPOINT_AMX                                                                                              \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-int8")))

namespace forkpoint {
namespace {

using Index = std::int64_t;

constexpr Index kGroup = 64;
constexpr Index kOutputs = 16;  // outputs that a thread computes at a time
constexpr Index kMaxBlockRows = 16;

inline float from_bfloat16(std::uint16_t value) {
    const std::uint32_t bits = std::uint32_t{value} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline std::uint16_t to_bfloat16(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<std::uint16_t>(number != number ? 0x7fc0u : rounded);
}

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

// Memory for one call, aligned to cache lines.
template <typename T>
class Scratch {
public:
    explicit Scratch(Index count) : start_(static_cast<T*>(std::aligned_alloc(64, bytes(count)))) {
        if (start_ == nullptr) throw std::bad_alloc();
    }
    ~Scratch() { std::free(start_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return start_; }

private:
    static std::size_t bytes(Index count) { return (static_cast<std::size_t>(count) * sizeof(T) + 64) / 64 * 64; }
    T* start_;
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
          groups((num_inputs + kGroup - 1) / kGroup),
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
FORKPOINT_AVX2 float quantise_group(const Rows& x, Index row, Index group, std::int8_t* values, std::int32_t* sum) {
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
void quantise(const Rows& x, const Quantised& into) {
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

// Fetch the next block of outputs while this one is computed: `group` of `groups` parts of it.
inline void prefetch_next(const Matrix& matrix, Index first, Index group) {
    const std::int8_t* next = matrix.values + ((first + kOutputs) * matrix.groups + group * kOutputs) * kGroup;
    for (Index line = 0; line < kOutputs; ++line) __builtin_prefetch(next + line * kGroup, 0, 2);
}

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

void outputs_avx2(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block, Index rows,
                  float* sums) {
    const BlockOf at(x, block);
    for_row_count(rows, [&](auto num_rows) {
        for (Index i = 0; i < count; ++i) {
            const Index start = (first + i) * matrix.groups;
            dot_avx2<num_rows>(matrix.values + start * kGroup, matrix.scales + start, matrix.groups, at.values,
                               at.scales, sums + i);
        }
    });
}

void outputs_avx_vnni(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block, Index rows,
                      float* sums) {
    const BlockOf at(x, block);
    for_row_count(rows, [&](auto num_rows) {
        for (Index i = 0; i < count; ++i) {
            const Index start = (first + i) * matrix.groups;
            dot_avx_vnni<num_rows>(matrix.values + start * kGroup, matrix.scales + start, matrix.groups, at.values,
                                   at.scales, at.corrections, sums + i);
        }
    });
}

void outputs_avx512_vnni(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block,
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

// ---- AMX: 16 outputs by 16 rows in one instruction. W's rows are A's as they lie; x is B, interleaved.

struct TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that LDTILECFG reads");
// Not on a stack: to the compiler _tile_loadconfig reads 8 bytes, and the others would not be written.
alignas(64) const TileConfig kTileConfig;

FORKPOINT_AMX void outputs_amx(const Matrix& matrix, Index first, Index count, const Quantised& x, Index block,
                               Index rows, float* sums) {
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
    const auto add = [&](Index group, const std::int32_t (*product)[16]) FORKPOINT_AMX {
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

FORKPOINT_AMX void begin_amx() { _tile_loadconfig(&kTileConfig); }

FORKPOINT_AMX void end_amx() { _tile_release(); }

void nothing() {}

const Path kAmxPath = {16, true, 0, outputs_amx, begin_amx, end_amx};
const Path kAvx512VnniPath = {8, false, 16, outputs_avx512_vnni, nothing, nothing};
const Path kAvxVnniPath = {8, false, 8, outputs_avx_vnni, nothing, nothing};
const Path kAvx2Path = {8, false, 0, outputs_avx2, nothing, nothing};

// One path for every number of rows: the same row gets the same result in any company.
const Path& choose_path() {
    if (has(kAmxInt8) && has(kAvx512)) return kAmxPath;
    if (has(kAvx512Vnni)) return kAvx512VnniPath;
    if (has(kAvxVnni)) return kAvxVnniPath;
    return kAvx2Path;
}

struct Result {
    void* start;
    const void* bias;  // [width] of the same type, or null
    Index width;
    bool is_bfloat16;
};

FORKPOINT_AVX2 void store(const float* sums, Index row, Index first, Index count, const Result& y) {
    const Index at = row * y.width + first;
    if (y.is_bfloat16) {
        auto* to = static_cast<std::uint16_t*>(y.start) + at;
        const auto* bias = static_cast<const std::uint16_t*>(y.bias);
        for (Index i = 0; i < count; ++i) {
            to[i] = to_bfloat16(bias == nullptr ? sums[i] : sums[i] + from_bfloat16(bias[first + i]));
        }
    } else {
        auto* to = static_cast<float*>(y.start) + at;
        const auto* bias = static_cast<const float*>(y.bias);
        for (Index i = 0; i < count; ++i) to[i] = bias == nullptr ? sums[i] : sums[i] + bias[first + i];
    }
}

// y = x W^T + b; call it from every thread of a parallel region.
void multiply(const Matrix& matrix, const Quantised& x, const Result& y) {
    const Index num_blocks = (matrix.outputs + kOutputs - 1) / kOutputs;
#pragma omp for schedule(static)
    for (Index at = 0; at < num_blocks; ++at) {
        const Index first = at * kOutputs;
        const Index left = matrix.outputs - first, count = left < kOutputs ? left : kOutputs;
        for (Index block = 0; block < x.blocks; ++block) {
            alignas(64) float sums[kMaxBlockRows * kOutputs];
            const Index rows = x.rows_of(block);
            x.path.outputs_of(matrix, first, count, x, block, rows, sums);
            for (Index r = 0; r < rows; ++r) {
                store(sums + r * kOutputs, block * x.path.block_rows + r, first, count, y);
            }
        }
    }
}

FORKPOINT_AVX2 void join(const Gate& gate, const float* gates, const float* ups, Index count, float* into) {
    if (gate.kind == kSilu) {
        for (Index i = 0; i < count; ++i) into[i] = gated_silu(gates[i], ups[i]);
    } else if (gate.kind == kGeluTanh) {
        for (Index i = 0; i < count; ++i) into[i] = gated_gelu_tanh(gates[i], ups[i]);
    } else {
        for (Index i = 0; i < count; ++i) into[i] = gated_clamped_swiglu(gates[i], ups[i], gate.alpha, gate.limit);
    }
}

// The first half of a gated MLP into `inner`, [rows, dim] float32. gate_up: gate's outputs, then up's.
void multiply_gated(const Matrix& gate_up, const Quantised& x, const Result& biases, const Gate& gate, float* inner) {
    const Index dim = gate_up.outputs / 2, num_blocks = (dim + kOutputs - 1) / kOutputs;
#pragma omp for schedule(static)
    for (Index at = 0; at < num_blocks; ++at) {
        const Index first = at * kOutputs, left = dim - first, count = left < kOutputs ? left : kOutputs;
        for (Index block = 0; block < x.blocks; ++block) {
            alignas(64) float gates[kMaxBlockRows * kOutputs], ups[kMaxBlockRows * kOutputs];
            const Index rows = x.rows_of(block);
            x.path.outputs_of(gate_up, first, count, x, block, rows, gates);
            x.path.outputs_of(gate_up, dim + first, count, x, block, rows, ups);
            for (Index r = 0; r < rows; ++r) {
                float* g = gates + r * kOutputs;
                float* u = ups + r * kOutputs;
                if (biases.bias != nullptr) {
                    for (Index i = 0; i < count; ++i) {
                        const Index of_gate = first + i, of_up = dim + first + i;
                        const auto* narrow = static_cast<const std::uint16_t*>(biases.bias);
                        const auto* wide = static_cast<const float*>(biases.bias);
                        g[i] += biases.is_bfloat16 ? from_bfloat16(narrow[of_gate]) : wide[of_gate];
                        u[i] += biases.is_bfloat16 ? from_bfloat16(narrow[of_up]) : wide[of_up];
                    }
                }
                join(gate, g, u, count, inner + (block * x.path.block_rows + r) * dim + first);
            }
        }
    }
}

template <typename Number>
inline __attribute__((always_inline)) void dequantise_row(const std::int8_t* values, const std::uint16_t* scales,
                                                          Index inputs, Number* into) {
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
inline __attribute__((always_inline)) void quantise_weight_row(const Number* row, Index inputs, std::int8_t* values,
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

Index groups_of(Index inputs) { return (inputs + kGroup - 1) / kGroup; }

}  // namespace
}  // namespace forkpoint

using forkpoint::Index;

// x: [rows, inputs], bias: [outputs] or null, y: [rows, outputs], all float32 or all bfloat16, contiguous.
FORKPOINT_EXPORT void forkpoint_int8_linear(const std::int8_t* values, const std::uint16_t* scales, const void* bias,
                                            const void* x, void* y, Index rows, Index inputs, Index outputs,
                                            std::int32_t is_bfloat16) {
    const forkpoint::Matrix matrix = {values, scales, outputs, forkpoint::groups_of(inputs)};
    const forkpoint::Quantised quantised(forkpoint::choose_path(), rows, inputs);
    const forkpoint::Rows source = {x, inputs, is_bfloat16 != 0};
    const forkpoint::Result result = {y, bias, outputs, is_bfloat16 != 0};
#pragma omp parallel
    {
        quantised.path.begin();
        forkpoint::quantise(source, quantised);
        forkpoint::multiply(matrix, quantised, result);
        quantised.path.end();
    }
}

// y = gate(x G^T, x U^T) D^T. gate_up: [2 * dim, hidden], gate's rows first; down: [hidden, dim]; biases or null.
FORKPOINT_EXPORT void forkpoint_int8_gated_mlp(const std::int8_t* gate_up, const std::uint16_t* gate_up_scales,
                                               const void* gate_up_bias, const std::int8_t* down,
                                               const std::uint16_t* down_scales, const void* down_bias,
                                               const void* x, void* y, Index rows, Index hidden, Index dim,
                                               std::int32_t kind, float alpha, float limit,
                                               std::int32_t is_bfloat16) {
    const bool is_narrow = is_bfloat16 != 0;
    const forkpoint::Path& path = forkpoint::choose_path();
    const forkpoint::Matrix first = {gate_up, gate_up_scales, 2 * dim, forkpoint::groups_of(hidden)};
    const forkpoint::Matrix second = {down, down_scales, hidden, forkpoint::groups_of(dim)};
    const forkpoint::Quantised outer(path, rows, hidden), inner(path, rows, dim);
    const forkpoint::Scratch<float> joined(rows * dim);
    const forkpoint::Gate gate = {static_cast<forkpoint::GateKind>(kind), alpha, limit};
    const forkpoint::Rows source = {x, hidden, is_narrow}, middle = {joined.get(), dim, false};
#pragma omp parallel
    {
        path.begin();
        forkpoint::quantise(source, outer);
        forkpoint::multiply_gated(first, outer, {nullptr, gate_up_bias, 2 * dim, is_narrow}, gate, joined.get());
        forkpoint::quantise(middle, inner);
        forkpoint::multiply(second, inner, {y, down_bias, hidden, is_narrow});
        path.end();
    }
}

// weight: [outputs, inputs] float32 or bfloat16. values: [outputs, groups * 64]; scales: [outputs, groups], the
// largest of a group / 127, rounded up; NaN where a number is not finite.
FORKPOINT_EXPORT void forkpoint_int8_quantize(const void* weight, std::int8_t* values, std::uint16_t* scales,
                                              Index outputs, Index inputs, std::int32_t is_bfloat16) {
    const Index groups = forkpoint::groups_of(inputs);
    if (is_bfloat16 != 0) {
        const auto* narrow = static_cast<const std::uint16_t*>(weight);
        forkpoint::quantise_weight(narrow, outputs, inputs, groups, values, scales);
    } else {
        forkpoint::quantise_weight(static_cast<const float*>(weight), outputs, inputs, groups, values, scales);
    }
}

// into: [outputs, inputs] float32 or bfloat16: every value times its scale, rounded once.
FORKPOINT_EXPORT void forkpoint_int8_dequantize(const std::int8_t* values, const std::uint16_t* scales, void* into,
                                                Index outputs, Index inputs, std::int32_t is_bfloat16) {
    const forkpoint::Matrix matrix = {values, scales, outputs, forkpoint::groups_of(inputs)};
    if (is_bfloat16 != 0) {
        forkpoint::dequantise(matrix, inputs, static_cast<std::uint16_t*>(into));
    } else {
        forkpoint::dequantise(matrix, inputs, static_cast<float*>(into));
    }
}
