// Attention of a chunk of new tokens: tiles of keys and values are packed once, then multiplied with many query rows.
#pragma once
#include "gemm.h"
#include "paged.h"

namespace kvrelay {

constexpr int64_t kTileRows = 96;  // query rows of an item

// Pack keys [kTileKeys][dim] (rows by address) as B = keys^T: two panels of 32 keys.
template <typename T>
inline void pack_keys(const T* const* keys, int64_t dim, T* packed) {
    constexpr int pack = Format<T>::kPack;
    int64_t steps = dim / pack;
    for (int64_t first = 0; first < kTileKeys; first += kLanes) {
        T* panel = packed + first / kPanel * panel_size<T>(dim) + first % kPanel * pack;
        for (int64_t k = 0; k < steps; k += kLanes) {
            I32x16 block[kLanes];
            for (int i = 0; i < kLanes; i++) block[i] = load<I32x16>(keys[first + i] + k * pack);
            transpose(block);
            for (int i = 0; i < kLanes; i++) store(panel + (k + i) * pack * kPanel, block[i]);
        }
    }
}

// Pack values [kTileKeys][dim] as B: dim / 32 panels, whose depth are the keys.
inline void pack_values(const float* const* values, int64_t dim, float* packed) {
    for (int64_t d = 0; d < dim; d += kPanel, packed += kTileKeys * kPanel)
        for (int64_t k = 0; k < kTileKeys; k++) std::memcpy(packed + k * kPanel, values[k] + d, kPanel * sizeof(float));
}
inline void pack_values(const bf16* const* values, int64_t dim, bf16* packed) {
    for (int64_t d = 0; d < dim; d += kPanel)
        for (int64_t k = 0; k < kTileKeys; k += 2)
            for (int half = 0; half < 2; half++, packed += 2 * kLanes) {
                I32x16 even = __builtin_convertvector(load<U16x16>(values[k] + d + half * kLanes), I32x16);
                I32x16 odd = __builtin_convertvector(load<U16x16>(values[k + 1] + d + half * kLanes), I32x16);
                store(packed, even | (odd << 16));
            }
}

// Buffers of a prefill item, one per thread.
template <typename T>
struct TileBuffers {
    std::vector<T> queries, keys, values, weights;
    std::vector<float> scores;
    Partial partial;

