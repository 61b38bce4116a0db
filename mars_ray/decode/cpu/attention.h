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

// One block of a key head for the query heads of a group's rows. Reads each key and value once.
template <class W>
class Block {
public:
    // Queries are those of (row, head), `size` floats each with zeros behind `size_`.
    void compute(const W* cache, int64_t page_size, int heads, int head, int size_, const Group& group,
                 int64_t block, const int64_t* place, int shared, const float* const* query, Part* part) {
        int size = (int)rounded(size_, LANES), queries = group.rows * shared;
        int64_t begin = block * KEYS;
        int count[QUERIES], most = 0;
        for (int q = 0; q < queries; q++) {
            int64_t seen = group.sight.seen_at(place[group.row[q / shared]]) - begin;
            count[q] = (int)(seen < 0 ? 0 : seen > KEYS ? KEYS : seen);
            if (count[q] > most) most = count[q];
        }
        int64_t step = 2ll * heads * size_;
        for (int first = 0; first < most; first += LANES) {
            int keys = most - first < LANES ? most - first : LANES;
            read(cache, page_size, heads, head, size_, group, begin + first, keys, step, first * size);
            scores(query, queries, size_, first);
        }
        for (int q = 0; q < queries; q++) weigh(score_[q], count[q], most, part[q]);
        for (int d = 0; d < size; d += 4 * LANES) {
            int q = 0;
            for (; q + GROUP <= queries; q += GROUP) values<GROUP>(part + q, q, most, d, size);
            for (; q < queries; q++) values<1>(part + q, q, most, d, size);
        }
    }

private:
#ifdef __AVX512F__
    static constexpr int GROUP = 4;  // queries that share the reading of a value
#else
    static constexpr int GROUP = 1;
#endif

    // Sixteen keys as columns, and their values as rows, in float32.
    void read(const W* cache, int64_t page_size, int heads, int head, int size_, const Group& group,
              int64_t rank, int keys, int64_t step, int to) {
        int size = (int)rounded(size_, LANES);
        const W* from[LANES];
        for (int j = 0; j < keys; j++) {
            int64_t place = group.sight.place(rank + j);
            int64_t slot = group.page[place / page_size] * page_size + place % page_size;
            from[j] = cache + slot * step + head * size_;
        }
        int64_t to_value = (int64_t)heads * size_;
        for (int d = 0; d < size; d += LANES) {
            alignas(64) float part[LANES][LANES];
            int lanes = size_ - d < LANES ? size_ - d : LANES;
            for (int j = 0; j < LANES; j++)
                if (j >= keys || lanes < LANES) {
                    memset(part[j], 0, sizeof part[j]);
                    for (int i = 0; i < lanes && j < keys; i++) part[j][i] = widened(from[j][d + i]);
                } else {
                    store(part[j], widen(from[j] + d));
                }
            transpose(part);
            memcpy(&key_[d * LANES], part, sizeof part);
            for (int j = 0; j < keys; j++) {
                float* value = &value_[to + j * size + d];
                if (lanes == LANES) {
                    store(value, widen(from[j] + to_value + d));
                    continue;
                }
                for (int i = 0; i < LANES; i++) value[i] = i < lanes ? widened(from[j][to_value + d + i]) : 0;
            }
        }
    }

    void scores(const float* const* query, int queries, int size_, int first) {
        int q = 0;
        for (; q + 6 <= queries; q += 6) scores_of<6>(query + q, q, size_, first);
        for (; q + 3 <= queries; q += 3) scores_of<3>(query + q, q, size_, first);
        for (; q < queries; q++) scores_of<1>(query + q, q, size_, first);
    }
    template <int M>
    void scores_of(const float* const* query, int q, int size_, int first) {
        F s[M];
        UNROLL for (int m = 0; m < M; m++) s[m] = all(0);
        for (int d = 0; d < size_; d++) {
            F key = load(&key_[d * LANES]);
            UNROLL for (int m = 0; m < M; m++) s[m] = fma(key, all(query[m][d]), s[m]);
        }
        UNROLL for (int m = 0; m < M; m++) store(score_[q + m] + first, s[m]);
    }

    // Scores of keys to exponentials, 0 for those that the row does not see.
    static void weigh(float* score, int count, int most, Part& part) {
        float largest_ = -INFINITY;
        for (int j = 0; j < count; j++) largest_ = score[j] > largest_ ? score[j] : largest_;
        part.most = largest_, part.sum = 0;
        for (int j = 0; j < count; j += LANES) store(score + j, exp(sub(load(score + j), all(largest_))));
        for (int j = count; j < most; j++) score[j] = 0;
    }

    template <int M>
    void values(Part* part, int q, int most, int d, int size) {
        int vectors = (size - d) / LANES;
        if (vectors >= 4) return values_of<M, 4>(part, q, most, d, size);
        if (vectors == 3) return values_of<M, 3>(part, q, most, d, size);
        if (vectors == 2) return values_of<M, 2>(part, q, most, d, size);
        values_of<M, 1>(part, q, most, d, size);
    }
    template <int M, int V>
    void values_of(Part* part, int q, int most, int d, int size) {
        F out[M][V];
        float sum_[M];
        UNROLL for (int m = 0; m < M; m++) {
            sum_[m] = 0;
            UNROLL for (int v = 0; v < V; v++) out[m][v] = all(0);
        }
        for (int j = 0; j < most; j++) {
            const float* value = &value_[j * size + d];
            F value_of[V];
            UNROLL for (int v = 0; v < V; v++) value_of[v] = load(value + v * LANES);
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

    alignas(64) float score_[QUERIES][KEYS], key_[SIZE_MOST * LANES], value_[KEYS * SIZE_MOST];
};
