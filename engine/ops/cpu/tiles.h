// Sums of products in tile registers (AMX), for many rows of rounded activations: four times as many products at a time
// as vectors, and the same sums, since sums of integers are exact.
#pragma once
#include "rounded.h"
#include "tile_registers.h"

namespace kvrelay {

constexpr int kMinTiledRows = kMaxRows + 1;  // vectors take fewer at once, and are as fast there
constexpr int kTileBytes = kBlock * kLanes;  // codes of a block, a byte each

// Quads of a row in a register. A register takes 16; a single block has 8.
inline constexpr int quads_together(int64_t span) { return span == 1 ? kQuads : 2 * kQuads; }

#if defined(KVRELAY_TILES)

// Macros: an instruction names its registers.
#define KVRELAY_ADD(sum, left, right, run)                                  \
    _tile_loadd(left, x.quads + (run) * kRun * x.rows, 4 * kRun);           \
    _tile_loadd(right, codes + (run) * kRun * 4 * kLanes, 4 * kLanes);      \
    if (kSigned) {                                                          \
        _tile_dpbssd(sum, left, right);                                     \
    } else {                                                                \
        _tile_dpbsud(sum, left, right);                                     \
    }
#define KVRELAY_SPAN(sum, left, right)                                      \
    if (s + (sum) < spans) {                                                \
        _tile_zero(sum);                                                    \
        if (kSpan == 1) {                                                   \
            KVRELAY_ADD(sum, left, right, s + (sum))                        \
        } else {                                                            \
            KVRELAY_ADD(sum, 4, 6, 2 * (s + (sum)))                         \
            KVRELAY_ADD(sum, 5, 7, 2 * (s + (sum)) + 1)                     \
        }                                                                   \
        _tile_stored(sum, sums[sum], 4 * kLanes);                           \
    }

constexpr int kTiledSpans = 4;

// Sums of at most four spans from s on. codes: a panel's, [quads][16 columns][4], signed or not.
template <bool kSigned, int kSpan>
inline void tiled_sums(
    const RoundedTile& x, const uint8_t* codes, int64_t spans, int64_t s, I32x16 (*sums)[kTiledRows]) {
    constexpr int kRun = quads_together(kSpan);
    KVRELAY_SPAN(0, 4, 6)
    KVRELAY_SPAN(1, 5, 7)
    KVRELAY_SPAN(2, 4, 6)
    KVRELAY_SPAN(3, 5, 7)
}

#undef KVRELAY_SPAN
#undef KVRELAY_ADD

#endif

}  // namespace kvrelay
