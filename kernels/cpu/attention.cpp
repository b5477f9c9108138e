// Paged attention: reads K and V directly from the KV cache, once for all queries of a tile.
//
// A row is one query of one head. The rows of a sequence that share a KV head are grouped into tiles
// of up to MAX_ROWS. Threads take work items one after another: a tile of rows over all the keys that
// it may see or, when few sequences decode with long contexts, over one split of those keys. An item
// keeps a running maximum (the online softmax of Milakov and Gimelshein, tiled as in FlashAttention).
// Splits are combined at the end, as in Flash-Decoding.
//
// A row has the same bits whatever is computed with it. Keys are summed in segments at fixed positions,
// and the segments of a row are merged in their order, by one function, wherever its splits begin. Tiles
// of keys begin at fixed positions too. A tile or segment that a row may not see changes no bit of it,
// because its weights are 0 and e^0 is 1. Few rows and many rows are summed in the same order.
//
// For a few rows, as in most decodes, both matrix products read the cache directly (few_rows.h). For
// more rows they use the kernel of linear layers (tiles.h): a tile of keys is packed into panels whose
// columns are keys, then its values into panels whose columns are dims. If the CPU multiplies bf16
// pairs, bf16 K and V stay in bf16 and the attention weights are rounded to bf16, as in FlashAttention.
// Sums are in fp32.

#include <algorithm>
#include <vector>

#include "few_rows.h"
#include "packed_rows.h"
#include "team.h"

// Mirrors `Attention` in attention.py. Strides are in elements.
struct Attention {
    void* out;  // [T, heads, value_dim]; a token's heads are dense
    const void* query;
    const void* keys;
    const void* values;
    const int32_t* block_tables;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const float* sinks;  // or null
    int64_t num_sequences, num_decodes, table_stride, block_size;
    int64_t num_heads, num_kv_heads, key_dim, value_dim;
    int64_t out_stride;        // per token
    int64_t query_strides[2];  // per token, head
    int64_t key_strides[3];    // per block, slot, head
    int64_t value_strides[3];
    int64_t window;  // keys that a query sees, up to its own; 0: all
    int64_t after;   // keys behind its own that it also sees
    float scale;
    float softcap;  // 0: none
};

namespace {

constexpr int64_t MAX_ROWS = 32;
constexpr int64_t SEGMENT = 256;           // in keys; a split has whole segments
constexpr int64_t ITEMS_PER_THREAD = 4;    // several, so that the load is balanced
constexpr int64_t CHUNKS_PER_THREAD = 16;  // a chunk is a run of items that a thread takes at once
constexpr float INITIAL_MAX = -1e30f;  // finite, so that the difference of two initial maxima is not NaN
constexpr float MASKED = -3e38f;

struct Span {
    int64_t first_token, num_queries, context;
};

struct Item {
    int64_t sequence, kv_head;
    int64_t first_row, num_rows;
    int64_t first_key, last_key;
    int64_t partial;  // index in Partials of its first segment's first row; -1: it writes to `out`
    int64_t seen;     // the first key that its first row sees: blocks before it may hold anything
};

// The sums of an item's rows over the keys of some segments.
struct Sums {
    float out[MAX_ROWS][MAX_DIM];
    float top[MAX_ROWS];    // the largest score so far
    float total[MAX_ROWS];  // the sum of e^(score - top) so far

    void clear(int64_t num_rows, int64_t value_dim) {
        for (int64_t row = 0; row < num_rows; row++) std::fill_n(out[row], value_dim, 0.0f);
        std::fill_n(top, num_rows, INITIAL_MAX);
        std::fill_n(total, num_rows, 0.0f);
    }
};

// One thread's working memory.
template <class T>
struct alignas(64) Scratch {
    Element<T> panels[TILE * MAX_DIM];  // first of keys, then of values
    Element<T> query[MAX_ROWS][MAX_DIM];
    Element<T> weights[MAX_ROWS][TILE];
    float scores[MAX_ROWS][TILE];
    Sums sums;     // of the segments so far
    Sums segment;  // of one segment, to be merged into `sums`
};

// A row whose keys are split. The sums of its segments have to be combined.
struct Combined {
    int64_t sequence, kv_head, row, first, stride, num_segments;
};

// The sums of segments that are to be combined: each row is [out (value_dim), top, total].
struct Partials {
    std::vector<float> floats;
    int64_t count, value_dim;

