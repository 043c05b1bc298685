// Function attributes that name the instructions a function may use, and the intrinsics.
#pragma once

// GCC 12 warns of its own intrinsics where a result is left undefined on purpose (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define FORKPOINT_AVX2 __attribute__((target("avx2,fma")))
#define FORKPOINT_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define FORKPOINT_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define FORKPOINT_AMX_BF16                                                                                         \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))
// For bodies without intrinsics that are compiled for several targets, by a caller for each.
#define FORKPOINT_INLINE inline __attribute__((always_inline))
