// The keys or values of a tile, where they lie in the KV cache.
#pragma once

#include "tiles.h"

namespace {

constexpr int64_t MAX_DIM = 576;
constexpr int64_t TILE = 64;  // most keys or values in a tile

// Element: the type of the numbers of a panel (tiles.h) that is made of rows of T. Unit: what an instruction multiplies
// in each lane, an element or a pair of them.
template <class T>
struct Packed {
    using Element = float;
    using Unit = float;
};
#if defined(__AVX512BF16__)
template <>
struct Packed<BFloat16> {
    using Element = BFloat16;
    using Unit = Pair;
};
#endif
template <class T>
using Element = typename Packed<T>::Element;
template <class T>
using Unit = typename Packed<T>::Unit;
template <class T>
constexpr int64_t ELEMENTS_PER_UNIT = sizeof(Unit<T>) / sizeof(Element<T>);

// Pointers to the keys or values of a tile. The last pointer is repeated up to a multiple of LANES.
template <class T>
struct Rows {
    int64_t num_rows, dim;
    const T* rows[TILE] = {};

    // Prefetches the cache line of this element of a row if the element is the first of its line. Lines are requested
    // one at a time while other rows are read, because a burst of requests would queue up. A null row is harmless.
    template <int CACHE>  // as in __builtin_prefetch: 3 for L1, 2 for L2
    void fetch(int64_t row, int64_t element) const {
        if (element * sizeof(T) % LINE_BYTES == 0) __builtin_prefetch(rows[row] + element, 0, CACHE);
    }
};

// A vector of a row's units from `first` on. Pairs from `depth` on are zeros; single elements always fill the vector.
template <class T>
inline Words units(const T* row, int64_t first, int64_t) { return (Words)load(row + first); }

// The units of a panel that come from two rows. If a unit is a single element, only the first row is used.
template <class T>
inline Words units_of_two_rows(const T* row, const T*) { return (Words)load(row); }

#if defined(__AVX512BF16__)
inline Words units(const BFloat16* row, int64_t first, int64_t depth) {
    return load((const Pair*)row + first, depth - first);
}

inline Words units_of_two_rows(const BFloat16* first, const BFloat16* second) {
    return alternating(first, second, std::make_integer_sequence<int, 2 * LANES>());
}
#endif

}  // namespace
