// Products with weights in 4 or 8 bits: y [rows, columns] = x [rows, depth] * W^T, with W = scale * code + offset.
//
// W is packed into panels of 16 columns, which a product reads as one stream. Panel p, block b: [steps][16 columns] of
// four bytes, each the code of one input (8 bits: 8 steps) or of two that are four inputs apart (4 bits: 4 steps, the
// first in the low half). Scales and offsets: [panel][group][16 columns].
//
// x is rounded to 8 bits (rounded.h). A row's result depends on this row alone, bit for bit, with any number of rows: the
// sum of a span is exact, and spans are added up in one order. bfloat16 where there are tile registers: tiled_codes.h.
#pragma once
#include "rounded.h"

namespace kvrelay {

// A weight on its grid.
struct Grouped {
    const uint8_t* codes;
    const void* scales;
    const void* offsets;   // or null: the grid is symmetric, with 2^(bits - 1) in its middle
    int64_t bits;          // 4 or 8
    int64_t scale_bits;    // of a scale and an offset: 16 (IEEE half) or 32
    int64_t group_blocks;  // blocks that share a scale
    int64_t in_tiles;      // whether the codes are packed for tile registers (tiled_codes.h)

    // Blocks of inputs that share one. Formats with one scale for a whole row of weights are made for one for a whole row
    // of inputs.
    int64_t input_span(int64_t depth) const { return group_blocks >= num_blocks(depth) ? kLongSpan : 1; }
};

inline int64_t num_panels(int64_t columns) { return (columns + kLanes - 1) / kLanes; }
inline int64_t num_groups(int64_t depth, int64_t group_blocks) {
    return (num_blocks(depth) + group_blocks - 1) / group_blocks;
}
inline int64_t grouped_block_bytes(int64_t bits) { return kBlock * kLanes * bits / 8; }

inline F32x16 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (F32x16)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return {(F32x16::Half)_mm256_cvtph_ps(load<__m128i>(from)), (F32x16::Half)_mm256_cvtph_ps(load<__m128i>(from + 8))};
#else
    I32x16 half = convert<int32_t>(load<U16x16>(from));
    // Exponent and mantissa move to a float's places; the factor corrects the exponent's bias, also of subnormals.
    F32x16 magnitude = as<float>((half & 0x7fff) << 13) * 0x1p112f;
    return as<float>(as<int32_t>(magnitude) | (half & 0x8000) << 16);
#endif
}

// Scales or offsets of a panel's columns in group g.
inline F32x16 load_grid(const void* grid, int64_t bits, int64_t g) {
    return bits == 16 ? load_half((const uint16_t*)grid + g * kLanes) : load<F32x16>((const float*)grid + g * kLanes);
}

// Add a span to a row's sums, given the sums of its products: with codes as they are, or, in a symmetric grid, with what
// they are above its middle.
template <bool kSymmetric>
inline F32x16 add_span(F32x16 acc, F32x16 sums, F32x16 scale, F32x16 offset, float code_sum, float x_scale) {
    F32x16 value = sums * scale;
    if (!kSymmetric) value = multiply_add(splat(code_sum), offset, value);
    return multiply_add(value, splat(x_scale), acc);
}

constexpr int kPrefetchBytes = 4096;  // the next panel's beginning follows this one's end

// Sums of one block: kRows rows of x times 16 columns.
template <int kBits, int kRows>
inline void multiply_block(const int32_t* quads, const uint8_t* codes, I32x16* sums) {
    constexpr int kSteps = kQuads * kBits / 8;
    [[maybe_unused]] I32x16 shorts[kRows] = {};
    auto add = [&](int r, I32x16 four_codes, int32_t four) {
        if constexpr (kHasShortSums<kBits>) shorts[r] = dot4_short(shorts[r], four_codes, four);
        else sums[r] = dot4<kBits>(sums[r], four_codes, four);
    };
#if !defined(__AVX512F__)
#pragma GCC unroll 1  // else g++ adds up in another order, for which there are too few registers
#endif
    for (int s = 0; s < kSteps; s++, codes += 64) {
        __builtin_prefetch(codes + kPrefetchBytes);
        I32x16 packed = load<I32x16>(codes);
        I32x16 first = kBits == 4 ? packed & 0x0f0f0f0f : packed;
        const int32_t* x = quads + s * (kBits == 4 ? 2 : 1) * kRows;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) add(r, first, x[r]);
        if (kBits == 4) {
            I32x16 second = (packed >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) add(r, second, x[kRows + r]);
        }
    }
    if constexpr (kHasShortSums<kBits>)
        for (int r = 0; r < kRows; r++) sums[r] = add_up(sums[r], shorts[r]);
}

// Scales and offsets of a panel, span by span.
class PanelGrid {
public:
    PanelGrid(const Grouped& w, int64_t blocks, int64_t p)
        : w_(w), group_(p * ((blocks + w.group_blocks - 1) / w.group_blocks)) {}

    KVRELAY_INLINE void next(int64_t span) {
        if (in_group_ == 0) {
            scale = load_grid(w_.scales, w_.scale_bits, group_);
            if (w_.offsets) offset = load_grid(w_.offsets, w_.scale_bits, group_);
            group_++;
        }
        in_group_ = in_group_ + span >= w_.group_blocks ? 0 : in_group_ + span;
    }

