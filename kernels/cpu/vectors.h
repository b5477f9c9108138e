// Vectors of floats as wide as the compiler's target has registers, in GCC's vector extensions:
// the same source is compiled for AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;  // two registers on NEON
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef float EightFloats __attribute__((vector_size(32)));
typedef float FourFloats __attribute__((vector_size(16)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

inline Floats load(const BFloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats numbers) { std::memcpy(to, &numbers, sizeof numbers); }

inline void store(BFloat16* to, Floats numbers) {  // rounds to nearest, ties to even, as torch does
    Words bits = (Words)numbers;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves halves = __builtin_convertvector(numbers == numbers ? rounded : bits >> 16 | 0x40, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// The nearest numbers that a T can hold.
template <class T>
inline Floats rounded(Floats numbers) {
    T rounded[LANES];
    store(rounded, numbers);
    return load(rounded);
}

inline Floats multiplied_and_added(float number, Floats vector, Floats sum) { return sum + number * vector; }

#if defined(__AVX512BF16__)
struct Pair {  // of bf16
    uint32_t bits;
};

inline Words load(const Pair* from) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

// To each number of `sum` both products of two pairs.
inline Floats multiplied_and_added(Pair pair, Words pairs, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair.bits), (__m512bh)pairs);
}
#endif

inline Floats all(float number) { return number - Floats{}; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline EightFloats folded(Floats numbers) {  // whose sum is the same
#if defined(__AVX512F__)
    EightFloats low, high;
    std::memcpy(&low, &numbers, sizeof low);
    std::memcpy(&high, (const char*)&numbers + sizeof low, sizeof high);
    return low + high;
#else
    return numbers;
#endif
}

inline EightFloats sums_of_pairs(EightFloats a, EightFloats b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sum of each of eight vectors, in 21 instructions and not 8 times 6.
inline EightFloats sums(const Floats* eight) {
    EightFloats pairs[4], fours[2];
    for (int i = 0; i < 4; i++) pairs[i] = sums_of_pairs(folded(eight[2 * i]), folded(eight[2 * i + 1]));
    for (int i = 0; i < 2; i++) fours[i] = sums_of_pairs(pairs[2 * i], pairs[2 * i + 1]);
    return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

inline float sum(Floats numbers) {
    EightFloats eight = folded(numbers);
    float total = 0;
    for (int i = 0; i < 8; i++) total += eight[i];
    return total;
}

inline float largest(Floats numbers) {
    float result = numbers[0];
    for (int i = 1; i < LANES; i++) result = numbers[i] > result ? numbers[i] : result;
    return result;
}

// e^x to 2 units in the last place; 0 below -87, where floats become denormal, infinite above 88.
// The polynomial is Cephes' expf.
inline Floats exponential(Floats x) {
    const Floats lowest = all(-87.0f), highest = all(88.0f);
    Floats clamped = x < highest ? x : highest;
    clamped = maximum(clamped, lowest);
    const float round = 12582912.0f;  // 1.5 * 2^23: what is added to it has no fraction left
    Floats shifted = clamped * 1.44269504088896341f + round;
    Floats n = shifted - round;
    Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Ints exponent = (Ints)shifted << 23;  // n in the lowest bits, moved to where exponents are
    Floats result = (Floats)((Ints)y + exponent);
    result = (Floats)((Ints)result & (x >= lowest));
    return x > highest ? all(__builtin_inff()) : result;
}

inline Floats hyperbolic_tangent(Floats x) {
    return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}
