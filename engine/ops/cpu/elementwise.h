// Norms and the gated activation, row by row, in float32.
#pragma once
#include <cmath>

#include "simd.h"

namespace kvrelay {

// Rows below this run on the calling thread: waking the others costs about two microseconds.
constexpr int64_t kMinParallelRows = 4;

// Write x / rms(x) * weight to `to`; `to` may be x.
template <typename T>
inline void norm_row(const T* x, const float* weight, T* to, int64_t size, float eps) {
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
inline void scale_row(T* row, float factor, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store_narrow(row + i, load_wide(row + i) * factor);
    if (i < size) store_some(row + i, load_some(row + i, size - i) * factor, size - i);
}

template <typename T>
void scale_rows(T* x, float factor, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) scale_row(x + row * size, factor, size);
}

template <typename T>
void rms_norm(const T* x, const float* weight, T* to, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * size, weight, to + row * size, size, eps);
}

// residual += x, then its norm. The sum is rounded to T before it is normalised, since that is what later layers see.
template <typename T>
void add_rms_norm(const T* x, T* residual, const float* weight, T* to, int64_t rows, int64_t size, float eps) {
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

enum class Activation : int64_t { kSilu = 0, kGelu = 1, kRelu2 = 2 };

// x / (1 + e^-y), by a power of e that cannot overflow: of -|y|.
inline F32x16 times_logistic(F32x16 x, F32x16 y) {
    F32x16 power = exp2(select(y < 0.0f, y, -y) * 1.44269504f);
    return x * select(y < 0.0f, power, splat(1.0f)) / (power + 1.0f);
}

template <Activation activation>
inline F32x16 activate(F32x16 x) {
    if constexpr (activation == Activation::kSilu) return times_logistic(x, x);
    // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
    else return times_logistic(x, x * (x * x * 0.0713548163f + 1.59576912f));
}

// to [rows, size] = combine(gate, up), of gate_up [rows, 2 * size].
template <typename T, typename Combine>
void combine_halves(const T* gate_up, T* to, int64_t rows, int64_t size, Combine combine) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* out = to + row * size;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store_narrow(out + i, combine(load_wide(gate + i), load_wide(up + i)));
        if (i < size)
            store_some(out + i, combine(load_some(gate + i, size - i), load_some(up + i, size - i)), size - i);
    }
}

// activation(gate) * up
template <Activation activation, typename T>
void gate_mul(const T* gate_up, T* to, int64_t rows, int64_t size) {
    combine_halves(gate_up, to, rows, size, [](F32x16 gate, F32x16 up) { return activate<activation>(gate) * up; });
}

// Square of ReLU; NaN stays.
template <typename T>
void square_positive(const T* x, T* to, int64_t rows, int64_t size) {
    auto square = [](F32x16 v) { return select(v < 0.0f, F32x16{}, v * v); };
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * size;
        T* out = to + row * size;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store_narrow(out + i, square(load_wide(from + i)));
        if (i < size) store_some(out + i, square(load_some(from + i, size - i)), size - i);
    }
}

// Activation(gate) * up, of gate_up [rows, 2 * size]; of the square of ReLU, which has no gate, [rows, size].
template <typename T>
void gate_mul(Activation activation, const T* gate_up, T* to, int64_t rows, int64_t size) {
    switch (activation) {
        case Activation::kSilu: return gate_mul<Activation::kSilu>(gate_up, to, rows, size);
        case Activation::kGelu: return gate_mul<Activation::kGelu>(gate_up, to, rows, size);
        case Activation::kRelu2: return square_positive(gate_up, to, rows, size);
    }
}

// heads *= 1 / (1 + e^-gates), [rows, size] each; size is a multiple of sixteen.
template <typename T>
void gate_heads(T* heads, const T* gates, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += kLanes) {
            T* to = heads + row * size + i;
            store_narrow(to, times_logistic(load_wide(to), load_wide(gates + row * size + i)));
        }
}

// `ClampedGate` of engine/weights/experts.py.
struct ClampedGate {
    float steepness, limit;  // limit 0: there is no such gate
};

template <typename T>
void gate_mul(ClampedGate by, const T* gate_up, T* to, int64_t rows, int64_t size) {
    combine_halves(gate_up, to, rows, size, [by](F32x16 gate, F32x16 up) {
        F32x16 limit = splat(by.limit);
        gate = select(gate > by.limit, limit, gate);
        up = select(up > by.limit, limit, select(up < -by.limit, -limit, up));
        return (up + 1.0f) * times_logistic(gate, gate * by.steepness);
    });
}

}  // namespace kvrelay