    float* row(int64_t index) { return &floats[index * (value_dim + 2)]; }

    void fit() {
        const size_t size = count * (value_dim + 2);
        if (floats.size() < size) floats.resize(size);
    }
};

// The keys and values of an item that are read at once.
template <class T>
struct Tile {
    Rows<T> keys, values;
};

// One online softmax step of a row: turns scores into weights and rescales the sums to the new maximum.
template <class T>
void update_softmax(Scratch<T>& my, Sums& sums, int64_t row, int64_t num_keys, int64_t value_dim) {
    const float* scores = my.scores[row];
    Floats tops = all(sums.top[row]);
    for (int64_t key = 0; key < num_keys; key += LANES) tops = maximum(tops, load(scores + key));
    const float top = largest(tops);
    Floats totals = {};
    for (int64_t key = 0; key < num_keys; key += LANES) {
        Floats weights = exponential(load(scores + key) - top);
        store(my.weights[row] + key, weights);
        totals += weights;
    }
    const float shrink = exponential(all(sums.top[row] - top))[0];
    sums.total[row] = sums.total[row] * shrink + sum(totals);
    sums.top[row] = top;
    if (shrink == 1.0f) return;
    float* out = sums.out[row];
    for (int64_t dim = 0; dim < value_dim; dim += LANES) store(out + dim, load(out + dim) * shrink);
}

void scale(float* scores, int64_t num_keys, float scale, float softcap) {
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const Floats scaled = load(scores + key) * scale;
        store(scores + key, softcap == 0 ? scaled : softcap * hyperbolic_tangent(scaled / softcap));
    }
}

// Masks the scores of keys that the query at `position` may not see. The tile starts at position `first`.
void mask(const Attention& a, float* scores, int64_t first, int64_t num_keys, int64_t position) {
    const int64_t own_end = position + 1 - first, past = own_end + a.after;
    std::fill(scores + std::clamp<int64_t>(past, 0, num_keys), scores + TILE, MASKED);
    if (a.window) std::fill_n(scores, std::clamp<int64_t>(own_end - a.window, 0, TILE), MASKED);
}

template <class T>
void write(const Attention& a, T* out, const float* row, float top, float total, int64_t head) {
    float shrink = 1.0f;
    if (a.sinks) {  // a sink takes a share of the weight but has no value
        const float new_top = std::max(top, a.sinks[head]);
        shrink = exponential(all(top - new_top))[0];
        total = total * shrink + exponential(all(a.sinks[head] - new_top))[0];
    }
    for (int64_t dim = 0; dim < a.value_dim; dim += LANES)
        store(out + dim, load(row + dim) * (shrink / total));
}

template <class T>
T* out_row(const Attention& a, const Span& span, int64_t kv_head, int64_t row, int64_t* head) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    *head = kv_head * group + row % group;
    return (T*)a.out + (span.first_token + row / group) * a.out_stride + *head * a.value_dim;
}

// Finds the keys or values of an item's tile that starts at position `first`; finds none if `item` is null.
template <class T>
void find(const Attention& a, const Item* item, int64_t first, const void* cache, const int64_t* strides,
          Rows<T>& rows) {
    rows.num_rows = item ? std::clamp<int64_t>(item->last_key - first, 0, TILE) : 0;
    if (rows.num_rows == 0) return;
    const int32_t* table = a.block_tables + item->sequence * a.table_stride;
    // Keys of the first tile that are out of the window are masked, but read: the first seen one stands for them.
    const int64_t skipped = std::max<int64_t>(0, item->seen - first);
    int64_t place = (first + skipped) / a.block_size, slot = (first + skipped) % a.block_size;
    for (int64_t row = skipped; row < rows.num_rows; row++, slot++) {
        if (slot == a.block_size) place++, slot = 0;
        rows.rows[row] = (const T*)cache + table[place] * strides[0] + slot * strides[1] + item->kv_head * strides[2];
    }
    std::fill_n(rows.rows, skipped, rows.rows[skipped]);
    std::fill_n(rows.rows + rows.num_rows, -rows.num_rows & (LANES - 1), rows.rows[rows.num_rows - 1]);
}

