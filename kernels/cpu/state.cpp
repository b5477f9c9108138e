// The operations of layers with state, as in kernels/state/reference.py.
//
// Sums go from row to row of a state, or from tap to tap, in the same order for a decode and for each token of a
// prompt. So a token has the same bits however a prompt is cut, unless states are rounded between its chunks.

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vectors.h"

// These mirror the structures in state.py. Strides are in elements.
struct Batch {
    const int32_t* starts;
    const int64_t *reads, *writes;
    int64_t num_sequences;
};

struct Convolution {
    void* out;
    const void *rows, *before, *after;  // before, after: null, or factors
    const void* weight;                 // [taps, num_channels]
    const void* bias;                   // null, or [num_channels]
    void* tails;
    Batch batch;
    int64_t num_channels, taps, slot_stride;
    int64_t strides[4];  // per token, of out, rows, before and after
    int32_t is_silu;
};

struct Recurrence {
    void* out;
    const void *query, *key, *value;
    const float *decay, *rate;  // [T, num_heads]
    const float* skip;          // null, or [num_heads]
    void* states;
    Batch batch;
    int64_t num_heads, num_key_heads, key_dim, value_dim, slot_stride;
    int64_t strides[4];  // per token, of out, query, key and value; heads are dense
    int32_t is_delta, has_narrow_states;
};

struct Gates {
    float *decay, *rate;          // [T, num_heads], dense
    const void *time, *rates;     // rates: null, or what sigmoid makes rates of
    const float *scale, *offset;  // [num_heads]
    int64_t num_tokens, num_heads;
    int64_t strides[2];  // per token, of time and rates
};

struct Scan {
    void* out;
    const void *query, *key, *value;
    const float* rate;           // [T, num_channels]
    const float *scale, *skip;   // [size, num_channels], [num_channels]
    void* states;
    Batch batch;
    int64_t num_channels, size, slot_stride;
    int64_t strides[4];  // per token, of out, query, key and value
    int32_t has_narrow_states;
};

