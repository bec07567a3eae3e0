// Attention over the paged cache: rotate and write the new tokens, then read each sequence's context where it lies.
//
// The work is cut into items that threads take one by one:
//   a decode token     (sequence, key heads, kSplitKeys keys)   the splits of one token are merged afterwards
//   a prefill chunk    (sequence, key head, some query rows)
//
// Query heads that share a key head are rows of the same item: each key is read once for all of them. Where keys are
// split depends on their own sequence alone, so that a row's result does not change with the other rows, bit for bit.
#pragma once
#include <omp.h>

#include "decode_codes.h"
#include "elementwise.h"
#include "tile_attention.h"

namespace kvrelay {

template <typename T>
inline void rotate(T* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        F32x16 a = load_wide(head + i), b = load_wide(head + half + i);
        F32x16 c = load<F32x16>(cos + i), s = load<F32x16>(sin + i);
        store_narrow(head + i, a * c - b * s);
        store_narrow(head + half + i, b * c + a * s);
    }
}

// Write one token's rotated keys, and its values, as codes.
template <typename T>
inline void write_codes(const Step& step, const Layer<T>& layer, const T* keys, const T* values, int64_t slot) {
    CodeLayout layout = layer.codes(step);
    int64_t block = slot / step.block_size, offset = slot % step.block_size, token = offset % kLanes;
    thread_local CodeRow row;
    for (int64_t h = 0; h < step.num_kv_heads; h++) {
        int64_t codes = layout.codes_at(block, offset, h), scales = layout.scales_at(block, offset, h);
        row.encode(keys + h * step.head_dim, step.head_dim, layout);
        row.write_key(layer.key_bytes() + codes, token);
        row.write_scales(layer.key_bytes() + scales, token);
        row.encode(values + h * step.head_dim, step.head_dim, layout);
        row.write_value(layer.value_bytes() + codes, token);
        row.write_scales(layer.value_bytes() + scales, token);
    }
}

// Write one token's turned keys, and its values, to a slot.
template <typename T>
inline void write_token(const Step& step, const Layer<T>& layer, const T* keys, const T* values, int64_t slot) {
    int64_t dim = step.head_dim;
    if (layer.has_codes()) return write_codes(step, layer, keys, values, slot);
    if (layer.format == PageFormat::kPlain) {
        std::memcpy(layer.keys + step.row_at(slot, 0), keys, step.num_kv_heads * dim * sizeof(T));
        std::memcpy(layer.values + step.row_at(slot, 0), values, step.num_kv_heads * dim * sizeof(T));
        return;
    }
    for (int64_t h = 0; h < step.num_kv_heads; h++, keys += dim, values += dim) {
        int64_t group = step.group_at(slot, h);
        write_row(keys, values, dim, slot % kLanes, layer.keys + group, layer.values + group);
    }
}

// Turn queries and keys in place; write keys and values to their slots. int4 pages hold mixed keys: queries are mixed
// too.
template <typename T>
void rotate_and_write(const Step& step, const Layer<T>& layer, T* qkv) {
    int64_t dim = step.head_dim, half = step.rope_dim / 2, num_rotated = step.num_heads + step.num_kv_heads;
#pragma omp parallel for schedule(static) if (step.num_tokens >= kMinParallelRows)
    for (int64_t token = 0; token < step.num_tokens; token++) {
        T* row = qkv + token * step.row_size();
        const float *cos = layer.cos + token * half, *sin = layer.sin + token * half;
        for (int64_t h = 0; h < num_rotated; h++) {
            T* head = row + h * dim;
            bool is_query = h < step.num_heads;
            const float* norm = is_query ? layer.q_norm : layer.k_norm;
            if (norm) norm_row(head, norm, head, dim, step.norm_eps);
            rotate(head, cos, sin, half);
            if (is_query && layer.query_factors) scale_row(head, layer.query_factors[token], dim);
            if (is_query && layer.format == PageFormat::kInt4) mix_row(head, dim);
        }
        const T *keys = row + step.num_heads * dim, *values = row + num_rotated * dim;
        write_token(step, layer, keys, values, step.slot_mapping[token]);
        if (!step.mirror_start_loc) continue;
        for (int64_t i = step.mirror_start_loc[token]; i < step.mirror_start_loc[token + 1]; i++)
            write_token(step, layer, keys, values, step.mirror_slots[i]);
    }
}