template <class T>
void find(const Attention& a, const Item* item, int64_t first, Tile<T>& tile) {
    find(a, item, first, a.keys, a.key_strides, tile.keys);
    find(a, item, first, a.values, a.value_strides, tile.values);
}

// Merges a row's sums over the next segment into those of the segments before. It must be the same machine code wherever
// it is called, because a compiler may contract the sum of two products in two ways: hence noipa.
__attribute__((noipa)) void merge(float* out, float& top, float& total, const float* next, float next_top,
                                  float next_total, int64_t value_dim) {
    const float new_top = std::max(top, next_top);
    const float share = exponential(all(top - new_top))[0], next_share = exponential(all(next_top - new_top))[0];
    top = new_top;
    total = total * share + next_total * next_share;
    for (int64_t dim = 0; dim < value_dim; dim += LANES)
        store(out + dim, load(out + dim) * share + load(next + dim) * next_share);
}

// `next` is the item that the thread probably runs afterwards, or null. Without noipa the compiler would look up
// the address of the thread_local scratch in the innermost loops.
template <class T>
__attribute__((noipa)) void run(const Attention& a, const Span& span, const Item& item, const Item* next,
                                Scratch<T>& my, Partials& partials) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    for (int64_t row = 0; row < item.num_rows; row++) {
        const int64_t token = span.first_token + (item.first_row + row) / group;
        const int64_t head = item.kv_head * group + (item.first_row + row) % group;
        const T* query = (const T*)a.query + token * a.query_strides[0] + head * a.query_strides[1];
        for (int64_t dim = 0; dim < a.key_dim; dim += LANES) store(my.query[row] + dim, load(query + dim));
    }
    // Multiplies the rows of `from` by each panel, into the rows of `to`.
    const auto multiply_panels = [&](auto summing, auto* to, const auto* from, int64_t num_columns, int64_t depth) {
        const auto* panel = (const Unit<T>*)my.panels;
        for (int64_t column = 0; column < num_columns; column += PANEL, panel += depth * PANEL)
            multiply<summing.value>(Product<Unit<T>, Unit<T>>{
                to[0] + column, (const Unit<T>*)from[0], panel, item.num_rows, depth,
                sizeof to[0] / sizeof(float), sizeof from[0] / sizeof(Unit<T>)});
    };
    constexpr std::integral_constant<Summing, Summing::BY_LANES> by_lanes;
    constexpr std::integral_constant<Summing, Summing::CONTINUED> continued;
    const bool is_few = item.num_rows <= FEW_ROWS, is_partial = item.partial >= 0;
    const Tile<T> none{{0, a.key_dim}, {0, a.value_dim}};
    Tile<T> tiles[] = {none, none};
    find(a, &item, item.first_key, tiles[0]);
    int turn = 0;
    float* partial = is_partial ? partials.row(item.partial) : nullptr;
    for (int64_t first = item.first_key; first < item.last_key;) {
        const int64_t end = std::min((first / SEGMENT + 1) * SEGMENT, item.last_key);
        const bool merges = !is_partial && first > item.first_key;
        Sums& sums = merges ? my.segment : my.sums;
        const FewRows<T> few{my.query, my.scores, my.weights, sums.out};
        sums.clear(item.num_rows, a.value_dim);
        for (; first < end; first += TILE, turn = !turn) {
            const Tile<T>& tile = tiles[turn];
            Tile<T>& ahead = tiles[!turn];
            const int64_t num_keys = tile.keys.num_rows;
            if (first + num_keys < item.last_key)
                find(a, &item, first + num_keys, ahead);
            else
                find(a, next, next ? next->first_key : 0, ahead);
            if (is_few) {
                for_few_rows(COMPUTE_SCORES<T>, few, item.num_rows, tile.keys, ahead.keys);
            } else {
                pack_keys(tile.keys, (Unit<T>*)my.panels, ahead.keys);
                multiply_panels(by_lanes, my.scores, my.query, num_keys, a.key_dim / ELEMENTS_PER_UNIT<T>);
            }
            for (int64_t row = 0; row < item.num_rows; row++) {
                scale(my.scores[row], num_keys, a.scale, a.softcap);
                const int64_t position = span.context - span.num_queries + (item.first_row + row) / group;
                mask(a, my.scores[row], first, num_keys, position);
                update_softmax(my, sums, row, num_keys, a.value_dim);
            }
            if (is_few) {
                for_few_rows(ADD_VALUES<T>, few, item.num_rows, tile.values, ahead.values);
            } else {
                pack_values(tile.values, (Unit<T>*)my.panels, ahead.values);
                const int64_t depth = (num_keys + ELEMENTS_PER_UNIT<T> - 1) / ELEMENTS_PER_UNIT<T>;
                multiply_panels(continued, sums.out, my.weights, a.value_dim, depth);
            }
        }
        for (int64_t row = 0; is_partial && row < item.num_rows; row++, partial += a.value_dim + 2) {
            std::copy_n(sums.out[row], a.value_dim, partial);
            partial[a.value_dim] = sums.top[row];
            partial[a.value_dim + 1] = sums.total[row];
        }
        for (int64_t row = 0; merges && row < item.num_rows; row++)
            merge(my.sums.out[row], my.sums.top[row], my.sums.total[row], sums.out[row], sums.top[row],
                  sums.total[row], a.value_dim);
    }
    for (int64_t row = 0; !is_partial && row < item.num_rows; row++) {
        int64_t head;
        T* to = out_row<T>(a, span, item.kv_head, item.first_row + row, &head);
        write(a, to, my.sums.out[row], my.sums.top[row], my.sums.total[row], head);
    }
}

