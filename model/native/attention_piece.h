// Single rows, as decode steps have them: the keys of a sequence are cut into pieces, so that a long one occupies
// many threads, and what the pieces give is joined. Keys and values are read from the pools, once for all heads of a
// group. Included once for each path (attention_path.h); no include guard.
//
// Sums of a piece: [group] greatest scores and [group] totals, padded to kLanes each head, then [group, padded_v].

// Where some keys and values begin; copies that zeros fill up where a dimension is no multiple of a vector.
template <typename Kv>
struct Pointers {
    const Kv* of[kPieceBlock];
};

template <typename Kv>
inline void find(const Call& call, const Sequence& sequence, Index kv_head, Index key, Index count, bool is_keys,
                 Kv* copies, Pointers<Kv>* found) {
    const Layer& layer = call.layer;
    const Index dim = is_keys ? layer.k_dim : layer.v_dim, padded = round_up(dim, kStep);
    const Kv* pool = static_cast<const Kv*>(is_keys ? layer.keys : layer.values);
    const Index page_size = call.batch.page_size;
    for (Index i = 0; i < count;) {
        const Index slot = call.slot(sequence, key + i), left = page_size - slot % page_size;
        for (Index in_page = 0; in_page < left && i < count; ++in_page, ++i) {
            const Kv* start = pool + ((slot + in_page) * layer.num_kv_heads + kv_head) * dim;
            if (padded != dim) {
                Kv* copy = copies + i * padded;
                std::memcpy(copy, start, dim * sizeof(Kv));
                std::memset(copy + dim, 0, (padded - dim) * sizeof(Kv));
                start = copy;
            }
            found->of[i] = start;
        }
    }
}

inline Vec add_product(const float* a, const float* b, Vec sum) { return multiply_add(load(a), load(b), sum); }
inline Vec add_product(const std::uint16_t* a, const float* b, Vec sum) { return multiply_add(load(a), load(b), sum); }
#if FORKPOINT_PAIRS
inline Vec add_product(const std::uint16_t* a, const std::uint16_t* b, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
#endif

#if FORKPOINT_LANES == 16
constexpr int kKeysAtOnce = 4;
#else
constexpr int kKeysAtOnce = 2;
#endif

// scores[head][key] of kHeads heads with `count` keys. q: [kHeads, padded_k].
template <int kHeads, typename Kv>
inline void score(const Pointers<Kv>& keys, Index count, const Number* q, Index padded_k, float factor,
                  const Pointers<Kv>& values, Index value_bytes, float* scores) {
    constexpr Index kAtOnce = 4 / sizeof(Number) * kVec;
    for (Index key = 0; key < count; key += kKeysAtOnce) {
        const Kv* at[kKeysAtOnce];
        for (Index k = 0; k < kKeysAtOnce; ++k) at[k] = keys.of[key + k < count ? key + k : count - 1];
        Vec sums[kKeysAtOnce * kHeads];
        for (int i = 0; i < kKeysAtOnce * kHeads; ++i) sums[i] = all(0.0f);
        for (Index d = 0; d < padded_k; d += kAtOnce) {
            for (int k = 0; k < kKeysAtOnce; ++k) {
                for (int h = 0; h < kHeads; ++h) {
                    sums[k * kHeads + h] = add_product(at[k] + d, q + h * padded_k + d, sums[k * kHeads + h]);
                }
            }
        }
        // The values of these keys come next.
        for (Index k = key; k < key + kKeysAtOnce && k < count; ++k) {
            for (Index byte = 0; byte < value_bytes; byte += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(values.of[k]) + byte, 0, 2);
            }
        }
        alignas(64) float results[16];
#if FORKPOINT_LANES == 16
        Vec sixteen[16];
        for (int i = 0; i < 16; ++i) sixteen[i] = i < kKeysAtOnce * kHeads ? sums[i] : all(0.0f);
        store(results, dot::sums_of_16(sixteen));
#else
        for (int i = 0; i < kKeysAtOnce * kHeads; ++i) results[i] = sum_of(sums[i]);
#endif
        for (Index k = 0; k < kKeysAtOnce && key + k < count; ++k) {
            for (int h = 0; h < kHeads; ++h) scores[h * kPieceBlock + key + k] = results[k * kHeads + h] * factor;
        }
    }
}

