// Multiplies rows by integer weights that become fp32 as they are read, for up to BLOCK_ROWS rows at a
// time. A weight without minimums equals (code - zero) * scale bit for bit, and sums are fp32.

#include "integers.h"
#include "team.h"

namespace {

constexpr int64_t BLOCK_DEPTH = 256;               // a block's weights fit into L1; a multiple of a word's codes
constexpr int64_t COPY_STRIDE = BLOCK_DEPTH + 16;  // a cache line more, so that rows use different L1 sets

// Stores the weights of inputs [first, end) in `to` [inputs, PANEL]. If the last word has further inputs, their weights
// are stored too. A code is put into the last bits of the float 2^23, which makes it 2^23 + code. `zeros` include 2^23,
// so subtracting them leaves code - zero.
template <int BITS, bool HAS_MINIMUMS>
void dequantize_panel(const IntegerPanel<BITS>& panel, int64_t group, int64_t first, int64_t end, float* to) {
    constexpr int64_t PER_WORD = IntegerPanel<BITS>::PER_WORD;
    constexpr uint32_t MASK = (1 << BITS) - 1, EXPONENT = 0x4b000000;
    for (int64_t k = first; k < end;) {
        const int64_t place = k / group * PANEL, group_end = std::min((k / group + 1) * group, end);
        Floats scales[2], zeros[2], minimums[2];
        for (int half = 0; half < 2; half++) {
            scales[half] = load(panel.scales + place + half * LANES);
            const Ints zero = load(panel.zeros + place + half * LANES);
            zeros[half] = __builtin_convertvector(zero, Floats) + 8388608.0f;
            if constexpr (HAS_MINIMUMS) minimums[half] = load(panel.minimums + place + half * LANES);
        }
        for (; k < group_end; k += PER_WORD) {
            const uint32_t* from = panel.words + k / PER_WORD * PANEL;
            for (int half = 0; half < 2; half++) {
                __builtin_prefetch((const char*)(from + half * LANES) + AHEAD_BYTES);
                const Words words = load(from + half * LANES);
                for (uint32_t i = 0; i < PER_WORD; i++) {
                    const uint32_t shift = i % 4 * 8 + i / 4 * 4;
                    const Floats code = (Floats)(words >> shift & MASK | EXPONENT);
                    Floats weight = (code - zeros[half]) * scales[half];
                    if constexpr (HAS_MINIMUMS) weight -= minimums[half];
                    store(to + (k - first + i) * PANEL + half * LANES, weight);
                }
            }
        }
    }
}

template <int BITS>
void dequantize(const IntegerPanel<BITS>& panel, int64_t group, int64_t first, int64_t end, float* to) {
    panel.minimums ? dequantize_panel<BITS, true>(panel, group, first, end, to)
                   : dequantize_panel<BITS, false>(panel, group, first, end, to);
}

template <class Row, int BITS>
void multiply_block_of_rows(const IntegerLinear& a, int64_t row, int64_t num_rows, int64_t portion, int64_t end) {
    alignas(64) float sums[PORTION][BLOCK_ROWS * PANEL];
    alignas(64) float rows[BLOCK_ROWS * COPY_STRIDE], weights[BLOCK_DEPTH * PANEL];
    for (int64_t first = 0; first < a.depth; first += BLOCK_DEPTH) {
        const int64_t depth = std::min(BLOCK_DEPTH, a.depth - first);
        for (int64_t r = 0; r < num_rows; r++)
            widen((const Row*)a.rows + (row + r) * a.row_stride + first, depth, rows + r * COPY_STRIDE);
        for (int64_t panel = portion; panel < end; panel++) {
            dequantize(IntegerPanel<BITS>(a, panel), a.group, first, first + depth, weights);
            multiply(Product<float, float>{sums[panel - portion], rows, weights, num_rows, depth, PANEL,
                                           COPY_STRIDE, first > 0});
        }
    }
    for (int64_t panel = portion; panel < end; panel++) write<Row>(a, row, num_rows, panel, sums[panel - portion]);
}

template <class Row, int BITS>
void multiply_bits(const IntegerLinear& a, Team& team) {
    team.share(num_portions(a), [&](int64_t number) {
        const int64_t portion = number * PORTION, end = std::min(portion + PORTION, count_panels(a));
        for (int64_t row = 0; row < a.num_rows; row += BLOCK_ROWS)
            multiply_block_of_rows<Row, BITS>(a, row, std::min(BLOCK_ROWS, a.num_rows - row), portion, end);
    });
}

template <class Row>
void multiply_all(const IntegerLinear& a, Team& team) {
    a.bits == 8 ? multiply_bits<Row, 8>(a, team) : multiply_bits<Row, 4>(a, team);
}

}  // namespace

extern "C" void integers_fp32(const IntegerLinear* arguments, Team& team) { multiply_all<float>(*arguments, team); }
extern "C" void integers_bf16(const IntegerLinear* arguments, Team& team) { multiply_all<BFloat16>(*arguments, team); }
