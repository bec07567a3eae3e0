// Activations in 8 bits, as the products with grouped weights take them.
//
// A row is rounded in blocks of 32 inputs, each with its own scale (the scheme of llama.cpp's Q8_0), so that a block's
// part of a product is one sum of integers: exact, in whatever order it is added up.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace kvrelay {

constexpr int kBlock = 32;          // inputs that share a scale
constexpr int kQuads = kBlock / 4;  // an instruction multiplies and adds up four inputs
constexpr float kLargestCode = 127;

inline int64_t num_blocks(int64_t depth) { return (depth + kBlock - 1) / kBlock; }

// Rows in tiles of at most kMaxRows. Rows alternate within a tile, so that a kernel reads all of them through one
// pointer: of a tile of n rows, block b of row r has quads[(b * kQuads + q) * n + r] and scales[b * n + r].
struct RoundedTile {
    int64_t rows;
    int32_t* quads;   // four codes each
    float* scales;    // a value is scale * code
    float* code_sums;
};

class RoundedRows {
public:
    // `memory` holds the rows and may be reused when they are not needed any more.
    RoundedRows(int64_t rows, int64_t depth, std::vector<int32_t>& memory)
        : rows_(rows), depth_(depth), blocks_(num_blocks(depth)), tile_rows_(rows_per_pass(rows)) {
        size_t size = size_t(rows * blocks_);
        if (memory.size() < size * (kQuads + 2)) memory.resize(size * (kQuads + 2));
        quads_ = memory.data();
        scales_ = (float*)(quads_ + size * kQuads);
        code_sums_ = scales_ + size;
    }

    int64_t rows() const { return rows_; }
    int64_t blocks() const { return blocks_; }
    int64_t tile_rows() const { return tile_rows_; }

    // The tile that begins at `row`, a multiple of tile_rows().
    RoundedTile tile(int64_t row) const {
        int64_t at = row * blocks_;
        return {std::min(rows_ - row, tile_rows_), quads_ + at * kQuads, scales_ + at, code_sums_ + at};
    }

    // Fill in one row. Rows may be filled by several threads.
    template <typename T>
    void round(const T* x, int64_t row) const {
        int64_t in_tile = row % tile_rows_;
        RoundedTile to = tile(row - in_tile);
        for (int64_t b = 0; b < blocks_; b++, x += kBlock) {
            int64_t left = depth_ - b * kBlock;
            F32x16 low, high;
            if (left >= kBlock) {
                low = load_wide(x), high = load_wide(x + kLanes);
            } else {
                low = load_some(x, std::min<int64_t>(left, kLanes));
                high = load_some(x + kLanes, std::max<int64_t>(left - kLanes, 0));
            }
            int64_t at = b * to.rows + in_tile;
            int32_t* quads = to.quads + b * kQuads * to.rows + in_tile;
            round_block(low, high, quads, to.rows, to.scales + at, to.code_sums + at);
        }
    }

private:
    static void round_block(
        F32x16 low, F32x16 high, int32_t* quads, int64_t stride, float* scale, float* code_sum) {
        I32x16 no_sign = 0x7fffffff - I32x16{};
        float largest = highest(max((F32x16)((I32x16)low & no_sign), (F32x16)((I32x16)high & no_sign)));
        float inverse = largest > 0 ? kLargestCode / largest : 0;
        // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits.
        I32x16 low_codes = (I32x16)(low * inverse + 12582912.0f) - 0x4b400000;
        I32x16 high_codes = (I32x16)(high * inverse + 12582912.0f) - 0x4b400000;
        I8x16 codes[2] = {__builtin_convertvector(low_codes, I8x16), __builtin_convertvector(high_codes, I8x16)};
        int32_t words[kQuads];
        std::memcpy(words, codes, sizeof(words));
        for (int q = 0; q < kQuads; q++) quads[q * stride] = words[q];
        // Codes cannot show infinity or NaN: the scale does.
        *scale = largest / kLargestCode + 0 * sum(low + high);
        *code_sum = sum(__builtin_convertvector(low_codes + high_codes, F32x16));
    }

    int64_t rows_, depth_, blocks_, tile_rows_;
    int32_t* quads_;
    float *scales_, *code_sums_;
};

}  // namespace kvrelay
