// Multiplies rows that are rounded to integers by integer weights. With VNNI they are rounded to 8 bits, and one
// instruction adds four products in each lane. With AVX2 alone they are rounded to 16 bits, and one instruction adds
// two products: those of bytes need as many instructions, because sums of two may exceed 16 bits.
//
// Rows are rounded in groups of inputs, each with its own scale: the largest magnitude becomes 127 or 32767. Sums
// within a group are exact, and the groups' sums are added as floats, in order. So a row's result is
// bitwise independent of the other rows. Where the CPU has AMX, its tiles sum the groups of many rows.

#include <cfloat>
#include <numeric>
#include <vector>

#include "amx.h"
#include "integers.h"
#include "team.h"

#if defined(HAS_ROW_CODES)

namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS_OF_CODES = 6;  // of 32 registers: 12 sums of integers and 12 of floats, 4 vectors of codes
#elif defined(HAS_VNNI)
constexpr int TILE_ROWS_OF_CODES = 2;  // of AVX2's 16 registers: 4 sums of integers and 4 of floats, 4 vectors of codes
#else
constexpr int TILE_ROWS_OF_CODES = 5;  // of AVX2's 16 registers: 10 sums of integers, 4 vectors of codes, 1 product
#endif
constexpr int64_t LARGEST_CODE = (1 << (8 * sizeof(RowCode) - 1)) - 1;
constexpr int64_t ROW_GROUP = 64 * sizeof(RowCode);  // at most this many inputs share a scale of a row; sums fit 32 bits
constexpr int64_t UNIT = 4 / sizeof(RowCode);        // codes of a row that one instruction multiplies

// Makes a vector at least this long. If it grows, its old numbers are lost: nobody needs a copy of them.
template <class Element>
void grow(std::vector<Element>& numbers, size_t size) {
    if (numbers.size() < size) numbers = std::vector<Element>(size);
}

struct RoundedRows {
    int64_t group, num_groups, stride;
    // The number of rows is a multiple of AMX_ROWS. What the last ones contain does not matter.
    std::vector<RowCode> codes;  // [rows, stride], in the order of `ordered`; zeros follow the last input
    std::vector<float> scales;   // [rows, groups]
    std::vector<int32_t> sums;   // [rows, groups]: the sums of the codes

    void fit(const IntegerLinear& a) {
        const int64_t num_rows = (a.num_rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS;
        group = std::gcd(a.group, ROW_GROUP);
        num_groups = (a.depth + group - 1) / group;
        stride = num_groups * group + LANES;
        grow(codes, num_rows * stride);
        grow(scales, num_rows * num_groups);
        grow(sums, num_rows * num_groups);
    }
};

// Rounds `count` numbers. Writes zeros after them, up to a whole vector. If one is NaN or infinite, the scale is NaN.
template <class Row>
void round_group(const Row* from, int64_t count, RowCode* to, float& scale, int32_t& total) {
    alignas(64) float numbers[ROW_GROUP + LANES] = {};
    widen(from, count, numbers);
    Floats most = {}, invalid = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load(numbers + i);
        most = maximum(most, maximum(x, -x));
        invalid += x * 0.0f;
    }
    scale = largest(most) / LARGEST_CODE + sum(invalid);
    const float inverse = scale >= FLT_MIN ? 1 / scale : 0;
    Words totals = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats shifted = load(numbers + i) * inverse + 12582912.0f;  // rounds, as in exponential()
        const Words integers = (Words)shifted - 0x4b400000;
        totals += integers;
        const auto codes = ordered(__builtin_convertvector(integers, RowCodes));
        std::memcpy(to + i, &codes, sizeof codes);
    }
    total = 0;
    for (int lane = 0; lane < LANES; lane++) total += (int32_t)totals[lane];
}

template <class Row>
void round_row(const IntegerLinear& a, int64_t row, RoundedRows& to) {
    for (int64_t g = 0; g < to.num_groups; g++) {
        const int64_t first = g * to.group, place = row * to.num_groups + g;
        round_group((const Row*)a.rows + row * a.row_stride + first, std::min(to.group, a.depth - first),
                    to.codes.data() + row * to.stride + first, to.scales[place], to.sums[place]);
    }
}

template <int BITS>
struct RoundedTile {
    const IntegerPanel<BITS>& panel;
    const RoundedRows& rows;
    int64_t depth, group;  // of the weight
    int64_t first_row;
    float* sums;  // [rows, PANEL]

    RoundedTile after(int64_t count) const { return {panel, rows, depth, group, first_row + count, sums + count * PANEL}; }
};

inline uint32_t unit_of_row(const RowCode* from) {
    uint32_t unit;
    std::memcpy(&unit, from, sizeof unit);
    return unit;
}

