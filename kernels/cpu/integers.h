// Weights (code - zero) * scale - minimum of 4 or 8 bits in panels, as integers.py packs them.
#pragma once

#include <algorithm>

#include "linear.h"

// Mirrors `IntegerLinear` in integers.py. `panels` are [panels, words, PANEL]. A word has four codes of 8
// bits, one in each byte, or eight codes of 4 bits: inputs 0 to 3 in the low halves of its bytes, inputs 4
// to 7 in the high halves.
struct IntegerLinear : Linear {
    const float* scales;   // [panels, groups, PANEL]
    const uint8_t* zeros;  // [panels, groups, PANEL]
    const float* minimums;  // [panels, groups, PANEL]; null: all are 0
    int64_t bits, group, num_groups;  // group: inputs per scale, a multiple of a word's codes
};

namespace {

constexpr int64_t AHEAD_BYTES = 4096;  // prefetch distance from the words being read

template <int BITS>
struct IntegerPanel {
    static constexpr int64_t PER_WORD = 32 / BITS;
    const uint32_t* words;
    const float* scales;
    const uint8_t* zeros;
    const float* minimums;

    IntegerPanel(const IntegerLinear& a, int64_t panel) {
        const int64_t groups = panel * a.num_groups * PANEL;
        words = (const uint32_t*)a.panels + panel * num_words(a.depth) * PANEL;
        scales = a.scales + groups, zeros = a.zeros + groups;
        minimums = a.minimums ? a.minimums + groups : nullptr;
    }

    static int64_t num_words(int64_t depth) { return (depth + PER_WORD - 1) / PER_WORD; }
};

}  // namespace
