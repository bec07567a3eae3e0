// A whole decoder layer in one call: what a step of few tokens saves in calls is a good part of its time.
#pragma once
#include "attention.h"
#include "experts.h"

namespace kvrelay {

template <typename T>
struct LayerWeights {
    Projection<T> qkv, output, gate_up, down;
    const Experts<T>* experts;  // in place of gate_up and down, or null
    const float* post_attention_norm;  // or null: there is no MLP
    const float* next_norm;  // of the layer behind this one, or the final norm
    const float *attention_output_norm, *mlp_output_norm;  // or null
    float residual_scale;                                  // of what is added to the residual stream
};

// Rows are tokens.
template <typename T>
struct Activations {
    T* residual;   // [hidden_size], added to
    T* normed;     // [hidden_size], in and out
    T* projected;  // [hidden_size], scratch
    T* qkv;        // [(num_heads + 2 * num_kv_heads) * head_dim], scratch
    T* attended;   // [num_heads * head_dim], scratch with pages, else in
    T* gate_up;    // [2 * the largest intermediate size], scratch
    T* expanded;   // [the largest intermediate size], scratch
};

// Without `pages` (null), `attended` has already what the layer has in place of attention. All threads. Writes the new
// tokens' pages.
template <typename T>
void run_layer(const Step& step, const Layer<T>* pages, const LayerWeights<T>& weights, const Activations<T>& to) {
    int64_t rows = step.num_tokens, hidden_size = weights.output.columns;
    if (pages) {
        weights.qkv(to.normed, to.qkv, rows);
        attend(step, *pages, to.qkv, to.attended);
    }
    weights.output(to.attended, to.projected, rows);
    auto norm_and_scale_output = [&](const float* norm) {
        if (norm) rms_norm(to.projected, norm, to.projected, rows, hidden_size, step.norm_eps);
        if (weights.residual_scale != 1) scale_rows(to.projected, weights.residual_scale, rows, hidden_size);
    };
    norm_and_scale_output(weights.attention_output_norm);
    auto add_and_norm = [&](const float* norm) {
        add_rms_norm(to.projected, to.residual, norm, to.normed, rows, hidden_size, step.norm_eps);
    };
    if (!weights.post_attention_norm) return add_and_norm(weights.next_norm);
    add_and_norm(weights.post_attention_norm);
    if (weights.experts) {
        run_experts(*weights.experts, to.normed, to.projected, rows, to.gate_up, to.expanded);
    } else {
        weights.gate_up(to.normed, to.gate_up, rows);
        gate_mul(step.activation, to.gate_up, to.expanded, rows, weights.down.depth);
        weights.down(to.expanded, to.projected, rows);
    }
    norm_and_scale_output(weights.mlp_output_norm);
    add_and_norm(weights.next_norm);
}

}  // namespace kvrelay
