// Products of few query rows with keys and values where they lie, in groups. Sums are added up in the order of
// multiply_columns, so that they have its bits.
//
// What is multiplied comes from memory, in its order, and each load asks for the same place of the next tile: the
// processor's own prefetcher does not see through block tables.
#pragma once
#include "tile_packing.h"

namespace kvrelay {

constexpr int kRegisterLanes = num_lanes<Register>, kGroupRegisters = kLanes / kRegisterLanes;

// scores [kRows][kTileKeys], from `first` on: queries [kRows][dim] times kPanel keys, of the head that begins `at` elements
// behind a group's first one.
template <int kRows, typename T>
inline void score_keys(const T* queries, const TileGroups<T>& tile, const TileGroups<T>& next, int64_t first, int64_t at,
                       int64_t dim, float* scores) {
    constexpr int pack = Format<T>::kPack;
    const T *groups[2], *ahead[2];
    for (int g = 0; g < 2; g++)
        groups[g] = tile.keys[first / kLanes + g] + at, ahead[g] = next.keys[first / kLanes + g] + at;
    Register sums[kRows][2][kGroupRegisters] = {};
    for (int64_t k = 0; k < dim; k += pack)
        for (int g = 0; g < 2; g++)
            for (int v = 0; v < kGroupRegisters; v++) {
                int64_t from = k * kLanes + v * kRegisterLanes * pack;
                if (v * kRegisterBytes % 64 == 0) fetch_line(ahead[g] + from);
                Register columns = load<Register>(groups[g] + from);
                for (int r = 0; r < kRows; r++)
                    sums[r][g][v] = add_product<T>(sums[r][g][v], depths(queries + r * dim + k), columns);
            }
    for (int r = 0; r < kRows; r++)
        for (int g = 0; g < 2; g++)
            for (int v = 0; v < kGroupRegisters; v++)
                store(scores + r * kTileKeys + first + g * kLanes + v * kRegisterLanes, sums[r][g][v]);
}

// out [kRows][dim] += weights [kRows][kTileKeys], from `first` on, of the values of a group.
template <int kRows, int kWidth, typename T>
inline void add_columns(const T* weights, const TileGroups<T>& tile, const TileGroups<T>& next, int64_t first, int64_t at,
                        int64_t dim, float* out) {
    constexpr int pack = Format<T>::kPack;
    const T *group = tile.values[first / kLanes] + at, *ahead = next.values[first / kLanes] + at;
    for (int64_t d = 0; d < dim; d += kWidth * kRegisterLanes) {
        Register sums[kRows][kWidth];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kWidth; v++) sums[r][v] = load<Register>(out + r * dim + d + v * kRegisterLanes);
        for (int64_t k = 0; k < kLanes; k += pack)
            for (int v = 0; v < kWidth; v++) {
                int64_t from = k * dim + (d + v * kRegisterLanes) * pack;
                if (v * kRegisterBytes % 64 == 0) fetch_line(ahead + from);
                Register columns = load<Register>(group + from);
                for (int r = 0; r < kRows; r++)
                    sums[r][v] = add_product<T>(sums[r][v], depths(weights + r * kTileKeys + first + k), columns);
            }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kWidth; v++) store(out + r * dim + d + v * kRegisterLanes, sums[r][v]);
    }
}
// As many columns at a time as there are registers for sums: memory likes to be read in order.
template <int kRows, typename T>
inline void add_values(const T* weights, const TileGroups<T>& tile, const TileGroups<T>& next, int64_t first, int64_t at,
                       int64_t dim, float* out) {
    constexpr int kWidth = kPanel / kRegisterLanes;
    if constexpr (2 * kRows <= kMaxRows)
        if (dim % (2 * kPanel) == 0) return add_columns<kRows, 2 * kWidth>(weights, tile, next, first, at, dim, out);
    add_columns<kRows, kWidth>(weights, tile, next, first, at, dim, out);
}

}  // namespace kvrelay