    F32x16 scale{}, offset{};

private:
    const Grouped& w_;
    int64_t group_, in_group_ = 0;
};

// Panel p of the product with one tile, [kRows].
template <int kBits, bool kSymmetric, int kRows>
KVRELAY_ONCE void multiply_panel(
    const RoundedTile& x, const Grouped& w, int64_t blocks, int64_t span, int64_t p, F32x16* y) {
    // What dot4 has taken off each code too much.
    constexpr float kExcess = kDotBias<kBits> - (kSymmetric ? 1 << (kBits - 1) : 0);
    const uint8_t* codes = w.codes + p * blocks * grouped_block_bytes(kBits);
    PanelGrid grid(w, blocks, p);
    F32x16 acc[kRows] = {};
    for (int64_t b = 0, s = 0; b < blocks; s++) {
        grid.next(span);
        I32x16 sums[kRows] = {};
        for (int64_t end = std::min(b + span, blocks); b < end; b++, codes += grouped_block_bytes(kBits))
            multiply_block<kBits, kRows>(x.quads + b * kQuads * kRows, codes, sums);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
            F32x16 wide = convert<float>(sums[r]);
            float code_sum = x.code_sums[s * kRows + r];
            if (kExcess != 0) wide = multiply_add(splat(code_sum), splat(kExcess), wide);  // exact
            acc[r] = add_span<kSymmetric>(acc[r], wide, grid.scale, grid.offset, code_sum, x.scales[s * kRows + r]);
        }
    }
    for (int r = 0; r < kRows; r++) y[r] = acc[r];
}

// The product's panels that this thread has, on rounded rows. Y is T or wider.
template <int kBits, bool kSymmetric, int kSpan, typename T, typename Y>
void multiply_panels(const RoundedRows& x, const Grouped& w, const T* bias, Y* y, int64_t columns) {
    int64_t blocks = x.blocks();
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(columns); p++) {
        for (int64_t row = 0; row < x.rows(); row += x.tile_rows()) {
            RoundedTile tile = x.tile(row);
            F32x16 product[kMaxTileRows];
            with_count<kMaxTileRows>(int(tile.rows), [&](auto count) {
                multiply_panel<kBits, kSymmetric, count>(tile, w, blocks, kSpan, p, product);
            });
            for (int64_t r = 0; r < tile.rows; r++)
                store_columns(product[r], bias, y + (row + r) * columns, columns, p * kLanes);
        }
    }
}

// Rows of this many inputs in all are rounded by every thread for itself, which costs less than waiting for another.
constexpr int64_t kRoundedAlone = 4096;

template <int kBits, bool kSymmetric, int kSpan, typename T, typename Y>
void grouped_product(const T* x, const Grouped& w, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth) {
    static thread_local std::vector<int32_t> memory;
    RoundedRows together(rows, depth, kSpan, memory);
    bool is_alone = rows * depth <= kRoundedAlone;
#pragma omp parallel
    {
        RoundedRows rounded = is_alone ? RoundedRows(rows, depth, kSpan, memory) : together;
        if (is_alone) {
            for (int64_t row = 0; row < rows; row++) rounded.round(x + row * depth, row);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) rounded.round(x + row * depth, row);
        }
        multiply_panels<kBits, kSymmetric, kSpan>(rounded, w, bias, y, columns);
    }
}

template <int kBits, typename T, typename Y>
void grouped_product(const T* x, const Grouped& w, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth) {
    bool is_long = w.input_span(depth) > 1;
    if (w.offsets) {
        is_long ? grouped_product<kBits, false, kLongSpan>(x, w, bias, y, rows, columns, depth)
                : grouped_product<kBits, false, 1>(x, w, bias, y, rows, columns, depth);
    } else {
        is_long ? grouped_product<kBits, true, kLongSpan>(x, w, bias, y, rows, columns, depth)
                : grouped_product<kBits, true, 1>(x, w, bias, y, rows, columns, depth);
    }
}

// y [rows, columns] = x [rows, depth] * W^T (+ bias). Both sides' rows are contiguous; Y is T or wider. All threads.
template <typename T, typename Y>
void grouped_linear(const T* x, const Grouped& w, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth) {
    w.bits == 4 ? grouped_product<4>(x, w, bias, y, rows, columns, depth)
                : grouped_product<8>(x, w, bias, y, rows, columns, depth);
}

// Pack panel p of the codes [columns, depth]. Missing columns and inputs have code 0; their x is 0.
inline void pack_vector_codes(
    const uint8_t* codes, int64_t columns, int64_t depth, int64_t bits, uint8_t* packed, int64_t p) {
    int64_t blocks = num_blocks(depth);
    packed += p * blocks * grouped_block_bytes(bits);
    auto code = [&](int64_t column, int64_t at) -> uint8_t {
        return column < columns && at < depth ? codes[column * depth + at] : 0;
    };
    for (int64_t at = 0; at < blocks * kBlock; at += bits == 4 ? 8 : 4)
        for (int64_t c = p * kLanes; c < (p + 1) * kLanes; c++)
            for (int i = 0; i < 4; i++)
                *packed++ = bits == 4 ? code(c, at + i) | code(c, at + 4 + i) << 4 : code(c, at + i);
}

}  // namespace kvrelay
