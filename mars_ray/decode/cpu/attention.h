// Attention of a forward's rows over the pages of the cache.
//
// A row sees some keys of its sequence. They are counted off by rank: the place among the keys that
// the row sees, not the place in the sequence, because an accepted branch of drafts is moved to other
// places and has to keep its bits. Blocks end at fixed ranks. Within a block every sum runs key by
// key; blocks are joined in the order of their ranks, whoever has computed them.
#pragma once
#include <cmath>

#include "pool.h"
#include "product.h"

constexpr int KEYS = 128;     // ranks of a block
constexpr int QUERIES = 64;   // query heads of some rows that share the reading of a block, at most
constexpr int SIZE_MOST = 256;  // head size

// What a row sees: the places before `clean`, the j-th place from there on if bit j of `bits` is set,
// and those from `begin` to its own.
struct Sight {
    int64_t clean, begin, bits;
    bool operator==(const Sight& other) const {
        return clean == other.clean && begin == other.begin && bits == other.bits;
    }
    int64_t place(int64_t rank) const {
        if (rank < clean) return rank;
        int64_t rest = rank - clean;
        for (uint64_t left = (uint64_t)bits; left; left &= left - 1)
            if (rest-- == 0) return clean + __builtin_ctzll(left);
        return begin + rest;
    }
    int64_t seen_at(int64_t place) const {
        return clean + __builtin_popcountll((uint64_t)bits) + place - begin + 1;
    }
};

// Rows of a sequence that see the same keys in the blocks from `first_block` to `last_block`, but for
// those behind their own ends.
struct Group {
    const int64_t* row;   // among the forward's rows
    const int64_t* page;  // the sequence's
    int rows;
    int64_t first_block, last_block;
    Sight sight;
    bool is_split;  // its blocks are joined by another phase
};

// A block's part of a row's attention: the largest score, the sum of exponentials, and their sum
// weighted by the values.
struct Part {
    float most, sum;
    float* out;
};

static inline void join(Part& all_, const Part& next, int size) {
    if (next.sum == 0) return;
    if (all_.sum == 0) {
        all_.most = next.most, all_.sum = next.sum;
        memcpy(all_.out, next.out, size * sizeof(float));
        return;
    }
    float most = next.most > all_.most ? next.most : all_.most;
    float old = exp_of(all_.most - most), now = exp_of(next.most - most);
    all_.most = most;
    all_.sum = all_.sum * old + next.sum * now;
    F f_old = all(old), f_now = all(now);
    for (int d = 0; d < size; d += LANES)
        store(all_.out + d, add(mul(load(all_.out + d), f_old), mul(load(next.out + d), f_now)));
}

// One block of a key head for the query heads of a group's rows.
template <class W>
class Block {
public:
    // Queries are those of (row, head), `size` floats each.
    void compute(const W* cache, int64_t page_size, int heads, int head, int size, const Group& group,
                 int64_t block, const int64_t* place, int shared, const float* const* query, Part* part) {
        int queries = group.rows * shared, count[QUERIES];
        int64_t begin = block * KEYS;
        keys_ = 0;
        for (int q = 0; q < queries; q++) {
            int64_t seen = group.sight.seen_at(place[group.row[q / shared]]) - begin;
            count[q] = (int)(seen < 0 ? 0 : seen > KEYS ? KEYS : seen);
            if (count[q] > keys_) keys_ = count[q];
        }
        to_value_ = (int64_t)heads * size;
        find(cache + head * size, page_size, 2 * to_value_, group, begin);
        if (size % LANES) copy(size);
        next_ = head + 1 < heads ? size : 0;
        for (int first = 0; first < keys_; first += TOGETHER) {
            ask(first + TOGETHER, TOGETHER, 0, size);
            ask(first, TOGETHER, to_value_, size);
            for (int g = 0; g < TOGETHER; g += LANES) turn(first + g, size, key_ + g);
            scores<6>(query, 0, queries, size, first);
        }
        for (int q = 0; q < queries; q++) weigh(score_[q], count[q], part[q]);
        for (int d = 0; d < size; d += 4 * LANES) values<MOST_QUERIES>(part, 0, queries, d, size);
    }

private:
    // Dimensions in 32 bits, keys whose scores are summed side by side, and queries that share the
    // reading of a value.
    static constexpr int DIMS = 4 / sizeof(W);
#ifdef __AVX512F__
    static constexpr int TOGETHER = 2 * LANES, MOST_QUERIES = 6;
#else
    static constexpr int TOGETHER = LANES, MOST_QUERIES = 1;
#endif

    // Where the block's keys are; behind the last one it stands again, up to a whole number of them.
    void find(const W* cache, int64_t page_size, int64_t step, const Group& group, int64_t rank) {
        int64_t before = -1;
        const W* from = nullptr;
        for (int j = 0; j < keys_; j++) {
            int64_t place = group.sight.place(rank + j);
            if (j && place == before + 1 && place % page_size)
                from += step;
            else
                from = cache + (group.page[place / page_size] * page_size + place % page_size) * step;
            from_[j] = from, before = place;
        }
        for (int j = keys_; j % TOGETHER; j++) from_[j] = from;
    }

