// Attention over the paged pools: prefill rows in tiles on packed keys and values, single rows straight from the pools.
//
// A row's result depends on its position, its window and its keys alone: blocks of keys begin at absolute positions,
// a single row is cut into pieces by position, and lanes do not meet. Neither chunks, nor neighbours, nor the number of
// threads change a bit. Only whether a row is the only one of its sequence in a call matters: then it takes the way of
// single rows.
#include "attention_job.h"
#include "dot.h"
#include "features.h"
#include "targets.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <omp.h>
#include <vector>

// The functions below are compiled for a path's instructions and called only where the processor has them.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define FORKPOINT_PATH avx2
#define FORKPOINT_LANES 8
#define FORKPOINT_PAIRS 0
#define FORKPOINT_TILES 0
#include "attention_path.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define FORKPOINT_PATH avx512
#define FORKPOINT_LANES 16
#define FORKPOINT_PAIRS 0
#define FORKPOINT_TILES 0
#include "attention_path.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define FORKPOINT_PATH avx512_bf16
#define FORKPOINT_LANES 16
#define FORKPOINT_PAIRS 1
#define FORKPOINT_TILES 0
#include "attention_path.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif
#define FORKPOINT_PATH amx
#define FORKPOINT_LANES 16
#define FORKPOINT_PAIRS 1
#define FORKPOINT_TILES 1
#include "attention_path.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace forkpoint::attention {
namespace {

// Packed keys and values that lie in memory at once: more of them are worked off in several turns.
constexpr Index kPackedBytes = Index{64} << 20;

const Path& choose_path(const Layer& layer) {
    if (layer.q_is_bfloat16 && layer.kv_is_bfloat16) {
        if (has(kAmxBf16)) return amx::path;
        if (has(kAvx512Bf16)) return avx512_bf16::path;
    }
    return has(kAvx512) ? avx512::path : avx2::path;
}

// Memory that stays from call to call: fresh pages would cost more than what is written to them.
class Kept {
public:
    char* of_size(Index bytes) {
        if (bytes > bytes_) {
            std::free(start_);
            bytes_ = round_up(bytes + bytes / 2, 64);
            start_ = static_cast<char*>(std::aligned_alloc(64, bytes_));
            if (start_ == nullptr) throw std::bad_alloc();
        }
        return start_;
    }
    Kept() = default;
    ~Kept() { std::free(start_); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

private:
    char* start_ = nullptr;
    Index bytes_ = 0;
};

// The rows of a call by sequence.
struct Rows {
    Rows(const Layer& layer, const Batch& batch, const std::int64_t* chosen, Index num_chosen) {
        const Index num_rows = batch.q_indptr[batch.num_sequences];
        std::vector<Index> order(chosen == nullptr ? num_rows : num_chosen);
        for (Index i = 0; i < static_cast<Index>(order.size()); ++i) order[i] = i;
        if (chosen != nullptr) {
            std::sort(order.begin(), order.end(), [&](Index a, Index b) { return chosen[a] < chosen[b]; });
        }
        queries.reserve(order.size());
        Index next = 0;
        for (Index b = 0; b < batch.num_sequences; ++b) {
            const Index first = next;
            for (; next < static_cast<Index>(order.size()); ++next) {
                const Index row = chosen == nullptr ? next : chosen[order[next]];
                if (row >= batch.q_indptr[b + 1]) break;
                queries.push_back({order[next], batch.positions[row]});
            }
            if (next == first) continue;
            Sequence sequence = {b, queries.data() + first, next - first, batch.lowest_key[b], 0};
            const Index start = queries[first].position;
            if (layer.window != 0) sequence.low = std::max(sequence.low, start - layer.window + 1);
            sequence.end = queries[next - 1].position + 1;
            (sequence.num_queries == 1 ? singles : several).push_back(sequence);
        }
    }
    std::vector<Query> queries;
    std::vector<Sequence> singles, several;
};

struct PieceJob {
    const Sequence* sequence;
    Index kv_head, start, end, index, num_pieces;
};

void attend_singles(const Call& call, const Path& path, const Rows& rows, char* memory, Index memory_bytes,
                    Kept* kept) {
    const Layer& layer = call.layer;
    std::vector<PieceJob> jobs;
    for (const Sequence& sequence : rows.singles) {
        const Index first = sequence.low / kPiece, num_pieces = (sequence.end - 1) / kPiece + 1 - first;
        for (Index head = 0; head < layer.num_kv_heads; ++head) {
            for (Index i = 0; i < num_pieces; ++i) {
                const Index start = std::max((first + i) * kPiece, sequence.low);
                const Index end = std::min((first + i + 1) * kPiece, sequence.end);
                jobs.push_back({&sequence, head, start, end, i, num_pieces});
            }
        }
    }
    const Index stride = sums_of_piece(layer), num_jobs = static_cast<Index>(jobs.size());
    auto* sums = reinterpret_cast<float*>(kept->of_size(num_jobs * stride * Index{sizeof(float)}));
#pragma omp parallel
    {
        char* own = memory + omp_get_thread_num() * memory_bytes;
#pragma omp for schedule(dynamic)
        for (Index i = 0; i < num_jobs; ++i) {
            const PieceJob& job = jobs[i];
            path.piece(call, *job.sequence, job.kv_head, job.start, job.end, sums + i * stride, own);
            if (job.num_pieces == 1) path.join(call, *job.sequence, job.kv_head, sums + i * stride, 1);
        }
#pragma omp for schedule(dynamic)
        for (Index i = 0; i < num_jobs; ++i) {
            const PieceJob& job = jobs[i];
            if (job.index == 0 && job.num_pieces > 1) {
                path.join(call, *job.sequence, job.kv_head, sums + i * stride, job.num_pieces);
            }
        }
    }
}

struct PackJob {
    Index packed, step;
};
struct TileJob {
    Index packed, first;
};

void attend_several(const Call& call, const Path& path, const std::vector<Packed>& all, char* memory,
                    Index memory_bytes) {
    std::vector<PackJob> packs;
    std::vector<TileJob> tiles;
    for (Index i = 0; i < static_cast<Index>(all.size()); ++i) {
        for (Index step = 0; step < all[i].num_steps; ++step) packs.push_back({i, step});
        const Index num_rows = all[i].sequence->num_queries * call.layer.group();
        for (Index first = 0; first < num_rows; first += kTileRows) tiles.push_back({i, first});
    }
#pragma omp parallel
    {
        char* own = memory + omp_get_thread_num() * memory_bytes;
#pragma omp for schedule(static)
        for (Index i = 0; i < static_cast<Index>(packs.size()); ++i) {
            path.pack(call, all[packs[i].packed], packs[i].step);
        }
        path.begin();
        // The last tiles of a full layer see the most keys: they go first.
#pragma omp for schedule(dynamic)
        for (Index i = static_cast<Index>(tiles.size()) - 1; i >= 0; --i) {
            path.tile(call, all[tiles[i].packed], tiles[i].first, own);
        }
        path.end();
    }
}

void attend_prefills(const Call& call, const Path& path, const Rows& rows, char* memory, Index memory_bytes,
                     Kept* kept) {
    const Layer& layer = call.layer;
    std::vector<Packed> all;
    std::vector<Index> starts;
    Index used = 0;
    const auto attend = [&] {
        char* start = kept->of_size(used);
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[i].keys = start + starts[i];
            all[i].values = all[i].keys + all[i].num_steps * kStep * layer.padded_k() * path.number_bytes;
        }
        attend_several(call, path, all, memory, memory_bytes);
        all.clear();
        starts.clear();
        used = 0;
    };
    for (Index head = 0; head < layer.num_kv_heads; ++head) {
        for (const Sequence& sequence : rows.several) {
            const Index first = sequence.low / kStep, num_steps = (sequence.end - 1) / kStep + 1 - first;
            const Index bytes = num_steps * kStep * (layer.padded_k() + layer.padded_v()) * path.number_bytes;
            if (used > 0 && used + bytes > kPackedBytes) attend();
            all.push_back({&sequence, head, first, num_steps, nullptr, nullptr});
            starts.push_back(used);
            used += bytes;
        }
    }
    if (used > 0) attend();
}

}  // namespace
}  // namespace forkpoint::attention

// Attend q [N, num_q_heads, k_dim] to the pools into out [N, num_q_heads, v_dim], of q's type. rows: [N] rows of the
// batch that q holds; null for all. sinks: [num_q_heads] or null.
FORKPOINT_EXPORT void forkpoint_attention(const forkpoint::attention::Layer* layer,
                                          const forkpoint::attention::Batch* batch, const void* q, void* out,
                                          const float* sinks, const std::int64_t* rows, std::int64_t num_rows) {
    using namespace forkpoint::attention;
    static thread_local Kept own, sums, packed;
    const Call call = {*layer, *batch, q, out, sinks};
    const Path& path = choose_path(*layer);
    const Rows sorted(*layer, *batch, rows, num_rows);
    const forkpoint::Index memory_bytes = forkpoint::round_up(path.memory_bytes(*layer), 64);
    char* memory = own.of_size(memory_bytes * omp_get_max_threads());
    if (!sorted.several.empty()) attend_prefills(call, path, sorted, memory, memory_bytes, &packed);
    if (!sorted.singles.empty()) attend_singles(call, path, sorted, memory, memory_bytes, &sums);
}