// sums[head][d] = kept[head] * sums[head][d] + sum over keys of powers[head][key] * values[key][d].
template <int kHeads, int kVecs, typename Kv>
inline void add_values(const Pointers<Kv>& values, Index count, const float* powers, const float* kept, Index d,
                       Index padded_v, float* sums) {
    Vec totals[kHeads][kVecs];
    for (int h = 0; h < kHeads; ++h) {
        for (int v = 0; v < kVecs; ++v) totals[h][v] = load(sums + h * padded_v + d + v * kVec) * all(kept[h]);
    }
    for (Index key = 0; key < count; ++key) {
        Vec numbers[kVecs];
        for (int v = 0; v < kVecs; ++v) numbers[v] = load(values.of[key] + d + v * kVec);
        for (int h = 0; h < kHeads; ++h) {
            const Vec power = all(powers[h * kPieceBlock + key]);
            for (int v = 0; v < kVecs; ++v) totals[h][v] = multiply_add(power, numbers[v], totals[h][v]);
        }
    }
    for (int h = 0; h < kHeads; ++h) {
        for (int v = 0; v < kVecs; ++v) store(sums + h * padded_v + d + v * kVec, totals[h][v]);
    }
}

// The scores of one head become powers; returns what remains of the sums before.
inline float advance_row(float cap, Index count, float* scores, float* greatest, float* total) {
    const Index padded = round_up(count, kVec);
    for (Index key = 0; cap != 0 && key < padded; key += kVec) {
        store(scores + key, capped(load(scores + key), cap) * all(kLog2E));
    }
    for (Index key = count; key < padded; ++key) scores[key] = -INFINITY;
    Vec most = all(-INFINITY);
    for (Index key = 0; key < padded; key += kVec) most = greater(most, load(scores + key));
    const Vec after = greater(all(greatest_of(most)), all(*greatest));
    const Vec kept = power_of_two(all(*greatest) - after);
    Vec sum = all(0.0f);
    for (Index key = 0; key < padded; key += kVec) {
        const Vec power = power_of_two(load(scores + key) - after);
        store(scores + key, power);
        sum = sum + power;
    }
    alignas(64) float firsts[2][kVec];
    store(firsts[0], after);
    store(firsts[1], kept);
    *greatest = firsts[0][0];
    *total = *total * firsts[1][0] + sum_of(sum);
    return firsts[1][0];
}

template <typename Kv>
struct Piece {
    const Call& call;
    Pointers<Kv> keys, values;
    const Number* q;
    float *scores, *sums;

    // Some heads of the group, from `first` on, over `count` keys.
    template <int kHeads>
    inline void attend(Index first, Index count) {
        const Layer& layer = call.layer;
        const Index padded_k = layer.padded_k(), padded_v = layer.padded_v();
        const float factor = layer.softcap == 0 ? layer.scale * kLog2E : layer.scale;
        score<kHeads>(keys, count, q + first * padded_k, padded_k, factor, values,
                      layer.v_dim * Index{sizeof(Kv)}, scores);
        float kept[kHeads];
        for (int h = 0; h < kHeads; ++h) {
            float* state = sums + (first + h) * kLanes;
            kept[h] = advance_row(layer.softcap, count, scores + h * kPieceBlock, state, state + 1);
        }
        float* own = sums + layer.group() * kLanes + first * padded_v;
        constexpr int kVecs = FORKPOINT_LANES == 16 ? 4 : 2;
        Index d = 0;
        for (; d + kVecs * kVec <= padded_v; d += kVecs * kVec) {
            add_values<kHeads, kVecs>(values, count, scores, kept, d, padded_v, own);
        }
        for (; d < padded_v; d += kVec) add_values<kHeads, 1>(values, count, scores, kept, d, padded_v, own);
    }
};

