// A mixture of experts: each row goes through the few experts that its router prefers.
//
// An expert multiplies all its rows at once, and a row's results are added up in the order of the experts: a row's sum
// depends on this row alone, bit for bit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "projection.h"

namespace kvrelay {

template <typename T>
struct Experts {
    Projection<T> router;
    const Projection<T>*gate_up, *down;  // [num_experts]
    int64_t num_experts, num_chosen;
    int64_t has_normalised_weights;  // whether the weights of the chosen ones add up to 1
    int64_t has_shared;              // whether every row goes through the last expert, too
    ClampedGate clamped_gate;        // in place of silu
};

// Turn a row's logits into weights: their softmax, 0 where an expert is not chosen. Of equal ones the first is chosen.
inline void choose_experts(float* logits, int64_t count, int64_t num_chosen, bool has_normalised_weights) {
    static thread_local std::vector<float> powers;
    powers.resize(count);
    float highest = *std::max_element(logits, logits + count), total = 0, total_chosen = 0;
    for (int64_t e = 0; e < count; e++) total += powers[e] = std::exp(logits[e] - highest);
    std::fill_n(logits, count, 0.0f);
    for (int64_t n = 0; n < num_chosen; n++) {
        int64_t best = std::max_element(powers.begin(), powers.end()) - powers.begin();
        total_chosen += logits[best] = powers[best];
        powers[best] = -1;
    }
    float scale = 1.0f / (has_normalised_weights ? total_chosen : total);
    for (int64_t e = 0; e < count; e++) logits[e] *= scale;
}

// sums += weight * x
inline void add_weighted(const float* x, float weight, float* sums, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store_narrow(sums + i, load_wide(sums + i) + load_wide(x + i) * weight);
    if (i < size) store_some(sums + i, load_some(sums + i, size - i) + load_some(x + i, size - i) * weight, size - i);
}

// y [rows, size] of x [rows, size]; `gate_up` and `expanded` are scratch for all rows of an expert. All threads.
template <typename T>
void run_experts(const Experts<T>& experts, const T* x, T* y, int64_t rows, T* gate_up, T* expanded) {
    static thread_local std::vector<float> memory;  // weights, then the sums and an expert's results
    static thread_local std::vector<T> gathered;
    static thread_local std::vector<int64_t> found;
    int64_t count = experts.num_experts, last = count - 1, size = experts.router.depth;
    memory.resize(std::max<size_t>(memory.size(), rows * (count + 2 * size)));
    gathered.resize(std::max<size_t>(gathered.size(), rows * size));
    float *weights = memory.data(), *sums = weights + rows * count, *results = sums + rows * size;
    T* inputs = gathered.data();
    experts.router(x, weights, rows);
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        float* of_row = weights + row * count;
        choose_experts(of_row, count - experts.has_shared, experts.num_chosen, experts.has_normalised_weights);
        if (experts.has_shared) of_row[last] = 1.0f / (1.0f + std::exp(-of_row[last]));
        std::fill_n(sums + row * size, size, 0.0f);
    }
    for (int64_t e = 0; e < count; e++) {
        found.clear();
        for (int64_t row = 0; row < rows; row++)
            if (weights[row * count + e] != 0) found.push_back(row);
        if (found.empty()) continue;
        int64_t num_found = found.size();
        const int64_t* row_of = found.data();
#pragma omp parallel for schedule(static) if (num_found >= kMinParallelRows)
        for (int64_t i = 0; i < num_found; i++)
            std::memcpy((void*)(inputs + i * size), x + row_of[i] * size, size * sizeof(T));
        experts.gate_up[e](inputs, gate_up, num_found);
        if (experts.clamped_gate.limit > 0)
            gate_mul(experts.clamped_gate, gate_up, expanded, num_found, experts.down[e].depth);
        else gate_mul<Activation::kSilu>(gate_up, expanded, num_found, experts.down[e].depth);
        experts.down[e](expanded, results, num_found);
#pragma omp parallel for schedule(static) if (num_found >= kMinParallelRows)
        for (int64_t i = 0; i < num_found; i++)
            add_weighted(results + i * size, weights[row_of[i] * count + e], sums + row_of[i] * size, size);
    }
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i++) y[row * size + i] = from_float<T>(sums[row * size + i]);
}

}  // namespace kvrelay
