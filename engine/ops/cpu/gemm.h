// Matrix products with one packed operand: C [rows, columns] = A [rows, depth] * B, for weights and for attention.
//
// B is packed into panels of 32 columns, which a product reads from beginning to end as one stream:
//     panel p, step k: [32 columns of p] x [kPack consecutive depths of step k]
// with kPack = 2 for bfloat16, whose products are summed in pairs by one instruction, and 1 for float32. Columns and
// depths beyond the matrix are zero. A panel has whole runs of kRun steps, which are what a tile register takes.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

namespace kvrelay {

constexpr int kPanel = 2 * kLanes;  // columns of a panel
// Rows at a time: 24 sums in 32 registers, 12 in 16.
constexpr int kMaxRows = kRegisterBytes == 64 ? 12 : 3;

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

// The depths of one step of a row, in every lane. `add_product` multiplies them with those of one column in each lane.
inline Register depths(const float* a) { return splat<Register>(*a); }
inline Register depths(const bf16* a) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (Register)splat<IntRegister>(pair);
}
template <typename T>
inline Register add_product(Register sum, Register row, Register columns) {
    if constexpr (std::is_same_v<T, float>) return multiply_add(row, columns, sum);
#if defined(__AVX512BF16__)
    else return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)columns);
#endif
    auto even = [](Register pairs) { return (Register)((IntRegister)pairs << 16); };
    auto odd = [](Register pairs) { return (Register)((IntRegister)pairs & int32_t(0xffff0000)); };
    return multiply_add(odd(row), odd(columns), multiply_add(even(row), even(columns), sum));
}

// kRows rows of A times one panel, the columns of which begin at `left` and `right`, sixteen each, and have their next step
// kWidth columns further; sums [kRows][2] are added to. A's rows are readable up to the padded depth. The panel comes from
// memory, or from the first cache.
enum class From { kMemory, kCache };
// Whether products are added one after the other to what the sums were before, or each segment's own sum of them is.
enum class Begin { kWithSums, kAnew };
template <int kRows, From from, Begin begin, int kWidth, typename T>
KVRELAY_ONCE void multiply_columns(const T* a, int64_t a_stride, const T* left, const T* right, int64_t steps,
                                   F32x16 (*sums)[2], int64_t segments) {
    constexpr int pack = Format<T>::kPack, lanes = num_lanes<Register>, width = kPanel / lanes;
    for (; segments > 0; segments--) {  // of `steps` each, one behind the other
        Register acc[kRows][width];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < width; v++)
                acc[r][v] = begin == Begin::kAnew ? Register{} : load<Register>((const float*)sums[r] + v * lanes);
        for (int64_t k = 0; k < steps; k++, a += pack, left += pack * kWidth, right += pack * kWidth) {
            if constexpr (from == From::kMemory) {
                __builtin_prefetch(left + kPrefetchSteps * pack * kWidth);
                __builtin_prefetch((kWidth == kPanel ? left + pack * kLanes : right) + kPrefetchSteps * pack * kWidth);
            }
            auto columns = [&](int v) {
                bool is_left = kWidth == kPanel || v < width / 2;  // with one address, products with weights are faster
                return load<Register>(is_left ? left + v * lanes * pack : right + (v - width / 2) * lanes * pack);
            };
            if constexpr (kRegisterBytes == 64) {
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++)
                    for (int v = 0; v < width; v++)
                        acc[r][v] = add_product<T>(acc[r][v], depths(a + r * a_stride), columns(v));
            } else {
                Register rows[kRows];
                for (int r = 0; r < kRows; r++) rows[r] = depths(a + r * a_stride);
                for (int v = 0; v < width; v++) {
                    Register loaded = in_register(columns(v));
                    for (int r = 0; r < kRows; r++) acc[r][v] = add_product<T>(acc[r][v], rows[r], loaded);
                }
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < width; v++) {
                float* to = (float*)sums[r] + v * lanes;
                store(to, begin == Begin::kAnew ? load<Register>(to) + acc[r][v] : acc[r][v]);
            }
    }
}

// Call use(count) with a count in 1 to `most` that is known only at run time, as a constant.
template <int most, typename Use>
inline void with_count(int count, Use use) {
    if constexpr (most > 1)
        if (count < most) return with_count<most - 1>(count, use);
    use(std::integral_constant<int, most>());
}

// The same for a row count known only at run time.
template <From from = From::kMemory, Begin begin = Begin::kWithSums, typename T>
inline void multiply_panel(int rows, const T* a, int64_t a_stride, const T* panel, int64_t steps, F32x16 (*sums)[2],
                           int64_t segments = 1) {
    with_count<kMaxRows>(rows, [&](auto count) {
        const T* right = panel + Format<T>::kPack * kLanes;
        multiply_columns<count, from, begin, kPanel>(a, a_stride, panel, right, steps, sums, segments);
    });
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

// A product's depth in equal segments, each of which is added up by itself, in float32; then the segments' sums are, from
// first to last. So processes that have some segments each get the bits of one that has all (ranks.h).
struct Segments {
    int64_t count = 1;
    bool are_apart = false;  // whether each segment's sums go to a y of their own, [count, rows, columns], without bias
};

// Add a segment's sums of some rows to those of the segments before, and let the sums begin anew.
inline void add_sums(F32x16 (*sums)[2], int64_t rows, F32x16 (*totals)[2]) {
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) totals[r][half] += sums[r][half], sums[r][half] = F32x16{};
}