// Returns what one instruction multiplies by a unit of a row: in each lane, UNIT codes of the lane's word.
template <int BITS>
inline Words unit_of_words(Words words, int unit) {
#if defined(HAS_VNNI)
    return BITS == 8 ? words : words >> (unit * 4) & 0x0f0f0f0f;
#else
    const int shift = unit / 2 * 4 + unit % 2 * 8;
    const Words shifted = (Words)((Pairs)words >> shift);
    return shift + BITS == 16 ? shifted : shifted & (BITS == 8 ? 0x00ff00ff : 0x000f000f);
#endif
}

// Adds the products of a unit of R rows, `stride` codes apart, and a unit of a panel.
template <int R>
inline void add_unit(const RowCode* codes, int64_t stride, const Words (&unit)[2], Ints (&sums)[R][2]) {
    for (int r = 0; r < R; r++) {
        const uint32_t row = unit_of_row(codes + r * stride);
        for (int half = 0; half < 2; half++) sums[r][half] = multiplied_and_added(row, unit[half], sums[r][half]);
    }
}

// Adds the sums of one group to a row's totals.
inline Floats group_added(Floats totals, Ints sums, Floats scales, float row_scale) {
    return totals + __builtin_convertvector(sums, Floats) * scales * row_scale;
}

// Adds the products of one group of inputs to the totals of R rows. `units`: the panel's codes of the group minus their
// zeros, or null: codes are taken from the panel's words, and zeros times the rows' sums are subtracted. Unless its last
// loops are unrolled early, GCC 12 keeps the sums in memory: for small groups, that takes a fifth of the time.
template <int BITS, int R, bool HAS_UNITS>
inline void add_group(const RoundedTile<BITS>& t, int64_t g, const Words (*units)[2], Floats (&totals)[R][2]) {
    constexpr int64_t PER_WORD = IntegerPanel<BITS>::PER_WORD;
    const RoundedRows& rows = t.rows;
    const RowCode* codes = rows.codes.data() + t.first_row * rows.stride;
    const float* row_scales = rows.scales.data() + t.first_row * rows.num_groups + g;
    const int32_t* row_sums = rows.sums.data() + t.first_row * rows.num_groups + g;
    const int64_t first = g * rows.group, end = std::min(first + rows.group, t.depth);
    const int64_t place = (t.group == rows.group ? g : first / t.group) * PANEL;  // a division takes long
    Ints sums[R][2] = {};
    if constexpr (!HAS_UNITS)
        for (int half = 0; half < 2; half++) {
            const Ints zeros = load(t.panel.zeros + place + half * LANES);
            for (int r = 0; r < R; r++) sums[r][half] = zeros * -row_sums[r * rows.num_groups];
        }
    if constexpr (HAS_UNITS)
        for (int64_t k = first; k < end; k += UNIT, units++) add_unit<R>(codes + k, rows.stride, *units, sums);
    else
        for (int64_t k = first; k < end; k += PER_WORD) {
            const uint32_t* from = t.panel.words + k / PER_WORD * PANEL;
            for (int half = 0; half < 2; half++) __builtin_prefetch((const char*)(from + half * LANES) + AHEAD_BYTES);
            const Words words[2] = {load(from), load(from + LANES)};
            for (int unit = 0; unit < PER_WORD / UNIT; unit++)
                add_unit<R>(codes + k + unit * UNIT, rows.stride,
                            {unit_of_words<BITS>(words[0], unit), unit_of_words<BITS>(words[1], unit)}, sums);
        }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const Floats scales = load(t.panel.scales + place + half * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            totals[r][half] = group_added(totals[r][half], sums[r][half], scales, row_scales[r * rows.num_groups]);
    }
    if (!t.panel.minimums) return;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const Floats minimums = load(t.panel.minimums + place + half * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const int64_t index = r * rows.num_groups;
            totals[r][half] -= minimums * (row_scales[index] * (float)row_sums[index]);
        }
    }
}

template <int BITS, int R>
void multiply_tile(const RoundedTile<BITS>& t) {
    Floats totals[R][2] = {};
    for (int64_t g = 0; g < t.rows.num_groups; g++) add_group<BITS, R, false>(t, g, nullptr, totals);
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(t.sums + r * PANEL + half * LANES, totals[r][half]);
}

template <int BITS, int... R>
void multiply_tile_of(int64_t num_rows, const RoundedTile<BITS>& t, std::integer_sequence<int, R...>) {
    constexpr void (*TABLE[])(const RoundedTile<BITS>&) = {multiply_tile<BITS, R + 1>...};
    TABLE[num_rows - 1](t);
}

