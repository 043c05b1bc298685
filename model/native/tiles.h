// Products on AMX tiles: 16 outputs by 16 rows of x by 32 inputs at a time, the weights straight from their rows.
#pragma once
#include "dot.h"
#include "numbers.h"
#include "targets.h"

#include <memory>

namespace forkpoint {

constexpr Index kTile = 256;  // pairs of bfloat16 in a tile

namespace tiles {

struct alignas(64) Configuration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know that a tile load reads memory: what was written must be there.
inline void written() { __asm__ volatile("" ::: "memory"); }

}  // namespace tiles

// In each thread, before its first product and after its last. All eight tiles are 16 rows of 64 bytes.
FORKPOINT_AMX_BF16 inline void begin_tiles() {
    const tiles::Configuration configuration;
    tiles::written();
    _tile_loadconfig(&configuration);
}
FORKPOINT_AMX_BF16 inline void end_tiles() { _tile_release(); }

// 16 by 16 numbers of 32 bits, turned.
FORKPOINT_AVX512 inline void turn_avx512(const void* from, Index from_bytes, Index rows, float (*into)[16]) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) {
        a[i] = i < rows ? _mm512_loadu_ps(static_cast<const char*>(from) + i * from_bytes) : _mm512_setzero_ps();
    }
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        const __m512d low0 = _mm512_castps_pd(b[i]), low1 = _mm512_castps_pd(b[i + 2]);
        const __m512d high0 = _mm512_castps_pd(b[i + 1]), high1 = _mm512_castps_pd(b[i + 3]);
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low1));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low1));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high1));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high1));
    }
    // Now lane L of a[4 g + c] is column 4 L + c of rows 4 g to 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512 even0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        const __m512 odd0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        const __m512 even1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 odd1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_ps(into[c], _mm512_shuffle_f32x4(even0, even1, 0x88));
        _mm512_storeu_ps(into[4 + c], _mm512_shuffle_f32x4(odd0, odd1, 0x88));
        _mm512_storeu_ps(into[8 + c], _mm512_shuffle_f32x4(even0, even1, 0xdd));
        _mm512_storeu_ps(into[12 + c], _mm512_shuffle_f32x4(odd0, odd1, 0xdd));
    }
}

// One tile of x: inputs [32 * step, 32 * step + 32) of `rows` <= 16 rows, pair by pair; zeros where there are none.
inline void pack_tile(const std::uint16_t* x, Index inputs, Index rows, Index step, std::uint32_t* into) {
    const std::uint16_t* start = x + step * kStep;
    const Index left = inputs - step * kStep;
    auto* turned = reinterpret_cast<float(*)[16]>(into);
    if (left >= kStep) {
        turn_avx512(start, inputs * 2, rows, turned);
        return;
    }
    alignas(64) std::uint16_t padded[kRowBlock][kStep] = {};
    for (Index r = 0; r < rows; ++r) std::memcpy(padded[r], start + r * inputs, left * 2);
    turn_avx512(padded, sizeof *padded, rows, turned);
}

// A slab of weights as tiles. What is no full tile lies in a copy that zeros fill up.
class TilesOf {
public:
    TilesOf(const char* start, Index inputs, Index count)
        : start_(start),
          stride_(inputs * 2),
          full_(inputs / kStep),
          has_tail_(inputs % kStep != 0) {
        if (count < kSlab) {
            // Few rows at the end of a matrix: all of them are copied.
            copy_ = std::make_unique<Scratch<char>>(kSlab * round_up(inputs, kStep) * 2);
            stride_ = round_up(inputs, kStep) * 2;
            std::memset(copy_->get(), 0, kSlab * stride_);
            for (Index o = 0; o < count; ++o) {
                std::memcpy(copy_->get() + o * stride_, start + o * inputs * 2, inputs * 2);
            }
            start_ = copy_->get();
            full_ = stride_ / 64;
            has_tail_ = false;
        } else if (has_tail_) {
            const Index done = full_ * 64;
            std::memset(tail_, 0, sizeof tail_);
            for (Index o = 0; o < kSlab; ++o) std::memcpy(tail_[o], start + o * stride_ + done, stride_ - done);
        }
        tiles::written();
    }
    const char* at(Index step) const { return step < full_ ? start_ + step * 64 : tail_[0]; }
    Index stride_at(Index step) const { return step < full_ ? stride_ : 64; }

private:
    const char* start_;
    Index stride_, full_;
    bool has_tail_;
    std::unique_ptr<Scratch<char>> copy_;
    alignas(64) char tail_[kSlab][64];
};

// What will be read after two slabs: two more, fetched in the order of memory while those are multiplied.
struct Ahead {
    const char *one, *two;

    void fetch(const char* next, Index step) const {
        for (int line = 0; line < kSlab; ++line) __builtin_prefetch(next + (step * kSlab + line) * 64, 0, 2);
    }
};

// Two slabs of weights with kBlocks = 1 or 2 blocks of x. sums: [kBlocks, 2 slabs, 16 outputs, 16 rows].
template <int kBlocks, bool kFetches>
FORKPOINT_AMX_BF16 void multiply_tiles(const TilesOf& one, const TilesOf& two, const Ahead& ahead,
                                       const std::uint32_t* x0, const std::uint32_t* x1, Index padded, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (kBlocks == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (Index step = 0; step < padded / kStep; ++step) {
        if (kFetches) ahead.fetch(ahead.one, step);
        _tile_loadd(4, one.at(step), one.stride_at(step));
        _tile_loadd(6, x0 + step * kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (kFetches) ahead.fetch(ahead.two, step);
        _tile_loadd(5, two.at(step), two.stride_at(step));
        _tile_dpbf16ps(1, 5, 6);
        if (kBlocks == 2) {
            _tile_loadd(7, x1 + step * kTile, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (kBlocks == 2) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

}  // namespace forkpoint
