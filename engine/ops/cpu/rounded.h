// Activations in 8 bits, as the products with grouped weights take them.
//
// A row is rounded in spans of one or four blocks of 32 inputs, each with its own scale (one: the scheme of llama.cpp's
// Q8_0), so that a span's part of a product is one sum of integers: exact, in whatever order it is added up.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace kvrelay {

constexpr int kBlock = 32;          // inputs whose codes are together
constexpr int kLongSpan = 4;        // blocks that share a scale where weights of all inputs do
constexpr int kQuads = kBlock / 4;  // an instruction multiplies and adds up four inputs
constexpr float kLargestCode = 127;

inline int64_t num_blocks(int64_t depth) { return (depth + kBlock - 1) / kBlock; }

// Rows in tiles of n. Span s of row r has scales[s * n + r] and code_sums[s * n + r]. For vectors, rows alternate, so that
// a kernel reads all of them through one pointer: quads[(block * kQuads + q) * n + r]. For tile registers a row's codes
// of `together` quads are side by side: of run k, quads[(k * n + r) * together + q].
struct RoundedTile {
    int64_t rows;
    int32_t* quads;   // four codes each
    float* scales;    // a value is scale * code
    float* code_sums;
};

// How rows are rounded.
struct Rounding {
    int64_t span;      // blocks that share a scale: 1 or kLongSpan
    int64_t together;  // quads of a row side by side: 1, or for tile registers 8 or 16
    int64_t most;      // rows of a tile
};

class RoundedRows {
public:
    // `memory` holds the rows and may be reused when they are not needed any more.
    RoundedRows(int64_t rows, int64_t depth, Rounding how, std::vector<int32_t>& memory)
        : rows_(rows), depth_(depth), spans_((num_blocks(depth) + how.span - 1) / how.span), how_(how),
          tile_rows_(rows_per_pass(rows, how.most)) {
        size_t codes = size_t(rows * spans_ * how.span) * kQuads, grids = size_t(rows * spans_);
        size_t whole = codes + 2 * grids + how.most;  // what a kernel of `most` rows reads beyond a smaller tile
        if (memory.size() < whole) memory.resize(whole);
        quads_ = memory.data();
        scales_ = (float*)(quads_ + codes);
        code_sums_ = scales_ + grids;
    }

    int64_t rows() const { return rows_; }
    int64_t blocks() const { return num_blocks(depth_); }
    int64_t spans() const { return spans_; }
    int64_t tile_rows() const { return tile_rows_; }
    bool is_for_tiles() const { return how_.together > 1; }

    // The tile that begins at `row`, a multiple of tile_rows().
    RoundedTile tile(int64_t row) const {
        int64_t at = row * spans_;
        return {std::min(rows_ - row, tile_rows_), quads_ + at * how_.span * kQuads, scales_ + at, code_sums_ + at};
    }

    // Fill in one row. Rows may be filled by several threads.
    template <typename T>
    void round(const T* x, int64_t row) const {
        int64_t in_tile = row % tile_rows_;
        RoundedTile to = tile(row - in_tile);
        for (int64_t s = 0; s < spans_; s++) {
            F32x16 values[2 * kLongSpan];
            int64_t parts = 2 * how_.span;
            for (int64_t i = 0; i < parts; i++) {
                int64_t at = (s * parts + i) * kLanes, left = std::min<int64_t>(depth_ - at, kLanes);
                values[i] = left == kLanes ? load_wide(x + at) : load_some(x + at, std::max<int64_t>(left, 0));
            }
            round_span(values, to, s, in_tile);
        }
    }

private:
    void round_span(const F32x16* values, const RoundedTile& to, int64_t s, int64_t row) const {
        I32x16 no_sign = 0x7fffffff - I32x16{}, code_sum{};
        F32x16 magnitude{}, value_sum{};
        for (int64_t i = 0; i < 2 * how_.span; i++) {
            magnitude = max((F32x16)((I32x16)values[i] & no_sign), magnitude);
            value_sum += values[i];
        }
        float largest = highest(magnitude), inverse = largest > 0 ? kLargestCode / largest : 0;
        for (int64_t i = 0; i < 2 * how_.span; i++) {
            // Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits.
            I32x16 codes = (I32x16)(values[i] * inverse + 12582912.0f) - 0x4b400000;
            code_sum += codes;
            I8x16 bytes = __builtin_convertvector(codes, I8x16);
            int32_t words[4];
            std::memcpy(words, &bytes, sizeof(words));
            int64_t quad = (2 * how_.span * s + i) * 4, run = quad / how_.together;
            int32_t* at = to.quads + (run * to.rows + row) * how_.together + quad % how_.together;
            for (int q = 0; q < 4; q++) at[how_.together > 1 ? q : q * to.rows] = words[q];
        }
        // Codes cannot show infinity or NaN: the scale does.
        to.scales[s * to.rows + row] = largest / kLargestCode + 0 * sum(value_sum);
        to.code_sums[s * to.rows + row] = sum(__builtin_convertvector(code_sum, F32x16));
    }

    int64_t rows_, depth_, spans_;
    Rounding how_;
    int64_t tile_rows_;
    int32_t* quads_;
    float *scales_, *code_sums_;
};

}  // namespace kvrelay
