// Attention of one new token over pages of codes. Queries and softmax weights are cut into bytes, so that integer
// products multiply them with the codes as they lie, exactly; a scale is applied to each token's sum, or to its weight.
#pragma once
#include "paged.h"

namespace kvrelay {

// Bytes of a number, of 7 bits each: 14 bits and a sign where bfloat16 has 8 bits, 21 where float has 24.
template <typename T>
constexpr int kParts = sizeof(T) == sizeof(float) ? 3 : 2;

// Rows of numbers as bytes: number = scale of its row * sum of parts[p] * 128^(kNumParts - 1 - p).
template <int kNumParts>
struct Parts {
    std::vector<int8_t> bytes;   // [rows][kNumParts][length]
    std::vector<int32_t> sums;   // [rows][kNumParts][pieces], of `piece` consecutive bytes
    std::vector<float> scales;   // [rows]
    int64_t length, pieces;

    void reset(int64_t rows, int64_t size, int64_t piece) {
        length = size, pieces = size / piece;
        bytes.resize(rows * kNumParts * length);
        sums.resize(rows * kNumParts * pieces);
        scales.resize(rows);
    }
    const int8_t* row(int64_t r, int p) const { return bytes.data() + (r * kNumParts + p) * length; }
    int32_t sum(int64_t r, int p, int64_t piece) const { return sums[(r * kNumParts + p) * pieces + piece]; }

