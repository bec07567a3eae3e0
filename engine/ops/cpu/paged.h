// What decode and prefill attention share: the step, the pages, and the softmax of a row that sees its keys tile by tile.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "codes.h"
#include "elementwise.h"

namespace kvrelay {

constexpr int64_t kTileKeys = 64;    // keys between two rescalings
constexpr int kTileGroups = kTileKeys / kLanes;
constexpr int64_t kSplitKeys = 256;  // keys that are summed by themselves
constexpr float kNever = -std::numeric_limits<float>::infinity();

// One step, as `library.py` describes it. Counts, then addresses; everything int64 but tables.
struct Step {
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, rope_dim, block_size;
    const int64_t* slot_mapping;      // [num_tokens]
    const int64_t* mirror_start_loc;  // [num_tokens + 1] or null: bounds of the tokens' further slots
    const int64_t* mirror_slots;
    const int64_t* query_start_loc;   // [num_seqs + 1]
    const int64_t* context_lens;      // [num_seqs]
    const int32_t* const* block_tables;  // [num_seqs], each [cdiv(context_len, block_size)]
    Activation activation;            // of MLPs
    float scale;  // of scores, times log2(e): softmax is computed with powers of two
    float norm_eps;
    PageHeads page_heads;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t row_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    // Offset in plain pages of a key head's row in a slot.
    int64_t row_at(int64_t slot, int64_t head) const {
        return (slot * page_heads.count + page_heads.first + head) * head_dim;
    }
    // Offset in grouped pages of a key head's keys, or values, of the group that a slot is in.
    int64_t group_at(int64_t slot, int64_t head) const {
        return (slot / kLanes * page_heads.count + page_heads.first + head) * kLanes * head_dim;
    }
};

// `Window` of engine/window.py.
struct Window {
    int64_t num_tokens;  // 0: every key is visible
    int64_t is_chunk;

    // The first key that a position sees.
    int64_t first_visible(int64_t position) const {
        if (!num_tokens) return 0;
        return is_chunk ? position / num_tokens * num_tokens : std::max<int64_t>(0, position - num_tokens + 1);
    }
};

template <typename T>
struct Layer {
    // In plain pages [num_blocks, block_size, page_heads.count, head_dim]; in grouped ones as products take them
    // (gemm.h), sixteen tokens in a group:
    //     keys    [num_blocks, block_size / 16, page_heads.count] x [head_dim / kPack] [16 tokens] [kPack dimensions]
    //     values  [num_blocks, block_size / 16, page_heads.count] x [16 / kPack] [head_dim] [kPack tokens]
    T* keys;
    T* values;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    const T* sinks;  // [num_heads] or null: logits that join the softmax of their query head and have no value
    const float *cos, *sin;  // [num_tokens, rope_dim / 2]
    const float* query_factors;  // [num_tokens] of rotated queries, or null: 1
    Window window;
    PageFormat format;

    bool has_codes() const { return format == PageFormat::kInt8 || format == PageFormat::kInt4; }
    CodeLayout codes(const Step& step) const {
        return CodeLayout::of(format, step.head_dim, step.page_heads, step.block_size);
    }
    uint8_t* key_bytes() const { return reinterpret_cast<uint8_t*>(keys); }
    uint8_t* value_bytes() const { return reinterpret_cast<uint8_t*>(values); }
};

struct Item {
    int64_t seq;
    int64_t first_head, num_heads;  // key heads; prefill: one
    int64_t begin, end;             // decode: keys; prefill: tokens of the chunk
    int64_t split;                  // decode: where its partial result goes; -1: it is the only one
};

// Softmax state of some query rows that have seen a part of their keys. out [rows][dim] is not yet divided by `sums`.
struct Partial {
    std::vector<float> peaks, sums, out;

    void reset(int64_t rows, int64_t dim) {
        peaks.assign(rows, kNever);
        sums.assign(rows, 0.0f);
        out.assign(rows * dim, 0.0f);
    }

    // Add row `from` of the keys that follow to this row. A row that has seen no key has the sum 0; others about 1 or more,
    // or NaN, which has to stay.
    KVRELAY_ONCE void absorb(int64_t row, const Partial& next, int64_t from, int64_t dim) {
        if (next.sums[from] == 0) return;
        if (sums[row] == 0) {
            peaks[row] = next.peaks[from], sums[row] = next.sums[from];
            std::copy_n(next.out.data() + from * dim, dim, out.data() + row * dim);
            return;
        }
        float best = std::max(peaks[row], next.peaks[from]);
        float mine = exp2(peaks[row] - best), other = exp2(next.peaks[from] - best);
        peaks[row] = best;
        sums[row] = sums[row] * mine + next.sums[from] * other;
        for (int64_t i = 0; i < dim; i += kLanes) {
            float* to = out.data() + row * dim + i;
            store(to, load<F32x16>(to) * mine + load<F32x16>(next.out.data() + from * dim + i) * other);
        }
    }
};

// Turn a tile's scores of one row into weights 2^(score * scale - peak), and rescale what was summed before (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018). `peak` is the largest score * scale so far.
template <typename T>
KVRELAY_ONCE void soften(
    const float* scores, float scale, T* weights, float& peak, float& total, float* out, int64_t dim) {
    constexpr int kVectors = kTileKeys / kLanes;
    F32x16 row[kVectors], high = splat(kNever), mass{};
    for (int i = 0; i < kVectors; i++) {
        row[i] = load<F32x16>(scores + i * kLanes);
        high = max(high, row[i]);
    }
    float tile_peak = highest(high) * scale, best = std::max(peak, tile_peak);
    if (best == kNever) best = 0.0f;  // every key so far is hidden: all weights are 2^-inf = 0
    for (int i = 0; i < kVectors; i++) {
        row[i] = exp2<std::is_same_v<T, bf16>>(row[i] * scale - best);
        mass += row[i];
        store_narrow(weights + i * kLanes, row[i]);
    }
    if (tile_peak > peak) {
        float shrink = exp2(peak - best);
        total *= shrink;
        for (int64_t i = 0; i < dim; i += kLanes) store(out + i, load<F32x16>(out + i) * shrink);
        peak = best;
    }
    total += sum(mass);
}

// Returns what a sink adds to the weights' total of a row whose largest score * scale is `peak`. Without bound: a sink far
// above all scores leaves nothing of the row.
KVRELAY_ONCE float sink_weight(float sink, float peak) {
    float distance = sink * 1.44269504f - peak, power = exp2(-std::abs(distance));
    return distance > 0 ? 1.0f / power : power;
}

// Divide the sum of a row of `seen`, of a query head, by its weights' total. int4 pages hold mixed values: their sum is
// mixed back, in `seen`.
template <typename T>
inline void write_result(const Layer<T>& layer, int64_t head, Partial& seen, int64_t row, int64_t dim, T* to) {
    float *out = seen.out.data() + row * dim, total = seen.sums[row];
    if (layer.sinks) total += sink_weight(to_float(layer.sinks[head]), seen.peaks[row]);
    if (layer.format == PageFormat::kInt4) mix_row(out, dim);
    for (int64_t i = 0; i < dim; i += kLanes) store_narrow(to + i, load<F32x16>(out + i) / total);
}

}  // namespace kvrelay
