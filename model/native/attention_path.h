// One path of attention: the other headers compiled for the instructions that FORKPOINT_TARGET names.
// attention.cpp includes it once for each path, with these set; no include guard.
//
//   FORKPOINT_PATH    the namespace        FORKPOINT_LANES   float32 numbers of a vector, 8 or 16
//   FORKPOINT_PAIRS   bfloat16 is multiplied, in pairs, else float32   FORKPOINT_TILES   on AMX tiles

namespace forkpoint::attention {
namespace FORKPOINT_PATH {

#if FORKPOINT_PAIRS
using Number = std::uint16_t;
#else
using Number = float;
#endif

// 16 lines of 64 bytes, turned.
inline void turn(const void* from, float (*into)[16]) {
#if FORKPOINT_LANES == 16
    turn_avx512(from, 64, 16, into);
#else
    const auto* numbers = static_cast<const float*>(from);
    for (Index i = 0; i < 16; ++i) {
        for (Index j = 0; j < 16; ++j) into[i][j] = numbers[j * 16 + i];
    }
#endif
}

#include "attention_vectors.h"

#include "attention_multiply.h"

#include "attention_tile.h"

#include "attention_piece.h"

inline Index memory_bytes(const Layer& layer) {
    const Index padded = layer.padded_k() + layer.padded_v();
    const Index of_piece = (layer.group() * layer.padded_k() + 4 * kPieceBlock + kPieceBlock * padded) * 4;
    return TileMemory::bytes(layer) > of_piece ? TileMemory::bytes(layer) : of_piece;
}

#if FORKPOINT_TILES
inline void begin() { begin_tiles(); }
inline void end() { end_tiles(); }
#else
inline void begin() {}
inline void end() {}
#endif

constexpr Path path = {sizeof(Number), memory_bytes, pack, attend_tile, attend_piece, join_pieces, begin, end};

}  // namespace FORKPOINT_PATH
}  // namespace forkpoint::attention

#undef FORKPOINT_PATH
#undef FORKPOINT_LANES
#undef FORKPOINT_PAIRS
#undef FORKPOINT_TILES