// Combines the segments of one row: num_segments partial rows, `stride` rows apart.
template <class T>
void combine(const Attention& a, T* out, Partials& partials, int64_t first, int64_t stride,
             int64_t num_segments, int64_t head) {
    float top = INITIAL_MAX, total = 0.0f, row[MAX_DIM] = {};
    for (int64_t segment = 0; segment < num_segments; segment++) {
        const float* partial = partials.row(first + segment * stride);
        merge(row, top, total, partial, partial[a.value_dim], partial[a.value_dim + 1], a.value_dim);
    }
    write(a, out, row, top, total, head);
}

// The work of one call.
struct Plan {
    std::vector<Span> spans;
    std::vector<Item> items;
    std::vector<Combined> combined;
    Partials partials;
    int64_t chunk;  // items that a thread takes at once

    void make(const Attention& a, int64_t num_threads);

   private:
    void find_spans(const Attention& a);
    void add(const Attention& a, int64_t sequence, int64_t target_splits);
};

void Plan::find_spans(const Attention& a) {
    spans.clear();
    for (int64_t i = 0; i < a.num_sequences; i++) {
        const int64_t after = i - a.num_decodes;
        if (after < 0)
            spans.push_back({i, 1, a.context_lens[i]});
        else
            spans.push_back({a.num_decodes + a.query_starts[after],
                             a.query_starts[after + 1] - a.query_starts[after], a.context_lens[i]});
    }
}

