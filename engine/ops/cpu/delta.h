// Gated delta nets (arXiv:2412.06464), token by token: decay the state, replace what the key finds there, read it.
//
// The work is cut into items of one sequence and key head, with the value heads that share it. An item reads its tokens
// in chunks, and goes through each chunk with some columns of a state at a time, which stay in the nearest cache. A
// value is added up in the same order whatever the chunks, so that no cut of a text changes a bit.
#pragma once
#include <omp.h>

#include "recurrent.h"

namespace kvrelay {

constexpr int64_t kDeltaTokens = 64;  // of a chunk

// `Features` of engine/weights/delta.py: where a token's products begin that belong to a key head.
struct Features {
    int64_t begin, stride;
    int64_t at(int64_t key_head) const { return begin + key_head * stride; }
};

struct Delta {
    Convolution convolution;  // of queries, keys, values
    const float* step_bias;   // [num_heads]
    const float* log_decay;   // [num_heads]
    const float* norm;        // [value_dim]
    int64_t num_key_heads, num_heads, key_dim, value_dim;  // dims are multiples of sixteen
    Features query, key, value, gate, rate, decay;
    int64_t row_size;  // products of a token

    int64_t shared() const { return num_heads / num_key_heads; }
};

// A chunk of an item's tokens, all float32.
struct DeltaChunk {
    std::vector<float> query, key;           // [tokens, key_dim]
    std::vector<float> value, results;       // [tokens, shared, value_dim]
    std::vector<float> rates, decays;        // [tokens, shared]
    std::vector<float> columns;              // [key_dim, some of value_dim]
};

// Scale a head to `length`.
KVRELAY_ONCE inline void normalise(float* head, int64_t dim, float length) {
    F32x16 squares{};
    for (int64_t i = 0; i < dim; i += kLanes) {
        F32x16 v = load<F32x16>(head + i);
        squares = multiply_add(v, v, squares);
    }
    float scale = length / std::sqrt(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < dim; i += kLanes) store(head + i, load<F32x16>(head + i) * scale);
}

// Run tokens through 16 * `width` columns of a state, [key_dim, 16 * width]. Value and result of a token are `stride`
// behind those of the one before it, its rate and decay `shared`.
template <int width>
KVRELAY_ONCE void run_columns(float* columns, int64_t key_dim, int64_t tokens, const float* query, const float* key,
                              const float* value, float* result, int64_t stride, const float* rates,
                              const float* decays, int64_t shared) {
    constexpr int kChains = 2;  // sums side by side
    for (int64_t t = 0; t < tokens; t++) {
        F32x16 found[kChains][width] = {}, read[kChains][width] = {}, change[width], decay = splat(decays[t * shared]);
        for (int64_t k = 0; k < key_dim; k += kChains)
            for (int chain = 0; chain < kChains; chain++)
                for (int i = 0; i < width; i++) {
                    F32x16 at = load<F32x16>(columns + ((k + chain) * width + i) * kLanes);
                    found[chain][i] = multiply_add(at, splat(key[k + chain]), found[chain][i]);
                }
        for (int i = 0; i < width; i++) {
            F32x16 wanted = load<F32x16>(value + i * kLanes);
            change[i] = (wanted - (found[0][i] + found[1][i]) * decay) * rates[t * shared];
        }
        for (int64_t k = 0; k < key_dim; k += kChains)
            for (int chain = 0; chain < kChains; chain++)
                for (int i = 0; i < width; i++) {
                    float* at = columns + ((k + chain) * width + i) * kLanes;
                    F32x16 next = multiply_add(change[i], splat(key[k + chain]), load<F32x16>(at) * decay);
                    store(at, next);
                    read[chain][i] = multiply_add(next, splat(query[k + chain]), read[chain][i]);
                }
        for (int i = 0; i < width; i++) store(result + i * kLanes, read[0][i] + read[1][i]);
        query += key_dim, key += key_dim, value += stride, result += stride;
    }
}

// Run a chunk through the state of one of the value heads that share its key head, from `source` (null: zeros) to
// `target`.
inline void run_head(
    const Delta& delta, DeltaChunk& chunk, int64_t tokens, int64_t head, const float* source, float* target) {
    int64_t dim = delta.value_dim, shared = delta.shared();
    for (int64_t first = 0, width; first < dim; first += width) {
        width = std::min<int64_t>(2 * kLanes, dim - first);
        float* columns = chunk.columns.data();
        for (int64_t k = 0; k < delta.key_dim; k++)
            if (source) std::copy_n(source + k * dim + first, width, columns + k * width);
            else std::fill_n(columns + k * width, width, 0.0f);
        auto run = width == kLanes ? run_columns<1> : run_columns<2>;
        int64_t at = head * dim + first;
        run(columns, delta.key_dim, tokens, chunk.query.data(), chunk.key.data(), chunk.value.data() + at,
            chunk.results.data() + at, shared * dim, chunk.rates.data() + head, chunk.decays.data() + head, shared);
        for (int64_t k = 0; k < delta.key_dim; k++) std::copy_n(columns + k * width, width, target + k * dim + first);
    }
}

// to = norm(result) * SiLU(gate)
template <typename T>
KVRELAY_ONCE void gate_result(const float* result, const float* norm, const T* gate, T* to, int64_t dim, float eps) {
    F32x16 squares{};
    for (int64_t i = 0; i < dim; i += kLanes) {
        F32x16 v = load<F32x16>(result + i);
        squares = multiply_add(v, v, squares);
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    for (int64_t i = 0; i < dim; i += kLanes) {
        F32x16 by = load_wide(gate + i);
        store_narrow(to + i, load<F32x16>(result + i) * scale * load<F32x16>(norm + i) * times_logistic(by, by));
    }
}

template <typename T>
void run_delta_item(const Step& step, const States& states, const Delta& delta, int64_t seq, int64_t key_head,
                    const T* projected, T* output) {
    thread_local DeltaChunk chunk;
    thread_local Channels queries, keys, values;
    int64_t key_dim = delta.key_dim, shared = delta.shared(), values_dim = shared * delta.value_dim;
    int64_t first_key = delta.num_key_heads * key_dim;
    chunk.query.resize(kDeltaTokens * key_dim), chunk.key.resize(kDeltaTokens * key_dim);
    chunk.value.resize(kDeltaTokens * values_dim), chunk.results.resize(kDeltaTokens * values_dim);
    chunk.rates.resize(kDeltaTokens * shared), chunk.decays.resize(kDeltaTokens * shared);
    chunk.columns.resize(key_dim * 2 * kLanes);
    const float* source = states.source(seq);
    float* target = states.target(seq);
    queries.begin(delta.convolution, source, key_head * key_dim, key_dim);
    keys.begin(delta.convolution, source, first_key + key_head * key_dim, key_dim);
    values.begin(delta.convolution, source, 2 * first_key + key_head * values_dim, values_dim);
    int64_t matrix = key_dim * delta.value_dim, convolved = (delta.convolution.taps - 1) * delta.convolution.channels;
    int64_t matrices = convolved + key_head * shared * matrix;
    int64_t end = step.query_start_loc[seq + 1];
    for (int64_t begin = step.query_start_loc[seq], tokens; begin < end; begin += tokens) {
        tokens = std::min(kDeltaTokens, end - begin);
        const T* rows = projected + begin * delta.row_size;
        queries.run(rows + delta.query.at(key_head), delta.row_size, tokens, chunk.query.data());
        keys.run(rows + delta.key.at(key_head), delta.row_size, tokens, chunk.key.data());
        values.run(rows + delta.value.at(key_head), delta.row_size, tokens, chunk.value.data());
        for (int64_t t = 0; t < tokens; t++) {
            normalise(chunk.query.data() + t * key_dim, key_dim, 1.0f / std::sqrt(float(key_dim)));
            normalise(chunk.key.data() + t * key_dim, key_dim, 1.0f);
            const T* row = rows + t * delta.row_size;
            for (int64_t i = 0; i < shared; i++) {
                int64_t head = key_head * shared + i;
                float rate = to_float(row[delta.rate.at(key_head) + i]);
                float decay = to_float(row[delta.decay.at(key_head) + i]);
                chunk.rates[t * shared + i] = 1.0f / (1.0f + std::exp(-rate));
                decay = softplus(decay + delta.step_bias[head]);
                chunk.decays[t * shared + i] = std::exp(-std::exp(delta.log_decay[head]) * decay);
            }
        }
        for (int64_t i = 0; i < shared; i++) {
            int64_t at = matrices + i * matrix;
            run_head(delta, chunk, tokens, i, source ? source + at : nullptr, target + at);
        }
        source = target;
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < shared; i++) {
                int64_t at = (t * shared + i) * delta.value_dim;
                const T* gate = rows + t * delta.row_size + delta.gate.at(key_head) + i * delta.value_dim;
                T* to = output + ((begin + t) * delta.num_heads + key_head * shared + i) * delta.value_dim;
                gate_result(chunk.results.data() + at, delta.norm, gate, to, delta.value_dim, step.norm_eps);
            }
    }
    queries.end(target), keys.end(target), values.end(target);
}

// output [num_tokens, num_heads * value_dim] from projected [num_tokens, row_size]. Writes the states. All threads.
template <typename T>
void run_delta(const Step& step, const States& states, const Delta& delta, const T* projected, T* output) {
    int64_t count = step.num_seqs * delta.num_key_heads;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < count; i++)
        run_delta_item(step, states, delta, i / delta.num_key_heads, i % delta.num_key_heads, projected, output);
}

}  // namespace kvrelay
