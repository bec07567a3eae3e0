// What recurrent layers of all kinds share: pages of states, and the causal convolution before the recurrence.
//
// Nothing here adds up in an order that depends on how a text is cut into steps.
#pragma once
#include <algorithm>
#include <vector>

#include "paged.h"

namespace kvrelay {

// One layer's states. A state begins with the last inputs of the convolution, [taps - 1, channels].
struct States {
    float* pages;            // [num_pages, size]
    const int64_t* sources;  // [num_seqs]: page of the state before the step; -1: zeros
    const int64_t* targets;  // [num_seqs]: page of the state behind it; perhaps the source, and never another's
    int64_t size;

    const float* source(int64_t seq) const { return sources[seq] < 0 ? nullptr : pages + sources[seq] * size; }
    float* target(int64_t seq) const { return pages + targets[seq] * size; }
};

struct Convolution {
    const float* weights;  // [channels, taps]; a token's own input is the last one
    const float* bias;     // [channels] or null
    int64_t channels, taps;
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Some channels of a sequence's convolution, a multiple of sixteen, which goes on from chunk to chunk of its tokens.
class Channels {
  public:
    // Channels [first, first + count). `state` is that before the sequence's first token; null: zeros.
    void begin(const Convolution& convolution, const float* state, int64_t first, int64_t count) {
        taps_ = convolution.taps, count_ = count, first_ = first, channels_ = convolution.channels;
        weights_.resize(taps_ * count);
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < taps_; i++) weights_[i * count + c] = convolution.weights[(first + c) * taps_ + i];
        bias_ = convolution.bias ? convolution.bias + first : nullptr;
        rows_.assign(taps_ * count, 0.0f);
        past_.resize(taps_);
        for (int64_t i = 0; i < taps_; i++) {
            past_[i] = rows_.data() + i * count;
            if (state && i > 0) std::copy_n(state + (i - 1) * channels_ + first, count, past_[i]);
        }
    }

    // Write the SiLU of the convolution of `rows` tokens, [rows, count], whose inputs are `stride` apart.
    template <typename T>
    void run(const T* inputs, int64_t stride, int64_t rows, float* to) {
        for (int64_t row = 0; row < rows; row++, inputs += stride, to += count_) {
            std::rotate(past_.begin(), past_.begin() + 1, past_.end());
            float* own = past_.back();  // in place of the oldest one
            for (int64_t c = 0; c < count_; c += kLanes) store(own + c, load_wide(inputs + c));
            for (int64_t c = 0; c < count_; c += kLanes) {
                F32x16 sum = bias_ ? load<F32x16>(bias_ + c) : F32x16{};
                for (int64_t i = 0; i < taps_; i++)
                    sum = multiply_add(load<F32x16>(past_[i] + c), load<F32x16>(weights_.data() + i * count_ + c), sum);
                store(to + c, times_logistic(sum, sum));
            }
        }
    }

    // Leave the last inputs in the state behind the sequence's last token.
    void end(float* state) const {
        for (int64_t i = 1; i < taps_; i++) std::copy_n(past_[i], count_, state + (i - 1) * channels_ + first_);
    }

  private:
    std::vector<float> weights_, rows_;  // [taps, count] each
    std::vector<float*> past_;           // rows of the last inputs, the newest one behind the others
    const float* bias_;
    int64_t taps_, count_, first_, channels_;
};

}  // namespace kvrelay
