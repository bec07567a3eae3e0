// Attention of one new token: keys and values are read once, straight from their pages.
#pragma once
#include <type_traits>

#include "gemm.h"
#include "paged.h"

namespace kvrelay {

constexpr int64_t kSplitKeys = 256;  // keys of an item

template <typename T>
inline F32x16 dot_lanes(const T* a, const T* b, int64_t dim) {
    F32x16 lanes{};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < dim; i += 2 * kLanes)
            lanes = (F32x16)_mm512_dpbf16_ps((__m512)lanes, load<__m512bh>(a + i), load<__m512bh>(b + i));
        return lanes;
    }
#endif
#pragma GCC unroll 4
    for (int64_t i = 0; i < dim; i += kLanes) lanes += load_wide(a + i) * load_wide(b + i);
    return lanes;
}

// Scores of one query row for the first `count` keys of a tile, whose heads begin at `column`; the other keys are hidden.
// kDim: head_dim where it is known when compiling, else 0.
// `meanwhile(k)` is called before each sixteen keys.
template <int kDim, typename T, typename Meanwhile>
inline void score_keys(const T* query, const T* const* keys, int64_t column, int64_t count, int64_t head_dim,
                       float* scores, Meanwhile meanwhile) {
    for (int64_t k = 0; k < count; k += kLanes) {
        meanwhile(k);
        F32x16 lanes[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) lanes[i] = dot_lanes(query, keys[k + i] + column, kDim ? kDim : head_dim);
        store(scores + k, sum_each(lanes));
    }
    for (int64_t k = count; k < kTileKeys; k++) scores[k] = kNever;
}

// out [kRows][dim] += weights [kRows][kTileKeys] * values, for 32 columns and the first `count` keys; `values` begin at
// those columns plus `column`.
template <int kRows>
inline void add_columns(const float* weights, const float* const* values, int64_t count, int64_t column, float* out,
                        int64_t dim) {
    F32x16 acc[kRows][2];
    for (int r = 0; r < kRows; r++)
        for (int half = 0; half < 2; half++) acc[r][half] = load<F32x16>(out + r * dim + half * kLanes);
    for (int64_t k = 0; k < count; k++) {
        F32x16 low = load<F32x16>(values[k] + column), high = load<F32x16>(values[k] + column + kLanes);
        for (int r = 0; r < kRows; r++) {
            acc[r][0] += weights[r * kTileKeys + k] * low;
            acc[r][1] += weights[r * kTileKeys + k] * high;
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int half = 0; half < 2; half++) store(out + r * dim + half * kLanes, acc[r][half]);
}

// The same for bfloat16, two keys at a time: their values are interleaved, so that one instruction adds both.
template <int kRows>
inline void add_columns(const bf16* weights, const bf16* const* values, int64_t count, int64_t column, float* out,
                        int64_t dim) {
    typedef uint16_t U16x32 __attribute__((vector_size(64)));
    F32x16 acc[kRows][2];
    for (int r = 0; r < kRows; r++)
        for (int half = 0; half < 2; half++) acc[r][half] = load<F32x16>(out + r * dim + half * kLanes);
    for (int64_t k = 0; k < count; k += 2) {
        U16x32 even = load<U16x32>(values[k] + column), odd = load<U16x32>(values[k + 1] + column);
        U16x32 pairs[2] = {
            __builtin_shufflevector(even, odd, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10,
                                    42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47),
            __builtin_shufflevector(even, odd, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                    25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)};
        for (int r = 0; r < kRows; r++)
            for (int half = 0; half < 2; half++)
                acc[r][half] = multiply_add(acc[r][half], weights + r * kTileKeys + k, (const bf16*)&pairs[half]);
    }
    for (int r = 0; r < kRows; r++)
        for (int half = 0; half < 2; half++) store(out + r * dim + half * kLanes, acc[r][half]);
}

template <int kRows, typename T>
inline void add_rows(const T* weights, const T* const* values, int64_t count, int64_t column, float* out, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kPanel)
        add_columns<kRows>(weights, values, count, column + i, out + i, dim);
}

