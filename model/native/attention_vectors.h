// Vectors of float32 for the path being compiled (attention_path.h): a few operations, each one instruction or two.
// Included once for each path; no include guard.

#if FORKPOINT_LANES == 16

using Vec = __m512;
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const std::uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline void store(float* into, Vec v) { _mm512_storeu_ps(into, v); }
inline Vec all(float number) { return _mm512_set1_ps(number); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// If one is NaN, the second.
inline Vec greater(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec lesser(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec rounded(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec v, Vec exponent) { return _mm512_scalef_ps(v, exponent); }
inline bool differ(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
inline float sum_of(Vec v) { return _mm512_reduce_add_ps(v); }
inline float greatest_of(Vec v) { return _mm512_reduce_max_ps(v); }
// Where low <= key <= high the score, elsewhere minus infinity.
inline Vec if_seen(Vec score, std::int32_t key, const std::int32_t* low, const std::int32_t* high) {
    const __m512i keys = _mm512_set1_epi32(key);
    const __mmask16 seen = _mm512_cmple_epi32_mask(_mm512_loadu_si512(low), keys) &
                           _mm512_cmple_epi32_mask(keys, _mm512_loadu_si512(high));
    return _mm512_mask_blend_ps(seen, all(-INFINITY), score);
}

#else

using Vec = __m256;
inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline Vec load(const std::uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline void store(float* into, Vec v) { _mm256_storeu_ps(into, v); }
inline Vec all(float number) { return _mm256_set1_ps(number); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// If one is NaN, the second.
inline Vec greater(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec lesser(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec rounded(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Zero for exponents of -127 and less.
inline Vec times_power(Vec v, Vec exponent) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(greater(all(-127.0f), exponent)), _mm256_set1_epi32(127));
    return v * _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline bool differ(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
inline float sum_of(Vec v) { return dot::sum_of(v); }
inline float greatest_of(Vec v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Where low <= key <= high the score, elsewhere minus infinity.
inline Vec if_seen(Vec score, std::int32_t key, const std::int32_t* low, const std::int32_t* high) {
    const __m256i keys = _mm256_set1_epi32(key);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)), keys);
    const __m256i above = _mm256_cmpgt_epi32(keys, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    return _mm256_blendv_ps(score, all(-INFINITY), _mm256_castsi256_ps(_mm256_or_si256(below, above)));
}

#endif

constexpr Index kVec = FORKPOINT_LANES;

// 2^x; zero from about 2^-127 down, NaN of NaN.
inline Vec power_of_two(Vec x) {
    x = greater(all(-200.0f), x);
    const Vec whole = rounded(x);
    const Vec f = x - whole;
    // The Taylor series of 2^f. Its rest is 1e-7, or 2e-6 where the result is rounded to bfloat16.
#if FORKPOINT_PAIRS
    Vec p = multiply_add(all(1.3333558e-3f), f, all(9.6181291e-3f));
#else
    Vec p = multiply_add(all(1.5403530e-4f), f, all(1.3333558e-3f));
    p = multiply_add(p, f, all(9.6181291e-3f));
#endif
    p = multiply_add(p, f, all(5.5504109e-2f));
    p = multiply_add(p, f, all(2.4022651e-1f));
    p = multiply_add(p, f, all(6.9314718e-1f));
    p = multiply_add(p, f, all(1.0f));
    return times_power(p, whole);
}

// cap * tanh(score / cap), by 1 - 2 / (e^2x + 1).
inline Vec capped(Vec score, float cap) {
    const Vec doubled = lesser(all(60.0f), score * all(2.0f * kLog2E / cap));
    return all(cap) - all(2.0f * cap) / (power_of_two(doubled) + all(1.0f));
}

inline void store_numbers(const float* from, Index count, void* into, Index start, bool is_bfloat16) {
    if (!is_bfloat16) {
        std::memcpy(static_cast<float*>(into) + start, from, count * sizeof(float));
        return;
    }
    std::uint16_t* narrow = static_cast<std::uint16_t*>(into) + start;
#if FORKPOINT_PAIRS
    if (count == 16) {
        const __m256bh rounded = _mm512_cvtneps_pbh(load(from));
        std::memcpy(narrow, &rounded, sizeof rounded);
        return;
    }
#endif
    for (Index i = 0; i < count; ++i) narrow[i] = to_bfloat16(from[i]);
}

// Numbers [start, start + count) as float32 or, where both are so, bfloat16; zeros up to `padded`.
inline void copy_numbers(const void* from, bool is_bfloat16, Index start, Index count, Index padded, Number* into) {
    if (is_bfloat16) {
        const auto* source = static_cast<const std::uint16_t*>(from) + start;
        if constexpr (sizeof(Number) == 2) {
            std::memcpy(into, source, count * 2);
        } else {
            for (Index i = 0; i < count; ++i) into[i] = from_bfloat16(source[i]);
        }
    } else if constexpr (sizeof(Number) == 4) {
        std::memcpy(into, static_cast<const float*>(from) + start, count * 4);
    }
    std::memset(into + count, 0, (padded - count) * sizeof(Number));
}
