// Tile registers (AMX): sixteen rows of 64 bytes each, which an instruction multiplies with one another.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define KVRELAY_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvrelay {

constexpr int kTiledRows = 16;

#if defined(KVRELAY_TILES)

// Whether the system lets this process use the registers: their content is part of what it saves for a thread.
inline bool has_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_permitted;
}

// Tile 0 to 3: sums [rows][columns]; 4, 5: [rows][16 pairs of depths]; 6, 7: [16 pairs of depths][columns].
// One thread's registers for as long as this lives; other code of the thread finds its own layout afterwards.
class Tiles {
public:
    Tiles(int rows, int columns) {
        Layout layout{};
        for (int tile = 0; tile < 8; tile++) {
            layout.rows[tile] = uint8_t(tile < 6 ? rows : kLanes);
            layout.row_bytes[tile] = uint16_t(4 * (tile == 4 || tile == 5 ? kLanes : columns));
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

#else

inline bool has_tiles() { return false; }

#endif

}  // namespace kvrelay
