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
constexpr int kMaxTileRows = kRegisterBytes == 64 ? 12 : 4;  // rows that are multiplied together
constexpr int kLongSpan = 4;        // blocks that share a scale where weights of all inputs do
constexpr int kQuads = kBlock / 4;  // an instruction multiplies and adds up four inputs
constexpr float kLargestCode = 127, kRounder = 0x1.8p23f, kSmallest = 0x1p-120f;

inline int64_t num_blocks(int64_t depth) { return (depth + kBlock - 1) / kBlock; }

// Grids of up to sixteen spans: a value is scale * code.
struct SpanGrids {
    // Of the bits of each span's largest magnitude. Magnitudes as integers have the order of their values, with infinity
    // and NaN above all. Codes cannot show these: the scale does. Next to nothing is 0: its inverse would be infinite.
    explicit SpanGrids(I32x16 magnitudes) {
        F32x16 largest = as<float>(magnitudes);
        store(scale, largest / kLargestCode);
        store(inverse, select(largest > kSmallest, kLargestCode / largest, F32x16{}));
    }

    // Adding kRounder, 1.5 * 2^23, rounds to the nearest integer, which then stands in the low bits.
    I32x16 codes(F32x16 values, int64_t span) const {
        return as<int32_t>(on_grid(values, span)) - 0x4b400000;
    }

    // The values on the grid.
    F32x16 rounded(F32x16 values, int64_t span) const {
        return (on_grid(values, span) - kRounder) * scale[span];
    }

    F32x16 on_grid(F32x16 values, int64_t span) const {
        return multiply_add(values, splat(inverse[span]), splat(kRounder));
    }

    alignas(64) float scale[kLanes], inverse[kLanes];
};

inline I32x16 magnitude(F32x16 values) { return as<int32_t>(values) & 0x7fffffff; }

// Rows in tiles of n, which alternate, so that a kernel reads all of them through one pointer:
// quads[(block * kQuads + q) * n + r]. Span s of row r has scales[s * n + r] and code_sums[s * n + r].
struct RoundedTile {
    int64_t rows;
    int32_t* quads;  // four codes each
    float* scales;
    float* code_sums;
};

class RoundedRows {
public:
    // A scale for each `span` blocks, 1 or kLongSpan. `memory` holds the rows and may be reused when they are not needed
    // any more.
    RoundedRows(int64_t rows, int64_t depth, int64_t span, std::vector<int32_t>& memory)
        : rows_(rows), depth_(depth), span_(span), spans_((num_blocks(depth) + span - 1) / span),
          tile_rows_(rows_per_pass(rows, kMaxTileRows)) {
        size_t codes = size_t(rows * spans_ * span) * kQuads, grids = size_t(rows * spans_);
        if (memory.size() < codes + 2 * grids) memory.resize(codes + 2 * grids);
        quads_ = memory.data();
        scales_ = (float*)(quads_ + codes);
        code_sums_ = scales_ + grids;
    }

    int64_t rows() const { return rows_; }
    int64_t blocks() const { return num_blocks(depth_); }
    int64_t tile_rows() const { return tile_rows_; }

    // The tile that begins at `row`, a multiple of tile_rows().
    RoundedTile tile(int64_t row) const {
        int64_t at = row * spans_;
        return {std::min(rows_ - row, tile_rows_), quads_ + at * span_ * kQuads, scales_ + at, code_sums_ + at};
    }

    // Fill in one row. Rows may be filled by several threads.
    template <typename T>
    void round(const T* x, int64_t row) const {
        int64_t in_tile = row % tile_rows_, parts = 2 * span_;
        RoundedTile to = tile(row - in_tile);
        auto values = [&](int64_t part) {
            int64_t left = std::min<int64_t>(depth_ - part * kLanes, kLanes);
            const T* from = x + part * kLanes;
            return left == kLanes ? load_wide(from) : load_some(from, std::max<int64_t>(left, 0));
        };
        for (int64_t first = 0; first < spans_; first += kLanes) {
            int64_t end = std::min<int64_t>(first + kLanes, spans_);
            I32x16 magnitudes[kLanes]{};
            for (int64_t s = first; s < end; s++)
                for (int64_t i = 0; i < parts; i++)
                    magnitudes[s - first] = max(magnitude(values(s * parts + i)), magnitudes[s - first]);
            SpanGrids grids(highest_each(magnitudes));
            for (int64_t s = first; s < end; s++) {
                I32x16 code_sum{};
                for (int64_t part = s * parts; part < (s + 1) * parts; part++) {
                    I32x16 codes = grids.codes(values(part), s - first);
                    code_sum += codes;
                    I8x16 bytes = convert<int8_t>(codes);
                    int32_t words[4];
                    std::memcpy(words, &bytes, sizeof(words));
                    int32_t* at = to.quads + part * 4 * to.rows + in_tile;
                    for (int q = 0; q < 4; q++) at[q * to.rows] = words[q];
                }
                to.scales[s * to.rows + in_tile] = grids.scale[s - first];
                to.code_sums[s * to.rows + in_tile] = float(sum(code_sum));
            }
        }
    }

private:
    int64_t rows_, depth_, span_, spans_, tile_rows_;
    int32_t* quads_;
    float *scales_, *code_sums_;
};

}  // namespace kvrelay