#if !defined(HAS_VNNI)
// Adds one group's products to `t.sums`.
template <int BITS, int R>
void add_tile(const RoundedTile<BITS>& t, int64_t g, const Words (*units)[2]) {
    Floats totals[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) totals[r][half] = load(t.sums + r * PANEL + half * LANES);
    add_group<BITS, R, true>(t, g, units, totals);
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(t.sums + r * PANEL + half * LANES, totals[r][half]);
}

// Multiplies many rows, from `first` on: takes the codes of a group from the panel's words once for all tiles.
template <int BITS, int... R>
void multiply_many(int64_t num_rows, const RoundedTile<BITS>& t, std::integer_sequence<int, R...>) {
    constexpr int64_t PER_WORD = IntegerPanel<BITS>::PER_WORD;
    constexpr void (*TABLE[])(const RoundedTile<BITS>&, int64_t, const Words (*)[2]) = {add_tile<BITS, R + 1>...};
    const int64_t count = num_tiles(num_rows, sizeof...(R)), group = t.rows.group;
    int64_t starts[BLOCK_ROWS + 1];  // of the tiles, found once: divisions take long
    for (int64_t i = 0; i <= count; i++) starts[i] = num_rows * i / count;
    std::fill_n(t.sums, num_rows * PANEL, 0.0f);
    for (int64_t g = 0; g < t.rows.num_groups; g++) {
        Words units[ROW_GROUP / UNIT][2];
        const uint32_t* from = t.panel.words + g * group / PER_WORD * PANEL;
        const int64_t place = g * group / t.group * PANEL;
        Words zeros[2];  // each twice, as the pairs of a unit's codes
        for (int half = 0; half < 2; half++) zeros[half] = (Words)load(t.panel.zeros + place + half * LANES) * 0x00010001;
        const int64_t num_words = (std::min(group, t.depth - g * group) + PER_WORD - 1) / PER_WORD;
        for (int64_t word = 0; word < num_words; word++, from += PANEL) {
            for (int half = 0; half < 2; half++) {
                __builtin_prefetch((const char*)(from + half * LANES) + AHEAD_BYTES);
                const Words words = load(from + half * LANES);
                for (int unit = 0; unit < PER_WORD / UNIT; unit++)
                    units[word * (PER_WORD / UNIT) + unit][half] =
                        (Words)((Pairs)unit_of_words<BITS>(words, unit) - (Pairs)zeros[half]);
            }
        }
        for (int64_t i = 0; i < count; i++) TABLE[starts[i + 1] - starts[i] - 1](t.after(starts[i]), g, units);
    }
}
#endif

#if defined(__AMX_INT8__)
constexpr int64_t MIN_AMX_ROWS = 12;  // with fewer, VNNI is as fast
static_assert(ROW_GROUP == AMX_BYTES && BLOCK_ROWS % AMX_ROWS == 0);

// Whether each code of a panel minus its zero fits into a signed byte.
template <int BITS>
bool fits_signed_bytes(const IntegerPanel<BITS>& panel, const IntegerLinear& a) {
    const int64_t count = a.num_groups * PANEL;
    return BITS == 4 || std::all_of(panel.zeros, panel.zeros + count, [](uint8_t zero) { return zero == 128; });
}

// Loads the codes of a group, minus their zeros, into tiles 6 and 7: each has half of the panel's columns, and four
// inputs of a column in a word.
template <int BITS>
inline void load_codes(const uint32_t* words, const uint8_t* zeros) {
    typedef int8_t SignedBytes __attribute__((vector_size(4 * LANES)));
    alignas(64) uint32_t codes[AMX_ROWS][PANEL];
    for (int64_t half = 0; half < PANEL; half += LANES) {
        const SignedBytes zero = (SignedBytes)(load(zeros + half) * 0x01010101);
        for (int64_t row = 0; row < AMX_ROWS; row++) {
            Words four = load(words + row * BITS / 8 * PANEL + half);
            if constexpr (BITS == 4) four = four >> (row % 2 * 4) & 0x0f0f0f0f;
            const SignedBytes difference = (SignedBytes)four - zero;
            std::memcpy(codes[row] + half, &difference, sizeof difference);
        }
    }
    barrier();
    _tile_loadd(6, codes[0], PANEL * sizeof codes[0][0]);
    _tile_loadd(7, codes[0] + LANES, PANEL * sizeof codes[0][0]);
}

