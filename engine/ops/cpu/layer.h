// A whole decoder layer in one call: what a step of few tokens saves in calls is a good part of its time.
#pragma once
#include <type_traits>

#include "attention.h"
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

template <typename T>
struct LayerWeights {
    Projection<T> qkv, output, gate_up, down;
    const T* post_attention_norm;
    const T* next_norm;  // of the layer behind this one, or the final norm
};

// Rows are tokens.
template <typename T>
struct Activations {
    T* residual;   // [hidden_size], added to
    T* normed;     // [hidden_size], in and out
    T* projected;  // [hidden_size], scratch
    T* qkv;        // [(num_heads + 2 * num_kv_heads) * head_dim], scratch
    T* attended;   // [num_heads * head_dim], scratch
    T* gate_up;    // [2 * intermediate_size], scratch
    T* expanded;   // [intermediate_size], scratch
};

// All threads. Writes the new tokens' pages.
template <typename T>
void run_layer(const Step& step, const Layer<T>& pages, const LayerWeights<T>& weights, const Activations<T>& to) {
    int64_t rows = step.num_tokens, hidden_size = weights.output.columns;
    weights.qkv(to.normed, to.qkv, rows);
    attend(step, pages, to.qkv, to.attended);
    weights.output(to.attended, to.projected, rows);
    add_rms_norm(
        to.projected, to.residual, weights.post_attention_norm, to.normed, rows, hidden_size, step.norm_eps);
    weights.gate_up(to.normed, to.gate_up, rows);
    silu_mul(to.gate_up, to.expanded, rows, weights.down.depth);
    weights.down(to.expanded, to.projected, rows);
    add_rms_norm(to.projected, to.residual, weights.next_norm, to.normed, rows, hidden_size, step.norm_eps);
}

}  // namespace kvrelay