    // Keys and values are read in whole vectors, so those of other sizes get room behind them.
    void copy(int size) {
        for (int j = 0; j < rounded(keys_, TOGETHER); j++) {
            memcpy(room_[j], from_[j], size * sizeof(W));
            memcpy(room_[j] + SIZE_MOST, from_[j] + to_value_, size * sizeof(W));
            from_[j] = room_[j];
        }
        to_value_ = SIZE_MOST;
    }

    // Asks for what lies so far behind some keys: it is scattered, so the processor does not foresee it.
    void ask(int first, int count, int64_t behind, int size) {
        for (int j = first; j < first + count && j < keys_; j++)
            for (int at = 0; at < size; at += 64 / (int)sizeof(W))
                _mm_prefetch((const char*)(from_[j] + behind + at), _MM_HINT_T0);
    }

    // Sixteen keys as columns.
    void turn(int first, int size, float* to) {
        const void* from[LANES];
        for (int d = 0; d < size; d += DIMS * LANES) {
            for (int j = 0; j < LANES; j++) from[j] = from_[first + j] + d;
            transpose(from, to + d / DIMS * TOGETHER, TOGETHER);
        }
    }

    template <int M>
    void scores(const float* const* query, int q, int queries, int size, int first) {
        for (; q + M <= queries; q += M) scores_of<M>(query + q, q, size, first);
        if constexpr (M > 1)
            if (q < queries) scores<M - 1>(query, q, queries, size, first);
    }
    // Sums run over the dimensions one by one.
    template <int M>
    void scores_of(const float* const* query, int q, int size, int first) {
        constexpr int V = TOGETHER / LANES;
        F s[M][V];
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) s[m][v] = all(0);
        for (int d = 0; d < size; d += DIMS) {
            const float* key = key_ + d / DIMS * TOGETHER;
            UNROLL for (int i = 0; i < DIMS; i++) {
                F own[V];
                UNROLL for (int v = 0; v < V; v++) own[v] = part_of((const W*)(key + v * LANES), i);
                UNROLL for (int m = 0; m < M; m++) {
                    F x = all(query[m][d + i]);
                    UNROLL for (int v = 0; v < V; v++) s[m][v] = fma(own[v], x, s[m][v]);
                }
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int v = 0; v < V; v++) store(score_[q + m] + first + v * LANES, s[m][v]);
    }
    static F part_of(const float* key, int) { return load(key); }
    static F part_of(const bf16* key, int i) { return i ? second_of(key) : first_of(key); }

    // Scores of keys to exponentials, 0 for those that the row does not see.
    void weigh(float* score, int count, Part& part) {
        F several = all(-INFINITY);
        int j = 0;
        for (; j + LANES <= count; j += LANES) several = larger(load(score + j), several);
        float most = largest(several);
        for (; j < count; j++) most = score[j] > most ? score[j] : most;
        part.most = most, part.sum = 0;
        for (j = 0; j < count; j += LANES) store(score + j, exp(sub(load(score + j), all(most))));
        for (j = count; j < keys_; j++) score[j] = 0;
    }

    template <int M>
    void values(Part* part, int q, int queries, int d, int size) {
        int vectors = (size - d + LANES - 1) / LANES;
        for (; q + M <= queries; q += M) {
            if (vectors >= 4) values_of<M, 4>(part + q, q, d);
            else if (vectors == 3) values_of<M, 3>(part + q, q, d);
            else if (vectors == 2) values_of<M, 2>(part + q, q, d);
            else values_of<M, 1>(part + q, q, d);
        }
        if constexpr (M > 1)
            if (q < queries) values<M - 1>(part, q, queries, d, size);
    }
    template <int M, int V>
    void values_of(Part* part, int q, int d) {
        F out[M][V];
        float sum_[M];
        UNROLL for (int m = 0; m < M; m++) {
            sum_[m] = 0;
            UNROLL for (int v = 0; v < V; v++) out[m][v] = all(0);
        }
        for (int j = 0; j < keys_; j++) {
            const W* value = from_[j] + to_value_ + d;
            if (next_ && !q && !d) ask(j, 1, next_, next_), ask(j, 1, next_ + to_value_, next_);
            F value_of[V];
            UNROLL for (int v = 0; v < V; v++) value_of[v] = widen(value + v * LANES);
            UNROLL for (int m = 0; m < M; m++) {
                float weight = score_[q + m][j];
                sum_[m] += weight;
                UNROLL for (int v = 0; v < V; v++) out[m][v] = fma(all(weight), value_of[v], out[m][v]);
            }
        }
        UNROLL for (int m = 0; m < M; m++) {
            part[m].sum = sum_[m];
            UNROLL for (int v = 0; v < V; v++) store(part[m].out + d + v * LANES, out[m][v]);
        }
    }

    int keys_;
    int64_t to_value_;  // from a key
    int next_;          // from a key to that of the next head, or 0
    const W* from_[KEYS];
    alignas(64) float score_[QUERIES][KEYS], key_[SIZE_MOST / DIMS * TOGETHER];
    alignas(64) W room_[KEYS][2 * SIZE_MOST];
};
