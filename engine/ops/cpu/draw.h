// The random choice of tokens: top-k, top-p, min-p and the exponential race of `engine.sampling.draw`.
//
// Floats say how fast the fastest token of a part can be, and doubles who wins, in the one or two parts that matter. So
// the choice is that of doubles alone, which would take ten times as long.
//
// Nothing is sorted. Top-k and top-p keep the best tokens, up to a cut. Top-k's cut is selected. Top-p's need not be
// known: the winner stands if the share of the better tokens is below p; else the better tokens race again, without it.
// There are at most 1 + log(1 / p) races on average, whatever the logits.
//
// Weights and their sums have relative errors of some 1e-15. So the tokens are those of every other method in doubles,
// unless two speeds, or a share and p, are as near to each other as that.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "simd.h"

namespace kvrelay {

typedef Vector<uint64_t, kLanes> U64x16;
typedef Vector<double, kLanes> F64x16;

constexpr int64_t kDrawPart = 512;
constexpr int64_t num_parts(int64_t size) { return (size + kDrawPart - 1) / kDrawPart; }
// More than the relative error of a speed in floats.
constexpr float kSpeedMargin = 1e-4f;
constexpr uint64_t kDrawMask = (uint64_t(1) << 52) - 1;
constexpr double kDrawStep = 1.0 / double(uint64_t(1) << 52);
constexpr double kLog2E = 1.44269504088896341;

// `engine.sampling.draw.Draw` of rows that test no drafted tokens, and where their tokens go; -1 without a finite peak.
struct Draws {
    const float* logits;
    const double* peak;
    const double* temperature;
    const double* top_k;  // `size` or more for none
    const double* top_p;
    const double* min_p;
    const uint64_t* keys;
    int64_t* token_ids;
    int64_t rows, size;
};

// One row's logits, and what is drawn from them.
struct DrawRow {
    const float* logits;
    int64_t size;
    double peak;
    double temperature;
    double top_p;
    double min_p;
    uint64_t key;
    // The cut: tokens are kept with logits above `least`, and those with this one before token `end`.
    float least = -FLT_MAX;
    int64_t end = size;

    bool keeps(int64_t token) const { return logits[token] > least || (logits[token] == least && token < end); }

