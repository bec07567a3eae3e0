// Tile registers in ordinary memory, for kernels compiled on a processor that has none (`-include` this file).
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated_tiles {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
inline thread_local Config config;
alignas(64) inline thread_local uint8_t tiles[8][16][64];

inline void load_config(const void* from) {
    std::memcpy(&config, from, sizeof config);
    std::memset(tiles, 0, sizeof tiles);
}
inline void store_config(void* to) { std::memcpy(to, &config, sizeof config); }
inline void zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }
inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < config.rows[tile]; row++)
        std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, config.row_bytes[tile]);
}
inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < config.rows[tile]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], config.row_bytes[tile]);
}
inline float at(const uint8_t* row, int idx) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * idx, sizeof bits);
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
// c [rows][columns] += a [rows][pairs of depths] * b [pairs of depths][columns of pairs]
inline void multiply(int c, int a, int b) {
    for (int row = 0; row < config.rows[c]; row++) {
        float sums[16];
        std::memcpy(sums, tiles[c][row], sizeof sums);
        for (int pair = 0; pair < config.row_bytes[a] / 4; pair++)
            for (int column = 0; column < config.row_bytes[c] / 4; column++) {
                sums[column] += at(tiles[a][row], 2 * pair) * at(tiles[b][pair], 2 * column);
                sums[column] += at(tiles[a][row], 2 * pair + 1) * at(tiles[b][pair], 2 * column + 1);
            }
        std::memcpy(tiles[c][row], sums, sizeof sums);
    }
}

}  // namespace emulated_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_storeconfig emulated_tiles::store_config
#define _tile_release() (emulated_tiles::config = {})
#define _tile_zero emulated_tiles::zero
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_dpbf16ps emulated_tiles::multiply
#define syscall(...) 0L  // the system permits them
