// What one call of attention is given, and how its work is cut.
//
//     positions of a sequence   0 ....... low ................... end
//     keys that may be read               [ live                  )      written and not freed
//     steps of 32 keys            |       |xxxx   |       |   xxxx|      x: not live, packed as zeros
//
// Steps, blocks and pieces begin at absolute positions. A key that a row does not see adds an exact zero to it, so
// what else lies in a row's tile, chunk or batch does not change its bits.
#pragma once
#include "numbers.h"

namespace forkpoint::attention {

constexpr Index kStep = 32;      // keys that are packed together; a product's inner length in bfloat16 tiles
constexpr Index kBlock = 256;    // keys between two looks at the greatest score
constexpr Index kLanes = 16;     // rows of a tile that are computed side by side
constexpr Index kTileRows = 32;  // query rows of a tile, all heads of a KV head counted
constexpr Index kPiece = 256;    // keys of a decode row that one thread takes at a time
constexpr Index kPieceBlock = 64;

constexpr float kLog2E = 1.44269504f;
// Less than any score, and finite: the difference of two of them is zero.
constexpr float kLowest = -1e30f;

// The same fields, in the same order, as Layer in attention.py.
struct Layer {
    const void *keys, *values;  // [slots, num_kv_heads, dim]
    Index num_q_heads, num_kv_heads, k_dim, v_dim;
    Index window;   // 0: none
    float scale, softcap;  // softcap 0: none
    std::int32_t q_is_bfloat16, kv_is_bfloat16;

    Index group() const { return num_q_heads / num_kv_heads; }
    Index padded_k() const { return round_up(k_dim, kStep); }
    Index padded_v() const { return round_up(v_dim, kStep); }
};

// The same as Batch in attention.py: where the keys of each sequence lie, as KindTable says.
struct Batch {
    Index num_sequences, page_size;
    const std::int32_t *q_indptr, *positions;
    const std::int32_t *kv_indptr, *kv_pages, *first_position, *lowest_key;
};

// A row of q and of out.
struct Query {
    Index row, position;
};

// The rows of one sequence in this call, in order of position, and the keys [low, end) that they may read.
struct Sequence {
    Index index;
    const Query* queries;
    Index num_queries, low, end;
};

struct Call {
    const Layer& layer;
    const Batch& batch;
    const void* q;
    void* out;
    const float* sinks;  // or null

    Index slot(const Sequence& sequence, Index position) const {
        const Index offset = position - batch.first_position[sequence.index];
        const Index page = batch.kv_pages[batch.kv_indptr[sequence.index] + offset / batch.page_size];
        return page * batch.page_size + offset % batch.page_size;
    }
    Index low_of(const Sequence& sequence, Index position) const {
        const Index first = layer.window == 0 ? 0 : position - layer.window + 1;
        return first > sequence.low ? first : sequence.low;
    }
};

// The packed keys and values of one KV head of a sequence, from step `first_step` on.
struct Packed {
    const Sequence* sequence;
    Index kv_head, first_step, num_steps;
    char *keys, *values;
};

// The functions of one path.
struct Path {
    // 4 bytes for float32, 2 for bfloat16.
    Index number_bytes;
    // Bytes that a thread needs for itself.
    Index (*memory_bytes)(const Layer&);
    // One step of keys and values.
    void (*pack)(const Call&, const Packed&, Index step);
    // Up to kTileRows rows, the first of which is row `first` of num_queries * group.
    void (*tile)(const Call&, const Packed&, Index first, char* memory);
    // What the keys [start, end) give to a single row: for each head of the group the greatest score, the sum of
    // powers, and [padded_v] sums of values.
    void (*piece)(const Call&, const Sequence&, Index kv_head, Index start, Index end, float* sums, char* memory);
    // The row's result of its pieces' sums.
    void (*join)(const Call&, const Sequence&, Index kv_head, const float* sums, Index num_pieces);
    void (*begin)();
    void (*end)();
};

// Numbers of one piece's sums.
inline Index sums_of_piece(const Layer& layer) { return layer.group() * (kLanes + layer.padded_v()); }

}  // namespace forkpoint::attention