    // Keep the tokens that are better than one; with `cut_behind`, this one, too.
    void cut_before(int64_t token) { least = logits[token], end = token; }
    void cut_behind(int64_t token) { least = logits[token], end = token + 1; }
};

// Logits of sixteen tokens: minus infinity behind the last one, and where the cut drops them.
KVRELAY_INLINE F32x16 kept_logits(const DrawRow& row, int64_t token) {
    static const int32_t lane_ids[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float lanes[kLanes];
    const float* from = row.logits + token;
    if (token + kLanes > row.size) {
        for (int i = 0; i < kLanes; i++) lanes[i] = token + i < row.size ? from[i] : -INFINITY;
        from = lanes;
    }
    F32x16 logits = load<F32x16>(from);
    auto is_tie_kept = ~(logits < row.least) & (load<I32x16>(lane_ids) < int32_t(row.end - token));
    return select((logits > row.least) | is_tie_kept, logits, splat(-INFINITY));
}

// The mass of a part's tokens: the sum of their weights, which are probabilities relative to the best token's.
KVRELAY_ONCE inline double mass(const DrawRow& row, int64_t begin, int64_t end) {
    double per_unit = std::min(kLog2E / row.temperature, DBL_MAX);
    F64x16 sums{};
    for (int64_t token = begin; token < end; token += kLanes)
        sums += exp2((convert<double>(kept_logits(row, token)) - row.peak) * per_unit);
    return sum(sums);
}

// Keep the k best tokens.
inline void keep_best(DrawRow& row, int64_t k) {
    // Of many groups the highest logits: at least k tokens are not below the k-th of these.
    std::vector<float> highs(num_parts(row.size) * kLanes);
    for (int64_t part = 0; part < num_parts(row.size); part++) {
        int64_t begin = part * kDrawPart, end = std::min(begin + kDrawPart, row.size);
        F32x16 high = kept_logits(row, begin);
        for (int64_t token = begin + kLanes; token < end; token += kLanes) high = max(high, kept_logits(row, token));
        store(highs.data() + part * kLanes, high);
    }
    float least = row.least;
    if (k <= int64_t(highs.size())) {
        std::nth_element(highs.begin(), highs.begin() + k - 1, highs.end(), std::greater<float>());
        least = std::max(least, highs[k - 1]);
    }
    std::vector<int64_t> tokens;
    for (int64_t token = 0; token < row.size; token++)
        if (row.logits[token] >= least) tokens.push_back(token);
    if (k > int64_t(tokens.size())) return;  // the others are impossible
    std::nth_element(tokens.begin(), tokens.begin() + k - 1, tokens.end(), [&](int64_t a, int64_t b) {
        return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
    });
    row.cut_behind(tokens[k - 1]);
}

// The 52 bits of token t, given (t + 1) times SplitMix64's increment; see `engine.sampling.draw.waiting_times`.
template <typename V>
KVRELAY_INLINE V draw_bits(V output) {
    output = (output ^ (output >> 30)) * uint64_t(0xBF58476D1CE4E5B9);
    output = (output ^ (output >> 27)) * uint64_t(0x94D049BB133111EB);
    return (output ^ (output >> 31)) >> 12;
}
constexpr uint64_t kDrawIncrement = 0x9E3779B97F4A7C15;

// Uniform numbers between 0 and 1 of 52 bits each: the bits become a double's mantissa.
KVRELAY_INLINE F32x16 uniform(U64x16 bits) {
    auto wide = as<double>(bits | uint64_t(0x4330000000000000)) - 4503599627370495.5;
    return convert<float>(wide * kDrawStep);
}

// -log(u) with a relative error below 1e-6, given u and 1 - u, both between 0 and 1.
KVRELAY_INLINE F32x16 waiting_times(F32x16 u, F32x16 rest) {
    I32x16 bits = as<int32_t>(u) - 0x3f3504f3;  // of the square root of a half: mantissas from there to its double
    F32x16 exponent = convert<float>(bits >> 23);
    F32x16 mantissa = as<float>((bits & 0x7fffff) + 0x3f3504f3);
    auto is_near_one = rest < 0.29f;  // where u itself has lost what u - 1 is
    F32x16 below = select(is_near_one, -rest, mantissa - 1.0f);
    exponent = select(is_near_one, F32x16{}, exponent);
    F32x16 z = below / (below + 2.0f);  // log(1 + below) = 2 atanh(z)
    F32x16 square = z * z;
    F32x16 series = square * (1.0f / 9) + 1.0f / 7;
    series = series * square + 1.0f / 5;
    series = series * square + 1.0f / 3;
    series = series * square + 1.0f;
    return -(exponent * 0.69314718f + z * series * 2.0f);
}

// At least the highest speed of a part's tokens.
KVRELAY_ONCE inline float speed_bound(const DrawRow& row, int64_t begin, int64_t end) {
    float per_unit = float(std::min(kLog2E / row.temperature, double(FLT_MAX)));
    float peak = float(row.peak), lightest = float(row.min_p) * (1 - kSpeedMargin);
    uint64_t first[kLanes];
    for (int i = 0; i < kLanes; i++) first[i] = row.key + uint64_t(begin + i + 1) * kDrawIncrement;
    U64x16 outputs = load<U64x16>(first);
    F32x16 fastest{};
    for (int64_t token = begin; token < end; token += kLanes) {
        F32x16 weights = exp2((kept_logits(row, token) - peak) * per_unit);
        weights = select(weights < lightest, F32x16{}, weights);
        U64x16 bits = draw_bits(outputs);
        fastest = max(fastest, weights / waiting_times(uniform(bits), uniform(bits ^ kDrawMask)));
        outputs = outputs + kLanes * kDrawIncrement;
    }
    return highest(fastest) * (1 + kSpeedMargin);
}

struct Winner {
    double speed;
    int64_t token;
};

// The winner so far and the tokens of a part; of equals, the smaller token.
inline Winner race_part(const DrawRow& row, int64_t begin, int64_t end, Winner winner) {
    for (int64_t token = begin; token < end; token++) {
        if (!row.keeps(token)) continue;
        double weight = std::exp((double(row.logits[token]) - row.peak) / row.temperature);
        if (weight < row.min_p || weight == 0.0) continue;
        double bits = double(draw_bits(row.key + uint64_t(token + 1) * kDrawIncrement));
        double speed = weight / -std::log((bits + 0.5) * kDrawStep);
        if (speed > winner.speed || (speed == winner.speed && token < winner.token)) winner = {speed, token};
    }
    return winner;
}

// The token that wins among those that the cut keeps, given at least the highest speed of each part.
inline int64_t race(const DrawRow& row, const float* bounds, int64_t parts) {
    auto run = [&](int64_t part, Winner winner) {
        return race_part(row, part * kDrawPart, std::min((part + 1) * kDrawPart, row.size), winner);
    };
    int64_t favourite = std::max_element(bounds, bounds + parts) - bounds;
    Winner winner = run(favourite, {-1.0, 0});
    for (int64_t part = 0; part < parts; part++)
        if (part != favourite && bounds[part] >= winner.speed) winner = run(part, winner);
    return winner.token;
}

// The token that wins among those that the cut and top-p keep, given the mass that the cut keeps.
inline int64_t race_nucleus(DrawRow row, const float* bounds, int64_t parts, double total) {
    for (;;) {
        int64_t token = race(row, bounds, parts);
        row.cut_before(token);
        if (row.top_p == 1.0 || mass(row, 0, row.size) < row.top_p * total) return token;
    }
}

// All threads.
inline void draw(const Draws& draws) {
    int64_t size = draws.size, parts = num_parts(size);
    std::vector<DrawRow> rows(draws.rows);
    std::unique_ptr<float[]> bounds(new float[draws.rows * parts]);
    std::unique_ptr<double[]> masses(new double[draws.rows * parts]);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < draws.rows; i++) {
            rows[i] = {
                draws.logits + i * size, size, draws.peak[i], draws.temperature[i], draws.top_p[i], draws.min_p[i],
                draws.keys[i]};
            if (draws.top_k[i] < size && std::isfinite(draws.peak[i])) keep_best(rows[i], int64_t(draws.top_k[i]));
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < draws.rows * parts; item++) {
            const DrawRow& row = rows[item / parts];
            int64_t begin = item % parts * kDrawPart, end = std::min(begin + kDrawPart, size);
            bounds[item] = speed_bound(row, begin, end);
            masses[item] = row.top_p < 1.0 ? mass(row, begin, end) : 0.0;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < draws.rows; i++) {
            const double* first = masses.get() + i * parts;
            double total = std::accumulate(first, first + parts, 0.0);
            draws.token_ids[i] =
                std::isfinite(draws.peak[i]) ? race_nucleus(rows[i], bounds.get() + i * parts, parts, total) : -1;
        }
    }
}

}  // namespace kvrelay
