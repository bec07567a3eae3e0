// Sums of products in tile registers (AMX), for many rows of rounded activations: four times as many products at a time
// as vectors, and the same sums, since sums of integers are exact.
#pragma once
#include "rounded.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__)
#define KVRELAY_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvrelay {

constexpr int kTiledRows = 16;
constexpr int kMinTiledRows = kMaxRows + 1;  // vectors take fewer at once, and are as fast there
constexpr int kTileBytes = kBlock * kLanes;  // codes of a block, a byte each

// Quads of a row in a register. A register takes 16; a single block has 8.
inline constexpr int quads_together(int64_t span) { return span == 1 ? kQuads : 2 * kQuads; }

#if defined(KVRELAY_TILES)

// Whether the system lets this process use the registers: their content is part of what it saves for a thread.
inline bool has_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_permitted;
}

// Tile 0 to 3: sums [rows][16 columns]; 4, 5: [rows][quads of inputs]; 6, 7: [quads of inputs][16 columns].
// One thread's registers for as long as this lives; other code of the thread finds its own layout afterwards.
class Tiles {
public:
    Tiles(int rows, int quads) {
        Layout layout{};
        for (int tile = 0; tile < 8; tile++) {
            layout.rows[tile] = uint8_t(tile < 6 ? rows : quads);
            layout.row_bytes[tile] = uint16_t(4 * (tile == 4 || tile == 5 ? quads : kLanes));
        }
        _tile_storeconfig(&before_);
        load(layout);
    }
    ~Tiles() {
        if (before_.palette) {
            load(before_);
        } else {
            _tile_release();
        }
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

private:
    struct alignas(64) Layout {
        uint8_t palette = 1, start_row = 0, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static void load(const Layout& layout) {
        asm volatile("" ::"r"(&layout) : "memory");  // g++'s declaration of the instruction says that it reads 8 bytes
        _tile_loadconfig(&layout);
    }
    Layout before_;
};

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

#else

inline bool has_tiles() { return false; }

#endif

}  // namespace kvrelay
