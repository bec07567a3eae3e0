// A projection: a matrix product with a weight in one of the kernels' layouts.
#pragma once
#include <type_traits>

#include "tiled_codes.h"

namespace kvrelay {

template <typename T>
struct Projection {
    const T* packed;  // or null: the weight is `grouped`
    const T* bias;    // or null
    int64_t columns, depth;
    Grouped grouped;

    // Y is T or wider.
    template <typename Y>
    void operator()(const T* x, Y* y, int64_t rows) const {
        if (rows == 0) return;
#if defined(KVRELAY_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (packed ? has_tiles() : grouped.in_tiles)
                return packed ? tiled_linear(x, PlainPanels(packed, depth), bias, y, rows, columns, depth)
                              : tiled_grouped_linear(x, grouped, bias, y, rows, columns, depth);
#endif
        if (!packed) return grouped_linear(x, grouped, bias, y, rows, columns, depth);
        linear(x, packed, bias, y, rows, columns, depth);
    }
};

}  // namespace kvrelay
