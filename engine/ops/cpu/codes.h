// Pages of codes: int8 with a scale for each head, int4 with a scale for each 32 dimensions, which are mixed first.
// `engine/kv_format.py` defines both, `engine/kv_cache.py` where they lie:
//
//     keys    [groups of 16 tokens, heads] x [row bytes / 4] [16 tokens] [4 bytes]
//     values  [groups of 16 tokens, heads] x [4] [row bytes] [4 tokens]
//     scales  [groups of 16 tokens, heads] x [scales of a row] [16 tokens]    behind the keys, and behind the values
//
// so that one instruction multiplies four codes in each of sixteen lanes, tokens for scores and dimensions for sums.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "simd.h"

namespace kvrelay {

enum class PageFormat : int64_t { kPlain, kGrouped, kInt8, kInt4 };  // as `library.py` numbers them

constexpr int64_t kScaleDims = 32;  // dimensions that int4 mixes and scales together

// Key heads of pages, and the first of those that are read and written here.
struct PageHeads {
    int64_t count, first;
};

// Bytes of a layer's keys, or values, in pages of codes.
struct CodeLayout {
    PageFormat format;
    int64_t row_bytes, row_scales;
    PageHeads heads;
    int64_t block_size;

    static CodeLayout of(PageFormat format, int64_t head_dim, PageHeads heads, int64_t block_size) {
        if (format == PageFormat::kInt4) return {format, head_dim / 2, head_dim / kScaleDims, heads, block_size};
        return {format, head_dim, 1, heads, block_size};
    }
    int64_t bias() const { return format == PageFormat::kInt4 ? 8 : 128; }  // stored codes are not negative
    int64_t group_bytes() const { return kLanes * row_bytes; }
    int64_t group_scales() const { return kLanes * row_scales * int64_t(sizeof(bf16)); }
    int64_t page() const { return block_size / kLanes * heads.count * (group_bytes() + group_scales()); }

    // Offsets of the codes and the scales of a group of tokens, `offset` being one of them in its block.
    int64_t codes_at(int64_t block, int64_t offset, int64_t head) const {
        return block * page() + (offset / kLanes * heads.count + heads.first + head) * group_bytes();
    }
    int64_t scales_at(int64_t block, int64_t offset, int64_t head) const {
        int64_t codes = block_size / kLanes * heads.count * group_bytes();
        return block * page() + codes + (offset / kLanes * heads.count + heads.first + head) * group_scales();
    }
};

// To the nearest, ties to even; for |x| < 2^22.
inline F32x16 round_even(F32x16 x) { return x + 12582912.0f - 12582912.0f; }

inline I32x16 to_integers(F32x16 x, float scale, float least, float most) {
    F32x16 ratio = scale > 0 || scale < 0 ? x / scale : F32x16{};  // codes of a zero or NaN scale do not matter
    return convert<int32_t>(round_even(-max(splat(-most), -max(splat(least), ratio))));
}

// NaN where a lane of `x` is not finite, so that such a row does not pass for a good one; else 0.
inline F32x16 poison(F32x16 x) { return x * 0.0f; }

template <int kDistance>
struct SignOfLanes {
    constexpr SignOfLanes() {
        for (int i = 0; i < kLanes; i++) lanes[i] = i & kDistance ? -1.0f : 1.0f;
    }
    alignas(64) float lanes[kLanes]{};
};
template <int kDistance>
inline F32x16 butterfly(F32x16 v) {
    static constexpr SignOfLanes<kDistance> sign;
    return swap<kDistance>(v) + v * load<F32x16>(sign.lanes);
}
inline F32x16 mix_lanes(F32x16 v) {
    return butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(v))));
}
// Multiply each 32 values by the normalised Hadamard matrix, its own inverse, so that no dimension stands out.
inline void mix(F32x16& low, F32x16& high) {
    constexpr float kNorm = 0.17677669529663687f;  // 1 / sqrt(32)
    F32x16 sum = mix_lanes(low + high) * kNorm, difference = mix_lanes(low - high) * kNorm;
    low = sum, high = difference;
}
template <typename T>
inline void mix_row(T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kScaleDims) {
        F32x16 low = load_wide(row + i), high = load_wide(row + i + kLanes);
        mix(low, high);
        store_narrow(row + i, low);
        store_narrow(row + i + kLanes, high);
    }
}

template <typename T>
inline void encode_int8(const T* row, int64_t dim, uint8_t* codes, bf16* scales) {
    F32x16 high{}, bad{};
    for (int64_t i = 0; i < dim; i += kLanes) {
        F32x16 x = load_wide(row + i);
        high = max(high, max(x, -x));
        bad += poison(x);
    }
    *scales = from_float<bf16>(highest(high) / 127.0f + sum(bad));
    for (int64_t i = 0; i < dim; i += kLanes) {
        I32x16 code = to_integers(load_wide(row + i), to_float(*scales), -127.0f, 127.0f) + 128;
        store(codes + i, convert<uint8_t>(code));
    }
}