// Where registers are few, panels are read many times: chunks of them, as float32, stay in the first cache. Where there
// is no product of bfloat16 this also saves widening a number for each pass of rows. Sums are added up in the same order.
constexpr bool kHasChunks = kRegisterBytes < 64;
constexpr int64_t kChunkDepths = 128;

// `count` depths of a panel as float32, which may be written to `to`.
inline const float* widen_panel(const float* panel, int64_t, float*) { return panel; }
inline const float* widen_panel(const bf16* panel, int64_t count, float* to) {
    for (int64_t k = 0; k < count; k += 2)
        for (int64_t c = 0; c < kPanel; c += kLanes) {
            I32x16 pairs = load<I32x16>(panel + k * kPanel + 2 * c);
            store(to + k * kPanel + c, as<float>(pairs << 16));
            store(to + (k + 1) * kPanel + c, as<float>(pairs & int32_t(0xffff0000)));
        }
    return to;
}

// y [rows, columns] = x [rows, depth] * packed (+ bias), chunk by chunk.
template <typename T, typename Y>
void linear_in_chunks(const T* x, const T* packed, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth,
                      Segments segments) {
    constexpr bool is_float = std::is_same_v<T, float>;
    static thread_local std::vector<float> memory;  // of the rows as float32
    int64_t panels = (columns + kPanel - 1) / kPanel, size = panel_size<T>(depth), step = rows_per_pass(rows);
    int64_t parts = segments.count, length = depth / parts;
    if (!is_float && int64_t(memory.size()) < rows * depth) memory.resize(rows * depth);
    float* wide = memory.data();
#pragma omp parallel
    {
        const float* from = nullptr;
        if constexpr (is_float) {
            from = x;
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t k = 0; k < depth; k++) wide[row * depth + k] = to_float(x[row * depth + k]);
            from = wide;
        }
        static thread_local std::vector<float> chunk(is_float ? 0 : kChunkDepths * kPanel);
        static thread_local std::vector<F32x16> sums;
        if (int64_t(sums.size()) < 4 * rows) sums.resize(4 * rows);
        auto sums_of = [&](int64_t row) { return (F32x16(*)[2])(sums.data() + 2 * row); };
        auto totals_of = [&](int64_t row) { return sums_of(rows + row); };
        auto store_all = [&](F32x16(*from)[2], const T* bias, Y* to, int64_t p) {
            for (int64_t row = 0; row < rows; row++) store_sums(from[row], bias, to + row * columns, columns, p * kPanel);
        };
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            std::fill(sums.begin(), sums.begin() + 4 * rows, F32x16{});
            for (int64_t k = 0, s = 0; s < parts; s++) {
                for (int64_t end = (s + 1) * length; k < end;) {
                    int64_t count = std::min(kChunkDepths, end - k);
                    const float* panel = widen_panel(packed + p * size + k * kPanel, count, chunk.data());
                    for (int64_t row = 0; row < rows; row += step)
                        multiply_panel<From::kCache>(
                            int(std::min(step, rows - row)), from + row * depth + k, depth, panel, count, sums_of(row));
                    k += count;
                }
                if (segments.are_apart) store_all(sums_of(0), (const T*)nullptr, y + s * rows * columns, p);
                if (parts > 1) add_sums(sums_of(0), rows, totals_of(0));
            }
            if (!segments.are_apart) store_all(parts > 1 ? totals_of(0) : sums_of(0), bias, y, p);
        }
    }
}

// y [rows, columns] = x [rows, depth] * packed (+ bias). Both sides' rows are contiguous; bfloat16 has an even depth, in
// each segment, too. Y is T or wider. All threads.
template <typename T, typename Y>
void linear(const T* x, const T* packed, const T* bias, Y* y, int64_t rows, int64_t columns, int64_t depth,
            Segments segments = {}) {
    if constexpr (kHasChunks)
        if (rows > kMaxRows) return linear_in_chunks(x, packed, bias, y, rows, columns, depth, segments);
    int64_t panels = (columns + kPanel - 1) / kPanel, length = depth / segments.count, size = panel_size<T>(depth);
    int64_t steps = num_steps<T>(length), apart = segments.are_apart ? segments.count : 1;
    int64_t step = rows_per_pass(rows);
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int64_t column = p * kPanel;
        for (int64_t row = 0; row < rows; row += step) {
            int count = int(rows - row < step ? rows - row : step);
            for (int64_t s = 0; s < apart; s++) {
                F32x16 sums[kMaxRows][2] = {};
                multiply_panel<From::kMemory, Begin::kAnew>(count, x + row * depth + s * length, depth,
                    packed + p * size + s * length * kPanel, steps, sums, segments.count / apart);
                for (int r = 0; r < count; r++)
                    store_sums(sums[r], bias, y + (s * rows + row + r) * columns, columns, column);
            }
        }
    }
}

}  // namespace kvrelay
