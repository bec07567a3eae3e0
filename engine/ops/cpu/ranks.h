// Ranks: processes that have a part of each product's depth, and add up their sums through memory that all have mapped.
//
// A product's depth is cut in segments, whose number follows from the model alone. A rank has some consecutive ones. It
// writes their sums, waits for the others, and adds up the segments of all ranks, from first to last: one rank that has
// all of them computes the same bits. Two buffers alternate, so that an exchange waits once: who has begun the next one
// has read the one before.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"

namespace kvrelay {

constexpr int64_t kMostRanks = 64;
constexpr int kSpins = 4096;   // looks at a counter before the processor is left to others
constexpr int kYields = 4096;  // more of them before it is left for some time: there are fewer processors than ranks

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The beginning of the memory that ranks share; it begins as zeros, and two buffers of floats follow.
struct SharedCounts {
    struct alignas(64) Count {
        std::atomic<int64_t> value;
    };
    Count is_aborted;
    Count arrived[kMostRanks];  // exchanges that each rank has written
};

// One rank's view, as `library.py` describes it. One thread calls its methods.
struct Ranks {
    int64_t rank, size;
    SharedCounts* shared;
    int64_t buffer_size;  // floats
    int64_t num_exchanges;

    // The buffer of the exchange that begins.
    float* buffer() const { return (float*)(shared + 1) + num_exchanges % 2 * buffer_size; }

    // Wait until every rank has written its part of the buffer. After `is_aborted` nothing is waited for.
    void meet() {
        num_exchanges++;
        shared->arrived[rank].value.store(num_exchanges, std::memory_order_release);
        for (int64_t other = 0; other < size; other++)
            for (int spins = 0; shared->arrived[other].value.load(std::memory_order_acquire) < num_exchanges; spins++) {
                if (shared->is_aborted.value.load(std::memory_order_relaxed)) return;
                if (spins < kSpins) pause();
                else if (spins < kSpins + kYields) sched_yield();
                else usleep(20);
            }
    }

    // Rows of an exchange that takes so many floats each: few enough to stay in a cache, as far as weights are not read
    // too often.
    int64_t rows_together(int64_t row_size) const {
        constexpr int64_t kLeastRows = 256, kCached = 1 << 20;
        return std::clamp<int64_t>(std::max(kLeastRows, kCached / row_size), 1, buffer_size / row_size);
    }
};

// y [rows, columns] = the sums of `count` segments, parts [count, rows, columns], from first to last (+ bias). All threads.
template <typename T, typename Y>
void add_segments(const float* parts, int64_t count, const T* bias, Y* y, int64_t rows, int64_t columns) {
    constexpr int64_t kTogether = 512;
    int64_t blocks = (columns + kTogether - 1) / kTogether, size = rows * columns;
#pragma omp parallel for schedule(static) if (size >= 8 * kTogether)
    for (int64_t at = 0; at < rows * blocks; at++) {
        int64_t row = at / blocks, begin = at % blocks * kTogether, end = std::min(begin + kTogether, columns);
        for (int64_t c = begin; c < end; c += kLanes) {
            auto part = [&](int64_t segment) {
                const float* from = parts + segment * size + row * columns + c;
                return c + kLanes <= columns ? load<F32x16>(from) : load_some(from, columns - c);
            };
            F32x16 total{};
            for (int64_t s = 0; s < count; s++) total += part(s);
            store_columns(total, bias, y + row * columns, columns, c);
        }
    }
}

}  // namespace kvrelay
