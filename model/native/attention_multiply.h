// Products of packed keys or values with the rows of a tile: c[i][lane] (+)= sum over k of a[i][k] b[k][lane].
// Included once for each path (attention_path.h); no include guard.
//
// A word is a float32, or a pair of bfloat16 whose products are added. b and c have kTileRows words or numbers a line.

// Rows come in blocks of 32, words in steps of num_words; all distances are in words.
struct Operand {
    const float* start;
    Index row, block, word, step;  // from one to the next of each
    Index num_words, num_steps;
};

#if FORKPOINT_TILES

template <int kRowTiles, int kGroups>
inline void multiply_rows(const Operand& a, const float* b, bool adds, float* c) {
    const Index line = kTileRows * 4;
    if (adds) {
        _tile_loadd(0, c, line);
        if (kGroups == 2) _tile_loadd(1, c + kLanes, line);
        if (kRowTiles == 2) _tile_loadd(2, c + 16 * kTileRows, line);
        if (kRowTiles == 2 && kGroups == 2) _tile_loadd(3, c + 16 * kTileRows + kLanes, line);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (Index step = 0; step < a.num_steps; ++step) {
        const float* start = a.start + step * a.step;
        for (Index word = 0; word < a.num_words; word += 16) {
            _tile_loadd(6, b, line);
            _tile_loadd(4, start + word, a.row * 4);
            _tile_dpbf16ps(0, 4, 6);
            if (kGroups == 2) {
                _tile_loadd(7, b + kLanes, line);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (kRowTiles == 2) {
                _tile_loadd(5, start + 16 * a.row + word, a.row * 4);
                _tile_dpbf16ps(2, 5, 6);
                if (kGroups == 2) _tile_dpbf16ps(3, 5, 7);
            }
            b += 16 * kTileRows;
        }
    }
    _tile_stored(0, c, line);
    if (kGroups == 2) _tile_stored(1, c + kLanes, line);
    if (kRowTiles == 2) _tile_stored(2, c + 16 * kTileRows, line);
    if (kRowTiles == 2 && kGroups == 2) _tile_stored(3, c + 16 * kTileRows + kLanes, line);
}

// rows: a multiple of 32. groups: of lanes, 1 or 2.
inline void multiply(Operand a, const float* b, Index rows, Index groups, bool adds, float* c) {
    tiles::written();
    for (Index row = 0; row < rows; row += 32) {
        if (groups == 2) multiply_rows<2, 2>(a, b, adds, c + row * kTileRows);
        if (groups == 1) multiply_rows<2, 1>(a, b, adds, c + row * kTileRows);
        a.start += a.block;
    }
    tiles::written();
}

#else

inline Vec add_product(const float* a, Vec b, Vec sum) {
#if FORKPOINT_PAIRS
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
#else
    return multiply_add(all(*a), b, sum);
#endif
}

template <int kRows, int kVecs>
inline void multiply_rows(const Operand& a, const float* b, bool adds, float* c) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sums[r][v] = adds ? load(c + r * kTileRows + v * kVec) : all(0.0f);
    }
    for (Index step = 0; step < a.num_steps; ++step) {
        const float* start = a.start + step * a.step;
        for (Index word = 0; word < a.num_words; ++word) {
            Vec lanes[kVecs];
            for (int v = 0; v < kVecs; ++v) lanes[v] = load(b + v * kVec);
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVecs; ++v) sums[r][v] = add_product(start + r * a.row, lanes[v], sums[r][v]);
            }
            start += a.word;
            b += kTileRows;
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) store(c + r * kTileRows + v * kVec, sums[r][v]);
    }
}

// rows: a multiple of 32. groups: of lanes, 1 or 2.
inline void multiply(Operand a, const float* b, Index rows, Index groups, bool adds, float* c) {
    constexpr int kRows = FORKPOINT_LANES == 16 ? 8 : 4;
    const float* start = a.start;
    for (Index row = 0; row < rows; row += kRows) {
        a.start = start + row / 32 * a.block + row % 32 * a.row;
#if FORKPOINT_LANES == 16
        if (groups == 2) multiply_rows<kRows, 2>(a, b, adds, c + row * kTileRows);
        if (groups == 1) multiply_rows<kRows, 1>(a, b, adds, c + row * kTileRows);
#else
        for (Index g = 0; g < groups; ++g) {
            multiply_rows<kRows, 2>(a, b + g * kLanes, adds, c + row * kTileRows + g * kLanes);
        }
#endif
    }
}

#endif
