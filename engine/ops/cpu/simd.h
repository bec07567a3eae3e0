// The two number formats of activations and weights, and what all kernels do with vectors of them.
#pragma once
#include "vector.h"

namespace kvrelay {

struct bf16 {
    uint16_t bits;
};

inline F32x16 widen(U16x16 bits) { return as<float>(convert<int32_t>(bits) << 16); }

// To the nearest, ties to even. A NaN stays one: its mantissa is not allowed to round up into infinity's pattern.
inline U16x16 narrow(F32x16 wide) {
#if defined(__AVX512BF16__)
    return (U16x16)_mm512_cvtneps_pbh((__m512)wide);
#else
    I32x16 bits = as<int32_t>(wide);
    I32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    I32x16 quiet = (bits >> 16) | 0x40;
    return convert<uint16_t>(select((bits & 0x7fffffff) > 0x7f800000, quiet, rounded));
#endif
}

// Two consecutive depths of sixteen columns, the even one in the low bits.
inline I32x16 pair_up(U16x16 even, U16x16 odd) {
#if defined(__AVX512BW__)
    const __m512i lanes = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return (I32x16)_mm512_permutex2var_epi16(
        _mm512_castsi256_si512((__m256i)even), lanes, _mm512_castsi256_si512((__m256i)odd));
#else
    return convert<int32_t>(even) | convert<int32_t>(odd) << 16;
#endif
}

inline F32x16 load_wide(const float* from) { return load<F32x16>(from); }
inline F32x16 load_wide(const bf16* from) { return widen(load<U16x16>(from)); }
inline void store_narrow(float* to, F32x16 wide) { store(to, wide); }
inline void store_narrow(bf16* to, F32x16 wide) { store(to, narrow(wide)); }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
template <typename T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) { return value; }
template <>
inline bf16 from_float<bf16>(float value) {
    bf16 lanes[kLanes];
    store(lanes, narrow(splat(value)));
    return lanes[0];
}

// The first `count` lanes, the others 0; and back. For rows whose length is no multiple of sixteen.
template <typename T>
inline F32x16 load_some(const T* from, int64_t count) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = to_float(from[i]);
    return load<F32x16>(lanes);
}
template <typename T>
inline void store_some(T* to, F32x16 wide, int64_t count) {
    float lanes[kLanes];
    store(lanes, wide);
    for (int64_t i = 0; i < count; i++) to[i] = from_float<T>(lanes[i]);
}

// Combine all lanes by halves, in this order.
template <typename V, typename Combine>
inline Lane<V> fold(V v, Combine combine) {
    if constexpr (is_pair<V>) {
        return fold(combine(v.low, v.high), combine);
    } else if constexpr (num_lanes<V> > 4) {  // narrow registers are combined faster
        typedef Lane<V> Half __attribute__((vector_size(sizeof(V) / 2)));
        Half halves[2];
        std::memcpy(halves, &v, sizeof(V));
        return fold(combine(halves[0], halves[1]), combine);
    } else {
        v = combine(v, swap<2>(v));
        return combine(v, swap<1>(v))[0];
    }
}

// Of floats: when either is NaN, the second.
template <typename V>
inline V max(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<V, F32x16>) return (V)_mm512_max_ps((__m512)a, (__m512)b);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32 && std::is_same_v<Lane<V>, float>) return (V)_mm256_max_ps((__m256)a, (__m256)b);
    if constexpr (sizeof(V) == 16 && std::is_same_v<Lane<V>, float>) return (V)_mm_max_ps((__m128)a, (__m128)b);
#endif
    if constexpr (is_pair<V>) return {max(a.low, b.low), max(a.high, b.high)};
    else return select(a > b, a, b);
}

template <typename V>
inline Lane<V> sum(V v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}
inline float highest(F32x16 v) {
    return fold(v, [](auto a, auto b) { return max(a, b); });
}

