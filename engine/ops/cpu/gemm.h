// Matrix products with one packed operand: C [rows, columns] = A [rows, depth] * B, for weights and for attention.
//
// B is packed into panels of 32 columns, which a product reads from beginning to end as one stream:
//     panel p, step k: [32 columns of p] x [kPack consecutive depths of step k]
// with kPack = 2 for bfloat16, whose products are summed in pairs by one instruction, and 1 for float32. Columns and
// depths beyond the matrix are zero. A panel has whole runs of kRun steps, which are what a tile register takes.
#pragma once
#include "simd.h"

namespace kvrelay {

constexpr int kPanel = 2 * kLanes;  // columns of a panel
constexpr int kMaxRows = 12;        // rows at a time: 24 accumulators of the 32 registers

// How far ahead weights are asked from memory; the next panel follows at once. With 16 steps, 24 rows took a fifth longer.
constexpr int kPrefetchSteps = 64;

template <typename T>
struct Format;
template <>
struct Format<float> {
    static constexpr int kPack = 1, kRun = 1;
};
template <>
struct Format<bf16> {
    static constexpr int kPack = 2, kRun = 16;
};

constexpr int kRunDepths = Format<bf16>::kRun * Format<bf16>::kPack;  // what a tile register takes of a row

template <typename T>
inline int64_t num_steps(int64_t depth) {
    return (depth + Format<T>::kPack - 1) / Format<T>::kPack;
}

template <typename T>
inline int64_t num_runs(int64_t depth) {
    return (num_steps<T>(depth) + Format<T>::kRun - 1) / Format<T>::kRun;
}

// Elements of one packed panel.
template <typename T>
inline int64_t panel_size(int64_t depth) {
    return num_runs<T>(depth) * Format<T>::kRun * Format<T>::kPack * kPanel;
}

inline F32x16 multiply_add(F32x16 sum, const float* a, const float* b) { return sum + *a * load<F32x16>(b); }

// a: two consecutive depths of one row; b: sixteen columns, two depths each.
inline F32x16 multiply_add(F32x16 sum, const bf16* a, const bf16* b) {
    uint32_t pair;
    std::memcpy(&pair, a, 4);
#if defined(__AVX512BF16__)
    return (F32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), load<__m512bh>(b));
#else
    I32x16 columns = load<I32x16>(b);
    sum += to_float(bf16{uint16_t(pair)}) * (F32x16)(columns << 16);
    return sum + to_float(bf16{uint16_t(pair >> 16)}) * (F32x16)(columns & int32_t(0xffff0000));
#endif
}

// kRows rows of A times one panel; sums [kRows][2] are added to. A's rows are readable up to the padded depth.
template <int kRows, typename T>
inline void multiply_panel(const T* a, int64_t a_stride, const T* panel, int64_t steps, F32x16 (*sums)[2]) {
    constexpr int pack = Format<T>::kPack;
    F32x16 acc[kRows][2];
    for (int r = 0; r < kRows; r++) acc[r][0] = sums[r][0], acc[r][1] = sums[r][1];
    for (int64_t k = 0; k < steps; k++, panel += pack * kPanel) {
        __builtin_prefetch(panel + kPrefetchSteps * pack * kPanel);
        __builtin_prefetch(panel + kPrefetchSteps * pack * kPanel + pack * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
            acc[r][0] = multiply_add(acc[r][0], a + r * a_stride + k * pack, panel);
            acc[r][1] = multiply_add(acc[r][1], a + r * a_stride + k * pack, panel + pack * kLanes);
        }
    }
    for (int r = 0; r < kRows; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
}

// The same for a row count known only at run time.
template <typename T>
inline void multiply_panel(int rows, const T* a, int64_t a_stride, const T* panel, int64_t steps, F32x16 (*sums)[2]) {
    switch (rows) {
        case 1: return multiply_panel<1>(a, a_stride, panel, steps, sums);
        case 2: return multiply_panel<2>(a, a_stride, panel, steps, sums);
        case 3: return multiply_panel<3>(a, a_stride, panel, steps, sums);
        case 4: return multiply_panel<4>(a, a_stride, panel, steps, sums);
        case 5: return multiply_panel<5>(a, a_stride, panel, steps, sums);
        case 6: return multiply_panel<6>(a, a_stride, panel, steps, sums);
        case 7: return multiply_panel<7>(a, a_stride, panel, steps, sums);
        case 8: return multiply_panel<8>(a, a_stride, panel, steps, sums);
        case 9: return multiply_panel<9>(a, a_stride, panel, steps, sums);
        case 10: return multiply_panel<10>(a, a_stride, panel, steps, sums);
        case 11: return multiply_panel<11>(a, a_stride, panel, steps, sums);
        default: return multiply_panel<12>(a, a_stride, panel, steps, sums);
    }
}

// Rows per pass when `rows` are split evenly into passes of at most `most`.
inline int64_t rows_per_pass(int64_t rows, int64_t most = kMaxRows) {
    if (rows <= most) return most;
    int64_t passes = (rows + most - 1) / most;
    return (rows + passes - 1) / passes;
}

// Pack panel p of B = W^T, of a weight W [columns, depth] (row-major).
template <typename T>
inline void pack_transposed(const T* w, int64_t w_stride, int64_t columns, int64_t depth, T* panel, int64_t p) {
    constexpr int pack = Format<T>::kPack;
    int64_t steps = num_runs<T>(depth) * Format<T>::kRun;
    for (int64_t k = 0; k < steps; k++)
        for (int64_t c = 0; c < kPanel; c++)
            for (int i = 0; i < pack; i++) {
                int64_t column = p * kPanel + c, at = k * pack + i;
                panel[(k * kPanel + c) * pack + i] = column < columns && at < depth ? w[column * w_stride + at] : T{};
            }
}

// A row's sums of sixteen columns from `at` on (+ bias) into its row of y [columns].
template <typename T, typename Y>
inline void store_columns(F32x16 sums, const T* bias, Y* y, int64_t columns, int64_t at) {
    int64_t left = columns - at;
    if (left >= kLanes) {
        store_narrow(y + at, bias ? sums + load_wide(bias + at) : sums);
    } else if (left > 0) {
        store_some(y + at, bias ? sums + load_some(bias + at, left) : sums, left);
    }
}

// The same of the panel that begins at `column`.
template <typename T, typename Y>
inline void store_sums(const F32x16* sums, const T* bias, Y* y, int64_t columns, int64_t column) {
    for (int half = 0; half < 2; half++) store_columns(sums[half], bias, y, columns, column + half * kLanes);
}

// y [rows, columns] = x [rows, depth] * packed (+ bias). Both sides' rows are contiguous; Y is T or wider. All threads.
template <typename T, typename Y>
void linear(const T* x, const T* packed, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth) {
    int64_t panels = (columns + kPanel - 1) / kPanel, steps = num_steps<T>(depth), size = panel_size<T>(depth);
    int64_t step = rows_per_pass(rows);
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int64_t column = p * kPanel;
        for (int64_t row = 0; row < rows; row += step) {
            int count = int(rows - row < step ? rows - row : step);
            F32x16 sums[kMaxRows][2] = {};
            multiply_panel(count, x + row * depth, depth, packed + p * size, steps, sums);
            for (int r = 0; r < count; r++)
                store_sums(sums[r], bias, y + (row + r) * columns, columns, column);
        }
    }
}

}  // namespace kvrelay
