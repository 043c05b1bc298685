// The two sides of a product y = x W^T: weights as they are, and x as each way of multiplying wants it.
#pragma once
#include "dot.h"
#include "features.h"
#include "numbers.h"
#include "tiles.h"

namespace forkpoint::linear {

// The ways to multiply, best first; what each wants of the processor is in choose_path().
enum class Path { kAmx, kAvx512Bf16, kAvx512, kAvx2 };

inline Path choose_path(bool is_bfloat16) {
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

    const char* start() const { return matrix.row(first); }
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
};

inline void widen(Numbers from, Index start, Index count, float* into) {
    if (from.is_bfloat16) {
        const auto* source = static_cast<const std::uint16_t*>(from.start) + start;
        for (Index i = 0; i < count; ++i) into[i] = from_bfloat16(source[i]);
    } else {
        std::memcpy(into, static_cast<const float*>(from.start) + start, count * sizeof(float));
    }
}

// Lay out all rows; call it from every thread of a parallel region.
inline void lay_out(Numbers x, const Activations& into) {
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

}  // namespace forkpoint::linear
