// The argmax and the logsumexp of each row of logits, in one call and without an fp32 copy. With a large
// vocabulary, torch takes longer for these two operations than for a layer of the decoder.

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vectors.h"

// Mirrors `Logits` in logits.py.
struct Logits {
    int64_t* best;       // [num_rows]; the first of equal maxima
    float* normalizers;  // [num_rows], logsumexp
    const void* rows;
    int64_t num_rows, width, stride;
};

namespace {

float number(float number) { return number; }

float number(BFloat16 number) {
    const uint32_t bits = (uint32_t)number.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <class T>
void summarize(const T* row, int64_t width, int64_t& best, float& normalizer) {
    const int64_t whole = width / LANES * LANES;
    Floats tops = all(-__builtin_inff()), totals = {};
    Ints places = {}, here, is_nan = {};
    for (int lane = 0; lane < LANES; lane++) here[lane] = lane;
    for (int64_t i = 0; i < whole; i += LANES, here += (int32_t)LANES) {
        const Floats numbers = load(row + i);
        const Ints is_more = numbers > tops;
        tops = is_more ? numbers : tops;
        places = is_more ? here : places;
        is_nan |= numbers != numbers;
    }
    float top = largest(tops);
    best = width;
    for (int lane = 0; lane < LANES; lane++)
        if (tops[lane] == top) best = std::min<int64_t>(best, places[lane]);
    bool has_nan = false;
    for (int lane = 0; lane < LANES; lane++) has_nan |= is_nan[lane];
    for (int64_t i = whole; i < width; i++) {
        if (number(row[i]) > top) top = number(row[i]), best = i;
        has_nan |= std::isnan(number(row[i]));
    }
    if (has_nan) {  // NaN counts as the maximum, as in torch
        best = std::find_if(row, row + width, [](T logit) { return std::isnan(number(logit)); }) - row;
        normalizer = number(row[best]);
        return;
    }
    for (int64_t i = 0; i < whole; i += LANES) totals += exponential(load(row + i) - top);
    float total = sum(totals);
    for (int64_t i = whole; i < width; i++) total += exponential(all(number(row[i]) - top))[0];
    normalizer = std::isinf(top) ? top : top + std::log(total);
}

template <class T>
void summarize_all(const Logits& a, Team& team) {
    team.share(a.num_rows, [&](int64_t row) {
        summarize((const T*)a.rows + row * a.stride, a.width, a.best[row], a.normalizers[row]);
    });
}

}  // namespace

extern "C" void logits_fp32(const Logits* arguments, Team& team) { summarize_all<float>(*arguments, team); }
extern "C" void logits_bf16(const Logits* arguments, Team& team) { summarize_all<BFloat16>(*arguments, team); }
