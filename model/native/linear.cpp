// Products with float32 and bfloat16 weights, y = x W^T, for the few rows of a decode step.
//
// W stays as torch holds it: row-major, [outputs, inputs]. Outputs are computed 16 at a time, a slab; two slabs make a
// unit of work, and each thread takes a run of units, so that it reads one stretch of memory from front to back. x is
// laid out for the path once. Sums are float32, rounded once. Each sum runs over the inputs in an order that the path
// alone decides, so a row's result does not depend on how many rows there are.
#include "activations.h"
#include "dot.h"
#include "features.h"
#include "numbers.h"
#include "tiles.h"

namespace forkpoint {
namespace {

// Results of a unit for one block of rows: slab, output, row.
using Sums = float[2][kSlab][kRowBlock];

// The ways to multiply, best first; what each wants of the processor is in choose_path().
enum class Path { kAmx, kAvx512Bf16, kAvx512, kAvx2 };

Path choose_path(bool is_bfloat16) {
    if (is_bfloat16 && has(kAmxBf16)) return Path::kAmx;
    if (is_bfloat16 && has(kAvx512Bf16)) return Path::kAvx512Bf16;
    return has(kAvx512) ? Path::kAvx512 : Path::kAvx2;
}

struct Matrix {
    const void* weights;
    const void* bias;  // or null
    Index outputs, inputs;
    bool is_bfloat16;

    const char* row(Index output) const {
        return static_cast<const char*>(weights) + output * inputs * (is_bfloat16 ? 2 : 4);
    }
};

// 16 outputs of a matrix beginning with `first`; fewer where it ends.
struct Slab {
    const Matrix& matrix;
    Index first;

    Index count() const {
        const Index left = matrix.outputs - first;
        return left < 0 ? 0 : left < kSlab ? left : kSlab;
    }
};

// x as a path wants it, zeros beyond the last input.
//
// kAmx: [row blocks, inputs / 32, 16 pairs of inputs, 16 rows] pairs. kAvx512Bf16: [rows, padded] bfloat16. Others:
// [rows, padded] float32.
struct Activations {
    Activations(Path chosen, Index num_rows, Index num_inputs)
        : path(chosen),
          rows(num_rows),
          inputs(num_inputs),
          padded(round_up(num_inputs, kStep)),
          memory((path == Path::kAmx ? round_up(rows, kRowBlock) * 2 : rows * (is_narrow() ? 2 : 4)) * padded) {}

    bool is_narrow() const { return path == Path::kAvx512Bf16; }
    Index row_blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
    Index rows_of(Index block) const {
        const Index left = rows - block * kRowBlock;
        return left < kRowBlock ? left : kRowBlock;
    }
    std::uint32_t* tiles(Index block) const {
        return reinterpret_cast<std::uint32_t*>(memory.get()) + block * padded / 2 * kRowBlock;
    }
    std::uint16_t* narrow(Index row) const { return reinterpret_cast<std::uint16_t*>(memory.get()) + row * padded; }
    float* wide(Index row) const { return reinterpret_cast<float*>(memory.get()) + row * padded; }

    const Path path;
    const Index rows, inputs, padded;
    const Scratch<char> memory;
};

struct Numbers {
    const void* start;
    bool is_bfloat16;

