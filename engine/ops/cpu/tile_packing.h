// Tiles as matrix products take them (gemm.h): values packed in panels, codes decoded into groups and panels.
#pragma once
#include <algorithm>
#include <optional>
#include <type_traits>

#include "gemm.h"
#include "tile_groups.h"
#include "tile_registers.h"

namespace kvrelay {

// Pack the values of the first `count` keys of a head, which begins `at` elements behind a group's first one, as B: panels
// of 32 columns, as deep as kTileKeys keys.
template <typename T>
inline void pack_values(const TileGroups<T>& tile, int64_t count, int64_t at, int64_t dim, T* packed) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t d = 0; d < dim; d += kPanel, packed += kTileKeys * kPanel)
        for (int64_t k = 0; k < count; k += pack) {
            const T* from = tile.values[k / kLanes] + at + (k % kLanes * dim + d * pack);
            std::memcpy(packed + k * kPanel, from, kPanel * pack * sizeof(T));
        }
}

// Rows that so many query rows take: tile registers read and write whole tiles of them. A single tile may be smaller.
template <typename T>
inline int64_t padded_rows(int64_t rows) {
    if (!std::is_same_v<T, bf16> || !has_tiles() || rows < kTiledRows) return rows;
    return (rows + kTiledRows - 1) / kTiledRows * kTiledRows;
}

// Query rows that are multiplied with a tile at a time: what lies between the two products stays in the first cache.
template <typename T>
inline int64_t rows_together() {
    return std::is_same_v<T, bf16> && has_tiles() ? 2 * kTiledRows : 4 * kMaxRows;
}

// Buffers of an item, one per thread: queries of some heads [heads][padded rows][dim]; of one, keys in groups, values in
// panels, and scores and weights of some rows.
template <typename T>
struct TileBuffers {
    std::vector<T> queries, keys, values, weights;
    std::vector<float> scores;

    void reset(int64_t heads, int64_t rows, int64_t dim) {
        queries.resize(heads * rows * dim);
        keys.resize(kTileKeys * dim);
        values.resize(kTileKeys * dim);
        weights.resize(heads * std::min(rows, rows_together<T>()) * kTileKeys);
        scores.resize(heads * std::min(rows, rows_together<T>()) * kTileKeys);
    }
};

// The tile registers of a thread that multiplies query rows of type T, if there are some, for as long as this lives.
template <typename T>
class TileRegisters {
public:
    explicit TileRegisters([[maybe_unused]] int64_t rows) {
#if defined(KVRELAY_TILES)
        int tile_rows = int(std::min<int64_t>(rows, kTiledRows));
        if (std::is_same_v<T, bf16> && has_tiles()) registers_.emplace(tile_rows, kLanes);
#endif
    }

private:
#if defined(KVRELAY_TILES)
    std::optional<Tiles> registers_;
#endif
};

// Two depths of sixteen columns, at their place among kWidth of them.
template <int kWidth>
inline void store_depths(float* to, F32x16 even, F32x16 odd) {
    store(to, even);
    store(to + kWidth, odd);
}
template <int kWidth>
inline void store_depths(bf16* to, F32x16 even, F32x16 odd) {
    store(to, pair_up(narrow(even), narrow(odd)));
}

// Put the keys of one head's codes into groups of T, and pack the values. Only keys [begin, end) of the tile are read:
// values of others are zero.
template <bool kIsInt4, typename T>
inline void pack_codes(const CodeGroups<kTileGroups>& codes, const CodeLayout& layout, int64_t begin, int64_t end,
                       int64_t dim, TileBuffers<T>& tile) {
    constexpr int pack = Format<T>::kPack;
    int64_t bytes_per_scale = layout.row_bytes / layout.row_scales;
    auto each_half = [](I32x16 bytes, int64_t at, auto use) {  // the dimensions of sixteen, or four, bytes of a row
        if (!kIsInt4) return use(at, [&](int i) { return decode_byte<false, 0>(bytes, i); });
        int64_t low = at / kLanes * kScaleDims + at % kLanes;
        use(low, [&](int i) { return decode_byte<true, 0>(bytes, i); });
        use(low + kLanes, [&](int i) { return decode_byte<true, 1>(bytes, i); });
    };
    for (int g = 0; g < kTileGroups; g++) {
        T* group = tile.keys.data() + g * kLanes * dim;
        for (int64_t byte = 0; byte < layout.row_bytes; byte += 4) {
            F32x16 scale = load_scales(codes.key_scales[g], byte / bytes_per_scale);
            each_half(load<I32x16>(codes.keys[g] + byte * kLanes), byte, [&](int64_t d, auto code) {
                store_depths<kLanes>(group + d * kLanes, code(0) * scale, code(1) * scale);
                store_depths<kLanes>(group + (d + 2) * kLanes, code(2) * scale, code(3) * scale);
            });
        }
        for (int64_t byte = 0; byte < layout.row_bytes; byte += kLanes) {
            float scales[kLanes];
            store(scales, keep(load_scales(codes.value_scales[g], byte / bytes_per_scale), g * kLanes, begin, end));
            for (int quad = 0; quad < 4; quad++) {
                I32x16 bytes = load<I32x16>(codes.values[g] + (quad * layout.row_bytes + byte) * 4);
                each_half(bytes, byte, [&](int64_t d, auto code) {
                    int64_t k = g * kLanes + quad * 4;
                    T* to = tile.values.data() + d / kPanel * kTileKeys * kPanel + d % kPanel * pack;
                    store_depths<kPanel>(to + k * kPanel, code(0) * scales[quad * 4], code(1) * scales[quad * 4 + 1]);
                    store_depths<kPanel>(to + (k + 2) * kPanel, code(2) * scales[quad * 4 + 2], code(3) * scales[quad * 4 + 3]);
                });
            }
        }
    }
}

}  // namespace kvrelay