    void reset(int64_t rows, int64_t dim) {
        queries.resize(rows * dim);
        keys.resize(kTileKeys * dim);
        values.resize(kTileKeys * dim);
        weights.resize(rows * kTileKeys);
        scores.resize(rows * kTileKeys);
        partial.reset(rows, dim);
    }
};

// Two depths of sixteen columns, at their place in a panel.
inline void store_depths(float* to, F32x16 even, F32x16 odd) {
    store(to, even);
    store(to + kPanel, odd);
}
inline void store_depths(bf16* to, F32x16 even, F32x16 odd) {
    store(to, __builtin_convertvector(narrow(even), I32x16) | (__builtin_convertvector(narrow(odd), I32x16) << 16));
}

// Pack the codes of one head like rows of T. Only the first `count` keys are known to be written.
template <bool kIsInt4, typename T>
inline void pack_codes(const CodeGroups<kTileKeys / kLanes>& codes, const CodeLayout& layout, int64_t count,
                       int64_t dim, TileBuffers<T>& tile) {
    constexpr int pack = Format<T>::kPack;
    int64_t bytes_per_scale = layout.row_bytes / layout.row_scales;
    auto each_half = [](I32x16 bytes, int64_t at, auto use) {  // the dimensions of sixteen, or four, bytes of a row
        if (!kIsInt4) return use(at, [&](int i) { return decode_byte<false, 0>(bytes, i); });
        int64_t low = at / kLanes * kScaleDims + at % kLanes;
        use(low, [&](int i) { return decode_byte<true, 0>(bytes, i); });
        use(low + kLanes, [&](int i) { return decode_byte<true, 1>(bytes, i); });
    };
    for (int g = 0; g < kTileKeys / kLanes; g++) {
        T* panel = tile.keys.data() + g / 2 * panel_size<T>(dim) + g % 2 * kLanes * pack;
        for (int64_t byte = 0; byte < layout.row_bytes; byte += 4) {
            F32x16 scale = load_scales(codes.key_scales[g], byte / bytes_per_scale);
            each_half(load<I32x16>(codes.keys[g] + byte * kLanes), byte, [&](int64_t d, auto code) {
                store_depths(panel + d * kPanel, code(0) * scale, code(1) * scale);
                store_depths(panel + (d + 2) * kPanel, code(2) * scale, code(3) * scale);
            });
        }
        for (int64_t byte = 0; byte < layout.row_bytes; byte += kLanes) {
            F32x16 scales = keep(load_scales(codes.value_scales[g], byte / bytes_per_scale), g * kLanes, 0, count);
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

// C [rows][columns] (= or +=) A [rows][depth] * packed panels; float32 result.
enum class Into { kStore, kAdd };
template <Into into, typename T>
inline void multiply_tile(const T* a, int64_t rows, int64_t depth, const T* packed, int64_t columns, float* c) {
    int64_t step = rows_per_pass(rows);
    for (int64_t column = 0; column < columns; column += kPanel, packed += panel_size<T>(depth))
        for (int64_t row = 0; row < rows; row += step) {
            int count = int(std::min(step, rows - row));
            F32x16 sums[kMaxRows][2] = {};
            float* to = c + row * columns + column;
            if constexpr (into == Into::kAdd)
                for (int r = 0; r < count; r++)
                    for (int half = 0; half < 2; half++) sums[r][half] = load<F32x16>(to + r * columns + half * kLanes);
            multiply_panel(count, a + row * depth, depth, packed, num_steps<T>(depth), sums);
            for (int r = 0; r < count; r++)
                for (int half = 0; half < 2; half++) store(to + r * columns + half * kLanes, sums[r][half]);
        }
}

// Hide what a query row must not see: keys after its position, and keys its window has left.
inline void hide(float* row, int64_t first_key, int64_t position, int64_t window) {
    int64_t oldest = window ? position - window + 1 : 0;
    for (int64_t k = 0; k < kTileKeys; k++)
        if (first_key + k > position || first_key + k < oldest) row[k] = kNever;
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
    tile.reset(rows, dim);
    for (int64_t r = 0; r < rows; r++) {
        const T* token = qkv + (start + item.begin + r / group) * step.row_size();
        std::memcpy(tile.queries.data() + r * dim, token + (item.first_head * group + r % group) * dim, dim * sizeof(T));
    }
    int64_t oldest = layer.window ? std::max<int64_t>(0, first - layer.window + 1) : 0;
    const int32_t* table = step.block_tables[item.seq];
    TileRows<T> found;
    CodeGroups<kTileKeys / kLanes> codes;
    for (int64_t at = oldest / kTileKeys * kTileKeys; at <= last; at += kTileKeys) {
        // Later keys are hidden from all rows.
        if (layer.has_codes()) {
            CodeLayout layout = layer.codes(step);
            codes.find(layout, layer.key_bytes(), layer.value_bytes(), table, item.first_head, at, last + 1);
            if (layer.format == PageFormat::kInt8) pack_codes<false>(codes, layout, last + 1 - at, dim, tile);
            else pack_codes<true>(codes, layout, last + 1 - at, dim, tile);
        } else {
            found.find(step, layer, table, item.first_head, at, last + 1);
            pack_keys(found.keys, dim, tile.keys.data());
            pack_values(found.values, dim, tile.values.data());
        }
        multiply_tile<Into::kStore>(tile.queries.data(), rows, dim, tile.keys.data(), kTileKeys, tile.scores.data());
        bool is_whole = at + kTileKeys - 1 <= first && (!layer.window || at >= last - layer.window + 1);
        for (int64_t r = 0; r < rows; r++) {
            float* row = tile.scores.data() + r * kTileKeys;
            if (!is_whole) hide(row, at, first + r / group, layer.window);
            Partial& partial = tile.partial;
            soften(row, step.scale, tile.weights.data() + r * kTileKeys, partial.peaks[r], partial.sums[r],
                   partial.out.data() + r * dim, dim);
        }
        multiply_tile<Into::kAdd>(
            tile.weights.data(), rows, kTileKeys, tile.values.data(), dim, tile.partial.out.data());
    }
    for (int64_t r = 0; r < rows; r++) {
        T* to = output + ((start + item.begin + r / group) * step.num_heads + item.first_head * group + r % group) * dim;
        write_result(tile.partial.out.data() + r * dim, tile.partial.sums[r], dim, layer.format, to);
    }
}

}  // namespace kvrelay