// out [rows][dim] += weights [rows][kTileKeys] * values, of the head that begins at `column`.
template <typename T>
inline void add_values(int64_t rows, const T* weights, const T* const* values, int64_t count, int64_t column,
                       float* out, int64_t dim) {
    for (; rows > 4; rows -= 4, weights += 4 * kTileKeys, out += 4 * dim)
        add_rows<4>(weights, values, count, column, out, dim);
    switch (rows) {
        case 1: return add_rows<1>(weights, values, count, column, out, dim);
        case 2: return add_rows<2>(weights, values, count, column, out, dim);
        case 3: return add_rows<3>(weights, values, count, column, out, dim);
        case 4: return add_rows<4>(weights, values, count, column, out, dim);
    }
}

// One token's query heads over keys [item.begin, item.end). queries: from the item's first one on. `after` is what this
// thread probably does next, or null.
template <int kDim, typename T>
void attend_keys(const Step& step, const Layer<T>& layer, const Item& item, const Item* after, const T* queries,
                 Partial& partial) {
    int64_t dim = kDim ? kDim : step.head_dim, group = step.group(), rows = item.num_heads * group;
    thread_local std::vector<T> weights;
    weights.resize(group * kTileKeys);
    partial.reset(rows, dim);
    float scores[kTileKeys];
    TileRows<T> tiles[2];
    tiles[0].find(step, layer, step.block_tables[item.seq], item.first_head, item.begin, item.end);
    int now = 0;
    for (int64_t at = item.begin; at < item.end; at += kTileKeys, now = 1 - now) {
        const TileRows<T>&tile = tiles[now], &next = tiles[1 - now];
        int64_t count = std::min(kTileKeys, item.end - at), next_at = at + count;
        const Item* owner = next_at < item.end ? &item : after;
        if (owner == after && after) next_at = after->begin;
        int64_t next_count = owner ? std::min(kTileKeys, owner->end - next_at) : 0;
        if (owner) {
            tiles[1 - now].find(
                step, layer, step.block_tables[owner->seq], owner->first_head, next_at, owner->end);
        }
        for (int64_t row = 0; row < rows; row++) {
            int64_t column = row / group * dim;
            // A little of the next tile at a time, in the order of memory, while this one is computed.
            auto fetch_next = [&](int64_t k) {
                int64_t part = row * kTileKeys + k, parts = rows * kTileKeys;
                next.prefetch(next_count * part / parts, next_count * (part + kLanes) / parts, item.num_heads * dim);
            };
            score_keys<kDim>(queries + row * dim, tile.keys, column, count, dim, scores, fetch_next);
            soften(scores, step.scale, weights.data() + row % group * kTileKeys, partial.peaks[row], partial.sums[row],
                   partial.out.data() + row * dim, dim);
            if (row % group == group - 1)
                add_values(group, weights.data(), tile.values, count, column,
                           partial.out.data() + (row + 1 - group) * dim, dim);
        }
    }
}

template <typename T>
inline void attend_keys(const Step& step, const Layer<T>& layer, const Item& item, const Item* after,
                        const T* queries, Partial& partial) {
    switch (step.head_dim) {
        case 64: return attend_keys<64>(step, layer, item, after, queries, partial);
        case 128: return attend_keys<128>(step, layer, item, after, queries, partial);
        default: return attend_keys<0>(step, layer, item, after, queries, partial);
    }
}

// Merge the splits of one token (partials [splits], each of `rows` query heads) and write the result.
template <typename T>
void merge(const Partial* partials, int64_t splits, int64_t rows, int64_t dim, PageFormat format, T* to) {
    thread_local std::vector<float> out;
    for (int64_t h = 0; h < rows; h++) {
        float peak = kNever, total = 0;
        for (int64_t s = 0; s < splits; s++) peak = std::max(peak, partials[s].peaks[h]);
        out.assign(dim, 0.0f);
        for (int64_t s = 0; s < splits; s++) {
            float share = std::exp2(partials[s].peaks[h] - peak);
            total += share * partials[s].sums[h];
            const float* from = partials[s].out.data() + h * dim;
            for (int64_t i = 0; i < dim; i += kLanes)
                store(out.data() + i, load<F32x16>(out.data() + i) + share * load<F32x16>(from + i));
        }
        write_result(out.data(), total, dim, format, to + h * dim);
    }
}

}  // namespace kvrelay