template <typename Kv>
inline void attend_piece_of(const Call& call, const Sequence& sequence, Index kv_head, Index start, Index end,
                            float* sums, char* memory) {
    const Layer& layer = call.layer;
    const Index group = layer.group(), padded_k = layer.padded_k(), padded_v = layer.padded_v();
    auto* q = reinterpret_cast<Number*>(memory);
    memory += group * padded_k * sizeof(float);
    for (Index h = 0; h < group; ++h) {
        const Index from = (sequence.queries[0].row * layer.num_q_heads + kv_head * group + h) * layer.k_dim;
        copy_numbers(call.q, layer.q_is_bfloat16 != 0, from, layer.k_dim, padded_k, q + h * padded_k);
        sums[h * kLanes] = kLowest;
        sums[h * kLanes + 1] = 0.0f;
    }
    std::memset(sums + group * kLanes, 0, group * padded_v * sizeof(float));
    auto* scores = reinterpret_cast<float*>(memory);
    auto* copies = reinterpret_cast<Kv*>(scores + 4 * kPieceBlock);
    Piece<Kv> piece = {call, {}, {}, q, scores, sums};
    for (Index key = start, next; key < end; key = next) {
        next = (key / kPieceBlock + 1) * kPieceBlock;
        next = next < end ? next : end;
        const Index count = next - key;
        find(call, sequence, kv_head, key, count, true, copies, &piece.keys);
        find(call, sequence, kv_head, key, count, false, copies + kPieceBlock * padded_k, &piece.values);
        Index head = 0;
        for (; head + 4 <= group; head += 4) piece.template attend<4>(head, count);
        if (group - head == 3) piece.template attend<3>(head, count);
        if (group - head == 2) piece.template attend<2>(head, count);
        if (group - head == 1) piece.template attend<1>(head, count);
    }
}

void attend_piece(const Call& call, const Sequence& sequence, Index kv_head, Index start, Index end, float* sums,
                  char* memory) {
#if FORKPOINT_PAIRS
    attend_piece_of<std::uint16_t>(call, sequence, kv_head, start, end, sums, memory);
#else
    const auto attend = call.layer.kv_is_bfloat16 ? attend_piece_of<std::uint16_t> : attend_piece_of<float>;
    attend(call, sequence, kv_head, start, end, sums, memory);
#endif
}

inline float power_of_two(float x) {
    alignas(64) float powers[kVec];
    store(powers, power_of_two(all(x)));
    return powers[0];
}

void join_pieces(const Call& call, const Sequence& sequence, Index kv_head, const float* sums, Index num_pieces) {
    const Layer& layer = call.layer;
    const Index group = layer.group(), padded_v = layer.padded_v(), stride = sums_of_piece(layer);
    for (Index h = 0; h < group; ++h) {
        const Index head = kv_head * group + h;
        const float sink = call.sinks == nullptr ? kLowest : call.sinks[head] * kLog2E;
        Vec most = all(sink);
        for (Index i = 0; i < num_pieces; ++i) most = greater(all(sums[i * stride + h * kLanes]), most);
        alignas(64) float firsts[kVec];
        store(firsts, most);
        const float greatest = firsts[0];
        float total = call.sinks == nullptr ? 0.0f : power_of_two(sink - greatest);
        for (Index i = 0; i < num_pieces; ++i) {
            const float* state = sums + i * stride + h * kLanes;
            total += state[1] * power_of_two(state[0] - greatest);
        }
        const Index start = (sequence.queries[0].row * layer.num_q_heads + head) * layer.v_dim;
        for (Index d = 0; d < layer.v_dim; d += kVec) {
            Vec sum = all(0.0f);
            for (Index i = 0; i < num_pieces; ++i) {
                const float* own = sums + i * stride + group * kLanes + h * padded_v;
                sum = multiply_add(load(own + d), all(power_of_two(sums[i * stride + h * kLanes] - greatest)), sum);
            }
            alignas(64) float numbers[kVec];
            store(numbers, sum / all(total));
            const Index count = layer.v_dim - d < kVec ? layer.v_dim - d : kVec;
            store_numbers(numbers, count, call.out, start + d, layer.q_is_bfloat16 != 0);
        }
    }
}