// Adds the items of a sequence. Each of its tiles of rows is split into at most target_splits items.
void Plan::add(const Attention& a, int64_t sequence, int64_t target_splits) {
    const Span& span = spans[sequence];
    const int64_t group = a.num_heads / a.num_kv_heads;
    const int64_t all_rows = span.num_queries * group;
    for (int64_t row = 0; row < all_rows; row += MAX_ROWS) {
        const int64_t num_rows = std::min(MAX_ROWS, all_rows - row);
        const int64_t position = span.context - span.num_queries + row / group;
        const int64_t last = span.context - span.num_queries + (row + num_rows - 1) / group;
        const int64_t end = std::min(last + 1 + a.after, span.context);
        const int64_t seen = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
        const int64_t start = seen / TILE * TILE;
        const int64_t first_segment = start / SEGMENT, num_segments = (end - 1) / SEGMENT + 1 - first_segment;
        const int64_t max_splits = std::max<int64_t>(1, (end - start) / SEGMENT);
        const int64_t splits = std::min(max_splits, target_splits);
        const int64_t per_split = (num_segments + splits - 1) / splits;
        for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
            if (per_split == num_segments) {
                items.push_back({sequence, kv_head, row, num_rows, start, end, -1, seen});
                continue;
            }
            for (int64_t r = 0; r < num_rows; r++)
                combined.push_back({sequence, kv_head, row + r, partials.count + r, num_rows, num_segments});
            for (int64_t segment = 0; segment < num_segments; segment += per_split) {
                const int64_t key = (first_segment + segment) * SEGMENT;
                items.push_back({sequence, kv_head, row, num_rows, std::max(key, start),
                                 std::min(key + per_split * SEGMENT, end), partials.count, seen});
                partials.count += std::min(per_split, num_segments - segment) * num_rows;
            }
        }
    }
}

void Plan::make(const Attention& a, int64_t num_threads) {
    find_spans(a);
    items.clear(), combined.clear();
    partials.count = 0, partials.value_dim = a.value_dim;
    chunk = 1;
    const int64_t group = a.num_heads / a.num_kv_heads;
    int64_t num_tiles = 0;
    for (const Span& span : spans)
        num_tiles += a.num_kv_heads * ((span.num_queries * group + MAX_ROWS - 1) / MAX_ROWS);
    if (num_tiles == 0) return;  // no new tokens
    const int64_t target_splits = (ITEMS_PER_THREAD * num_threads + num_tiles - 1) / num_tiles;
    for (int64_t i = 0; i < a.num_sequences; i++)
        if (spans[i].context) add(a, i, target_splits);
    partials.fit();
    chunk = std::max<int64_t>(1, items.size() / (CHUNKS_PER_THREAD * num_threads));
}

// Writes zeros for padding, which has no context.
template <class T>
void clear_padding(const Attention& a, const Plan& plan) {
    for (const Span& span : plan.spans)
        for (int64_t i = 0; span.context == 0 && i < span.num_queries; i++)
            std::fill_n((T*)a.out + (span.first_token + i) * a.out_stride, a.num_heads * a.value_dim, T{});
}

template <class T>
void attend(const Attention& a, Team& team) {
    const Prepared prepared = team.once<Plan>([&](Plan& plan) {
        plan.make(a, team.num_threads);
        clear_padding<T>(a, plan);
        const int64_t num_items = plan.items.size(), num_combined = plan.combined.size();
        return Prepared{&plan, {(num_items + plan.chunk - 1) / plan.chunk, num_combined}};
    });
    Plan& plan = *(Plan*)prepared.object;
    team.share(prepared.counts[0], [&](int64_t number) {
        static thread_local Scratch<T> my;
        const int64_t num_items = plan.items.size(), end = std::min((number + 1) * plan.chunk, num_items);
        for (int64_t i = number * plan.chunk; i < end; i++) {
            const Item& item = plan.items[i];
            run<T>(a, plan.spans[item.sequence], item, i + 1 < num_items ? &item + 1 : nullptr, my, plan.partials);
        }
    });
    team.share(prepared.counts[1], [&](int64_t i) {
        const Combined& row = plan.combined[i];
        int64_t head;
        T* out = out_row<T>(a, plan.spans[row.sequence], row.kv_head, row.row, &head);
        combine(a, out, plan.partials, row.first, row.stride, row.num_segments, head);
    });
}

}  // namespace

extern "C" void attend_fp32(const Attention* arguments, Team& team) { attend<float>(*arguments, team); }
extern "C" void attend_bf16(const Attention* arguments, Team& team) { attend<BFloat16>(*arguments, team); }