// The dimension that stands out most becomes -8: the scale has the opposite sign.
template <typename T>
inline void encode_int4(const T* row, int64_t dim, uint8_t* codes, bf16* scales) {
    for (int64_t i = 0; i < dim; i += kScaleDims, codes += kLanes, scales++) {
        F32x16 low = load_wide(row + i), high = load_wide(row + i + kLanes);
        mix(low, high);
        float most = highest(max(low, high)), least = -highest(max(-low, -high));
        *scales = from_float<bf16>((most > -least ? most : least) / -8.0f + sum(poison(low) + poison(high)));
        float scale = to_float(*scales);
        I32x16 pair = (to_integers(low, scale, -8.0f, 7.0f) + 8) | ((to_integers(high, scale, -8.0f, 7.0f) + 8) << 4);
        store(codes, convert<uint8_t>(pair));
    }
}

// One token's key and value of one head, on their way into the pages.
struct CodeRow {
    std::vector<uint8_t> codes;
    std::vector<bf16> scales;

    template <typename T>
    void encode(const T* row, int64_t dim, const CodeLayout& layout) {
        codes.resize(layout.row_bytes);
        scales.resize(layout.row_scales);
        if (layout.format == PageFormat::kInt8) encode_int8(row, dim, codes.data(), scales.data());
        else encode_int4(row, dim, codes.data(), scales.data());
    }
    void write_scales(uint8_t* group, int64_t token) const {
        for (size_t i = 0; i < scales.size(); i++) store(group + (i * kLanes + token) * sizeof(bf16), scales[i]);
    }
    void write_key(uint8_t* group, int64_t token) const {
        for (size_t i = 0; i < codes.size(); i += 4) std::memcpy(group + i * kLanes + token * 4, codes.data() + i, 4);
    }
    void write_value(uint8_t* group, int64_t token) const {
        uint8_t* to = group + token / 4 * 4 * codes.size() + token % 4;
        for (size_t i = 0; i < codes.size(); i++) to[i * 4] = codes[i];
    }
};

// Where the codes of a tile lie, from some key head on: groups of sixteen tokens. Groups beyond the last one repeat it.
template <int kGroups>
struct CodeGroups {
    const uint8_t *keys[kGroups], *values[kGroups], *key_scales[kGroups], *value_scales[kGroups];

    // From token `first` on, the first of its group. Tokens [begin, end) are read; groups without any hold a neighbour's.
    void find(const CodeLayout& layout, const uint8_t* key_pages, const uint8_t* value_pages, const int32_t* table,
              int64_t head, int64_t first, int64_t begin, int64_t end) {
        int64_t oldest = std::max(begin, first) / kLanes * kLanes, latest = (end - 1) / kLanes * kLanes;
        for (int g = 0; g < kGroups; g++) {
            int64_t token = std::clamp(first + g * kLanes, oldest, latest);
            int64_t block = table[token / layout.block_size], offset = token % layout.block_size;
            int64_t codes = layout.codes_at(block, offset, head), scales = layout.scales_at(block, offset, head);
            keys[g] = key_pages + codes, values[g] = value_pages + codes;
            key_scales[g] = key_pages + scales, value_scales[g] = value_pages + scales;
        }
    }

    // One head of a group's keys, or values. The processor's own prefetcher does not see through block tables.
    // Inline, or else g++ may drop the calls: to it a function that only fetches does nothing.
    KVRELAY_INLINE void prefetch_keys(const CodeLayout& layout, int64_t head, int g) const {
        fetch(keys[g] + head * layout.group_bytes(), key_scales[g] + head * layout.group_scales(), layout);
    }
    KVRELAY_INLINE void prefetch_values(const CodeLayout& layout, int64_t head, int g) const {
        fetch(values[g] + head * layout.group_bytes(), value_scales[g] + head * layout.group_scales(), layout);
    }

  private:
    KVRELAY_INLINE static void fetch(const uint8_t* codes, const uint8_t* scales, const CodeLayout& layout) {
        for (int64_t i = 0; i < layout.group_bytes(); i += 64) __builtin_prefetch(codes + i);
        __builtin_prefetch(scales);
    }
};

// The lowest byte of each lane after `index` others, as a code: what multiplies its scale.
template <bool kIsInt4, int kHalf>
inline F32x16 decode_byte(I32x16 bytes, int index) {
    I32x16 byte = bytes >> (index * 8);
    if (kIsInt4) return convert<float>(((byte >> (4 * kHalf)) & 15) - 8);
    return convert<float>((byte & 255) - 128);
}

inline F32x16 load_scales(const uint8_t* scales, int64_t index) {
    return load_wide(reinterpret_cast<const bf16*>(scales) + index * kLanes);
}

// Lanes [begin, end) of a vector whose first lane has index `first`; the others 0.
inline F32x16 keep(F32x16 v, int64_t first, int64_t begin, int64_t end) {
    if (begin <= first && first + kLanes <= end) return v;
    float lanes[kLanes];
    store(lanes, v);
    for (int i = 0; i < kLanes; i++)
        if (first + i < begin || first + i >= end) lanes[i] = 0.0f;
    return load<F32x16>(lanes);
}

}  // namespace kvrelay
