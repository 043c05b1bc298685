// What lies between a layer's products: norms, residual additions, rotation of heads, and the writing of keys and values.
//
// Each row is worked on by itself in float32 and rounded to the rows' type wherever the torch path rounds. Sums run
// over 32 lanes in an order that the width alone decides, so that a row has the same bits in any number of rows
// and threads. The bodies are plain C++, compiled for each target; both targets give the same bits.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "features.h"
#include "numbers.h"
#include "targets.h"

namespace forkpoint::rows {
namespace {

constexpr Index kLanes = 32;
// Fewer numbers than this are done before a second thread has woken up.
constexpr Index kNumbersForThreads = 1 << 16;

enum NormKind : std::int32_t { kNone = 0, kRms = 1, kRmsWide = 2, kLayer = 3 };

template <typename T>
FORKPOINT_INLINE float widen(T number) {
    if constexpr (std::is_same_v<T, float>) return number;
    else return from_bfloat16(number);
}

template <typename T>
FORKPOINT_INLINE T narrow(float number) {
    if constexpr (std::is_same_v<T, float>) return number;
    else return to_bfloat16(number);
}

// The same as widen(narrow()), without leaving the lanes of 32 bits.
template <typename T>
FORKPOINT_INLINE float rounded(float number) {
    if constexpr (std::is_same_v<T, float>) return number;
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u;
    bits = number != number ? 0x7fc00000u : bits;
    std::memcpy(&number, &bits, sizeof bits);
    return number;
}

template <typename T>
FORKPOINT_INLINE void load(const T* from, Index count, float* to) {
#pragma GCC ivdep
    for (Index i = 0; i < count; ++i) to[i] = widen<T>(from[i]);
}

// Numbers that are rounded to T, as To.
template <typename T, typename To>
FORKPOINT_INLINE void store(const float* from, Index count, To* to) {
#pragma GCC ivdep
    for (Index i = 0; i < count; ++i) {
        if constexpr (std::is_same_v<T, std::uint16_t> && std::is_same_v<To, std::uint16_t>) {
            std::uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            to[i] = static_cast<std::uint16_t>(bits >> 16);
        } else {
            to[i] = narrow<To>(from[i]);
        }
    }
}

// Sum of x, or of its squares: lane by lane, then the lanes. The lanes are vectors of the compiler's, so that they
// stay in registers: as an array they would go through memory each time.
template <bool kSquares>
FORKPOINT_INLINE float sum_of(const float* x, Index count) {
    typedef float Vector __attribute__((vector_size(32)));
    constexpr Index kWidth = sizeof(Vector) / sizeof(float), kVectors = kLanes / kWidth;
    Vector vectors[kVectors] = {};
    const Index whole = count / kLanes * kLanes;
    for (Index i = 0; i < whole; i += kLanes) {
        for (Index v = 0; v < kVectors; ++v) {
            Vector numbers;
            std::memcpy(&numbers, x + i + v * kWidth, sizeof numbers);
            vectors[v] += kSquares ? numbers * numbers : numbers;
        }
    }
    float lanes[kLanes];
    std::memcpy(lanes, vectors, sizeof lanes);
    for (Index i = whole; i < count; ++i) lanes[i - whole] += kSquares ? x[i] * x[i] : x[i];
    for (Index half = kLanes / 2; half > 0; half /= 2) {
        for (Index lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

// Norm of x in place, rounded to T as it would be stored.
template <typename T>
FORKPOINT_INLINE void normalise(float* x, Index count, std::int32_t kind, const float* weights, float eps) {
    if (kind == kLayer) {
        const float mean = sum_of<false>(x, count) / static_cast<float>(count);
#pragma GCC ivdep
        for (Index i = 0; i < count; ++i) x[i] -= mean;
    }
    const float squares = sum_of<true>(x, count);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
    if (kind == kRms) {
#pragma GCC ivdep
        for (Index i = 0; i < count; ++i) x[i] = rounded<T>(rounded<T>(x[i] * scale) * weights[i]);
    } else {
#pragma GCC ivdep
        for (Index i = 0; i < count; ++i) x[i] = rounded<T>(x[i] * scale * weights[i]);
    }
}

// The minus of each pair's first is in the formula. Rounded to T after the first product unless is_wide.
template <typename T>
FORKPOINT_INLINE void rotate_pair(float& first, float& second, float cos, float sin, bool is_wide) {
    float from_first = first * cos, from_second = second * cos;
    if (!is_wide) {
        from_first = rounded<T>(from_first);
        from_second = rounded<T>(from_second);
    }
    const float turned = rounded<T>(from_first - second * sin);
    second = rounded<T>(from_second + first * sin);
    first = turned;
}

template <typename T>
FORKPOINT_INLINE void rotate_halves(float* x, Index half, const float* angles, bool is_wide) {
#pragma GCC ivdep
    for (Index i = 0; i < half; ++i) rotate_pair<T>(x[i], x[half + i], angles[i], angles[half + i], is_wide);
}

template <typename T>
FORKPOINT_INLINE void rotate_neighbours(float* x, Index half, const float* angles, bool is_wide) {
#pragma GCC ivdep
    for (Index i = 0; i < half; ++i) rotate_pair<T>(x[2 * i], x[2 * i + 1], angles[i], angles[half + i], is_wide);
}

}  // namespace

// What becomes of a branch, and what the next one is given; as in rows.py. weights: [dim] float32.
struct Joint {
    Index dim;
    float multiplier;
    float branch_eps, next_eps;
    std::int32_t branch_norm, next_norm;
    const float *branch_weights, *next_weights;
    std::int32_t is_bfloat16;
};

// How q, k and v of one layer are treated; as in rows.py.
struct Heads {
    Index num_q_heads, num_kv_heads, k_dim, v_dim;
    Index rotary_dim;      // 0: no rotation
    const float* weights;  // [Hq + Hkv, k_dim]
    float eps;
    std::int32_t norm;
    std::int32_t is_flat;  // one norm over all heads of q, one over all of k
    std::int32_t is_interleaved;
    std::int32_t is_wide;  // rotated in float32
    float value_scale;
    void *keys, *values;  // the pool's slots
    std::int32_t pool_is_bfloat16;
    std::int32_t is_bfloat16;
};

// One call's rows; as in rows.py. angles: [positions, rotary_dim], cos then sin. q: [rows, Hq, k_dim].
struct HeadRows {
    const void* qkv;
    void* q;
    const Index *positions, *slots;
    const float* angles;
    Index count;
};

namespace {

template <typename T>
FORKPOINT_INLINE void join_row(const Joint& joint, const T* branch, T* x, T* next, float* sums, float* added) {
    load(x, joint.dim, sums);
    if (branch != nullptr) {
        load(branch, joint.dim, added);
        if (joint.branch_norm != kNone) {
            normalise<T>(added, joint.dim, joint.branch_norm, joint.branch_weights, joint.branch_eps);
        }
        if (joint.multiplier != 1.0f) {
            for (Index i = 0; i < joint.dim; ++i) added[i] = rounded<T>(added[i] * joint.multiplier);
        }
#pragma GCC ivdep
        for (Index i = 0; i < joint.dim; ++i) sums[i] = rounded<T>(sums[i] + added[i]);
        store<T>(sums, joint.dim, x);
    }
    if (joint.next_norm != kNone) {
        normalise<T>(sums, joint.dim, joint.next_norm, joint.next_weights, joint.next_eps);
        store<T>(sums, joint.dim, next);
    }
}

template <typename T, typename Pool>
FORKPOINT_INLINE void place_row(const Heads& heads, const HeadRows& rows, Index row, float* x) {
    const Index q_size = heads.num_q_heads * heads.k_dim, k_size = heads.num_kv_heads * heads.k_dim;
    const Index v_size = heads.num_kv_heads * heads.v_dim, size = q_size + k_size + v_size;
    load(static_cast<const T*>(rows.qkv) + row * size, size, x);
    if (heads.norm != kNone && heads.is_flat) {
        normalise<T>(x, q_size, heads.norm, heads.weights, heads.eps);
        normalise<T>(x + q_size, k_size, heads.norm, heads.weights + q_size, heads.eps);
    } else if (heads.norm != kNone) {
        for (Index start = 0; start < q_size + k_size; start += heads.k_dim) {
            normalise<T>(x + start, heads.k_dim, heads.norm, heads.weights + start, heads.eps);
        }
    }
    if (heads.rotary_dim > 0) {
        const float* angles = rows.angles + rows.positions[row] * heads.rotary_dim;
        for (Index start = 0; start < q_size + k_size; start += heads.k_dim) {
            if (heads.is_interleaved) rotate_neighbours<T>(x + start, heads.rotary_dim / 2, angles, heads.is_wide);
            else rotate_halves<T>(x + start, heads.rotary_dim / 2, angles, heads.is_wide);
        }
    }
    float* values = x + q_size + k_size;
    if (heads.value_scale != 1.0f) {
        for (Index i = 0; i < v_size; ++i) values[i] = rounded<T>(values[i] * heads.value_scale);
    }
    store<T>(x, q_size, static_cast<T*>(rows.q) + row * q_size);
    store<T>(x + q_size, k_size, static_cast<Pool*>(heads.keys) + rows.slots[row] * k_size);
    store<T>(values, v_size, static_cast<Pool*>(heads.values) + rows.slots[row] * v_size);
}

// The bodies for each target: calls below are inlined into them.
template <typename T>
using JoinRow = void (*)(const Joint&, const T*, T*, T*, float*, float*);
using PlaceRow = void (*)(const Heads&, const HeadRows&, Index, float*);

template <typename T>
FORKPOINT_AVX512 void join_row_avx512(const Joint& joint, const T* branch, T* x, T* next, float* sums, float* added) {
    join_row(joint, branch, x, next, sums, added);
}
template <typename T>
FORKPOINT_AVX2 void join_row_avx2(const Joint& joint, const T* branch, T* x, T* next, float* sums, float* added) {
    join_row(joint, branch, x, next, sums, added);
}
template <typename T, typename Pool>
FORKPOINT_AVX512 void place_row_avx512(const Heads& heads, const HeadRows& rows, Index row, float* x) {
    place_row<T, Pool>(heads, rows, row, x);
}
template <typename T, typename Pool>
FORKPOINT_AVX2 void place_row_avx2(const Heads& heads, const HeadRows& rows, Index row, float* x) {
    place_row<T, Pool>(heads, rows, row, x);
}

template <typename T>
void join(const Joint& joint, const T* branch, T* x, T* next, Index count) {
    const JoinRow<T> join_one = has(kAvx512) ? join_row_avx512<T> : join_row_avx2<T>;
#pragma omp parallel if (count * joint.dim >= kNumbersForThreads)
    {
        const Scratch<float> sums(joint.dim), added(joint.dim);
#pragma omp for schedule(static)
        for (Index row = 0; row < count; ++row) {
            const Index start = row * joint.dim;
            join_one(joint, branch == nullptr ? nullptr : branch + start, x + start,
                     next == nullptr ? nullptr : next + start, sums.get(), added.get());
        }
    }
}

template <typename T, typename Pool>
PlaceRow choose_place() { return has(kAvx512) ? place_row_avx512<T, Pool> : place_row_avx2<T, Pool>; }

PlaceRow choose_place(const Heads& heads) {
    if (heads.is_bfloat16) {
        return heads.pool_is_bfloat16 ? choose_place<std::uint16_t, std::uint16_t>() : choose_place<std::uint16_t, float>();
    }
    return heads.pool_is_bfloat16 ? choose_place<float, std::uint16_t>() : choose_place<float, float>();
}

}  // namespace
}  // namespace forkpoint::rows

// x += multiplier * norm(branch) in place, next = norm(x). branch may be null, next is untouched without a norm.
// All [rows, dim], contiguous, no two of them overlapping.
FORKPOINT_EXPORT void forkpoint_join(const forkpoint::rows::Joint* joint, const void* branch, void* x, void* next,
                                     std::int64_t count) {
    if (joint->is_bfloat16) {
        forkpoint::rows::join(*joint, static_cast<const std::uint16_t*>(branch), static_cast<std::uint16_t*>(x),
                              static_cast<std::uint16_t*>(next), count);
    } else {
        forkpoint::rows::join(*joint, static_cast<const float*>(branch), static_cast<float*>(x),
                              static_cast<float*>(next), count);
    }
}

// From the output of the qkv product: q normed and rotated to its own array, keys and values to their slots.
FORKPOINT_EXPORT void forkpoint_place_heads(const forkpoint::rows::Heads* heads,
                                            const forkpoint::rows::HeadRows* rows) {
    const auto place_one = forkpoint::rows::choose_place(*heads);
    const std::int64_t size = (heads->num_q_heads + heads->num_kv_heads) * heads->k_dim +
                              heads->num_kv_heads * heads->v_dim;
#pragma omp parallel if (rows->count * size >= forkpoint::rows::kNumbersForThreads)
    {
        const forkpoint::Scratch<float> x(size);
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < rows->count; ++row) place_one(*heads, *rows, row, x.get());
    }
}