    template <typename T>
    void cut(int64_t r, const T* numbers) {
        constexpr float kMost = kNumParts == 3 ? 127.0f * 128 * 128 : 127.0f * 128;
        F32x16 high{}, bad{};
        for (int64_t i = 0; i < length; i += kLanes) {
            F32x16 x = load_wide(numbers + i);
            high = max(high, max(x, -x));
            bad += poison(x);
        }
        float scale = highest(high) / kMost;
        scales[r] = scale + kvrelay::sum(bad);
        int64_t piece = length / pieces;
        for (int64_t from = 0; from < length; from += piece) {
            I32x16 totals[kNumParts] = {};
            for (int64_t i = from; i < from + piece; i += kLanes) {
                I32x16 rest = to_integers(load_wide(numbers + i), scale, -kMost, kMost);
                for (int p = kNumParts - 1; p >= 0; p--) {  // from the lowest: each is in [-64, 63] but the first
                    I32x16 next = p ? (rest + 64) >> 7 : I32x16{};
                    I32x16 part = rest - next * 128;
                    totals[p] += part;
                    store(bytes.data() + (r * kNumParts + p) * length + i, convert<int8_t>(part));
                    rest = next;
                }
            }
            for (int p = 0; p < kNumParts; p++)
                sums[(r * kNumParts + p) * pieces + from / piece] = kvrelay::sum(totals[p]);
        }
    }
};

// dot4 with codes of a page.
template <bool kIsInt4>
inline I32x16 dot_page(I32x16 sums, I32x16 codes, const int8_t* four) {
    return dot4<kIsInt4 ? 4 : 8>(sums, codes, load<int32_t>(four));
}
// What has to be taken off each code that dot_page has multiplied.
template <bool kIsInt4>
constexpr int32_t kPageBias = kIsInt4 ? 8 - kDotBias<4> : 128 - kDotBias<8>;

template <int kNumParts>
inline F32x16 join(const I32x16* parts) {
    F32x16 number = convert<float>(parts[0]);
    for (int p = 1; p < kNumParts; p++) number = number * 128.0f + convert<float>(parts[p]);
    return number;
}

// scores [kRows][kTileKeys], for one group of sixteen keys of one head.
template <bool kIsInt4, int kRows, int kNumParts>
inline void score_codes(const Parts<kNumParts>& queries, int64_t first_row, const uint8_t* codes, const uint8_t* scales,
                        float* scores) {
    int64_t piece = kIsInt4 ? kScaleDims : queries.length, quads = piece / (kIsInt4 ? 8 : 4);
    F32x16 totals[kRows] = {};
    for (int64_t s = 0; s < queries.pieces; s++) {
        I32x16 sums[kRows][kNumParts];
        const int8_t* rows[kRows][kNumParts];
        for (int r = 0; r < kRows; r++)
            for (int p = 0; p < kNumParts; p++) {
                sums[r][p] = splat<I32x16>(-kPageBias<kIsInt4> * queries.sum(first_row + r, p, s));
                rows[r][p] = queries.row(first_row + r, p) + s * piece;
            }
        for (int64_t quad = 0; quad < quads; quad++, codes += 4 * kLanes) {
            I32x16 bytes = load<I32x16>(codes), low = kIsInt4 ? bytes & 0x0f0f0f0f : bytes;
            for (int r = 0; r < kRows; r++)
                for (int p = 0; p < kNumParts; p++)
                    sums[r][p] = dot_page<kIsInt4>(sums[r][p], low, rows[r][p] + 4 * quad);
            if (!kIsInt4) continue;
            I32x16 high = (bytes >> 4) & 0x0f0f0f0f;
            for (int r = 0; r < kRows; r++)
                for (int p = 0; p < kNumParts; p++)
                    sums[r][p] = dot_page<kIsInt4>(sums[r][p], high, rows[r][p] + kLanes + 4 * quad);
        }
        F32x16 scale = load_scales(scales, s);
        for (int r = 0; r < kRows; r++) totals[r] += join<kNumParts>(sums[r]) * scale;
    }
    for (int r = 0; r < kRows; r++) store(scores + r * kTileKeys, totals[r] * queries.scales[first_row + r]);
}

// out [kRows][dim] += weights * values of the tile, for the sixteen dimensions of sixteen bytes; in int4, thirty-two.
template <bool kIsInt4, int kRows, int kNumParts>
inline void add_codes(const Parts<kNumParts>& weights, const uint8_t* const* values, int64_t group_row, int groups,
                      int64_t row_bytes, float* out, int64_t dim) {
    constexpr int kHalves = kIsInt4 ? 2 : 1;
    I32x16 sums[kHalves][kRows][kNumParts];
    for (int half = 0; half < kHalves; half++)
        for (int r = 0; r < kRows; r++)
            for (int p = 0; p < kNumParts; p++)
                sums[half][r][p] = splat<I32x16>(-kPageBias<kIsInt4> * weights.sum(r, p, 0));
    for (int g = 0; g < groups; g++)
        for (int quad = 0; quad < 4; quad++) {
            I32x16 bytes = load<I32x16>(values[g] + group_row + quad * 4 * row_bytes);
            for (int half = 0; half < kHalves; half++) {
                I32x16 codes = kIsInt4 ? (bytes >> (4 * half)) & 0x0f0f0f0f : bytes;
                for (int r = 0; r < kRows; r++)
                    for (int p = 0; p < kNumParts; p++)
                        sums[half][r][p] =
                            dot_page<kIsInt4>(sums[half][r][p], codes, weights.row(r, p) + g * kLanes + quad * 4);
            }
        }
    for (int half = 0; half < kHalves; half++)
        for (int r = 0; r < kRows; r++) {
            float* to = out + r * dim + half * kLanes;
            store(to, load<F32x16>(to) + join<kNumParts>(sums[half][r]) * weights.scales[r]);
        }
}

// Buffers of one thread.
template <int kNumParts>
struct CodeBuffers {
    Parts<kNumParts> queries, weights;
};

// kRows query rows from `row` on, all of one key head, over one tile whose first key is `first`. Asks memory for that
// head of the `next` tile, if there is one, a little at a time: many requests at once are dropped.
template <bool kIsInt4, int kRows, typename T>
inline void attend_tile(const Step& step, const Item& item, const CodeLayout& layout,
                        const CodeGroups<kTileGroups>& tile, const CodeGroups<kTileGroups>* next, int64_t first,
                        int64_t row, Partial& partial, CodeBuffers<kParts<T>>& with) {
    int64_t dim = step.head_dim, head = row / step.group();
    int groups = int(std::min<int64_t>(kTileGroups, (item.end - first + kLanes - 1) / kLanes));
    float scores[kRows * kTileKeys], softened[kRows * kTileKeys], scaled[kTileKeys];
    const uint8_t* values[kTileGroups];
    for (int g = 0; g < kTileGroups; g++) values[g] = tile.values[g] + head * layout.group_bytes();
    for (int g = 0; g < groups; g++) {
        if (next) next->prefetch_keys(layout, head, g);
        score_codes<kIsInt4, kRows>(with.queries, row, tile.keys[g] + head * layout.group_bytes(),
                                    tile.key_scales[g] + head * layout.group_scales(), scores + g * kLanes);
    }
    for (int r = 0; r < kRows; r++) {
        float* own = scores + r * kTileKeys;
        for (int64_t k = 0; k < kTileKeys; k++)
            if (first + k < item.begin || first + k >= item.end) own[k] = kNever;
        soften(own, step.scale, softened + r * kTileKeys, partial.peaks[row + r], partial.sums[row + r],
               partial.out.data() + (row + r) * dim, dim);
    }
    for (int64_t s = 0; s < layout.row_scales; s++) {
        for (int r = 0; r < kRows; r++) {
            for (int g = 0; g < groups; g++) {
                F32x16 scale = load_scales(tile.value_scales[g] + head * layout.group_scales(), s);
                int64_t at = g * kLanes;
                store(scaled + at, load<F32x16>(softened + r * kTileKeys + at) *
                                       keep(scale, first + at, item.begin, item.end));
            }
            for (int64_t k = groups * kLanes; k < kTileKeys; k++) scaled[k] = 0.0f;
            with.weights.cut(r, scaled);
        }
        float* out = partial.out.data() + row * dim + s * kScaleDims;
        for (int64_t byte = 0; byte < layout.row_bytes / layout.row_scales; byte += kLanes) {
            int64_t from = s * kLanes + byte;
            for (int64_t g = from / kLanes; next && g < kTileGroups; g += layout.row_bytes / kLanes)
                next->prefetch_values(layout, head, int(g));
            add_codes<kIsInt4, kRows>(with.weights, values, from * 4, groups, layout.row_bytes, out + byte, dim);
        }
    }
}

// One token's query heads over keys [item.begin, item.end), like `attend_keys` over pages of values.
template <bool kIsInt4, typename T>
void attend_codes(const Step& step, const Layer<T>& layer, const Item& item, const Item* after, const T* queries,
                  Partial& partial) {
    int64_t dim = step.head_dim, group = step.group(), rows = item.num_heads * group;
    CodeLayout layout = layer.codes(step);
    thread_local CodeBuffers<kParts<T>> with;
    partial.reset(rows, dim);
    with.queries.reset(rows, dim, kIsInt4 ? kScaleDims : dim);
    with.weights.reset(4, kTileKeys, kTileKeys);
    for (int64_t row = 0; row < rows; row++) with.queries.cut(row, queries + row * dim);
    CodeGroups<kTileGroups> tiles[2];
    auto find = [&](const Item& owner, int64_t first, CodeGroups<kTileGroups>& tile) {
        tile.find(layout, layer.key_bytes(), layer.value_bytes(), step.block_tables[owner.seq], owner.first_head, first,
                  owner.begin, owner.end);
    };
    int64_t start = item.begin / kLanes * kLanes;
    find(item, start, tiles[0]);
    int now = 0;
    for (int64_t at = start; at < item.end; at += kTileKeys, now = 1 - now) {
        const CodeGroups<kTileGroups>&tile = tiles[now], &next = tiles[1 - now];
        const Item* owner = at + kTileKeys < item.end ? &item : after;
        if (owner) find(*owner, owner == &item ? at + kTileKeys : after->begin / kLanes * kLanes, tiles[1 - now]);
        for (int64_t head = 0; head < item.num_heads; head++) {
            int64_t row = head * group, end = row + group;
            const CodeGroups<kTileGroups>* ahead = owner ? &next : nullptr;
            for (; end - row > 4; row += 4, ahead = nullptr)
                attend_tile<kIsInt4, 4, T>(step, item, layout, tile, ahead, at, row, partial, with);
            switch (end - row) {
                case 1: attend_tile<kIsInt4, 1, T>(step, item, layout, tile, ahead, at, row, partial, with); break;
                case 2: attend_tile<kIsInt4, 2, T>(step, item, layout, tile, ahead, at, row, partial, with); break;
                case 3: attend_tile<kIsInt4, 3, T>(step, item, layout, tile, ahead, at, row, partial, with); break;
                case 4: attend_tile<kIsInt4, 4, T>(step, item, layout, tile, ahead, at, row, partial, with); break;
            }
        }
    }
}

}  // namespace kvrelay