// Returns the items of a step and how many of them are splits.
inline std::vector<Item> cut(const Step& step, Window window, int64_t& num_splits) {
    std::vector<Item> items;
    num_splits = 0;
    int64_t num_whole = 0, chunk_rows = 0;
    auto first_split = [&](int64_t context) { return window.first_visible(context - 1) / kSplitKeys * kSplitKeys; };
    auto num_new = [&](int64_t seq) { return step.query_start_loc[seq + 1] - step.query_start_loc[seq]; };
    for (int64_t seq = 0; seq < step.num_seqs; seq++) {
        int64_t context = step.context_lens[seq];
        num_whole += num_new(seq) > 1 ? 1 : (context - first_split(context) + kSplitKeys - 1) / kSplitKeys;
        chunk_rows += num_new(seq) > 1 ? num_new(seq) * step.num_heads : 0;
    }
    int64_t rows_per_item = std::clamp(
        chunk_rows / (kItemsPerThread * omp_get_max_threads()), kLeastTileRows, most_tile_rows());
    int64_t tokens_per_item = std::max<int64_t>(1, rows_per_item / step.group());
    // All heads of a key lie side by side, and memory likes to be read in order; but every thread needs an item.
    int64_t heads_per_item = num_whole >= 2 * omp_get_max_threads() ? step.num_kv_heads : 1;
    for (int64_t seq = 0; seq < step.num_seqs; seq++) {
        int64_t context = step.context_lens[seq];
        if (num_new(seq) > 1) {  // the last rows see the most keys: the longest items come first
            for (int64_t end = num_new(seq); end > 0; end -= tokens_per_item)
                for (int64_t head = 0; head < step.num_kv_heads; head++)
                    items.push_back({seq, head, 1, std::max<int64_t>(0, end - tokens_per_item), end, -1});
            continue;
        }
        for (int64_t head = 0; head < step.num_kv_heads; head += heads_per_item)
            for (int64_t at = first_split(context); at < context; at += kSplitKeys) {
                int64_t begin = std::max(at, window.first_visible(context - 1)), end = std::min(context, at + kSplitKeys);
                bool is_only = at == first_split(context) && end == context;
                items.push_back({seq, head, heads_per_item, begin, end, is_only ? -1 : num_splits++});
            }
    }
    return items;
}

// output [num_tokens, num_heads, head_dim] from qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], whose
// queries and keys are turned in place. Writes the new tokens' pages. head_dim is a multiple of 32. All threads.
template <typename T>
void attend(const Step& step, const Layer<T>& layer, T* qkv, T* output) {
    rotate_and_write(step, layer, qkv);
    int64_t dim = step.head_dim, group = step.group(), num_splits;
    int64_t rows = layer.has_codes() ? group : padded_rows<T>(group);  // of a head in a partial result
    std::vector<Item> items = cut(step, layer.window, num_splits);
    static thread_local std::vector<Partial> partials;
    if (int64_t(partials.size()) < num_splits) partials.resize(num_splits);
    Partial* splits = partials.data();
    auto write = [&](const Item& item, const Partial* parts, int64_t count) {
        T* to = output + (step.query_start_loc[item.seq] * step.num_heads + item.first_head * group) * dim;
        merge(step, layer, item, parts, count, rows, to);
    };
    auto is_chunk = [&](const Item& item) {
        return step.query_start_loc[item.seq + 1] - step.query_start_loc[item.seq] > 1;
    };
    auto is_same_row = [](const Item& a, const Item& b) { return a.seq == b.seq && a.first_head == b.first_head; };
    int64_t num_chunks = std::stable_partition(items.begin(), items.end(), is_chunk) - items.begin();
    int64_t num_items = int64_t(items.size());
#pragma omp parallel
    {
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_chunks; i++) attend_chunk(step, layer, items[i], qkv, output);
        // Decode items are alike, and each thread takes neighbours: it asks memory for the next one before it is due.
#pragma omp for schedule(static)
        for (int64_t i = num_chunks; i < num_items; i++) {
            const Item& item = items[i];
            thread_local Partial own;
            Partial& partial = item.split < 0 ? own : splits[item.split];
            const T* queries = qkv + step.query_start_loc[item.seq] * step.row_size() + item.first_head * group * dim;
            const Item* after = i + 1 < num_items ? &items[i + 1] : nullptr;
            switch (layer.format) {
                case PageFormat::kPlain:
                case PageFormat::kGrouped: attend_keys(step, layer, item, after, queries, partial); break;
                case PageFormat::kInt8: attend_codes<false>(step, layer, item, after, queries, partial); break;
                case PageFormat::kInt4: attend_codes<true>(step, layer, item, after, queries, partial); break;
            }
            if (item.split < 0) write(item, &partial, 1);
        }
        if (num_splits) {  // those of one token and head lie side by side
#pragma omp for schedule(static)
            for (int64_t i = num_chunks; i < num_items; i++) {
                const Item& first = items[i];
                if (first.split < 0 || (i > num_chunks && is_same_row(items[i - 1], first))) continue;
                int64_t end = i + 1;
                while (end < num_items && is_same_row(items[end], first)) end++;
                write(first, splits + first.split, end - i);
            }
        }
    }
}

}  // namespace kvrelay