// Multiplies the rows [first, first + num_rows) by a panel. `totals` [rows, PANEL] has room for whole tiles.
template <int BITS>
void multiply_with_amx(const IntegerLinear& a, const IntegerPanel<BITS>& panel, const RoundedRows& rows, int64_t first,
                       int64_t num_rows, float* totals) {
    std::fill_n(totals, (num_rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS * PANEL, 0.0f);
    for (int64_t g = 0; g < rows.num_groups; g++) {
        const int64_t place = g * ROW_GROUP / a.group * PANEL;
        const uint32_t* words = panel.words + g * ROW_GROUP / IntegerPanel<BITS>::PER_WORD * PANEL;
        for (int64_t byte = 0; byte < ROW_GROUP * PANEL * BITS / 8; byte += LINE_BYTES)
            __builtin_prefetch((const char*)words + AHEAD_BYTES + byte);
        load_codes<BITS>(words, panel.zeros + place);
        const Floats scales[2] = {load(panel.scales + place), load(panel.scales + place + LANES)};
        for (int64_t row = 0; row < num_rows; row += AMX_ROWS) {
            alignas(64) int32_t sums[2][AMX_ROWS][LANES];
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(4, rows.codes.data() + (first + row) * rows.stride + g * ROW_GROUP, rows.stride);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_stored(0, sums[0], AMX_BYTES);
            _tile_stored(1, sums[1], AMX_BYTES);
            barrier();
            const float* row_scale = rows.scales.data() + (first + row) * rows.num_groups + g;
            for (int64_t r = 0; r < AMX_ROWS; r++, row_scale += rows.num_groups)
                for (int half = 0; half < 2; half++) {
                    Ints group;
                    std::memcpy(&group, sums[half][r], sizeof group);
                    float* to = totals + (row + r) * PANEL + half * LANES;
                    store(to, group_added(load(to), group, scales[half], *row_scale));
                }
        }
    }
}
#endif

template <class Row, int BITS>
void multiply_bits(const IntegerLinear& a, Team& team) {
    RoundedRows& rows = *(RoundedRows*)team.once<RoundedRows>([&](RoundedRows& rows) {
        rows.fit(a);
        return Prepared{&rows};
    }).object;
    team.share_rows(a.num_rows, a.depth, [&](int64_t row) { round_row<Row>(a, row, rows); });
    team.share(num_portions(a), [&](int64_t number) {
        const int64_t end = std::min((number + 1) * PORTION, count_panels(a));
#if defined(__AMX_INT8__)
        const bool uses_amx = a.num_rows >= MIN_AMX_ROWS && rows.group == ROW_GROUP && a.depth % ROW_GROUP == 0 && !a.minimums;
        if (uses_amx) configure_tiles({AMX_ROWS, AMX_ROWS, 0, 0, AMX_ROWS, 0, AMX_ROWS, AMX_ROWS});
#endif
        for (int64_t block = 0; block < a.num_rows; block += BLOCK_ROWS)
            for (int64_t place = number * PORTION; place < end; place++) {
                alignas(64) float sums[BLOCK_ROWS * PANEL];
                const IntegerPanel<BITS> panel(a, place);
                const int64_t num_rows = std::min(BLOCK_ROWS, a.num_rows - block);
#if defined(__AMX_INT8__)
                if (uses_amx && fits_signed_bytes(panel, a)) {
                    multiply_with_amx(a, panel, rows, block, num_rows, sums);
                    write<Row>(a, block, num_rows, place, sums);
                    continue;
                }
#endif
                const RoundedTile<BITS> tile{panel, rows, a.depth, a.group, block, sums};
                constexpr auto FUNCTIONS = std::make_integer_sequence<int, TILE_ROWS_OF_CODES>();
#if !defined(HAS_VNNI)
                if (num_rows > TILE_ROWS_OF_CODES) {
                    multiply_many(num_rows, tile, FUNCTIONS);
                    write<Row>(a, block, num_rows, place, sums);
                    continue;
                }
#endif
                const int64_t count = num_tiles(num_rows, TILE_ROWS_OF_CODES);
                for (int64_t i = 0; i < count; i++) {  // tiles of nearly equal size
                    const int64_t first = num_rows * i / count, end = num_rows * (i + 1) / count;
                    multiply_tile_of(end - first, tile.after(first), FUNCTIONS);
                }
                write<Row>(a, block, num_rows, place, sums);
            }
    });
}

template <class Row>
void multiply_all(const IntegerLinear& a, Team& team) {
    a.bits == 8 ? multiply_bits<Row, 8>(a, team) : multiply_bits<Row, 4>(a, team);
}

}  // namespace

extern "C" void rounded_fp32(const IntegerLinear* arguments, Team& team) { multiply_all<float>(*arguments, team); }
extern "C" void rounded_bf16(const IntegerLinear* arguments, Team& team) { multiply_all<BFloat16>(*arguments, team); }
#endif
