// Products of few query rows with keys and values where they lie, in groups. Sums are added up in the order of
// multiply_columns, so that they have its bits.
#pragma once
#include "tile_packing.h"

namespace kvrelay {

constexpr int64_t kMeanwhileDepths = 8;  // of keys, likewise
constexpr int kRegisterLanes = num_lanes<Register>, kGroupRegisters = kLanes / kRegisterLanes;

// scores [kRows][kTileKeys] of queries [kRows][dim] and `count` keys, a multiple of kPanel, of the head that begins `at`
// elements behind a group's first one. `meanwhile()` is called now and then, here as below.
template <int kRows, typename T, typename Meanwhile>
inline void score_keys(const T* queries, const TileGroups<T>& tile, int64_t at, int64_t count, int64_t dim, float* scores,
                       Meanwhile& meanwhile) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t first = 0; first < count; first += kPanel) {
        const T* groups[2] = {tile.keys[first / kLanes] + at, tile.keys[first / kLanes + 1] + at};
        Register sums[kRows][2][kGroupRegisters] = {};
        for (int64_t from = 0; from < dim; from += kMeanwhileDepths) {
            meanwhile();
            for (int64_t k = from; k < from + kMeanwhileDepths; k += pack)
                for (int g = 0; g < 2; g++)
                    for (int v = 0; v < kGroupRegisters; v++) {
                        Register columns = load<Register>(groups[g] + k * kLanes + v * kRegisterLanes * pack);
                        for (int r = 0; r < kRows; r++)
                            sums[r][g][v] = add_product<T>(sums[r][g][v], depths(queries + r * dim + k), columns);
                    }
        }
        for (int r = 0; r < kRows; r++)
            for (int g = 0; g < 2; g++)
                for (int v = 0; v < kGroupRegisters; v++)
                    store(scores + r * kTileKeys + first + g * kLanes + v * kRegisterLanes, sums[r][g][v]);
    }
}

// out [kRows][dim] += weights [kRows][kTileKeys] of `count` keys times their values.
template <int kRows, int kWidth, typename T, typename Meanwhile>
inline void add_columns(const T* weights, const TileGroups<T>& tile, int64_t at, int64_t count, int64_t dim, float* out,
                        Meanwhile& meanwhile) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t d = 0; d < dim; d += kWidth * kRegisterLanes) {
        Register sums[kRows][kWidth];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kWidth; v++) sums[r][v] = load<Register>(out + r * dim + d + v * kRegisterLanes);
        for (int64_t first = 0; first < count; first += kLanes) {
            const T* values = tile.values[first / kLanes] + at + d * pack;
            for (int64_t k = 0; k < kLanes; k += pack, values += dim * pack) {
                if (k % kMeanwhileKeys == 0) meanwhile();
                for (int v = 0; v < kWidth; v++) {
                    Register columns = load<Register>(values + v * kRegisterLanes * pack);
                    for (int r = 0; r < kRows; r++)
                        sums[r][v] = add_product<T>(sums[r][v], depths(weights + r * kTileKeys + first + k), columns);
                }
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kWidth; v++) store(out + r * dim + d + v * kRegisterLanes, sums[r][v]);
    }
}
// As many columns at a time as there are registers for sums: memory likes to be read in order.
template <int kRows, typename T, typename Meanwhile>
inline void add_values(const T* weights, const TileGroups<T>& tile, int64_t at, int64_t count, int64_t dim, float* out,
                       Meanwhile& meanwhile) {
    constexpr int kWidth = kPanel / kRegisterLanes;
    if constexpr (2 * kRows <= kMaxRows)
        if (dim % (2 * kPanel) == 0)
            return add_columns<kRows, 2 * kWidth>(weights, tile, at, count, dim, out, meanwhile);
    add_columns<kRows, kWidth>(weights, tile, at, count, dim, out, meanwhile);
}

}  // namespace kvrelay
