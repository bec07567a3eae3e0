// Products of bfloat16 inputs with weights in 4 or 8 bits in tile registers (AMX): codes are widened to bfloat16 just
// before they are multiplied.
//
// Not tiles of integers: the sum of each span of 32 inputs would have to be scaled by vectors, which takes longer than
// the tile's product. Inputs are rounded to 8 bits as everywhere (rounded.h), so that processors without tiles compute
// the same up to bfloat16's rounding. A row's result depends on this row alone, bit for bit: a register adds up a run in
// the same order whichever of its operands is the weight.
#pragma once
#include "grouped.h"
#include "tiled.h"

namespace kvrelay {

// Codes for tiles are packed as those for vectors, in panels of 16 columns that are read as one stream, but a block is
// in the order in which it is widened. 8 bits: [16 columns][32 inputs]. 4 bits: [4 groups of 4 columns][32 inputs] of
// two bytes, in which the first column has the lowest bits.
inline void pack_tiled_codes(
    const uint8_t* codes, int64_t columns, int64_t depth, int64_t bits, uint8_t* packed, int64_t p) {
    int64_t blocks = num_blocks(depth), size = grouped_block_bytes(bits);
    packed += p * blocks * size;
    std::memset(packed, 0, blocks * size);
    for (int64_t c = 0; c < std::min<int64_t>(columns - p * kLanes, kLanes); c++)
        for (int64_t at = 0; at < depth; at++) {
            uint8_t code = codes[(p * kLanes + c) * depth + at];
            uint8_t* block = packed + at / kBlock * size;
            if (bits == 8) {
                block[c * kBlock + at % kBlock] = code;
            } else {
                block[(c / 4 * kBlock + at % kBlock) * 2 + c % 4 / 2] |= code << (c % 2 * 4);
            }
        }
}

#if defined(KVRELAY_TILES)

constexpr int64_t kPrefetchBlocks = 4;  // further ahead, int8 took a sixth longer

// One block of a panel in bfloat16, [16 columns][32 inputs].
typedef bf16 WideBlock[kLanes][kBlock];

// Reads the blocks of a panel one after the other.
class CodeStream {
public:
    // Blocks [block, end) of panel p, which has so many. A thread has one stream at a time.
    CodeStream(const Grouped& w, int64_t blocks, int64_t p, int64_t block, int64_t end)
        : bits_(w.bits), group_blocks_(w.group_blocks), left_(w.group_blocks - block % w.group_blocks),
          codes_(w.codes + (p * blocks + block) * grouped_block_bytes(w.bits)) {
        int64_t groups = (blocks + w.group_blocks - 1) / w.group_blocks;
        // Of all groups before the first block is widened: what was stored just now is slow to read piece by piece.
        static thread_local std::vector<Grid> grids;
        if (int64_t(grids.size()) < groups) grids.resize(groups);
        for (int64_t g = block / w.group_blocks; g * w.group_blocks < end; g++) {
            F32x16 scales = load_grid(w.scales, w.scale_bits, p * groups + g);
            // A symmetric grid's middle is exact, and so is the value before it is rounded.
            F32x16 offsets = w.offsets ? load_grid(w.offsets, w.scale_bits, p * groups + g)
                                       : scales * -float(1 << (w.bits - 1));
            store(grids[g].scale, scales);
            store(grids[g].offset, offsets);
        }
        grid_ = grids.data() + block / w.group_blocks;
    }

    // The next block, widened.
    KVRELAY_ONCE void next(WideBlock& to) {
        if (left_ == 0) grid_++, left_ = group_blocks_;
        left_--;
        bits_ == 4 ? widen4(codes_, *grid_, to) : widen8(codes_, *grid_, to);
        codes_ += grouped_block_bytes(bits_);
    }

private:
    struct alignas(64) Grid {
        float scale[kLanes], offset[kLanes];
        F32x16 values(F32x16 codes, int column) const {
            return multiply_add(codes, splat(scale[column]), splat(offset[column]));
        }
    };

