// Vectors of sixteen lanes on any processor: one register with AVX-512, two with AVX2, four with less.
//
// A vector wider than a register is a pair of halves, down to registers: g++ keeps its own vectors in memory when they
// are wider. Code is the same for both: operators, and the functions below. A lane's value never depends on which it is.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
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
#define KVRELAY_INLINE __attribute__((always_inline)) inline

namespace kvrelay {

constexpr int kLanes = 16;
// Of registers there are 32 with AVX-512, whose products also take one number in memory for all lanes; else 16.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <typename V>
struct Pair {
    typedef V Half;
    Half low, high;
};

template <typename T, int count, bool is_register = (count * sizeof(T) <= kRegisterBytes)>
struct LanesOf {
    typedef T type __attribute__((vector_size(count * sizeof(T))));
};
template <typename T, int count>
struct LanesOf<T, count, false> {
    typedef Pair<typename LanesOf<T, count / 2>::type> type;
};
template <typename T, int count>
using Vector = typename LanesOf<T, count>::type;

typedef Vector<float, kRegisterBytes / 4> Register;
typedef Vector<int32_t, kRegisterBytes / 4> IntRegister;
typedef Vector<float, kLanes> F32x16;
typedef Vector<int32_t, kLanes> I32x16;
typedef Vector<uint16_t, kLanes> U16x16;
typedef Vector<int8_t, kLanes> I8x16;
typedef Vector<uint8_t, kLanes> U8x16;

// The value in a register, where a compiler would rather load it from memory for each of its uses.
KVRELAY_INLINE Register in_register(Register value) {
#if defined(__SSE2__)
    asm("" : "+x"(value));
#endif
    return value;
}

template <typename V>
constexpr bool is_pair = false;
template <typename Half>
constexpr bool is_pair<Pair<Half>> = true;

// The type of a vector's lanes, and their number.
template <typename V>
struct LaneTraits {
    typedef std::remove_reference_t<decltype(std::declval<V&>()[0])> type;
};
template <typename Half>
struct LaneTraits<Pair<Half>> : LaneTraits<Half> {};
template <typename V>
using Lane = typename LaneTraits<V>::type;
template <typename V>
constexpr int num_lanes = sizeof(V) / sizeof(Lane<V>);

#define KVRELAY_PAIRWISE(op)                                                                                           \
    template <typename V>                                                                                              \
    KVRELAY_INLINE auto operator op(Pair<V> a, Pair<V> b) {                                                            \
        return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                                       \
    }                                                                                                                  \
    template <typename V>                                                                                              \
    KVRELAY_INLINE auto operator op(Pair<V> a, Lane<V> b) {                                                            \
        return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                                                    \
    }                                                                                                                  \
    template <typename V>                                                                                              \
    KVRELAY_INLINE auto operator op(Lane<V> a, Pair<V> b) {                                                            \
        return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                                                    \
    }
KVRELAY_PAIRWISE(+)
KVRELAY_PAIRWISE(-)
KVRELAY_PAIRWISE(*)
KVRELAY_PAIRWISE(/)
KVRELAY_PAIRWISE(&)
KVRELAY_PAIRWISE(|)
KVRELAY_PAIRWISE(^)
KVRELAY_PAIRWISE(>)
KVRELAY_PAIRWISE(<)
#undef KVRELAY_PAIRWISE
template <typename V>
KVRELAY_INLINE Pair<V> operator-(Pair<V> a) { return {-a.low, -a.high}; }
template <typename V>
KVRELAY_INLINE Pair<V> operator~(Pair<V> a) { return {~a.low, ~a.high}; }
template <typename V>
KVRELAY_INLINE Pair<V> operator<<(Pair<V> a, int bits) { return {a.low << bits, a.high << bits}; }
template <typename V>
KVRELAY_INLINE Pair<V> operator>>(Pair<V> a, int bits) { return {a.low >> bits, a.high >> bits}; }
template <typename V, typename Other>
KVRELAY_INLINE Pair<V>& operator+=(Pair<V>& a, Other b) { return a = a + b; }

template <typename V, typename T>
KVRELAY_INLINE V load(const T* from) {
    V vector;
    if constexpr (is_pair<V>) {
        typedef decltype(vector.low) Half;
        vector.low = load<Half>(from);
        vector.high = load<Half>((const char*)from + sizeof(Half));
    } else {
        std::memcpy(&vector, from, sizeof(V));
    }
    return vector;
}

template <typename V, typename T>
KVRELAY_INLINE void store(T* to, V vector) {
    if constexpr (is_pair<V>) {
        store(to, vector.low);
        store((char*)to + sizeof(vector.low), vector.high);
    } else {
        std::memcpy((void*)to, &vector, sizeof(V));
    }
}

template <typename V>
KVRELAY_INLINE V splat(Lane<V> value) {
    if constexpr (is_pair<V>) {
        typedef decltype(V::low) Half;
        return {splat<Half>(value), splat<Half>(value)};
    } else {
        return value - V{};
    }
}
KVRELAY_INLINE F32x16 splat(float value) { return splat<F32x16>(value); }

// The same bits as lanes of another type of that size.
template <typename T, typename V>
KVRELAY_INLINE auto as(V v) {
    if constexpr (is_pair<V>) return Pair<decltype(as<T>(v.low))>{as<T>(v.low), as<T>(v.high)};
    else return (Vector<T, num_lanes<V>>)v;
}

// Lanes of `mask`, all ones or all zeros, say whether a lane is that of a or of b.
template <typename Mask, typename V>
KVRELAY_INLINE V select(Mask mask, V a, V b) {
    if constexpr (is_pair<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else return mask ? a : b;
}

template <typename V, int... lane>
KVRELAY_INLINE auto low_half(V v, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(v, v, lane...);
}
template <typename V, int... lane>
KVRELAY_INLINE auto high_half(V v, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(v, v, (int(sizeof...(lane)) + lane)...);
}
template <typename V, int... lane>
KVRELAY_INLINE auto concatenate(V low, V high, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(low, high, lane...);
}

// a * b + c, rounded once where the processor can.
template <typename V>
KVRELAY_INLINE V multiply_add(V a, V b, V c) {
    if constexpr (is_pair<V>) return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
#if defined(__AVX512F__)
    else if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__AVX2__) && defined(__FMA__)
    else if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
    else return a * b + c;
}

// Lanes as numbers of another type; integers that do not fit keep their low bits.
template <typename T, typename V>
KVRELAY_INLINE auto convert(V v) {
    constexpr int count = num_lanes<V>;
    typedef Vector<T, count> Result;
    if constexpr (is_pair<Result> && is_pair<V>) {
        return Result{convert<T>(v.low), convert<T>(v.high)};
    } else if constexpr (is_pair<Result>) {
        auto half = std::make_integer_sequence<int, count / 2>();
        return Result{convert<T>(low_half(v, half)), convert<T>(high_half(v, half))};
    } else if constexpr (is_pair<V>) {
        return concatenate(convert<T>(v.low), convert<T>(v.high), std::make_integer_sequence<int, count>());
    } else {
        return __builtin_convertvector(v, Result);
    }
}

// Exchange lanes: i with i ^ distance.
template <int distance, typename V, int... lane>
KVRELAY_INLINE V swap_lanes(V v, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(v, v, (lane ^ distance)...);
}
template <int distance, typename V>
KVRELAY_INLINE V swap(V v) {
    if constexpr (!is_pair<V>) return swap_lanes<distance>(v, std::make_integer_sequence<int, num_lanes<V>>());
    else if constexpr (2 * distance == num_lanes<V>) return {v.high, v.low};
    else return {swap<distance>(v.low), swap<distance>(v.high)};
}

// Lanes in groups of `distance`: a's even groups, each followed by b's; and a's odd groups, each followed by b's.
template <int distance, int of_a, typename V, int... lane>
KVRELAY_INLINE V zip_lanes(V a, V b, std::integer_sequence<int, lane...>) {
    constexpr int count = sizeof...(lane);
    return __builtin_shufflevector(
        a, b, (lane & distance ? count + (lane ^ distance) + of_a : lane + of_a)...);
}
template <int distance, typename V>
KVRELAY_INLINE V zip_even(V a, V b) {
    if constexpr (!is_pair<V>) return zip_lanes<distance, 0>(a, b, std::make_integer_sequence<int, num_lanes<V>>());
    else if constexpr (2 * distance == num_lanes<V>) return {a.low, b.low};
    else return {zip_even<distance>(a.low, b.low), zip_even<distance>(a.high, b.high)};
}
template <int distance, typename V>
KVRELAY_INLINE V zip_odd(V a, V b) {
    if constexpr (!is_pair<V>)
        return zip_lanes<distance, distance>(a, b, std::make_integer_sequence<int, num_lanes<V>>());
    else if constexpr (2 * distance == num_lanes<V>) return {a.high, b.high};
    else return {zip_odd<distance>(a.low, b.low), zip_odd<distance>(a.high, b.high)};
}

}  // namespace kvrelay
