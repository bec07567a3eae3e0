// Products of few query rows with keys and values where they lie: what a panel would hold is made in registers, for one
// use. Sums are added up in the order of multiply_panel, so that they have its bits.
#pragma once
#include "tile_packing.h"

namespace kvrelay {

// Where registers are few, a block of keys leaves none for sums.
constexpr bool kHasRowProducts = kRegisterBytes == 64;

// scores [kRows][kTileKeys] of queries [kRows][dim] and `count` keys (rows by address, from `column` on), a multiple of
// kPanel. `meanwhile()` is called now and then, here as below.
template <int kRows, typename T, typename Meanwhile>
inline void score_keys(const T* queries, const T* const* keys, int64_t count, int64_t column, int64_t dim, float* scores,
                       Meanwhile& meanwhile) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t first = 0; first < count; first += kPanel) {
        Register sums[kRows][2] = {};
        for (int64_t k = 0; k < dim; k += kLanes * pack)
            for (int half = 0; half < 2; half++) {
                meanwhile();
                I32x16 block[kLanes];
                for (int i = 0; i < kLanes; i++) block[i] = load<I32x16>(keys[first + half * kLanes + i] + column + k);
                transpose(block);
                for (int i = 0; i < kLanes; i++) {
                    const T* query = queries + k + i * pack;
                    for (int r = 0; r < kRows; r++)
                        sums[r][half] = add_product<T>(sums[r][half], depths(query + r * dim), (Register)block[i]);
                }
            }
        for (int r = 0; r < kRows; r++)
            for (int half = 0; half < 2; half++) store(scores + r * kTileKeys + first + half * kLanes, sums[r][half]);
    }
}

// Sixteen columns of one step of values: of one key, or of two in pairs.
template <typename T>
inline Register value_columns(const T* const* values, int64_t k, int64_t at) {
    if constexpr (std::is_same_v<T, float>) return load<Register>(values[k] + at);
    else return (Register)pair_up(load<U16x16>(values[k] + at), load<U16x16>(values[k + 1] + at));
}

// out [kRows][dim] += weights [kRows][kTileKeys] of `count` keys times their values, from `column` on.
template <int kRows, typename T, typename Meanwhile>
inline void add_values(const T* weights, const T* const* values, int64_t count, int64_t column, int64_t dim, float* out,
                       Meanwhile& meanwhile) {
    for (int64_t d = 0; d < dim; d += kPanel) {
        Register sums[kRows][2];
        for (int r = 0; r < kRows; r++)
            for (int half = 0; half < 2; half++) sums[r][half] = load<Register>(out + r * dim + d + half * kLanes);
        for (int64_t k = 0; k < count; k += Format<T>::kPack) {
            if (k % kMeanwhileKeys == 0) meanwhile();
            for (int half = 0; half < 2; half++) {
                Register columns = value_columns(values, k, column + d + half * kLanes);
                for (int r = 0; r < kRows; r++)
                    sums[r][half] = add_product<T>(sums[r][half], depths(weights + r * kTileKeys + k), columns);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int half = 0; half < 2; half++) store(out + r * dim + d + half * kLanes, sums[r][half]);
    }
}

}  // namespace kvrelay
