// A mixture of experts: each row goes through the few experts that its router prefers.
//
// An expert multiplies all its rows at once, and a row's results are added up in the order of the experts: a row's sum
// depends on this row alone, bit for bit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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
    int64_t has_sigmoid_scores;      // whether an expert's weight comes from its own logit alone
    int64_t has_weighted_inputs;     // whether weights multiply what goes into experts, not what comes out
    int64_t has_shared;              // whether every row goes through the last expert, too

    // Whether a row of the router weighs the shared expert, whose weight is otherwise 1.
    bool has_shared_gate() const { return router.columns == num_experts; }
    ClampedGate clamped_gate;        // in place of silu

    // Segments whose sums are kept apart: those of all experts, or one where experts differ, as some may have codes.
    int64_t num_segments() const {
        int64_t first = down[0].segments().count;
        for (int64_t e = 1; e < num_experts; e++)
            if (down[e].segments().count != first) return 1;
        return first;
    }
};

inline float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Make a row's weights of its logits: 0 where an expert is not chosen. Of equal ones the first is chosen. Overwrites the
// logits.
template <typename T>
void choose_experts(const Experts<T>& experts, float* logits, float* weights) {
    int64_t count = experts.num_experts - experts.has_shared;
    float highest = *std::max_element(logits, logits + count), total = 0, total_chosen = 0;
    for (int64_t e = 0; e < count; e++) total += std::exp(logits[e] - highest);
    std::fill_n(weights, count, 0.0f);
    for (int64_t n = 0; n < experts.num_chosen; n++) {
        int64_t best = std::max_element(logits, logits + count) - logits;
        float score = experts.has_sigmoid_scores ? logistic(logits[best]) : std::exp(logits[best] - highest);
        total_chosen += weights[best] = score;
        logits[best] = -std::numeric_limits<float>::infinity();
    }
    if (experts.has_normalised_weights || !experts.has_sigmoid_scores) {
        float scale = 1.0f / (experts.has_normalised_weights ? total_chosen : total);
        for (int64_t e = 0; e < count; e++) weights[e] *= scale;
    }
    if (experts.has_shared) weights[count] = experts.has_shared_gate() ? logistic(logits[count]) : 1.0f;
}

// Rows at a time: each segment of the experts' depth has sums of its own.
constexpr int64_t kExpertRows = 1024;

// sums += weight * x
inline void add_weighted(const float* x, float weight, float* sums, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store_narrow(sums + i, load_wide(sums + i) + load_wide(x + i) * weight);
    if (i < size) store_some(sums + i, load_some(sums + i, size - i) + load_some(x + i, size - i) * weight, size - i);
}

// y [rows, size] of x [rows, size], of at most kExpertRows rows.
template <typename T>
void run_expert_rows(const Experts<T>& experts, const T* x, T* y, int64_t rows, T* gate_up, T* expanded) {
    static thread_local std::vector<float> memory;  // logits, weights, then the sums and an expert's results
    static thread_local std::vector<T> gathered;
    static thread_local std::vector<int64_t> found;
    int64_t count = experts.num_experts, scored = experts.router.columns, size = experts.router.depth;
    int64_t segments = experts.num_segments();
    memory.resize(std::max<size_t>(memory.size(), rows * (scored + count + 2 * segments * size)));
    gathered.resize(std::max<size_t>(gathered.size(), rows * size));
    float *logits = memory.data(), *weights = logits + rows * scored;
    float *own = weights + rows * count, *results = own + segments * rows * size, *all = own;
    Ranks* ranks = experts.down[0].ranks;
    if (ranks) all = ranks->buffer(), own = all + ranks->rank * segments * rows * size;
    T* inputs = gathered.data();
    experts.router(x, logits, rows);
#pragma omp parallel for schedule(static) if (rows >= kMinParallelRows)
    for (int64_t row = 0; row < rows; row++) {
        choose_experts(experts, logits + row * scored, weights + row * count);
        for (int64_t s = 0; s < segments; s++) std::fill_n(own + (s * rows + row) * size, size, 0.0f);
    }
    for (int64_t e = 0; e < count; e++) {
        found.clear();
        for (int64_t row = 0; row < rows; row++)
            if (weights[row * count + e] != 0) found.push_back(row);
        if (found.empty()) continue;
        int64_t num_found = found.size();
        const int64_t* row_of = found.data();
#pragma omp parallel for schedule(static) if (num_found >= kMinParallelRows)
        for (int64_t i = 0; i < num_found; i++) {
            std::memcpy((void*)(inputs + i * size), x + row_of[i] * size, size * sizeof(T));
            if (experts.has_weighted_inputs)
                scale_row(inputs + i * size, weights[row_of[i] * count + e], size);
        }
        experts.gate_up[e](inputs, gate_up, num_found);
        if (experts.clamped_gate.limit > 0)
            gate_mul(experts.clamped_gate, gate_up, expanded, num_found, experts.down[e].depth);
        else gate_mul<Activation::kSilu>(gate_up, expanded, num_found, experts.down[e].depth);
        if (ranks || segments > 1) experts.down[e].apart(expanded, results, num_found);
        else experts.down[e](expanded, results, num_found);  // with its bias, which only a depth in one piece has
#pragma omp parallel for schedule(static) if (num_found >= kMinParallelRows)
        for (int64_t i = 0; i < num_found; i++) {
            float weight = experts.has_weighted_inputs ? 1.0f : weights[row_of[i] * count + e];
            for (int64_t s = 0; s < segments; s++)
                add_weighted(results + (s * num_found + i) * size, weight, own + (s * rows + row_of[i]) * size, size);
        }
    }
    if (ranks) ranks->meet();
    add_segments(all, ranks ? segments * ranks->size : segments, (const T*)nullptr, y, rows, size);
}

// y [rows, size] of x [rows, size]; `gate_up` and `expanded` are scratch for all rows of an expert. All threads.
template <typename T>
void run_experts(const Experts<T>& experts, const T* x, T* y, int64_t rows, T* gate_up, T* expanded) {
    int64_t size = experts.router.depth, step = kExpertRows;
    Ranks* ranks = experts.down[0].ranks;
    if (ranks) step = std::min(step, ranks->rows_together(experts.num_segments() * ranks->size * size));
    for (int64_t row = 0; row < rows; row += step)
        run_expert_rows(experts, x + row * size, y + row * size, std::min(step, rows - row), gate_up, expanded);
}

}  // namespace kvrelay