    // The sixteen values of a column are a table, whose upper halves are chosen by number: rounded to bfloat16, ties away
    // from zero.
    static void widen4(const uint8_t* codes, const Grid& grid, WideBlock& to) {
        const F32x16 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i in_place = _mm512_set1_epi16(15 << 1), upper = _mm512_set1_epi16(1);
#pragma GCC unroll 4
        for (int c = 0; c < kLanes; c += 4) {
            const uint8_t* from = codes + c * kBlock / 2;
            __builtin_prefetch(from + kPrefetchBlocks * grouped_block_bytes(4));
            __m512i words = load<__m512i>(from);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                I32x16 table = (I32x16)grid.values(numbers, c + i) + 0x8000;
                __m512i shifted = i == 0 ? _mm512_slli_epi16(words, 1) : _mm512_srli_epi16(words, 4 * i - 1);
                __m512i index = _mm512_ternarylogic_epi64(shifted, in_place, upper, 0xea);  // shifted & in_place | upper
                store(to[c + i], _mm512_permutexvar_epi16(index, (__m512i)table));
            }
        }
    }

    static F32x16 to_floats(__m128i codes) { return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)); }

    static void widen8(const uint8_t* codes, const Grid& grid, WideBlock& to) {
#pragma GCC unroll 16
        for (int c = 0; c < kLanes; c++) {
            const uint8_t* from = codes + c * kBlock;
            if (c % 2 == 0) __builtin_prefetch(from + kPrefetchBlocks * grouped_block_bytes(8));
            F32x16 half[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
                half[i] = grid.values(to_floats(load<__m128i>(from + kLanes * i)), c);
            store(to[c], _mm512_cvtne2ps_pbh((__m512)half[1], (__m512)half[0]));
        }
    }

    int64_t bits_, group_blocks_, left_;
    const uint8_t* codes_;
    const Grid* grid_;
};