    float operator[](Index i) const {
        return is_bfloat16 ? from_bfloat16(static_cast<const std::uint16_t*>(start)[i])
                           : static_cast<const float*>(start)[i];
    }
};

void widen(Numbers from, Index start, Index count, float* into) {
    if (from.is_bfloat16) {
        const auto* source = static_cast<const std::uint16_t*>(from.start) + start;
        for (Index i = 0; i < count; ++i) into[i] = from_bfloat16(source[i]);
    } else {
        std::memcpy(into, static_cast<const float*>(from.start) + start, count * sizeof(float));
    }
}

// Lay out all rows; call it from every thread of a parallel region.
void lay_out(Numbers x, const Activations& into) {
    if (into.path == Path::kAmx) {
        const Index steps = into.padded / kStep;
#pragma omp for schedule(static)
        for (Index i = 0; i < into.row_blocks() * steps; ++i) {
            const Index block = i / steps, step = i % steps;
            const auto* start = static_cast<const std::uint16_t*>(x.start) + block * kRowBlock * into.inputs;
            pack_tile(start, into.inputs, into.rows_of(block), step, into.tiles(block) + step * kTile);
        }
        return;
    }
    const Index missing = into.padded - into.inputs;
#pragma omp for schedule(static)
    for (Index row = 0; row < into.rows; ++row) {
        const Index start = row * into.inputs;
        if (into.is_narrow()) {
            const auto* source = static_cast<const std::uint16_t*>(x.start) + start;
            std::memcpy(into.narrow(row), source, into.inputs * 2);
            std::memset(into.narrow(row) + into.inputs, 0, missing * 2);
        } else {
            widen(x, start, into.inputs, into.wide(row));
            std::memset(into.wide(row) + into.inputs, 0, missing * 4);
        }
    }
}

// The 16 outputs of a slab for the rows of one block, by dot products; zeros for outputs that there are not.
void dot_slab(const Slab& slab, const Activations& x, Index block, float (*sums)[kRowBlock]) {
    const Index count = slab.count(), first_row = block * kRowBlock, rows = x.rows_of(block);
    std::memset(sums + count, 0, (kSlab - count) * sizeof *sums);
    if (count == 0) return;
    const SlabOf weights = {slab.matrix.row(slab.first), slab.matrix.inputs, count};
    if (x.path == Path::kAvx512Bf16) {
        dot_rows_avx512_bf16(weights, x.narrow(first_row), x.padded, rows, sums);
    } else if (x.path == Path::kAvx512) {
        const auto dot_rows = slab.matrix.is_bfloat16 ? dot_rows_avx512<std::uint16_t> : dot_rows_avx512<float>;
        dot_rows(weights, x.wide(first_row), x.padded, rows, sums);
    } else {
        const auto dot_rows = slab.matrix.is_bfloat16 ? dot_rows_avx2<std::uint16_t> : dot_rows_avx2<float>;
        dot_rows(weights, x.wide(first_row), x.padded, rows, sums);
    }
}

// A unit for one or two blocks of rows, from `block`. ahead: slabs to the next unit's. sums: one per block.
void multiply(const Slab& one, const Slab& two, Index ahead, const Activations& x, Index block, Index num_blocks,
              Sums* sums) {
    if (x.path == Path::kAmx) {
        const TilesOf first(one.matrix.row(one.first), one.matrix.inputs, one.count(), ahead);
        const TilesOf second(two.matrix.row(two.first), two.matrix.inputs, two.count(), ahead);
        const std::uint32_t* tiles = x.tiles(block);
        if (num_blocks == 2) {
            multiply_tiles<2>(first, second, tiles, x.tiles(block + 1), x.padded, &sums[0][0][0][0]);
        } else {
            multiply_tiles<1>(first, second, tiles, nullptr, x.padded, &sums[0][0][0][0]);
        }
        return;
    }
    for (Index b = 0; b < num_blocks; ++b) {
        dot_slab(one, x, block + b, sums[b][0]);
        dot_slab(two, x, block + b, sums[b][1]);
    }
}

void bias_of(const Slab& slab, float* into) {
    std::memset(into, 0, kSlab * sizeof(float));
    if (slab.matrix.bias != nullptr) {
        widen({slab.matrix.bias, slab.matrix.is_bfloat16}, slab.first, slab.count(), into);
    }
}

// [output, row] as [row, output].
template <bool kHasAvx512>
FORKPOINT_INLINE void turn(float (*sums)[kRowBlock], Index rows, float (*turned)[kSlab]) {
    if (kHasAvx512 && rows > 2) return turn_avx512(sums, sizeof *sums, kSlab, turned);
    for (Index r = 0; r < rows; ++r) {
        for (Index i = 0; i < kSlab; ++i) turned[r][i] = sums[i][r];
    }
}

// Write a slab's results to rows of y, plus bias.
template <bool kHasAvx512>
FORKPOINT_INLINE void store(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y) {
    alignas(64) float bias[kSlab], turned[kRowBlock][kSlab];
    bias_of(slab, bias);
    turn<kHasAvx512>(sums, rows, turned);
    const Index count = slab.count(), width = slab.matrix.outputs;
    for (Index r = 0; r < rows; ++r) {
        const Index start = (first_row + r) * width + slab.first;
        for (Index i = 0; i < kSlab; ++i) turned[r][i] += bias[i];
        if (slab.matrix.is_bfloat16) {
            std::uint16_t rounded[kSlab];
            for (Index i = 0; i < kSlab; ++i) rounded[i] = to_bfloat16(turned[r][i]);
            std::memcpy(static_cast<std::uint16_t*>(y) + start, rounded, count * 2);
        } else {
            std::memcpy(static_cast<float*>(y) + start, turned[r], count * 4);
        }
    }
}

// activation(gate) * up, over both.
FORKPOINT_INLINE void join(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums) {
    float gate_bias[kSlab], up_bias[kSlab];
    bias_of(gates, gate_bias);
    bias_of(ups, up_bias);
    for (Index i = 0; i < kSlab; ++i) {
        float *g = sums[0][i], *u = sums[1][i];
        if (i >= gates.count()) {
            // The next product multiplies them with zeros: they must be finite.
            std::memset(g, 0, sizeof sums[0][i]);
            continue;
        }
        for (Index r = 0; r < kRowBlock; ++r) {
            g[r] += gate_bias[i];
            u[r] += up_bias[i];
        }
        switch (gate.kind) {
            case kSilu:
                for (Index r = 0; r < kRowBlock; ++r) g[r] = gated_silu(g[r], u[r]);
                break;
            case kGeluTanh:
                for (Index r = 0; r < kRowBlock; ++r) g[r] = gated_gelu_tanh(g[r], u[r]);
                break;
            case kClampedSwiglu:
                for (Index r = 0; r < kRowBlock; ++r) g[r] = gated_clamped_swiglu(g[r], u[r], gate.alpha, gate.limit);
                break;
        }
    }
}

// Put 16 joined outputs where the next product looks for its inputs.
template <bool kHasAvx512>
FORKPOINT_INLINE void place(float (*joined)[kRowBlock], Index first, const Activations& into, Index block) {
    if (into.path == Path::kAmx) {
        std::uint32_t* pairs = into.tiles(block) + first / 2 * kRowBlock;
        for (Index i = 0; i < kSlab / 2; ++i) {
            for (Index r = 0; r < kRowBlock; ++r) {
                const std::uint32_t high = to_bfloat16(joined[2 * i + 1][r]);
                pairs[i * kRowBlock + r] = to_bfloat16(joined[2 * i][r]) | high << 16;
            }
        }
        return;
    }
    alignas(64) float turned[kRowBlock][kSlab];
    turn<kHasAvx512>(joined, into.rows_of(block), turned);
    for (Index r = 0; r < into.rows_of(block); ++r) {
        const Index row = block * kRowBlock + r;
        if (into.is_narrow()) {
            for (Index i = 0; i < kSlab; ++i) into.narrow(row)[first + i] = to_bfloat16(turned[r][i]);
        } else {
            std::memcpy(into.wide(row) + first, turned[r], sizeof turned[r]);
        }
    }
}

// ---- What comes after the products, compiled for each kind of register; the results are the same.

struct Epilogues {
    void (*store)(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y);
    void (*join_and_place)(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums, const Activations& into,
                           Index block);
};

FORKPOINT_AVX512 void store_avx512(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y) {
    store<true>(slab, sums, first_row, rows, y);
}
FORKPOINT_AVX2 void store_avx2(const Slab& slab, float (*sums)[kRowBlock], Index first_row, Index rows, void* y) {
    store<false>(slab, sums, first_row, rows, y);
}
FORKPOINT_AVX512 void join_avx512(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums,
                                  const Activations& into, Index block) {
    join(gate, gates, ups, sums);
    place<true>(sums[0], gates.first, into, block);
}
FORKPOINT_AVX2 void join_avx2(const Gate& gate, const Slab& gates, const Slab& ups, Sums& sums,
                              const Activations& into, Index block) {
    join(gate, gates, ups, sums);
    place<false>(sums[0], gates.first, into, block);
}

Epilogues epilogues_of(Path path) {
    if (path == Path::kAvx2) return {store_avx2, join_avx2};
    return {store_avx512, join_avx512};
}

// y = x W^T + b; call it from every thread of a parallel region.
void multiply_all(const Matrix& matrix, const Activations& x, void* y) {
    const Index units = (matrix.outputs + 2 * kSlab - 1) / (2 * kSlab);
    const auto store = epilogues_of(x.path).store;
#pragma omp for schedule(static)
    for (Index unit = 0; unit < units; ++unit) {
        const Slab one = {matrix, unit * 2 * kSlab}, two = {matrix, unit * 2 * kSlab + kSlab};
        for (Index block = 0; block < x.row_blocks(); block += 2) {
            const Index num_blocks = block + 1 < x.row_blocks() ? 2 : 1;
            alignas(64) Sums sums[2];
            multiply(one, two, 2, x, block, num_blocks, sums);
            for (Index b = 0; b < num_blocks; ++b) {
                const Index rows = x.rows_of(block + b);
                store(one, sums[b][0], (block + b) * kRowBlock, rows, y);
                if (two.count() > 0) store(two, sums[b][1], (block + b) * kRowBlock, rows, y);
            }
        }
    }
}

// gate(x G^T, x U^T) as activations for the next product; call it from every thread of a parallel region.
void multiply_gated(const Matrix& gates, const Matrix& ups, const Gate& gate, const Activations& x,
                    const Activations& into) {
    const auto join_and_place = epilogues_of(x.path).join_and_place;
#pragma omp for schedule(static)
    for (Index first = 0; first < into.padded; first += kSlab) {
        const Slab one = {gates, first}, two = {ups, first};
        for (Index block = 0; block < x.row_blocks(); block += 2) {
            const Index num_blocks = block + 1 < x.row_blocks() ? 2 : 1;
            alignas(64) Sums sums[2] = {};
            // Beyond the last output there may be room for zeros.
            if (one.count() > 0) multiply(one, two, 1, x, block, num_blocks, sums);
            for (Index b = 0; b < num_blocks; ++b) {
                join_and_place(gate, one, two, sums[b], into, block + b);
            }
        }
    }
}

// For what a thread does between the two: tile registers are set up and given back.
class TilesInUse {
public:
    explicit TilesInUse(Path path) : is_needed_(path == Path::kAmx) {
        if (is_needed_) begin_tiles();
    }
    ~TilesInUse() {
        if (is_needed_) end_tiles();
    }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;

private:
    const bool is_needed_;
};

}  // namespace
}  // namespace forkpoint

