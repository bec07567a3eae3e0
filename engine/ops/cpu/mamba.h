// Mamba-2 (arXiv:2405.21060), token by token: decay the state, add to it, read it. See engine/ops/mamba.py.
//
// First come what writes and what reads states, by sequence and group of heads; then the heads, by sequence and head; at
// last the norm of each token. A head reads its tokens in chunks, and goes through each chunk with some rows of its
// state at a time, which stay in the nearest cache. No cut of a text changes the order in which a value is added up.
#pragma once
#include <omp.h>

#include "recurrent.h"

namespace kvrelay {

constexpr int64_t kMambaTokens = 64;  // of a chunk
constexpr int kMambaRows = 4;         // of a state, side by side

struct Mamba {
    Convolution convolution;  // of the heads' inputs, of what writes, of what reads
    const float* step_bias;   // [num_heads]
    const float* log_decay;   // [num_heads]
    const float* skip;        // [num_heads]
    const float* norm;        // [num_heads * head_dim]
    int64_t num_heads, head_dim, num_groups, state_dim;  // dims are multiples of sixteen
    float least_step, largest_step;

    int64_t size() const { return num_heads * head_dim; }
    int64_t group_size() const { return num_groups * state_dim; }
    int64_t row_size() const { return size() + convolution.channels + num_heads; }
};

// Scratch for a step, float32.
struct MambaScratch {
    float* vectors;  // [2, num_groups, num_tokens, state_dim]: what writes, then what reads
    float* results;  // [num_tokens, num_heads * head_dim]
};

// Run tokens through rows of a head's state, [kMambaRows, dim]. Inputs of a token, one for each row, are `stride` behind
// those of the one before it, and results `result_stride`.
KVRELAY_ONCE inline void run_state_rows(float* rows, int64_t dim, int64_t tokens, const float* steps, const float* keeps,
                                        const float* write, const float* read, const float* x, int64_t stride,
                                        float skip, float* result, int64_t result_stride) {
    for (int64_t t = 0; t < tokens; t++) {
        F32x16 keep = splat(keeps[t]), scaled[kMambaRows], found[kMambaRows] = {};
        for (int r = 0; r < kMambaRows; r++) scaled[r] = splat(x[r] * steps[t]);
        for (int64_t i = 0; i < dim; i += kLanes) {
            F32x16 writes = load<F32x16>(write + i), reads = load<F32x16>(read + i);
            for (int r = 0; r < kMambaRows; r++) {
                float* at = rows + r * dim + i;
                F32x16 next = multiply_add(scaled[r], writes, load<F32x16>(at) * keep);
                store(at, next);
                found[r] = multiply_add(next, reads, found[r]);
            }
        }
        for (int r = 0; r < kMambaRows; r++) result[r] = sum(found[r]) + skip * x[r];
        write += dim, read += dim, x += stride, result += result_stride;
    }
}

template <typename T>
void run_mamba_head(const Step& step, const States& states, const Mamba& mamba, int64_t seq, int64_t head,
                    const T* projected, const MambaScratch& scratch) {
    thread_local std::vector<float> inputs, steps, keeps;
    thread_local Channels channels;
    int64_t dim = mamba.head_dim, state_dim = mamba.state_dim, row_size = mamba.row_size(), size = mamba.size();
    inputs.resize(kMambaTokens * dim), steps.resize(kMambaTokens), keeps.resize(kMambaTokens);
    const float* source = states.source(seq);
    float* target = states.target(seq);
    channels.begin(mamba.convolution, source, head * dim, dim);
    int64_t at = (mamba.convolution.taps - 1) * mamba.convolution.channels + head * dim * state_dim;
    int64_t group = head / (mamba.num_heads / mamba.num_groups);
    float rate = -std::exp(mamba.log_decay[head]);
    const float* writes = scratch.vectors + group * step.num_tokens * state_dim;
    const float* reads = writes + mamba.num_groups * step.num_tokens * state_dim;
    int64_t end = step.query_start_loc[seq + 1];
    for (int64_t begin = step.query_start_loc[seq], tokens; begin < end; begin += tokens) {
        tokens = std::min(kMambaTokens, end - begin);
        const T* rows = projected + begin * row_size;
        channels.run(rows + size + head * dim, row_size, tokens, inputs.data());
        for (int64_t t = 0; t < tokens; t++) {
            float stated = to_float(rows[(t + 1) * row_size - mamba.num_heads + head]);
            float time = softplus(stated + mamba.step_bias[head]);
            steps[t] = std::min(std::max(time, mamba.least_step), mamba.largest_step);
            keeps[t] = std::exp(steps[t] * rate);
        }
        for (int64_t row = 0; row < dim; row += kMambaRows) {
            float* own = target + at + row * state_dim;
            if (!source) std::fill_n(own, kMambaRows * state_dim, 0.0f);
            else if (source != target) std::copy_n(source + at + row * state_dim, kMambaRows * state_dim, own);
            run_state_rows(own, state_dim, tokens, steps.data(), keeps.data(), writes + begin * state_dim,
                           reads + begin * state_dim, inputs.data() + row, dim, mamba.skip[head],
                           scratch.results + begin * size + head * dim + row, size);
        }
        source = target;
    }
    channels.end(target);
}

// to = result * SiLU(gate) / its root mean square * norm. Mutates the result.
template <typename T>
KVRELAY_ONCE void gate_and_norm(float* result, const float* norm, const T* gate, T* to, int64_t size, float eps) {
    F32x16 squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
        F32x16 by = load_wide(gate + i), gated = load<F32x16>(result + i) * times_logistic(by, by);
        store(result + i, gated);
        squares = multiply_add(gated, gated, squares);
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int64_t i = 0; i < size; i += kLanes)
        store_narrow(to + i, load<F32x16>(result + i) * scale * load<F32x16>(norm + i));
}

// output [num_tokens, size] from projected [num_tokens, row_size]. Writes the states. All threads.
template <typename T>
void run_mamba(const Step& step, const States& states, const Mamba& mamba, const T* projected, T* output,
               const MambaScratch& scratch) {
    int64_t size = mamba.size(), state_dim = mamba.state_dim, row_size = mamba.row_size();
    int64_t num_vectors = 2 * mamba.num_groups, num_items = step.num_seqs * num_vectors;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < num_items; i++) {
        thread_local Channels channels;
        int64_t seq = i / num_vectors, vector = i % num_vectors, first = size + vector * state_dim;
        int64_t begin = step.query_start_loc[seq], tokens = step.query_start_loc[seq + 1] - begin;
        channels.begin(mamba.convolution, states.source(seq), first, state_dim);
        channels.run(projected + begin * row_size + size + first, row_size, tokens,
                     scratch.vectors + (vector * step.num_tokens + begin) * state_dim);
        channels.end(states.target(seq));
    }
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < step.num_seqs * mamba.num_heads; i++)
        run_mamba_head(step, states, mamba, i / mamba.num_heads, i % mamba.num_heads, projected, scratch);
    int64_t normed = size / mamba.num_groups;
#pragma omp parallel for schedule(static) if (step.num_tokens >= kMinParallelRows)
    for (int64_t token = 0; token < step.num_tokens; token++)
        for (int64_t at = 0; at < size; at += normed)
            gate_and_norm(scratch.results + token * size + at, mamba.norm + at, projected + token * row_size + at,
                          output + token * size + at, normed, step.norm_eps);
}

}  // namespace kvrelay