// Round the copied rows of tile t to 8 bits in spans of so many runs, and back: the same span of all rows at a time.
inline void round_tile(const TiledRows& x, int64_t t, int64_t span) {
    for (int64_t begin = 0; begin < x.runs(); begin += span) {
        int64_t end = std::min(begin + span, x.runs());
        I32x16 magnitudes[kLanes]{};
        for (int64_t run = begin; run < end; run++)
            for (int64_t r = 0; r < x.tile_rows(); r++) {
                // Pairs of numbers. Those in the lower half are moved up, where the bits of their neighbour do not count.
                I32x16 pairs = load<I32x16>(x.tile(t, run) + r * kRunDepths);
                magnitudes[r] = max(max(pairs & 0x7fff0000, pairs << 16 & 0x7fff0000), magnitudes[r]);
            }
        SpanGrids grids(highest_each(magnitudes));
        for (int64_t run = begin; run < end; run++)
            for (int64_t r = 0; r < x.tile_rows(); r++) {
                bf16* at = x.tile(t, run) + r * kRunDepths;
                F32x16 low = grids.rounded(load_wide(at), r), high = grids.rounded(load_wide(at + kLanes), r);
                store(at, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
            }
    }
}

// Weights whose panels are widened for the first rows, and stay in the second cache for the others.
class GroupedPanels {
public:
    GroupedPanels(const Grouped& w, int64_t columns, int64_t depth)
        : w_(w), panels_(num_panels(columns)), blocks_(num_blocks(depth)) {}

    // See `PlainPanels`. Inputs are rounded to 8 bits and back.
    void prepare(const TiledRows& x, int64_t t) const { round_tile(x, t, w_.input_span(kBlock * blocks_)); }

    // See `PlainPanels`.
    bool multiply(const TiledRows& x, int64_t t, Runs runs, int64_t p, int64_t idx, TileSums* sums) const {
        static thread_local std::vector<F32x16> memory;
        size_t size = (idx + 1) * blocks_ * kRunSize * sizeof(bf16) / sizeof(F32x16);
        if (memory.size() < size) memory.resize(size);
        bf16* panel = (bf16*)memory.data() + idx * blocks_ * kRunSize;
        if (t == 0)
            for (int64_t half = 0; half < 2 && 2 * p + half < panels_; half++)
                widen(2 * p + half, runs.begin, runs.end, panel + half * 2 * kLanes);
        asm volatile("" ::: "memory");  // tiles are loaded behind the compiler's back
        return add_runs(x, t, runs, PanelInMemory{panel}, sums);
    }

private:
    void widen(int64_t p, int64_t run, int64_t end, bf16* panel) const {
        CodeStream stream(w_, blocks_, p, run, end);
        alignas(64) WideBlock block;
        for (; run < end; run++) {
            stream.next(block);
            I32x16 pairs[kLanes];
            for (int i = 0; i < kLanes; i++) pairs[i] = load<I32x16>(block[i]);
            transpose(pairs);
            for (int i = 0; i < kLanes; i++) store(panel + run * kRunSize + i * 2 * kPanel, pairs[i]);
        }
    }

    const Grouped& w_;
    int64_t panels_, blocks_;
};

// Most rows for which weights are the left operand: [16 columns] x [rows], which takes no rearrangement of the weights.
constexpr int64_t kFewRows = 2 * kTiledRows;

// Copied rows of a tile as a right operand: [run][16 pairs of depths][rows], in place.
inline void turn_tile(const TiledRows& x, int64_t t) {
    int64_t rows = x.tile_rows();
    if (rows == 1) return;  // is the same
    for (int64_t run = 0; run < x.runs(); run++) {
        I32x16 pairs[kLanes]{};
        int32_t* at = (int32_t*)x.tile(t, run);
        for (int64_t r = 0; r < rows; r++) pairs[r] = load<I32x16>(at + r * kLanes);
        transpose(pairs);
        for (int i = 0; i < kLanes; i++) _mm512_mask_storeu_epi32(at + i * rows, (1u << rows) - 1, (__m512i)pairs[i]);
    }
}

// Panel p of the product with one or two turned tiles of rows: sums [tile][16 columns][rows], a line for each column.
template <int kTiles>
inline void multiply_few(const TiledRows& x, const Grouped& w, int64_t p, float (*sums)[kLanes][kLanes]) {
    constexpr int kStride = kLanes * sizeof(float), kBlockStride = kBlock * sizeof(bf16);
    int64_t row_bytes = x.tile_rows() * sizeof(float);
    alignas(64) WideBlock ring[2];  // a block is widened while tiles multiply the one before
    CodeStream stream(w, x.runs(), p, 0, x.runs());
    stream.next(ring[0]);
    _tile_zero(0);
    if (kTiles == 2) _tile_zero(1);
    for (int64_t run = 0; run < x.runs(); run++) {
        if (run + 1 < x.runs()) stream.next(ring[(run + 1) % 2]);
        asm volatile("" ::: "memory");  // tiles are loaded behind the compiler's back
        _tile_loadd(4, ring[run % 2], kBlockStride);
        _tile_loadd(6, x.tile(0, run), row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (kTiles == 2) _tile_loadd(7, x.tile(1, run), row_bytes);
        if (kTiles == 2) _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], kStride);
    if (kTiles == 2) _tile_stored(1, sums[1], kStride);
    asm volatile("" ::: "memory");
}

// The panels [panel, end) of the product with few rows, copied, rounded and turned.
template <typename Y>
void multiply_few_panels(
    const TiledRows& x, const Grouped& w, const bf16* bias, Y* y, int64_t columns, int64_t panel, int64_t end) {
    alignas(64) float sums[2][kLanes][kLanes];
    for (; panel < end; panel++) {
        x.tiles() == 2 ? multiply_few<2>(x, w, panel, sums) : multiply_few<1>(x, w, panel, sums);
        for (int64_t t = 0; t < x.tiles(); t++) {
            I32x16 lines[kLanes];
            for (int c = 0; c < kLanes; c++) lines[c] = load<I32x16>(sums[t][c]);
            transpose(lines);
            Y* row = y + t * x.tile_rows() * columns;
            for (int64_t r = 0; r < x.rows_of(t); r++, row += columns)
                store_columns((F32x16)lines[r], bias, row, columns, panel * kLanes);
        }
    }
}

// See `tiled_linear`.
template <typename Y>
void tiled_grouped_linear(
    const bf16* x, const Grouped& w, const bf16* bias, Y* y, int64_t rows, int64_t columns, int64_t depth) {
    GroupedPanels weight(w, columns, depth);
    if (rows > kFewRows) return tiled_linear(x, weight, bias, y, rows, columns, depth);
    with_tiled_rows(x, rows, depth, [&](const TiledRows& tiled, int64_t t) {
        weight.prepare(tiled, t);
        turn_tile(tiled, t);
    }, [&](const TiledRows& tiled, int64_t thread, int64_t threads) {
        Tiles registers(kLanes, int(tiled.tile_rows()));
        int64_t panels = num_panels(columns);
        multiply_few_panels(tiled, w, bias, y, columns, thread * panels / threads, (thread + 1) * panels / threads);
    });
}

#endif

}  // namespace kvrelay
