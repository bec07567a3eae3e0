// A projection: a matrix product with a weight in one of the kernels' layouts.
#pragma once
#include <type_traits>

#include "ranks.h"
#include "tiled_codes.h"

namespace kvrelay {

template <typename T>
struct Projection {
    const T* packed;  // or null: the weight is `grouped`
    const T* bias;    // or null
    int64_t columns, depth;
    Grouped grouped;
    int64_t num_segments;  // of the depth, here; 0 stands for 1
    Ranks* ranks;          // that have the segments before and behind these, or null

    Segments segments() const { return {std::max<int64_t>(num_segments, 1)}; }

    // y [rows, columns]; Y is T or wider.
    template <typename Y>
    void operator()(const T* x, Y* y, int64_t rows) const {
        if (!ranks) return multiply(x, bias, y, rows, segments());
        int64_t mine = segments().count, all = mine * ranks->size, step = ranks->rows_together(all * columns);
        for (int64_t row = 0; row < rows; row += step) {
            int64_t count = std::min(step, rows - row);
            float* parts = ranks->buffer();
            apart(x + row * depth, parts + ranks->rank * mine * count * columns, count);
            ranks->meet();
            add_segments(parts, all, bias, y + row * columns, count, columns);
        }
    }

    // The sums of each segment that is here, y [num_segments, rows, columns], without bias.
    void apart(const T* x, float* y, int64_t rows) const {
        multiply(x, nullptr, y, rows, {segments().count, true});
    }

private:
    template <typename Y>
    void multiply(const T* x, const T* added, Y* y, int64_t rows, Segments parts) const {
        if (rows == 0) return;
#if defined(KVRELAY_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (packed ? has_tiles() : grouped.in_tiles)
                return packed ? tiled_linear(x, PlainPanels(packed, depth), added, y, rows, columns, depth, parts)
                              : tiled_grouped_linear(x, grouped, added, y, rows, columns, depth);
#endif
        if (!packed) return grouped_linear(x, grouped, added, y, rows, columns, depth);
        linear(x, packed, added, y, rows, columns, depth, parts);
    }
};

// y [rows, columns], on ranks with a y, of the columns that each rank has: from columns * rank / size on. All threads.
template <typename T>
void gather_columns(const Projection<T>& projection, Ranks& ranks, const T* x, float* y, int64_t rows, int64_t columns) {
    int64_t step = std::max<int64_t>(1, std::min(rows, ranks.buffer_size / columns));
    auto begin = [&](int64_t rank) { return columns * rank / ranks.size; };
    for (int64_t row = 0; row < rows; row += step) {
        int64_t count = std::min(step, rows - row);
        float* parts = ranks.buffer();
        projection(x + row * projection.depth, parts + begin(ranks.rank) * count, count);
        ranks.meet();
        if (!y) continue;
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < count; r++)
            for (int64_t rank = 0; rank < ranks.size; rank++) {
                int64_t width = begin(rank + 1) - begin(rank);
                std::memcpy(y + (row + r) * columns + begin(rank), parts + begin(rank) * count + r * width,
                            width * sizeof(float));
            }
    }
}

}  // namespace kvrelay