using forkpoint::Index;

// weights: [outputs, inputs], bias: [outputs] or null, x: [rows, inputs], y: [rows, outputs]: all float32 or all
// bfloat16, contiguous.
FORKPOINT_EXPORT void forkpoint_linear(const void* weights, const void* bias, const void* x, void* y, Index rows,
                                       Index inputs, Index outputs, std::int32_t is_bfloat16) {
    const forkpoint::Matrix matrix = {weights, bias, outputs, inputs, is_bfloat16 != 0};
    const forkpoint::Activations laid_out(forkpoint::choose_path(matrix.is_bfloat16), rows, inputs);
#pragma omp parallel
    {
        const forkpoint::TilesInUse tiles(laid_out.path);
        forkpoint::lay_out({x, matrix.is_bfloat16}, laid_out);
        forkpoint::multiply_all(matrix, laid_out, y);
    }
}

// y = gate(x G^T, x U^T) D^T. gate_up: [2 * dim, hidden], gate's rows first; down: [hidden, dim]; biases or null.
FORKPOINT_EXPORT void forkpoint_gated_mlp(const void* gate_up, const void* gate_up_bias, const void* down,
                                          const void* down_bias, const void* x, void* y, Index rows, Index hidden,
                                          Index dim, std::int32_t kind, float alpha, float limit,
                                          std::int32_t is_bfloat16) {
    const bool is_narrow = is_bfloat16 != 0;
    const auto behind = [&](const void* start, Index numbers) -> const void* {
        return start == nullptr ? nullptr : static_cast<const char*>(start) + numbers * (is_narrow ? 2 : 4);
    };
    const forkpoint::Matrix gates = {gate_up, gate_up_bias, dim, hidden, is_narrow};
    const forkpoint::Matrix ups = {behind(gate_up, dim * hidden), behind(gate_up_bias, dim), dim, hidden, is_narrow};
    const forkpoint::Matrix last = {down, down_bias, hidden, dim, is_narrow};
    const forkpoint::Gate gate = {static_cast<forkpoint::GateKind>(kind), alpha, limit};
    const forkpoint::Path path = forkpoint::choose_path(is_narrow);
    const forkpoint::Activations outer(path, rows, hidden), inner(path, rows, dim);
#pragma omp parallel
    {
        const forkpoint::TilesInUse tiles(path);
        forkpoint::lay_out({x, is_narrow}, outer);
        forkpoint::multiply_gated(gates, ups, gate, outer, inner);
        forkpoint::multiply_all(last, inner, y);
    }
}
