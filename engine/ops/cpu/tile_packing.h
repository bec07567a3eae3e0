// Tiles of keys and values, of plain pages or of codes, packed as matrix products take them (gemm.h).
#pragma once
#include <algorithm>
#include <optional>
#include <type_traits>

#include "gemm.h"
#include "tile_groups.h"
#include "tile_registers.h"

namespace kvrelay {

constexpr int64_t kMeanwhileDepths = 8;  // of keys that are taken between two times that something else is done
constexpr int64_t kMeanwhileKeys = 4;    // the same of values

// Pack the first `count` keys of a head, which begins `at` elements behind a group's first one, as B = keys^T, in panels
// of 32 keys. `meanwhile()` is called now and then.
template <typename T, typename Meanwhile>
inline void pack_keys(
    const TileGroups<T>& tile, int64_t count, int64_t at, int64_t dim, T* packed, Meanwhile& meanwhile) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t first = 0; first < count; first += kLanes) {
        const T* from = tile.keys[first / kLanes] + at;
        T* panel = packed + first / kPanel * panel_size<T>(dim) + first % kPanel * pack;
        for (int64_t k = 0; k < dim; k += pack) {
            if (k % kMeanwhileDepths == 0) meanwhile();
            store(panel + k * kPanel, load<I32x16>(from + k * kLanes));
        }
    }
}

// Pack values likewise, as B: panels of 32 columns, whose depth are kTileKeys keys.
template <typename T, typename Meanwhile>
inline void pack_values(
    const TileGroups<T>& tile, int64_t count, int64_t at, int64_t dim, T* packed, Meanwhile& meanwhile) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t d = 0; d < dim; d += kPanel, packed += kTileKeys * kPanel)
        for (int64_t k = 0; k < count; k += pack) {
            if (k % kMeanwhileKeys == 0) meanwhile();
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

// Buffers of an item, one per thread: queries of some heads, keys and values of one, [padded rows][..].
template <typename T>
struct TileBuffers {
    std::vector<T> queries, keys, values, weights;
    std::vector<float> scores;

    void reset(int64_t heads, int64_t rows, int64_t dim) {
        queries.resize(heads * rows * dim);
        keys.resize(kTileKeys * dim);
        values.resize(kTileKeys * dim);
        weights.resize(rows * kTileKeys);
        scores.resize(rows * kTileKeys);
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

// Two depths of sixteen columns, at their place in a panel.
inline void store_depths(float* to, F32x16 even, F32x16 odd) {
    store(to, even);
    store(to + kPanel, odd);
}
inline void store_depths(bf16* to, F32x16 even, F32x16 odd) {
    store(to, pair_up(narrow(even), narrow(odd)));
}

// Pack the codes of one head like rows of T. Only the first `count` keys are known to be written.
template <bool kIsInt4, typename T>
inline void pack_codes(const CodeGroups<kTileGroups>& codes, const CodeLayout& layout, int64_t count,
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
        T* panel = tile.keys.data() + g / 2 * panel_size<T>(dim) + g % 2 * kLanes * pack;
        for (int64_t byte = 0; byte < layout.row_bytes; byte += 4) {
            F32x16 scale = load_scales(codes.key_scales[g], byte / bytes_per_scale);
            each_half(load<I32x16>(codes.keys[g] + byte * kLanes), byte, [&](int64_t d, auto code) {
                store_depths(panel + d * kPanel, code(0) * scale, code(1) * scale);
                store_depths(panel + (d + 2) * kPanel, code(2) * scale, code(3) * scale);
            });
        }
        for (int64_t byte = 0; byte < layout.row_bytes; byte += kLanes) {
            float scales[kLanes];
            store(scales, keep(load_scales(codes.value_scales[g], byte / bytes_per_scale), g * kLanes, 0, count));
            for (int quad = 0; quad < 4; quad++) {
                I32x16 bytes = load<I32x16>(codes.values[g] + (quad * layout.row_bytes + byte) * 4);
                each_half(bytes, byte, [&](int64_t d, auto code) {
                    int64_t k = g * kLanes + quad * 4;
                    T* to = tile.values.data() + d / kPanel * kTileKeys * kPanel + d % kPanel * pack;
                    store_depths(to + k * kPanel, code(0) * scales[quad * 4], code(1) * scales[quad * 4 + 1]);
                    store_depths(to + (k + 2) * kPanel, code(2) * scales[quad * 4 + 2], code(3) * scales[quad * 4 + 3]);
                });
            }
        }
    }
}

}  // namespace kvrelay
