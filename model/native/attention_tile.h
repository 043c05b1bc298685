// Rows of prefills, as many as kTileRows at a time, the query heads of a KV head among them: scores of a block of
// keys, their softmax as far as it is known, and the sums of values, over blocks from front to back.
// Included once for each path (attention_path.h); no include guard.
//
// All is turned: a line holds one key, or one dimension, of all rows of the tile, so that sums over keys need no
// exchange between lanes. Source of the running softmax: Milakov and Gimelshein 2018, algorithm 3.

inline Index step_bytes(Index padded) { return kStep * padded * Index{sizeof(Number)}; }

// Numbers of one key as the chunks of 32 that lie a block apart.
inline void copy_chunks(const void* from, bool is_bfloat16, Index start, Index count, Index padded, Number* into) {
    for (Index d = 0; d < padded; d += 32) {
        const Index left = count - d, taken = left < 0 ? 0 : left < 32 ? left : 32;
        copy_numbers(from, is_bfloat16, start + d, taken, 32, into + d * kStep);
    }
}

// One step of keys and values, as [padded / 32, 32 keys, 32 dimensions]; values that are multiplied in pairs of keys
// as [padded, 32 keys].
void pack(const Call& call, const Packed& packed, Index step) {
    const Layer& layer = call.layer;
    const Index padded_k = layer.padded_k(), padded_v = layer.padded_v();
    auto* keys = reinterpret_cast<Number*>(packed.keys + step * step_bytes(padded_k));
    auto* values = reinterpret_cast<Number*>(packed.values + step * step_bytes(padded_v));
    const bool is_narrow = layer.kv_is_bfloat16 != 0;
#if FORKPOINT_PAIRS
    alignas(64) Number lines[kStep][32];
    Index starts[kStep];
#endif
    for (Index i = 0; i < kStep; ++i) {
        const Index position = (packed.first_step + step) * kStep + i;
        const bool is_live = position >= packed.sequence->low && position < packed.sequence->end;
        const Index at =
            is_live ? call.slot(*packed.sequence, position) * layer.num_kv_heads + packed.kv_head : 0;
        const Index count_k = is_live ? layer.k_dim : 0;
        copy_chunks(layer.keys, is_narrow, at * layer.k_dim, count_k, padded_k, keys + i * 32);
#if FORKPOINT_PAIRS
        starts[i] = is_live ? at * layer.v_dim : -1;
#else
        const Index count_v = is_live ? layer.v_dim : 0;
        copy_chunks(layer.values, is_narrow, at * layer.v_dim, count_v, padded_v, values + i * 32);
#endif
    }
#if FORKPOINT_PAIRS
    for (Index d = 0; d < padded_v; d += 32) {
        const Index count = layer.v_dim - d < 32 ? layer.v_dim - d : 32;
        for (Index i = 0; i < kStep; ++i) {
            copy_numbers(layer.values, true, starts[i] + d, starts[i] < 0 ? 0 : count, 32, lines[i]);
        }
        // Pairs of dimensions turned, then parted: line d holds dimension d of 32 keys.
        alignas(64) float first[16][16], second[16][16];
        turn_avx512(lines[0], sizeof lines[0], 16, first);
        turn_avx512(lines[16], sizeof lines[0], 16, second);
        alignas(64) static const std::uint16_t evens[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                            22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                            44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
        const __m512i even = _mm512_load_si512(evens), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
        for (Index pair = 0; pair < 16; ++pair) {
            const __m512i low = _mm512_load_si512(first[pair]), high = _mm512_load_si512(second[pair]);
            Number* into = values + (d + 2 * pair) * kStep;
            _mm512_storeu_si512(into, _mm512_permutex2var_epi16(low, even, high));
            _mm512_storeu_si512(into + kStep, _mm512_permutex2var_epi16(low, odd, high));
        }
    }
#endif
}

// What a thread needs for a tile. Lines of kTileRows numbers or words.
struct TileMemory {
    TileMemory(const Layer& layer, char* start) {
        rows = reinterpret_cast<float*>(start);
        scores = rows + layer.padded_k() * kTileRows;
        // Powers take the place of their scores, but where two become a pair.
        powers = FORKPOINT_PAIRS ? scores + kBlock * kTileRows : scores;
        sums = scores + 2 * kBlock * kTileRows;
    }
    static Index bytes(const Layer& layer) {
        return (layer.padded_k() + 2 * kBlock + layer.padded_v()) * kTileRows * Index{sizeof(float)};
    }
    float *rows, *scores, *powers, *sums;
};

// The rows of a tile, and where each of them is in q and out.
struct Tile {
    Tile(const Call& call, const Packed& packed, Index first) {
        const Sequence& sequence = *packed.sequence;
        const Index group = call.layer.group(), left = sequence.num_queries * group - first;
        count = left < kTileRows ? left : kTileRows;
        groups = count > kLanes ? 2 : 1;
        for (Index lane = 0; lane < kTileRows; ++lane) {
            // Lanes beyond the last repeat it.
            const Index folded = first + (lane < count ? lane : count - 1);
            const Query& query = sequence.queries[folded / group];
            heads[lane] = packed.kv_head * group + folded % group;
            starts[lane] = query.row * call.layer.num_q_heads + heads[lane];
            low[lane] = static_cast<std::int32_t>(call.low_of(sequence, query.position));
            high[lane] = static_cast<std::int32_t>(query.position);
        }
    }
    // Queries are in order of position: the bounds of the first and of the last are those of all.
    Index first_key() const { return low[0]; }
    Index last_key() const { return high[count - 1]; }
    bool all_see(Index start, Index end) const { return start >= low[count - 1] && end <= high[0] + 1; }

    Index count, groups;
    Index heads[kTileRows], starts[kTileRows];
    alignas(64) std::int32_t low[kTileRows];
    alignas(64) std::int32_t high[kTileRows];
};

// Queries as lines of words.
inline void lay_out(const Call& call, const Tile& tile, float* into) {
    const Layer& layer = call.layer;
    constexpr Index kNumbers = 4 / sizeof(Number) * 16;  // of one row in 16 words
    for (Index d = 0; d < layer.padded_k(); d += kNumbers) {
        const Index left = layer.k_dim - d, count = left < 0 ? 0 : left < kNumbers ? left : kNumbers;
        for (Index g = 0; g < tile.groups; ++g) {
            alignas(64) Number from[kLanes][kNumbers];
            for (Index lane = 0; lane < kLanes; ++lane) {
                const Index start = tile.starts[g * kLanes + lane] * layer.k_dim + d;
                copy_numbers(call.q, layer.q_is_bfloat16 != 0, start, count, kNumbers, from[lane]);
            }
            alignas(64) float turned[16][16];
            turn(from, turned);
            for (Index word = 0; word < 16; ++word) {
                std::memcpy(into + word * kTileRows + g * kLanes, turned[word], sizeof turned[word]);
            }
        }
        into += 16 * kTileRows;
    }
}

// Scores of one step become capped, and minus infinity where a row does not see the key.
inline void cap_and_hide(const Call& call, const Tile& tile, Index first_key, float* scores) {
    const bool hides = !tile.all_see(first_key, first_key + kStep);
    if (call.layer.softcap == 0 && !hides) return;
    for (Index key = 0; key < kStep; ++key) {
        for (Index lane = 0; lane < tile.groups * kLanes; lane += kVec) {
            Vec score = load(scores + lane);
            if (call.layer.softcap != 0) score = capped(score * all(call.layer.scale), call.layer.softcap);
            if (hides) {
                const auto at = static_cast<std::int32_t>(first_key + key);
                score = if_seen(score, at, tile.low + lane, tile.high + lane);
            }
            store(scores + lane, score);
        }
        scores += kTileRows;
    }
}

// Powers of the scores of `num_keys` keys for kVec lanes, relative to `greatest`; returns their sum and `total`.
inline Vec powers_of(const float* scores, Index num_keys, Vec factor, Vec greatest, Vec total, float* into) {
    const Vec shift = all(0.0f) - greatest;
#if FORKPOINT_PAIRS
    alignas(64) static const std::uint16_t zipped[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(zipped);
    for (Index key = 0; key < num_keys; key += 2) {
        const Vec one = power_of_two(multiply_add(load(scores + key * kTileRows), factor, shift));
        const Vec two = power_of_two(multiply_add(load(scores + (key + 1) * kTileRows), factor, shift));
        total = total + one + two;
        const auto both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
        _mm512_storeu_si512(into + key / 2 * kTileRows, _mm512_permutexvar_epi16(order, both));
    }
#else
    for (Index key = 0; key < num_keys; ++key) {
        const Vec power = power_of_two(multiply_add(load(scores + key * kTileRows), factor, shift));
        total = total + power;
        store(into + key * kTileRows, power);
    }
#endif
    return total;
}

// Where the softmax of each row stands.
struct Running {
    Running(const Call& call, const Tile& tile) {
        for (Index lane = 0; lane < kTileRows; ++lane) {
            // A sink is a key that was seen before all others and has no value.
            greatest[lane] = call.sinks == nullptr ? kLowest : call.sinks[tile.heads[lane]] * kLog2E;
            total[lane] = call.sinks == nullptr ? 0.0f : 1.0f;
        }
    }
    alignas(64) float greatest[kTileRows];
    alignas(64) float total[kTileRows];
};

// The softmax goes on over `num_keys` keys; what was summed of values before is brought to the new scale.
inline void advance(const Call& call, const Tile& tile, const TileMemory& memory, Index num_keys, bool has_sums,
                    Running* running) {
    const Layer& layer = call.layer;
    // Capped scores have been scaled.
    const Vec factor = all(layer.softcap == 0 ? layer.scale * kLog2E : kLog2E);
    for (Index lane = 0; lane < tile.groups * kLanes; lane += kVec) {
        Vec four[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
        for (Index key = 0; key < num_keys; key += 4) {
            for (Index i = 0; i < 4; ++i) {
                four[i] = greater(four[i], load(memory.scores + (key + i) * kTileRows + lane));
            }
        }
        const Vec most = greater(greater(four[0], four[1]), greater(four[2], four[3]));
        const Vec before = load(running->greatest + lane);
        const Vec greatest = greater(most * factor, before);
        const Vec kept = power_of_two(before - greatest);
        const Vec total = load(running->total + lane) * kept;
        store(running->greatest + lane, greatest);
        store(running->total + lane,
              powers_of(memory.scores + lane, num_keys, factor, greatest, total, memory.powers + lane));
        if (!has_sums || !differ(kept, all(1.0f))) continue;
        for (Index d = 0; d < layer.padded_v(); ++d) {
            float* sums = memory.sums + d * kTileRows + lane;
            store(sums, load(sums) * kept);
        }
    }
}

inline void write_out(const Call& call, const Tile& tile, const Running& running, const float* sums) {
    const Layer& layer = call.layer;
    alignas(64) float shares[kTileRows];
    for (Index lane = 0; lane < tile.groups * kLanes; lane += kVec) {
        store(shares + lane, all(1.0f) / load(running.total + lane));
    }
    for (Index d = 0; d < layer.v_dim; d += 16) {
        const Index count = layer.v_dim - d < 16 ? layer.v_dim - d : 16;
        for (Index g = 0; g < tile.groups; ++g) {
            alignas(64) float scaled[16][16], turned[16][16];
            for (Index i = 0; i < 16; ++i) {
                for (Index lane = 0; lane < kLanes; lane += kVec) {
                    const Index at = g * kLanes + lane;
                    store(scaled[i] + lane, load(sums + (d + i) * kTileRows + at) * load(shares + at));
                }
            }
            turn(scaled, turned);
            for (Index lane = 0; lane < kLanes && g * kLanes + lane < tile.count; ++lane) {
                const Index start = tile.starts[g * kLanes + lane] * layer.v_dim + d;
                store_numbers(turned[lane], count, call.out, start, layer.q_is_bfloat16 != 0);
            }
        }
    }
}

void attend_tile(const Call& call, const Packed& packed, Index first, char* start) {
    const Layer& layer = call.layer;
    const Tile tile(call, packed, first);
    const TileMemory memory(layer, start);
    Running running(call, tile);
    lay_out(call, tile, memory.rows);
    constexpr Index kWords = kStep * sizeof(Number) / 4;  // of 32 numbers
    const Index first_step = tile.first_key() / kStep, end_step = tile.last_key() / kStep + 1;
    for (Index step = first_step, next; step < end_step; step = next) {
        constexpr Index kBlockSteps = kBlock / kStep;
        next = (step / kBlockSteps + 1) * kBlockSteps;
        next = next < end_step ? next : end_step;
        const Index in_packed = step - packed.first_step, num_steps = next - step;
        const auto* keys = reinterpret_cast<const float*>(packed.keys + in_packed * step_bytes(layer.padded_k()));
        const auto* values = reinterpret_cast<const float*>(packed.values + in_packed * step_bytes(layer.padded_v()));
        const Index padded_k = layer.padded_k(), padded_v = layer.padded_v();
        const Operand keys_in_rows = {keys, kWords, padded_k * kWords, 1, kStep * kWords, kWords, padded_k / 32};
        multiply(keys_in_rows, memory.rows, num_steps * kStep, tile.groups, false, memory.scores);
        for (Index i = 0; i < num_steps; ++i) {
            cap_and_hide(call, tile, (step + i) * kStep, memory.scores + i * kStep * kTileRows);
        }
        const bool has_sums = step > first_step;
        advance(call, tile, memory, num_steps * kStep, has_sums, &running);
#if FORKPOINT_PAIRS
        const Operand turned_values = {values, kWords, 32 * kWords, 1, padded_v * kWords, kWords, num_steps};
#else
        const Operand turned_values = {values, 1, 32 * kWords, kWords, padded_v * kWords, kWords, num_steps};
#endif
        multiply(turned_values, memory.powers, padded_v, tile.groups, has_sums, memory.sums);
    }
    write_out(call, tile, running, memory.sums);
}
