// Sixteen-lane vectors and the two number formats, in the compiler's own vector types. Right on any processor, but fast
// only with registers of this width: without AVX-512, g++ keeps such vectors in memory, and `select.py` takes torch.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Kernels are compiled once, not into each of their callers: compiling takes seconds of a first start, and two copies may
// round differently.
#if defined(__clang__)
#define KVRELAY_ONCE __attribute__((noinline))
#else
#define KVRELAY_ONCE __attribute__((noinline, noclone))
#endif
// In the innermost loops, of which a compiler may think otherwise.
#define KVRELAY_INLINE __attribute__((always_inline))

namespace kvrelay {

constexpr int kLanes = 16;
typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

template <typename V, typename T>
inline V load(const T* from) {
    V vector;
    std::memcpy(&vector, from, sizeof(V));
    return vector;
}

template <typename V, typename T>
inline void store(T* to, V vector) {
    std::memcpy(to, &vector, sizeof(V));
}

inline F32x16 splat(float value) { return value - F32x16{}; }

inline F32x16 widen(U16x16 bits) {
    return (F32x16)(__builtin_convertvector(bits, I32x16) << 16);
}

// To the nearest, ties to even. A NaN stays one: its mantissa is not allowed to round up into infinity's pattern.
inline U16x16 narrow(F32x16 wide) {
#if defined(__AVX512BF16__)
    return (U16x16)_mm512_cvtneps_pbh((__m512)wide);
#else
    I32x16 bits = (I32x16)wide;
    I32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    I32x16 quiet = (bits >> 16) | 0x40;
    I32x16 is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), U16x16);
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
inline bf16 from_float<bf16>(float value) { return {narrow(splat(value))[0]}; }

// The first `count` lanes, the others 0; and back. For rows whose length is no multiple of sixteen.
template <typename T>
inline F32x16 load_some(const T* from, int64_t count) {
    F32x16 wide{};
    for (int64_t i = 0; i < count; i++) wide[i] = to_float(from[i]);
    return wide;
}
template <typename T>
inline void store_some(T* to, F32x16 wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from_float<T>(wide[i]);
}

// Fold a vector by halves, so that lane 0 holds the result for all lanes.
template <typename Combine>
inline float fold(F32x16 v, Combine combine) {
    v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
}

inline I32x16 max(I32x16 a, I32x16 b) { return a > b ? a : b; }

// When either is NaN, the second.
inline F32x16 max(F32x16 a, F32x16 b) {
#if defined(__AVX512F__)
    return (F32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float sum(F32x16 v) {
    return fold(v, [](F32x16 a, F32x16 b) { return a + b; });
}
inline float highest(F32x16 v) {
    return fold(v, [](F32x16 a, F32x16 b) { return max(a, b); });
}

// 2^x for x <= 0, with a relative error below 3e-7; 0 below -125, NaN of NaN (hence the order of max's arguments). No
// number on the way is subnormal: processors take a hundred cycles for these.
inline F32x16 exp2(F32x16 x) {
    F32x16 clamped = max(splat(-125.0f), x);
#if defined(__AVX512F__)
    F32x16 n = (F32x16)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    F32x16 shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    F32x16 n = shifted - 12582912.0f;
#endif
    F32x16 r = clamped - n;  // in [-0.5, 0.5]: the Taylor series of e^(r ln 2)
    F32x16 p = 1.5403530e-4f * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    F32x16 result = (F32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    F32x16 result = p * (F32x16)(((I32x16)shifted - 0x4b400000 + 127) << 23);
#endif
    return x < -125.0f ? F32x16{} : result;
}

// Lane i of the result is the largest of v[i]'s lanes: four rounds of comparing neighbours.
inline I32x16 highest_each(const I32x16* v) {
    I32x16 pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++) {
        I32x16 a = v[2 * i], b = v[2 * i + 1];
        pairs[i] = max(__builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                       __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
    }
    for (int i = 0; i < 4; i++) {
        I32x16 a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = max(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                       __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    }
    for (int i = 0; i < 2; i++) {
        I32x16 a = fours[2 * i], b = fours[2 * i + 1];
        eights[i] = max(__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                        __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    }
    I32x16 a = eights[0], b = eights[1];
    return max(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
}

// Turn sixteen rows of sixteen into columns.
inline void transpose(I32x16* v) {
    I32x16 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        t[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            I32x16 a = t[i + j], b = t[i + j + 2];
            v[i + j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            v[i + j + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            I32x16 a = v[i + j], b = v[i + j + 4];
            t[i + j] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            t[i + j + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        I32x16 a = t[j], b = t[j + 8];
        v[j] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        v[j + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

}  // namespace kvrelay
