// Norms and the gated activation, row by row, in float32.
#pragma once
#include <cmath>

#include "simd.h"

namespace kvrelay {

// Rows below this run on the calling thread: waking the others costs about two microseconds.
constexpr int64_t kMinParallelRows = 4;

// Write x / rms(x) * weight to `to`; `to` may be x.
template <typename T>
inline void norm_row(const T* x, const T* weight, T* to, int64_t size, float eps) {
    F32x16 squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        F32x16 v = load_wide(x + i);
        squares += v * v;
    }
    if (i < size) {
        F32x16 v = load_some(x + i, size - i);
        squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes)
        store_narrow(to + i, load_wide(x + i) * scale * load_wide(weight + i));
    if (i < size) store_some(to + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i), size - i);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* to, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * size, weight, to + row * size, size, eps);
}

// residual += x, then its norm. The sum is rounded to T before it is normalised, since that is what later layers see.
template <typename T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* to, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * size;
        T* stream = residual + row * size;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store_narrow(stream + i, load_wide(stream + i) + load_wide(from + i));
        if (i < size) store_some(stream + i, load_some(stream + i, size - i) + load_some(from + i, size - i), size - i);
        norm_row(stream, weight, to + row * size, size, eps);
    }
}

// x / (1 + e^-x), by a power of e that cannot overflow: of -|x|.
inline F32x16 silu(F32x16 x) {
    F32x16 power = exp2(select(x < 0.0f, x, -x) * 1.44269504f);
    return x * select(x < 0.0f, power, splat(1.0f)) / (power + 1.0f);
}

// to [rows, size] = silu(gate) * up, of gate_up [rows, 2 * size].
template <typename T>
void silu_mul(const T* gate_up, T* to, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* out = to + row * size;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store_narrow(out + i, silu(load_wide(gate + i)) * load_wide(up + i));
        if (i < size)
            store_some(out + i, silu(load_some(gate + i, size - i)) * load_some(up + i, size - i), size - i);
    }
}

}  // namespace kvrelay