// 2^x for x <= 0, with a relative error below 3e-7, or of 1.1e-4 for what is rounded to bfloat16 (4e-3 between neighbours);
// 1 of 0, 0 below -125, NaN of NaN (hence the order of max's arguments). No number on the way is subnormal: processors take
// a hundred cycles for these.
template <bool kIsRounded = false>
inline F32x16 exp2(F32x16 x) {
    F32x16 clamped = max(splat(-125.0f), x);
#if defined(__AVX512F__)
    F32x16 n = (F32x16)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    F32x16 shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    F32x16 n = shifted - 12582912.0f;
#endif
    F32x16 r = clamped - n, p;  // in [-0.5, 0.5]
    if constexpr (kIsRounded) {  // the least error
        p = 5.500895e-2f * r + 2.4221101e-1f;
        p = p * r + 6.9328293e-1f;
    } else {  // the Taylor series of e^(r ln 2)
        p = 1.5403530e-4f * r + 1.3333558e-3f;
        p = p * r + 9.6181291e-3f;
        p = p * r + 5.5504109e-2f;
        p = p * r + 2.4022651e-1f;
        p = p * r + 6.9314718e-1f;
    }
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    F32x16 result = (F32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    F32x16 result = p * as<float>((as<int32_t>(shifted) - 0x4b400000 + 127) << 23);
#endif
    return select(x < -125.0f, F32x16{}, result);
}

inline float exp2(float x) {
    float lanes[kLanes];
    store(lanes, exp2(splat(x)));
    return lanes[0];
}

// The same in doubles, with a relative error of some 1e-16; 0 below -1000.
inline Vector<double, kLanes> exp2(Vector<double, kLanes> x) {
    typedef Vector<double, kLanes> F64x16;
    constexpr double factors[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
        1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0};
    F64x16 clamped = max(splat<F64x16>(-1000.0), x);
    F64x16 shifted = clamped + 6755399441055744.0;  // 1.5 * 2^52: the integer lands in the low bits
    F64x16 r = (clamped - (shifted - 6755399441055744.0)) * 0.69314718055994531;
    F64x16 p = splat<F64x16>(1.0 / 6227020800);
    for (double factor : factors) p = p * r + factor;
    F64x16 result = p * as<double>((as<uint64_t>(shifted) + uint64_t(1023)) << 52);
    return select(x < -1000.0, F64x16{}, result);
}

// What dot4 takes off each code before it multiplies it.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int bits>
constexpr int32_t kDotBias = bits == 8 ? 128 : 0;
#else
template <int bits>
constexpr int32_t kDotBias = 0;
#endif

// Add to each lane its four codes, unsigned bytes of 4 or 8 bits less kDotBias, times four signed bytes above -128.
template <int bits, typename V>
KVRELAY_INLINE V dot4(V sums, V codes, int32_t four) {
    if constexpr (is_pair<V>) {
        return {dot4<bits>(sums.low, codes.low, four), dot4<bits>(sums.high, codes.high, four)};
    } else {
#if defined(__AVX512VNNI__)
        return (V)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        __m256i left = (__m256i)codes, right = _mm256_set1_epi32(four);
        if constexpr (bits == 8) {  // sums of two products of unsigned codes would not fit into 16 bits
            __m256i centred = _mm256_xor_si256(left, _mm256_set1_epi8(int8_t(0x80)));
            left = _mm256_abs_epi8(centred);
            right = _mm256_sign_epi8(right, centred);
        }
        return sums + (V)_mm256_madd_epi16(_mm256_maddubs_epi16(left, right), _mm256_set1_epi16(1));
#else
        for (int i = 0; i < 4; i++) sums += ((codes >> (8 * i)) & 255) * int32_t(int8_t(four >> (8 * i)));
        return sums;
#endif
    }
}

// Like dot4 of 4 bits where AVX2 adds up products in 16 bits first: eight of them fit. `add_up` adds these to sums.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int bits>
constexpr bool kHasShortSums = bits == 4;
template <typename V>
KVRELAY_INLINE V dot4_short(V shorts, V codes, int32_t four) {
    if constexpr (is_pair<V>)
        return {dot4_short(shorts.low, codes.low, four), dot4_short(shorts.high, codes.high, four)};
    else return (V)_mm256_add_epi16((__m256i)shorts, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four)));
}
template <typename V>
KVRELAY_INLINE V add_up(V sums, V shorts) {
    if constexpr (is_pair<V>) return {add_up(sums.low, shorts.low), add_up(sums.high, shorts.high)};
    else return sums + (V)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
}
#else
template <int bits>
constexpr bool kHasShortSums = false;
template <typename V>
V dot4_short(V shorts, V codes, int32_t four);
template <typename V>
V add_up(V sums, V shorts);
#endif

// Turn sixteen rows of sixteen into columns: lanes change places with rows, the nearest first.
template <int distance = 1>
inline void transpose(I32x16* v) {
    for (int row = 0; row < kLanes; row++) {
        if (row & distance) continue;
        I32x16 a = v[row], b = v[row + distance];
        v[row] = zip_even<distance>(a, b);
        v[row + distance] = zip_odd<distance>(a, b);
    }
    if constexpr (2 * distance < kLanes) transpose<2 * distance>(v);
}

// Lane i of the result is the largest of v[i]'s lanes. Mutates v.
template <int distance = 1>
inline I32x16 highest_each(I32x16* v) {
    for (int row = 0; row < kLanes; row += 2 * distance) {
        I32x16 a = v[row], b = v[row + distance];
        v[row] = max(zip_even<distance>(a, b), zip_odd<distance>(a, b));
    }
    if constexpr (2 * distance < kLanes) return highest_each<2 * distance>(v);
    else return v[0];
}

}  // namespace kvrelay
