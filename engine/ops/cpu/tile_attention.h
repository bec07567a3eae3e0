// Attention of new tokens, tile of keys by tile of keys: keys are multiplied where they lie, values are packed once and then
// multiplied with all query rows of a chunk; with those of a single token they, too, where they lie (row_products.h).
//
// Both in one way, so that a token has the same bits whether it was decoded, read in a chunk or read again elsewhere:
// tiles and splits begin at multiples of their sizes, and the tiles of a split, then the splits, are added up in order.
#pragma once
#include "row_products.h"

namespace kvrelay {

// Query rows of a chunk's item. Each item packs all values that it sees: the more rows, the less of that. But
// more than 192 leave the first cache, which costs products in vectors a percent, and packs little beside them.
constexpr int64_t kLeastTileRows = 96;
inline int64_t most_tile_rows() { return has_tiles() ? 384 : 192; }
constexpr int64_t kItemsPerThread = 8;  // items of a chunk, unless that makes them too large or too small

// Where a matrix begins, and how many elements its rows are apart.
template <typename T>
struct Strided {
    T* at;
    int64_t stride;
};

// Where the columns of a panel begin, sixteen each.
template <typename T>
struct Columns {
    const T *left, *right;
};

// C [rows][columns] (= or +=) A [rows][depth] * B; float32 result. depth and columns are multiples of 32. panel(c) has the
// columns of B from c on, each step of which has kWidth columns: kPanel of a packed panel, kLanes of a group.
enum class Into { kStore, kAdd };
#if defined(KVRELAY_TILES)
// In tile registers: `padded_rows` of C are written, whatever A has there. Two tiles of rows at a time, if there are two.
template <Into into, int kTiles, int kWidth>
inline void multiply_rows(
    const bf16* a, int64_t a_stride, int64_t depth, Columns<bf16> b, float* c, int64_t c_stride) {
    constexpr int64_t b_bytes = 2 * kWidth * sizeof(bf16);
    int64_t a_bytes = a_stride * sizeof(bf16), c_bytes = c_stride * sizeof(float);
    float* below = c + kTiledRows * c_stride;
    if constexpr (into == Into::kAdd) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + kLanes, c_bytes);
        if constexpr (kTiles == 2) {
            _tile_loadd(2, below, c_bytes);
            _tile_loadd(3, below + kLanes, c_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kTiles == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t k = 0; k < depth; k += kRunDepths) {
        _tile_loadd(4, a + k, a_bytes);
        _tile_loadd(6, b.left + k * kWidth, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.right + k * kWidth, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTiles == 2) {
            _tile_loadd(5, a + kTiledRows * a_stride + k, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + kLanes, c_bytes);
    if constexpr (kTiles == 2) {
        _tile_stored(2, below, c_bytes);
        _tile_stored(3, below + kLanes, c_bytes);
    }
}
template <Into into, int kWidth, typename Panel>
inline void multiply_in_registers(
    Strided<const bf16> a, int64_t rows, int64_t depth, Panel panel, int64_t columns, Strided<float> c) {
    asm volatile("" ::: "memory");  // tiles are loaded and stored behind the compiler's back
    for (int64_t column = 0; column < columns; column += kPanel) {
        const bf16* from = a.at;
        float* to = c.at + column;
        int64_t left = rows;
        for (; left > kTiledRows; left -= 2 * kTiledRows) {
            multiply_rows<into, 2, kWidth>(from, a.stride, depth, panel(column), to, c.stride);
            from += 2 * kTiledRows * a.stride, to += 2 * kTiledRows * c.stride;
        }
        if (left > 0) multiply_rows<into, 1, kWidth>(from, a.stride, depth, panel(column), to, c.stride);
    }
    asm volatile("" ::: "memory");
}
#endif

template <Into into, int kWidth, typename T, typename Panel>
inline void multiply_tile(
    Strided<const T> a, int64_t rows, int64_t depth, Panel panel, int64_t columns, Strided<float> c) {
#if defined(KVRELAY_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (has_tiles()) return multiply_in_registers<into, kWidth>(a, rows, depth, panel, columns, c);
#endif
    int64_t step = rows_per_pass(rows);
    for (int64_t column = 0; column < columns; column += kPanel) {
        Columns<T> b = panel(column);
        for (int64_t row = 0; row < rows; row += step) {
            F32x16 sums[kMaxRows][2] = {};
            float* to = c.at + row * c.stride + column;
            with_count<kMaxRows>(int(std::min(step, rows - row)), [&](auto count) {
                if constexpr (into == Into::kAdd)
                    for (int r = 0; r < count; r++)
                        for (int half = 0; half < 2; half++)
                            sums[r][half] = load<F32x16>(to + r * c.stride + half * kLanes);
                multiply_columns<count, From::kMemory, Begin::kWithSums, kWidth>(
                    a.at + row * a.stride, a.stride, b.left, b.right, num_steps<T>(depth), sums, 1);
                for (int r = 0; r < count; r++)
                    for (int half = 0; half < 2; half++) store(to + r * c.stride + half * kLanes, sums[r][half]);
            });
        }
    }
}

// Hide what a query row must not see: keys after its position, and keys before its window.
inline void hide(float* row, int64_t first_key, int64_t position, Window window) {
    int64_t oldest = window.first_visible(position);
    for (int64_t k = 0; k < kTileKeys; k++)
        if (first_key + k > position || first_key + k < oldest) row[k] = kNever;
}

// Keys of a tile that are multiplied if `count` are left: whole panels, and runs of registers.
inline int64_t multiplied_keys(int64_t count) { return std::min(kTileKeys, (count + kPanel - 1) / kPanel * kPanel); }

// Turn the scores of `rows` query rows, from row `from` of `tile` on, into weights, and rescale what they have summed before,
// from row `own` of `partial` on. Row r is at position first + (skipped + r) / group.
template <typename T>
inline void soften_tile(const Step& step, Window window, int64_t at, int64_t first, int64_t skipped, int64_t rows,
                        TileBuffers<T>& tile, Partial& partial, int64_t own, int64_t from = 0) {
    int64_t dim = step.head_dim, last = first + (skipped + rows - 1) / step.group();
    bool is_whole = at + kTileKeys - 1 <= first && at >= window.first_visible(last);
    for (int64_t r = 0; r < rows; r++) {
        float* row = tile.scores.data() + (from + r) * kTileKeys;
        if (!is_whole) hide(row, at, first + (skipped + r) / step.group(), window);
        soften(row, step.scale, tile.weights.data() + (from + r) * kTileKeys, partial.peaks[own + r], partial.sums[own + r],
               partial.out.data() + (own + r) * dim, dim);
    }
}

// Add `keys` keys, the first of which is `at`, to what `rows` query rows have summed, from row `own` of `partial` on: keys
// in groups, of a head `offset` elements behind the first one, and values packed in `tile`. Query row r is at position
// first + r / group. Rows that see none of the keys are passed over, as many whole tiles of them as there are at either end.
template <typename T>
inline void add_tile(const Step& step, Window window, int64_t at, int64_t keys, const T* const* groups, int64_t offset,
                     const T* queries, int64_t rows, int64_t first, TileBuffers<T>& tile, Partial& partial, int64_t own) {
    int64_t dim = step.head_dim;
    auto sees = [&](int64_t row) { return window.first_visible(first + row / step.group()) < at + kTileKeys; };
    int64_t blind = std::max<int64_t>(0, at - first) * step.group() / kTiledRows * kTiledRows;
    int64_t end = (rows - 1) / kTiledRows * kTiledRows;  // where the last tile of rows begins
    while (end > blind && !sees(end)) rows = end, end -= kTiledRows;
    auto key_columns = [&](int64_t key) {
        return Columns<T>{groups[key / kLanes] + offset, groups[key / kLanes + 1] + offset};
    };
    auto value_columns = [&](int64_t column) {
        const T* panel = tile.values.data() + column * kTileKeys;
        return Columns<T>{panel, panel + Format<T>::kPack * kLanes};
    };
    for (int64_t row = blind; row < rows; row += rows_together<T>()) {
        int64_t count = std::min(rows_together<T>(), rows - row);
        multiply_tile<Into::kStore, kLanes, T>(
            {queries + row * dim, dim}, count, dim, key_columns, keys, {tile.scores.data(), kTileKeys});
        soften_tile(step, window, at, first, row, count, tile, partial, own + row);
        multiply_tile<Into::kAdd, kPanel, T>({tile.weights.data(), kTileKeys}, count, keys, value_columns, dim,
                                             {partial.out.data() + (own + row) * dim, dim});
    }
}

// The same for the query rows of a decode token, of all `heads` of its item, with keys and values where they lie: in the
// order of memory, group by group. The processor's own prefetcher does not see through block tables, so that each load asks
// for the same place of the next tile.
template <typename T>
inline void add_rows(const Step& step, Window window, int64_t at, int64_t keys, const TileGroups<T>& found,
                     const TileGroups<T>& next, int64_t heads, int64_t position, TileBuffers<T>& tile, Partial& partial) {
    int64_t dim = step.head_dim, group = step.group(), size = kLanes * dim;
    with_count<kMaxRows>(int(group), [&](auto count) {
        for (int64_t first = 0; first < keys; first += kPanel)
            for (int64_t head = 0; head < heads; head++) {
                int64_t row = head * group;
                score_keys<count>(tile.queries.data() + row * dim, found, next, first, head * size, dim,
                                  tile.scores.data() + row * kTileKeys);
            }
        for (int64_t row = 0; row < heads * group; row += group)
            soften_tile(step, window, at, position, 0, group, tile, partial, row, row);
        for (int64_t first = 0; first < keys; first += kLanes)
            for (int64_t head = 0; head < heads; head++) {
                int64_t row = head * group;
                add_values<count>(tile.weights.data() + row * kTileKeys, found, next, first, head * size, dim,
                                  partial.out.data() + row * dim);
            }
    });
}

// Tokens [item.begin, item.end) of a chunk, query heads of one key head.
template <typename T>
void attend_chunk(const Step& step, const Layer<T>& layer, const Item& item, const T* qkv, T* output) {
    int64_t dim = step.head_dim, group = step.group();
    int64_t start = step.query_start_loc[item.seq], context = step.context_lens[item.seq];
    int64_t chunk_at = context - (step.query_start_loc[item.seq + 1] - start);  // position of the chunk's first token
    int64_t rows = (item.end - item.begin) * group;
    int64_t first = chunk_at + item.begin, last = chunk_at + item.end - 1;  // positions of the rows
    thread_local TileBuffers<T> tile;
    thread_local Partial split, whole;
    tile.reset(1, padded_rows<T>(rows), dim);
    split.reset(padded_rows<T>(rows), dim);
    whole.reset(rows, dim);
    TileRegisters<T> registers(rows);
    for (int64_t r = 0; r < rows; r++) {
        const T* token = qkv + (start + item.begin + r / group) * step.row_size();
        const T* query = token + (item.first_head * group + r % group) * dim;
        std::memcpy(tile.queries.data() + r * dim, query, dim * sizeof(T));
    }
    int64_t oldest = layer.window.first_visible(first), begin = oldest / kTileKeys * kTileKeys;
    const int32_t* table = step.block_tables[item.seq];
    thread_local TileGroups<T> found;
    CodeGroups<kTileGroups> codes;
    for (int64_t at = begin; at <= last; at += kTileKeys) {
        int64_t keys = multiplied_keys(last + 1 - at);  // later keys are hidden from all rows
        if (layer.has_codes()) {
            CodeLayout layout = layer.codes(step);
            codes.find(layout, layer.key_bytes(), layer.value_bytes(), table, item.first_head, at, oldest, last + 1);
            if (layer.format == PageFormat::kInt8) pack_codes<false>(codes, layout, oldest - at, last + 1 - at, dim, tile);
            else pack_codes<true>(codes, layout, oldest - at, last + 1 - at, dim, tile);
            for (int g = 0; g < kTileGroups; g++) found.keys[g] = tile.keys.data() + g * kLanes * dim;
        } else {
            found.find(step, layer, table, item.first_head, 1, at, oldest, last + 1);
            pack_values(found, keys, 0, dim, tile.values.data());
        }
        add_tile(step, layer.window, at, keys, found.keys, 0, tile.queries.data(), rows, first, tile, split, 0);
        if (at + kTileKeys > last || (at + kTileKeys) % kSplitKeys == 0) {
            for (int64_t r = 0; r < rows; r++) whole.absorb(r, split, r, dim);
            split.reset(padded_rows<T>(rows), dim);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = start + item.begin + r / group, head = item.first_head * group + r % group;
        T* to = output + (token * step.num_heads + head) * dim;
        write_result(layer, head, whole, r, dim, to);
    }
}

// One token's query heads over keys [item.begin, item.end), which are of one split: a head's rows of `partial` begin at
// a multiple of `padded_rows`. queries: from the item's first one on. `after` is what this thread probably does next, or
// null.
template <typename T>
void attend_keys(const Step& step, const Layer<T>& layer, const Item& item, const Item* after, const T* queries,
                 Partial& partial) {
    int64_t dim = step.head_dim, group = step.group(), rows = padded_rows<T>(group), heads = item.num_heads;
    int64_t size = kLanes * dim;  // of a head's part of a group
    thread_local TileBuffers<T> buffers;
    buffers.reset(heads, rows, dim);
    partial.reset(heads * rows, dim);
    TileRegisters<T> registers(group);
    for (int64_t head = 0; head < heads; head++)
        std::memcpy(buffers.queries.data() + head * rows * dim, queries + head * group * dim, group * dim * sizeof(T));
    // This tile, the next and the one after that, which may be of the item `after`.
    thread_local TileGroups<T> tile, next_tile, later_tile;
    struct Place {
        const Item* owner;
        int64_t at;
    };
    auto first_of = [](const Item& owner) { return Place{&owner, owner.begin / kTileKeys * kTileKeys}; };
    auto following = [&](Place place) {
        if (place.owner && place.at + kTileKeys < place.owner->end) return Place{place.owner, place.at + kTileKeys};
        return place.owner == &item && after ? first_of(*after) : Place{nullptr, 0};
    };
    auto locate = [&](Place place, TileGroups<T>& groups) -> int64_t {
        const Item* of = place.owner;
        if (!of || layer.format != PageFormat::kGrouped) return 0;
        return groups.locate(step, layer, step.block_tables[of->seq], of->first_head, place.at, of->begin, of->end);
    };
    int64_t position = step.context_lens[item.seq] - 1;
    for (Place place = first_of(item); place.owner == &item; place = following(place)) {
        int64_t at = place.at, keys = multiplied_keys(item.end - at);
        tile.find(step, layer, step.block_tables[item.seq], item.first_head, heads, at, item.begin, item.end);
        const TileGroups<T>& next = locate(following(place), next_tile) ? next_tile : tile;
        look_up(later_tile, locate(following(following(place)), later_tile), heads, size);
        if (group <= kMaxRows && !has_tiles()) {  // which take packed panels
            add_rows(step, layer.window, at, keys, tile, next, heads, position, buffers, partial);
            continue;
        }
        for (int64_t head = 0; head < heads; head++) {
            const T* of_head = buffers.queries.data() + head * rows * dim;
            fetch_head(next, head * size, size);
            pack_values(tile, keys, head * size, dim, buffers.values.data());
            add_tile(step, layer.window, at, keys, tile.keys, head * size, of_head, group, position, buffers, partial,
                     head * rows);
        }
    }
}

// Merge the splits of one token, whose key heads' rows are `rows` apart, and write the result for an item's heads.
template <typename T>
void merge(const Step& step, const Layer<T>& layer, const Item& item, const Partial* splits, int64_t count,
           int64_t rows, T* to) {
    int64_t dim = step.head_dim, group = step.group();
    thread_local Partial whole;
    for (int64_t h = 0; h < item.num_heads * group; h++, to += dim) {
        whole.reset(1, dim);
        for (int64_t s = 0; s < count; s++) whole.absorb(0, splits[s], h / group * rows + h % group, dim);
        write_result(layer, item.first_head * group + h, whole, 0, dim, to);
    }
}

}  // namespace kvrelay
