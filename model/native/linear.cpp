// Products with float32 and bfloat16 weights, y = x W^T, for the few rows of a decode step.
//
// W stays as torch holds it: row-major, [outputs, inputs]. Outputs are computed 16 at a time, a slab; two slabs make a
// unit of work, and each thread takes a run of units, so that it reads one stretch of memory from front to back. x is
// laid out for the path once. Sums are float32, rounded once. Each sum runs over the inputs in an order that the path
// alone decides, so a row's result does not depend on how many rows there are.
#include "epilogue.h"
#include "features.h"
#include "layout.h"

namespace forkpoint::linear {
namespace {

// The 16 outputs of a slab for the rows of one block, by dot products; zeros for outputs that there are not.
void dot_slab(const Slab& slab, const Activations& x, Index block, float (*sums)[kRowBlock]) {
    const Index count = slab.count(), first_row = block * kRowBlock, rows = x.rows_of(block);
    std::memset(sums + count, 0, (kSlab - count) * sizeof *sums);
    if (count == 0) return;
    const SlabOf weights = {slab.start(), slab.matrix.inputs, count};
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

// A unit for one or two blocks of rows, from `block`. ahead: slabs from here to the next unit. sums: one per block.
void multiply(const Slab& one, const Slab& two, Index ahead, const Activations& x, Index block, Index num_blocks,
              Sums* sums) {
    if (x.path != Path::kAmx) {
        for (Index b = 0; b < num_blocks; ++b) {
            dot_slab(one, x, block + b, sums[b][0]);
            dot_slab(two, x, block + b, sums[b][1]);
        }
        return;
    }
    const TilesOf first(one.start(), one.matrix.inputs, one.count());
    const TilesOf second(two.start(), two.matrix.inputs, two.count());
    const Ahead next = {one.matrix.row(one.first + ahead * kSlab), two.matrix.row(two.first + ahead * kSlab)};
    const std::uint32_t* tiles = x.tiles(block);
    // The first blocks of rows fetch for all of them.
    if (num_blocks == 1) {
        const auto run = block == 0 ? multiply_tiles<1, true> : multiply_tiles<1, false>;
        run(first, second, next, tiles, nullptr, x.padded, &sums[0][0][0][0]);
    } else {
        const auto run = block == 0 ? multiply_tiles<2, true> : multiply_tiles<2, false>;
        run(first, second, next, tiles, x.tiles(block + 1), x.padded, &sums[0][0][0][0]);
    }
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
    const auto join = epilogues_of(x.path).join;
#pragma omp for schedule(static)
    for (Index first = 0; first < into.padded; first += kSlab) {
        const Slab one = {gates, first}, two = {ups, first};
        for (Index block = 0; block < x.row_blocks(); block += 2) {
            const Index num_blocks = block + 1 < x.row_blocks() ? 2 : 1;
            alignas(64) Sums sums[2];
            // Beyond the last output there may be room for zeros.
            if (one.count() > 0) multiply(one, two, 1, x, block, num_blocks, sums);
            for (Index b = 0; b < num_blocks; ++b) {
                join(gate, one, two, sums[b], into, block + b);
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
}  // namespace forkpoint::linear

using forkpoint::Index;

// weights: [outputs, inputs], bias: [outputs] or null, x: [rows, inputs], y: [rows, outputs]: all float32 or all
// bfloat16, contiguous.
FORKPOINT_EXPORT void forkpoint_linear(const void* weights, const void* bias, const void* x, void* y, Index rows,
                                       Index inputs, Index outputs, std::int32_t is_bfloat16) {
    const forkpoint::linear::Matrix matrix = {weights, bias, outputs, inputs, is_bfloat16 != 0};
    const forkpoint::linear::Activations laid_out(forkpoint::linear::choose_path(matrix.is_bfloat16), rows, inputs);
#pragma omp parallel
    {
        const forkpoint::linear::TilesInUse tiles(laid_out.path);
        forkpoint::linear::lay_out({x, matrix.is_bfloat16}, laid_out);
        forkpoint::linear::multiply_all(matrix, laid_out, y);
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
    const forkpoint::linear::Matrix gates = {gate_up, gate_up_bias, dim, hidden, is_narrow};
    const forkpoint::linear::Matrix ups = {behind(gate_up, dim * hidden), behind(gate_up_bias, dim), dim, hidden,
                                           is_narrow};
    const forkpoint::linear::Matrix last = {down, down_bias, hidden, dim, is_narrow};
    const forkpoint::Gate gate = {static_cast<forkpoint::GateKind>(kind), alpha, limit};
    const forkpoint::linear::Path path = forkpoint::linear::choose_path(is_narrow);
    const forkpoint::linear::Activations outer(path, rows, hidden), inner(path, rows, dim);
#pragma omp parallel
    {
        const forkpoint::linear::TilesInUse tiles(path);
        forkpoint::linear::lay_out({x, is_narrow}, outer);
        forkpoint::linear::multiply_gated(gates, ups, gate, outer, inner);
        forkpoint::linear::multiply_all(last, inner, y);
    }
}
