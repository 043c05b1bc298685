// Products with int8 weights, y = x W^T, for the few rows of a decode step.
//
// W is row-major, [outputs, groups * 64] int8, with one bfloat16 scale per output and group of 64 inputs; inputs
// beyond the last are zeros. x is quantised on the fly in the same groups, so that all products are whole numbers,
// exact on every path; then each group's sum is scaled and added in float32. A row's result does not depend on how
// many rows there are. One group is one cache line, one register of AVX-512, and one row of an AMX tile.
#include "activations.h"
#include "features.h"
#include "int8_dot.h"
#include "int8_rows.h"
#include "int8_tiles.h"
#include "int8_weights.h"

namespace forkpoint::int8 {
namespace {

void nothing() {}

const Path kAmxPath = {16, true, 0, outputs_amx, begin_amx, end_amx};
const Path kAvx512VnniPath = {8, false, 16, outputs_avx512_vnni, nothing, nothing};
const Path kAvxVnniPath = {8, false, 8, outputs_avx_vnni, nothing, nothing};
const Path kAvx2Path = {8, false, 0, outputs_avx2, nothing, nothing};

// One path for every number of rows: the same row gets the same result in any company.
const Path& choose_path() {
    if (has(kAmxInt8) && has(kAvx512)) return kAmxPath;
    if (has(kAvx512Vnni)) return kAvx512VnniPath;
    if (has(kAvxVnni)) return kAvxVnniPath;
    return kAvx2Path;
}

struct Result {
    void* start;
    const void* bias;  // [width] of the same type, or null
    Index width;
    bool is_bfloat16;
};

FORKPOINT_AVX2 void store(const float* sums, Index row, Index first, Index count, const Result& y) {
    const Index at = row * y.width + first;
    if (y.is_bfloat16) {
        auto* to = static_cast<std::uint16_t*>(y.start) + at;
        const auto* bias = static_cast<const std::uint16_t*>(y.bias);
        for (Index i = 0; i < count; ++i) {
            to[i] = to_bfloat16(bias == nullptr ? sums[i] : sums[i] + from_bfloat16(bias[first + i]));
        }
    } else {
        auto* to = static_cast<float*>(y.start) + at;
        const auto* bias = static_cast<const float*>(y.bias);
        for (Index i = 0; i < count; ++i) to[i] = bias == nullptr ? sums[i] : sums[i] + bias[first + i];
    }
}

// y = x W^T + b; call it from every thread of a parallel region.
void multiply(const Matrix& matrix, const Quantised& x, const Result& y) {
    const Index num_blocks = (matrix.outputs + kOutputs - 1) / kOutputs;
#pragma omp for schedule(static)
    for (Index at = 0; at < num_blocks; ++at) {
        const Index first = at * kOutputs;
        const Index left = matrix.outputs - first, count = left < kOutputs ? left : kOutputs;
        for (Index block = 0; block < x.blocks; ++block) {
            alignas(64) float sums[kMaxBlockRows * kOutputs];
            const Index rows = x.rows_of(block);
            x.path.outputs_of(matrix, first, count, x, block, rows, sums);
            for (Index r = 0; r < rows; ++r) {
                store(sums + r * kOutputs, block * x.path.block_rows + r, first, count, y);
            }
        }
    }
}

FORKPOINT_AVX2 void join(const Gate& gate, const float* gates, const float* ups, Index count, float* into) {
    if (gate.kind == kSilu) {
        for (Index i = 0; i < count; ++i) into[i] = gated_silu(gates[i], ups[i]);
    } else if (gate.kind == kGeluTanh) {
        for (Index i = 0; i < count; ++i) into[i] = gated_gelu_tanh(gates[i], ups[i]);
    } else {
        for (Index i = 0; i < count; ++i) into[i] = gated_clamped_swiglu(gates[i], ups[i], gate.alpha, gate.limit);
    }
}

// The first half of a gated MLP into `inner`, [rows, dim] float32. gate_up: gate's outputs, then up's.
void multiply_gated(const Matrix& gate_up, const Quantised& x, const Result& biases, const Gate& gate, float* inner) {
    const Index dim = gate_up.outputs / 2, num_blocks = (dim + kOutputs - 1) / kOutputs;
#pragma omp for schedule(static)
    for (Index at = 0; at < num_blocks; ++at) {
        const Index first = at * kOutputs, left = dim - first, count = left < kOutputs ? left : kOutputs;
        for (Index block = 0; block < x.blocks; ++block) {
            alignas(64) float gates[kMaxBlockRows * kOutputs], ups[kMaxBlockRows * kOutputs];
            const Index rows = x.rows_of(block);
            x.path.outputs_of(gate_up, first, count, x, block, rows, gates);
            x.path.outputs_of(gate_up, dim + first, count, x, block, rows, ups);
            for (Index r = 0; r < rows; ++r) {
                float* g = gates + r * kOutputs;
                float* u = ups + r * kOutputs;
                if (biases.bias != nullptr) {
                    for (Index i = 0; i < count; ++i) {
                        const Index of_gate = first + i, of_up = dim + first + i;
                        const auto* narrow = static_cast<const std::uint16_t*>(biases.bias);
                        const auto* wide = static_cast<const float*>(biases.bias);
                        g[i] += biases.is_bfloat16 ? from_bfloat16(narrow[of_gate]) : wide[of_gate];
                        u[i] += biases.is_bfloat16 ? from_bfloat16(narrow[of_up]) : wide[of_up];
                    }
                }
                join(gate, g, u, count, inner + (block * x.path.block_rows + r) * dim + first);
            }
        }
    }
}

}  // namespace
}  // namespace forkpoint::int8

