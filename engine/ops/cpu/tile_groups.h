// Where a tile's keys and values lie, in groups of sixteen tokens (paged.h): pages of groups are read in place, rows of
// plain pages are put into groups first.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "paged.h"

namespace kvrelay {

// Write one token's row of keys, and of values, of one head to its place in a group.
template <typename T>
inline void write_row(const T* key, const T* value, int64_t dim, int64_t token, T* keys, T* values) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t d = 0; d < dim; d += pack) std::memcpy(keys + d * kLanes + token * pack, key + d, pack * sizeof(T));
    T* to = values + token / pack * pack * dim + token % pack;
    for (int64_t d = 0; d < dim; d++) to[d * pack] = value[d];
}

// Put sixteen rows, by address, into a group.
template <typename T>
inline void group_keys(const T* const* rows, int64_t dim, T* to) {
    constexpr int pack = Format<T>::kPack;
    for (int64_t d = 0; d < dim; d += kLanes * pack) {
        I32x16 block[kLanes];
        for (int i = 0; i < kLanes; i++) block[i] = load<I32x16>(rows[i] + d);
        transpose(block);
        for (int i = 0; i < kLanes; i++) store(to + (d + i * pack) * kLanes, block[i]);
    }
}
inline void group_values(const float* const* rows, int64_t dim, float* to) {
    for (int i = 0; i < kLanes; i++) std::memcpy(to + i * dim, rows[i], dim * sizeof(float));
}
inline void group_values(const bf16* const* rows, int64_t dim, bf16* to) {
    for (int i = 0; i < kLanes; i += 2)
        for (int64_t d = 0; d < dim; d += kLanes)
            store(to + i * dim + 2 * d, pair_up(load<U16x16>(rows[i] + d), load<U16x16>(rows[i + 1] + d)));
}

// The groups of a tile, from some key head on: a head's part of a group is 16 * head_dim elements behind the one before.
template <typename T>
class TileGroups {
public:
    const T *keys[kTileGroups], *values[kTileGroups];

    // The tile begins at key `first`; keys [begin, end) of it are read, of `heads` heads. Values of other places meet the
    // weight 0, which a NaN survives that another request has left behind. So they are those of a neighbour, or zero, or,
    // before `begin` in its group, the sequence's own.
    void find(const Step& step, const Layer<T>& layer, const int32_t* table, int64_t head, int64_t heads, int64_t first,
              int64_t begin, int64_t end) {
        begin = std::max(begin, first), end = std::min(end, first + kTileKeys);
        if (layer.format == PageFormat::kPlain) return regroup(step, layer, table, head, heads, first, begin, end);
        int last = int(locate(step, layer, table, head, first, begin, end)) - 1;
        if (end % kLanes == 0) return;
        int64_t size = kLanes * step.head_dim;
        int64_t held = end % kLanes, whole = (held + kPack - 1) / kPack * kPack;  // of them, and with the last one's pair
        own_.assign(values[last], values[last] + heads * size);
        for (T* to = own_.data(); to < own_.data() + heads * size; to += size) {
            if (held < whole)
                for (int64_t d = 0; d < step.head_dim; d++) to[(whole - kPack) * step.head_dim + d * kPack + 1] = T{};
            std::fill(to + whole * step.head_dim, to + size, T{});
        }
        // Places before the tile's first key may hold its last group, too.
        for (int g = begin >= end / kLanes * kLanes ? 0 : last; g < kTileGroups; g++) values[g] = own_.data();
    }

    // Only where they lie, of grouped pages, before any is read. Returns the number of groups up to the last one's.
    int64_t locate(const Step& step, const Layer<T>& layer, const int32_t* table, int64_t head, int64_t first,
                   int64_t begin, int64_t end) {
        begin = std::max(begin, first), end = std::min(end, first + kTileKeys);
        int64_t oldest = begin / kLanes * kLanes, latest = (end - 1) / kLanes * kLanes;
        for (int g = 0; g < kTileGroups; g++) {
            int64_t key = std::clamp(first + g * kLanes, oldest, latest);
            int64_t at = step.group_at(table[key / step.block_size] * step.block_size + key % step.block_size, head);
            keys[g] = layer.keys + at, values[g] = layer.values + at;
        }
        return (latest - first) / kLanes + 1;
    }

private:
    static constexpr int kPack = Format<T>::kPack;
    std::vector<T> own_;  // what is not read in place

    void regroup(const Step& step, const Layer<T>& layer, const int32_t* table, int64_t head, int64_t heads,
                 int64_t first, int64_t begin, int64_t end) {
        int64_t dim = step.head_dim, size = heads * kLanes * dim;
        own_.resize(2 * kTileGroups * size);
        for (int g = 0; g < kTileGroups; g++) {
            T *own_keys = own_.data() + 2 * g * size, *own_values = own_keys + size;
            for (int64_t h = 0; h < heads; h++) {
                const T *key_rows[kLanes], *value_rows[kLanes];
                for (int i = 0; i < kLanes; i++) {
                    int64_t key = std::clamp(first + g * kLanes + i, begin, end - 1);
                    int64_t slot = table[key / step.block_size] * step.block_size + key % step.block_size;
                    int64_t at = step.row_at(slot, head + h);
                    key_rows[i] = layer.keys + at, value_rows[i] = layer.values + at;
                }
                group_keys(key_rows, dim, own_keys + h * kLanes * dim);
                group_values(value_rows, dim, own_values + h * kLanes * dim);
            }
            keys[g] = own_keys, values[g] = own_values;
        }
    }
};

// Ask for a line of the next tile, into the second cache, since the first has fewer requests at a time. Inline, here as
// below, or else g++ drops the call: to it a function that only fetches does nothing.
template <typename T>
KVRELAY_INLINE void fetch_line(const T* at) {
    __builtin_prefetch(at, 0, 2);
}
// The same for a head's part of all groups.
template <typename T>
KVRELAY_INLINE void fetch_head(const TileGroups<T>& next, int64_t at, int64_t size) {
    for (int g = 0; g < kTileGroups; g++)
        for (int64_t i = at; i < at + size; i += 64 / int64_t(sizeof(T)))
            fetch_line(next.keys[g] + i), fetch_line(next.values[g] + i);
}
// Have the processor look up where the pages of the tile after the next lie: else it may drop a fetch.
template <typename T>
KVRELAY_INLINE void look_up(const TileGroups<T>& later, int64_t groups, int64_t heads, int64_t size) {
    for (int64_t g = 0; g < groups; g++)
        for (int64_t h = 0; h < heads; h++)
            __builtin_prefetch(later.keys[g] + h * size), __builtin_prefetch(later.values[g] + h * size);
}

}  // namespace kvrelay