namespace {

constexpr int64_t CHANNELS = 128;  // of one portion; rows of fewer would be read in pieces of a few cache lines
constexpr int64_t MAX_TAPS = 8;
constexpr int64_t MAX_KEY_DIM = 256;
constexpr int VECTORS = 4;  // columns of a state whose sums stay in registers
constexpr int64_t COLUMNS = VECTORS * LANES;
constexpr float LENGTH_EPS = 1e-6f;

template <class T>
void convolve(const Convolution& a, Team& team) {
    const int64_t num_portions = (a.num_channels + CHANNELS - 1) / CHANNELS, num_kept = a.taps - 1;
    team.share(a.batch.num_sequences * num_portions, [&](int64_t portion) {
        const int64_t sequence = portion / num_portions, first = portion % num_portions * CHANNELS;
        const int64_t width = std::min(CHANNELS, a.num_channels - first), read = a.batch.reads[sequence];
        const T *weight = (const T*)a.weight + first, *bias = a.bias ? (const T*)a.bias + first : nullptr;
        T* tails = (T*)a.tails + first;
        alignas(64) float ring[MAX_TAPS][CHANNELS] = {};  // the inputs of the latest tokens
        float* window[MAX_TAPS];                          // the same, the latest last
        for (int64_t tap = 0; tap < a.taps; tap++) window[tap] = ring[tap];
        if (read >= 0)
            for (int64_t kept = 0; kept < num_kept; kept++)
                widen(tails + read * a.slot_stride + kept * a.num_channels, width, window[kept + 1]);
        for (int64_t token = a.batch.starts[sequence]; token < a.batch.starts[sequence + 1]; token++) {
            std::rotate(window, window + 1, window + a.taps);
            const T* rows = (const T*)a.rows + token * a.strides[1] + first;
            const T* before = a.before ? (const T*)a.before + token * a.strides[2] + first : nullptr;
            const T* after = a.after ? (const T*)a.after + token * a.strides[3] + first : nullptr;
            T* out = (T*)a.out + token * a.strides[0] + first;
            for (int64_t i = 0; i < width; i += LANES) {
                Floats input = load(rows + i);
                if (before) input = rounded<T>(input * load(before + i));
                store(window[num_kept] + i, input);
                Floats total = load(window[0] + i) * load(weight + i);
                for (int64_t tap = 1; tap < num_kept; tap++)
                    total += load(window[tap] + i) * load(weight + tap * a.num_channels + i);
                total += input * load(weight + num_kept * a.num_channels + i);
                if (bias) total += load(bias + i);
                if (a.is_silu) {
                    total = rounded<T>(total);
                    total /= 1.0f + exponential(-total);
                }
                store(out + i, after ? rounded<T>(total) * load(after + i) : total);
            }
            const int64_t write = a.batch.writes[token];
            for (int64_t kept = 0; kept < num_kept && write >= 0; kept++) {
                T* tail = tails + write * a.slot_stride + kept * a.num_channels;
                for (int64_t i = 0; i < width; i += LANES) store(tail + i, load(window[kept + 1] + i));
            }
        }
    });
}

// log(1 + e^x) = 2 atanh(u) with u = t / (2 + t) and t = e^x, up to 1/3 here: a series of odd powers.
inline Floats softplus(Floats x) {
    constexpr int LAST_POWER = 15;  // what it leaves out is below 1e-8
    const Floats t = exponential(-maximum(x, -x)), u = t / (2.0f + t), square = u * u;
    Floats series = all(1.0f / LAST_POWER);
    for (int power = LAST_POWER - 2; power > 0; power -= 2) series = series * square + 1.0f / power;
    return maximum(x, Floats{}) + 2.0f * u * series;
}

template <class T>
void compute_gates(const Gates& a, Team& team) {
    team.share_rows(a.num_tokens, a.num_heads, [&](int64_t token) {
        const T* time = (const T*)a.time + token * a.strides[0];
        const T* rates = a.rates ? (const T*)a.rates + token * a.strides[1] : nullptr;
        for (int64_t head = 0; head < a.num_heads; head += LANES) {
            const int64_t count = std::min(LANES, a.num_heads - head), place = token * a.num_heads + head;
            T given[2][LANES] = {};
            float scale[LANES] = {}, offset[LANES] = {}, decay[LANES], rate[LANES];
            std::copy_n(time + head, count, given[0]);
            if (rates) std::copy_n(rates + head, count, given[1]);
            std::copy_n(a.scale + head, count, scale);
            std::copy_n(a.offset + head, count, offset);
            const Floats steps = softplus(load(given[0]) + load(offset));
            store(decay, load(scale) * steps);
            store(rate, rates ? rounded<T>(1.0f / (1.0f + exponential(-load(given[1])))) : steps);
            std::copy_n(decay, count, a.decay + place);
            std::copy_n(rate, count, a.rate + place);
        }
    });
}

// One token of one head, in float and ready for use.
struct alignas(64) Token {
    float query[MAX_KEY_DIM], key[MAX_KEY_DIM], value[COLUMNS], result[COLUMNS];
    float factor, rate;
};

// Computes COUNT * LANES columns of the state after a token, and of its result. `to` may be `from`.
template <int COUNT, class From, class To>
__attribute__((noinline)) void advance(Token& token, bool is_delta, int64_t key_dim, const From* from,
                                       int64_t from_stride, To* to, int64_t to_stride) {
    Floats u[COUNT];
    for (int j = 0; j < COUNT; j++) u[j] = load(token.value + j * LANES);
    if (is_delta) {
        Floats even[COUNT] = {}, odd[COUNT] = {};  // twice as many sums as one loop has time for
        for (int64_t row = 0; row < key_dim; row += 2)
            for (int j = 0; j < COUNT; j++) {
                even[j] += token.key[row] * load(from + row * from_stride + j * LANES);
                odd[j] += token.key[row + 1] * load(from + (row + 1) * from_stride + j * LANES);
            }
        for (int j = 0; j < COUNT; j++) u[j] -= token.factor * (even[j] + odd[j]);
    }
    for (int j = 0; j < COUNT; j++) u[j] *= token.rate;
    Floats result[COUNT] = {};
    const Floats factor = all(token.factor);
    for (int64_t row = 0; row < key_dim; row++) {
        const Floats key = all(token.key[row]), query = all(token.query[row]);  // not loaded again after a store
        for (int j = 0; j < COUNT; j++) {
            const Floats state = factor * load(from + row * from_stride + j * LANES) + key * u[j];
            store(to + row * to_stride + j * LANES, state);
            result[j] += query * state;
        }
    }
    for (int j = 0; j < COUNT; j++) store(token.result + j * LANES, result[j]);
}

void divide_by_length(float* numbers, int64_t count, float factor) {
    Floats squares = {};
    for (int64_t i = 0; i < count; i += LANES) squares += load(numbers + i) * load(numbers + i);
    factor /= __builtin_sqrtf(sum(squares) + LENGTH_EPS);
    for (int64_t i = 0; i < count; i += LANES) store(numbers + i, load(numbers + i) * factor);
}

// COUNT * LANES columns of the states of one head, from `first` on.
template <int COUNT, class T, class S>
void run_columns(const Recurrence& a, int64_t sequence, int64_t head, int64_t first) {
    constexpr int64_t WIDTH = COUNT * LANES;
    const int64_t start = a.batch.starts[sequence], end = a.batch.starts[sequence + 1];
    const int64_t read = a.batch.reads[sequence], key_head = head / (a.num_heads / a.num_key_heads);
    S* columns = (S*)a.states + head * a.key_dim * a.value_dim + first;
    Token token;
    const auto load_token = [&](int64_t row) {
        widen((const T*)a.query + row * a.strides[1] + key_head * a.key_dim, a.key_dim, token.query);
        widen((const T*)a.key + row * a.strides[2] + key_head * a.key_dim, a.key_dim, token.key);
        widen((const T*)a.value + row * a.strides[3] + head * a.value_dim + first, WIDTH, token.value);
        token.factor = std::exp(a.decay[row * a.num_heads + head]);
        token.rate = a.rate[row * a.num_heads + head];
        if (!a.is_delta) return;
        divide_by_length(token.key, a.key_dim, 1.0f);
        divide_by_length(token.query, a.key_dim, 1.0f / __builtin_sqrtf(a.key_dim));
    };
    const auto store_result = [&](int64_t row) {
        T* out = (T*)a.out + row * a.strides[0] + head * a.value_dim + first;
        const float skip = a.skip ? a.skip[head] : 0.0f;
        for (int64_t i = 0; i < WIDTH; i += LANES)
            store(out + i, load(token.result + i) + skip * load(token.value + i));
    };
    if (end - start == 1 && read >= 0 && a.batch.writes[start] >= 0) {
        load_token(start);
        advance<COUNT>(token, a.is_delta, a.key_dim, columns + read * a.slot_stride, a.value_dim,
                       columns + a.batch.writes[start] * a.slot_stride, a.value_dim);
        store_result(start);
        return;
    }
    // Dense, it stays in the L1 cache. At the distance of a slot's rows, it would be in half of the cache's sets.
    alignas(64) float state[MAX_KEY_DIM * WIDTH];
    if (read < 0) std::fill_n(state, a.key_dim * WIDTH, 0.0f);
    for (int64_t row = 0; row < a.key_dim && read >= 0; row++)
        widen(columns + read * a.slot_stride + row * a.value_dim, WIDTH, state + row * WIDTH);
    for (int64_t row = start; row < end; row++) {
        load_token(row);
        advance<COUNT>(token, a.is_delta, a.key_dim, state, WIDTH, state, WIDTH);
        store_result(row);
        const int64_t write = a.batch.writes[row];
        for (int64_t i = 0; i < a.key_dim && write >= 0; i++)
            for (int64_t j = 0; j < WIDTH; j += LANES)
                store(columns + write * a.slot_stride + i * a.value_dim + j, load(state + i * WIDTH + j));
    }
}

template <class T, class S>
void run_states(const Recurrence& a, Team& team) {
    const int64_t num_parts = (a.value_dim + COLUMNS - 1) / COLUMNS;
    team.share(a.batch.num_sequences * a.num_heads * num_parts, [&](int64_t portion) {
        const int64_t sequence = portion / num_parts / a.num_heads, head = portion / num_parts % a.num_heads;
        int64_t first = portion % num_parts * COLUMNS;
        if (first + COLUMNS <= a.value_dim) return run_columns<VECTORS, T, S>(a, sequence, head, first);
        for (; first < a.value_dim; first += LANES) run_columns<1, T, S>(a, sequence, head, first);
    });
}

template <class T>
void run_states(const Recurrence& a, Team& team) {
    a.has_narrow_states ? run_states<T, BFloat16>(a, team) : run_states<T, float>(a, team);
}

// COUNT * LANES channels of Mamba's recurrence, from `first` on.
template <int COUNT, class T, class S>
void scan_channels(const Scan& a, int64_t sequence, int64_t first) {
    constexpr int64_t WIDTH = COUNT * LANES;
    const int64_t read = a.batch.reads[sequence];
    S* columns = (S*)a.states + first;
    alignas(64) float state[MAX_KEY_DIM * WIDTH], query[MAX_KEY_DIM], key[MAX_KEY_DIM];
    if (read < 0) std::fill_n(state, a.size * WIDTH, 0.0f);
    for (int64_t row = 0; row < a.size && read >= 0; row++)
        widen(columns + read * a.slot_stride + row * a.num_channels, WIDTH, state + row * WIDTH);
    for (int64_t token = a.batch.starts[sequence]; token < a.batch.starts[sequence + 1]; token++) {
        widen((const T*)a.query + token * a.strides[1], a.size, query);
        widen((const T*)a.key + token * a.strides[2], a.size, key);
        const T* value = (const T*)a.value + token * a.strides[3] + first;
        Floats rate[COUNT], u[COUNT], result[COUNT] = {};
        for (int j = 0; j < COUNT; j++) {
            rate[j] = load(a.rate + token * a.num_channels + first + j * LANES);
            u[j] = rate[j] * load(value + j * LANES);
        }
        for (int64_t row = 0; row < a.size; row++) {
            const Floats keys = all(key[row]), queries = all(query[row]);
            for (int j = 0; j < COUNT; j++) {
                float* place = state + row * WIDTH + j * LANES;
                const Floats factor = exponential(rate[j] * load(a.scale + row * a.num_channels + first + j * LANES));
                const Floats next = factor * load(place) + keys * u[j];
                store(place, next);
                result[j] += queries * next;
            }
        }
        T* out = (T*)a.out + token * a.strides[0] + first;
        for (int j = 0; j < COUNT; j++)
            store(out + j * LANES, result[j] + load(a.skip + first + j * LANES) * load(value + j * LANES));
        const int64_t write = a.batch.writes[token];
        for (int64_t row = 0; row < a.size && write >= 0; row++)
            for (int64_t i = 0; i < WIDTH; i += LANES)
                store(columns + write * a.slot_stride + row * a.num_channels + i, load(state + row * WIDTH + i));
    }
}

template <class T, class S>
void scan(const Scan& a, Team& team) {
    const int64_t num_parts = (a.num_channels + COLUMNS - 1) / COLUMNS;
    team.share(a.batch.num_sequences * num_parts, [&](int64_t portion) {
        const int64_t sequence = portion / num_parts;
        int64_t first = portion % num_parts * COLUMNS;
        if (first + COLUMNS <= a.num_channels) return scan_channels<VECTORS, T, S>(a, sequence, first);
        for (; first < a.num_channels; first += LANES) scan_channels<1, T, S>(a, sequence, first);
    });
}

template <class T>
void scan(const Scan& a, Team& team) {
    a.has_narrow_states ? scan<T, BFloat16>(a, team) : scan<T, float>(a, team);
}

}  // namespace

extern "C" void state_gates_fp32(const Gates* a, Team& team) { compute_gates<float>(*a, team); }
extern "C" void state_gates_bf16(const Gates* a, Team& team) { compute_gates<BFloat16>(*a, team); }
extern "C" void conv_rows_fp32(const Convolution* a, Team& team) { convolve<float>(*a, team); }
extern "C" void conv_rows_bf16(const Convolution* a, Team& team) { convolve<BFloat16>(*a, team); }
extern "C" void state_step_fp32(const Recurrence* a, Team& team) { run_states<float>(*a, team); }
extern "C" void state_step_bf16(const Recurrence* a, Team& team) { run_states<BFloat16>(*a, team); }
extern "C" void scan_fp32(const Scan* a, Team& team) { scan<float>(*a, team); }
extern "C" void scan_bf16(const Scan* a, Team& team) { scan<BFloat16>(*a, team); }