using namespace forkpoint;
using namespace forkpoint::int8;

// x: [rows, inputs], bias: [outputs] or null, y: [rows, outputs], all float32 or all bfloat16, contiguous.
FORKPOINT_EXPORT void forkpoint_int8_linear(const std::int8_t* values, const std::uint16_t* scales, const void* bias,
                                            const void* x, void* y, Index rows, Index inputs, Index outputs,
                                            std::int32_t is_bfloat16) {
    const Matrix matrix = {values, scales, outputs, groups_of(inputs)};
    const Quantised quantised(choose_path(), rows, inputs);
    const Rows source = {x, inputs, is_bfloat16 != 0};
    const Result result = {y, bias, outputs, is_bfloat16 != 0};
#pragma omp parallel
    {
        quantised.path.begin();
        quantise(source, quantised);
        multiply(matrix, quantised, result);
        quantised.path.end();
    }
}

// y = gate(x G^T, x U^T) D^T. gate_up: [2 * dim, hidden], gate's rows first; down: [hidden, dim]; biases or null.
FORKPOINT_EXPORT void forkpoint_int8_gated_mlp(const std::int8_t* gate_up, const std::uint16_t* gate_up_scales,
                                               const void* gate_up_bias, const std::int8_t* down,
                                               const std::uint16_t* down_scales, const void* down_bias,
                                               const void* x, void* y, Index rows, Index hidden, Index dim,
                                               std::int32_t kind, float alpha, float limit,
                                               std::int32_t is_bfloat16) {
    const bool is_narrow = is_bfloat16 != 0;
    const Path& path = choose_path();
    const Matrix first = {gate_up, gate_up_scales, 2 * dim, groups_of(hidden)};
    const Matrix second = {down, down_scales, hidden, groups_of(dim)};
    const Quantised outer(path, rows, hidden), inner(path, rows, dim);
    const Scratch<float> joined(rows * dim);
    const Gate gate = {static_cast<GateKind>(kind), alpha, limit};
    const Rows source = {x, hidden, is_narrow}, middle = {joined.get(), dim, false};
#pragma omp parallel
    {
        path.begin();
        quantise(source, outer);
        multiply_gated(first, outer, {nullptr, gate_up_bias, 2 * dim, is_narrow}, gate, joined.get());
        quantise(middle, inner);
        multiply(second, inner, {y, down_bias, hidden, is_narrow});
        path.end();
    }
}

// weight: [outputs, inputs] float32 or bfloat16. values: [outputs, groups * 64]; scales: [outputs, groups], the
// largest of a group / 127, rounded up; NaN where a number is not finite.
FORKPOINT_EXPORT void forkpoint_int8_quantize(const void* weight, std::int8_t* values, std::uint16_t* scales,
                                              Index outputs, Index inputs, std::int32_t is_bfloat16) {
    const Index groups = groups_of(inputs);
    if (is_bfloat16 != 0) {
        const auto* narrow = static_cast<const std::uint16_t*>(weight);
        quantise_weight(narrow, outputs, inputs, groups, values, scales);
    } else {
        quantise_weight(static_cast<const float*>(weight), outputs, inputs, groups, values, scales);
    }
}

// into: [outputs, inputs] float32 or bfloat16: every value times its scale, rounded once.
FORKPOINT_EXPORT void forkpoint_int8_dequantize(const std::int8_t* values, const std::uint16_t* scales, void* into,
                                                Index outputs, Index inputs, std::int32_t is_bfloat16) {
    const Matrix matrix = {values, scales, outputs, groups_of(inputs)};
    if (is_bfloat16 != 0) {
        dequantise(matrix, inputs, static_cast<std::uint16_t*>(into));
    } else {
        dequantise(matrix, inputs, static_cast<float*>(into));
    }
}
