// Vectors of floats as wide as the target's registers. The source uses GCC's vector extensions, so it
// compiles for AVX2, AVX-512 and NEON alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
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
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef float EightFloats __attribute__((vector_size(32)));

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
#if defined(__AVX512F__)  // GCC 12 compiles the portable line to five instructions
    return (Floats)(_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#else
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

inline Words load(const uint32_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

inline Ints load(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)  // GCC 12 would take the bytes apart one by one
    return (Ints)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return __builtin_convertvector(bytes, Ints);
#endif
}

inline void store(float* to, Floats numbers) { std::memcpy(to, &numbers, sizeof numbers); }

inline void store(BFloat16* to, Floats numbers) {  // rounds to nearest, ties to even, as torch does
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
#else
    Words bits = (Words)numbers;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves halves = __builtin_convertvector(numbers == numbers ? rounded : bits >> 16 | 0x40, Halves);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// Rounds to the precision of T.
template <class T>
inline Floats rounded(Floats numbers) {
    T rounded[LANES];
    store(rounded, numbers);
    return load(rounded);
}

// Widens `count` numbers to fp32.
template <class T>
inline void widen(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    T rest[LANES] = {};
    std::memcpy(rest, from + i, (count - i) * sizeof(T));
    float widened[LANES];
    store(widened, load(rest));
    std::memcpy(to + i, widened, (count - i) * sizeof(float));
}

inline Floats multiplied_and_added(float number, Floats vector, Floats sum) { return sum + number * vector; }

struct Pair {  // of bf16
    uint32_t bits;
};

#if defined(__AVX512BF16__)
// Loads `count` pairs, at most LANES, and zeros for the rest.
inline Words load(const Pair* from, int64_t count) {
    const __mmask16 known = count < LANES ? (1 << count) - 1 : -1;
    return (Words)_mm512_maskz_loadu_epi32(known, from);
}

// Interleaves two rows: lane i is the pair (first[i], second[i]).
template <int... LANE>
inline Words alternating(const BFloat16* first, const BFloat16* second, std::integer_sequence<int, LANE...>) {
    typedef uint16_t Both __attribute__((vector_size(4 * LANES)));
    Halves a, b;
    std::memcpy(&a, first, sizeof a);
    std::memcpy(&b, second, sizeof b);
    return (Words)(Both)__builtin_shufflevector(a, b, (LANE / 2 + LANE % 2 * LANES)...);
}

inline Words load(const Pair* from) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

// Multiplies `pair` by the pair in each lane of `pairs`, and adds both products to that lane of `sum`.
inline Floats multiplied_and_added(Pair pair, Words pairs, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair.bits), (__m512bh)pairs);
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_ROW_CODES
#define HAS_VNNI
using RowCode = uint8_t;  // of a row that is rounded to integers; signed
typedef Bytes RowCodes;

inline RowCodes ordered(RowCodes codes) { return codes; }

// Adds the products of the four signed bytes of `four` and the unsigned bytes of each lane to the lane's sum.
inline Ints multiplied_and_added(uint32_t four, Words bytes, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32(four));
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, _mm256_set1_epi32(four));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_ROW_CODES
using RowCode = int16_t;
typedef int16_t RowCodes __attribute__((vector_size(2 * LANES)));
typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));

// Puts even inputs of each four before odd ones: a mask or a shift of a word's four bytes leaves every other one.
inline RowCodes ordered(RowCodes codes) { return __builtin_shufflevector(codes, codes, 0, 2, 1, 3, 4, 6, 5, 7); }

// Adds the products of the two signed numbers of `two` and those of each lane to the lane's sum.
inline Ints multiplied_and_added(uint32_t two, Words pairs, Ints sum) {
    return sum + (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(two));
}
#endif

// One step of a transpose: swaps the odd parts of a with the even parts of b, in parts of STEP lanes.
template <int STEP, int... LANE>
inline void exchange(Words& a, Words& b, std::integer_sequence<int, LANE...>) {
    const Words first = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + LANE - STEP : LANE)...);
    b = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + LANE : LANE + STEP)...);
    a = first;
}

// Transposes a square by swapping off-diagonal blocks of ever smaller size.
template <int STEP = LANES / 2>
inline void transpose(Words (&square)[LANES]) {
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(square[i], square[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(square);
}

// Returns the sum of each vector's lanes: lane i is the sum of vectors[i]. Overwrites the vectors.
// `multiply_tile_by_lanes` (tiles.h) adds in the same order.
template <int STEP = LANES / 2>
inline Floats lane_sums(Floats (&vectors)[LANES]) {
    for (int i = 0; i < STEP; i++) {
        Words a = (Words)vectors[i], b = (Words)vectors[i + STEP];
        exchange<STEP>(a, b, std::make_integer_sequence<int, LANES>());
        vectors[i] = (Floats)a + (Floats)b;
    }
    if constexpr (STEP > 1) return lane_sums<STEP / 2>(vectors);
    return vectors[0];
}

inline Floats all(float number) { return number - Floats{}; }
inline Words all(Pair pair) { return pair.bits - Words{}; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline EightFloats folded(Floats numbers) {  // preserves the sum
#if defined(__AVX512F__)
    EightFloats low, high;
    std::memcpy(&low, &numbers, sizeof low);
    std::memcpy(&high, (const char*)&numbers + sizeof low, sizeof high);
    return low + high;
#else
    return numbers;
#endif
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

// e^x within 2 ulp; 0 below -87, where floats become denormal; infinity above 88. The polynomial is
// that of Cephes' expf.
inline Floats exponential(Floats x) {
    const Floats lowest = all(-87.0f), highest = all(88.0f);
    Floats clamped = x < highest ? x : highest;
    clamped = maximum(clamped, lowest);
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats shifted = clamped * 1.44269504088896341f + round;
    Floats n = shifted - round;
    Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Ints exponent = (Ints)shifted << 23;  // moves n from the lowest bits to the exponent's
    Floats result = (Floats)((Ints)y + exponent);
    result = (Floats)((Ints)result & (x >= lowest));
    return x > highest ? all(__builtin_inff()) : result;
}

inline Floats hyperbolic_tangent(Floats x) {
    return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}

// Mirrors ACTIVATIONS in elementwise.py.
enum ActivationKind : int64_t { NO_ACTIVATION, SILU, GELU_TANH, GELU, RELU, SIGMOID };

inline Floats activated(Floats x, int64_t kind) {
    if (kind == NO_ACTIVATION) return x;
    if (kind == RELU) return maximum(x, Floats{});
    if (kind == GELU) {  // x / 2 * erfc(-x / sqrt(2)), by Abramowitz and Stegun's 7.1.26, within 1.5e-7 * x / 2
        const Floats magnitude = (x < 0.0f ? -x : x) * 0.70710678118654752f;
        const Floats t = 1.0f / (1.0f + 0.3275911f * magnitude);
        Floats y = t * 1.061405429f - 1.453152027f;
        y = y * t + 1.421413741f;
        y = y * t - 0.284496736f;
        y = y * t + 0.254829592f;
        y = y * t * exponential(-magnitude * magnitude);
        return 0.5f * x * (x < 0.0f ? y : 2.0f - y);
    }
    // SiLU and GELU are x * sigmoid(y): GELU's 0.5 * (1 + tanh(z)) equals sigmoid(2 * z).
    const Floats y = kind == GELU_TANH ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    return (kind == SIGMOID ? all(1.0f) : x) / (1.0f + exponential(-y));
}
