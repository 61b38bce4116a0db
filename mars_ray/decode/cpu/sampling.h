// The choice of a token from a row of logits, with the meaning of core/sampling.py: temperature, top-k,
// top-p, min-p, and Gumbel noise that is a pure function of (seed, position, token).
//
// A row is read few times, and nothing is sorted but what lies at a border:
//  - one pass finds the largest logit of each block of 64 tokens. Later passes skip the blocks that
//    cannot matter;
//  - top-k and top-p become one threshold, found by selection (`border`);
//  - the noise is compared by its hash first: two logarithms for a dozen tokens instead of all.
// Rows are independent, and each is computed in one order, so neither the batch nor the number of
// threads can change a token.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

// Of a row, as Python's Sampling.
struct SampleRow {
    int64_t seed, position;  // the position of the predicted token
    int64_t top_k;
    double temperature, top_p, min_p;
};

// Rows and tokens whose scores are compared with the best one of the row.
struct Pairs {
    int64_t count;
    const int64_t *row, *token;
};

namespace sampling {

// ---- Masks over sixteen lanes ----

#ifdef __AVX512F__
static inline uint32_t where_reached(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline uint32_t where_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
static inline F add_where(uint32_t mask, F a, F b) { return _mm512_mask_add_ps(a, (__mmask16)mask, a, b); }
// Writes the masked lanes one behind the other, and up to 16 floats in all; returns how many.
static inline int pack(float* to, uint32_t mask, F a) {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)mask, a));
    return __builtin_popcount(mask);
}
static inline float most_of(F a) { return _mm512_reduce_max_ps(a); }
#else
static inline uint32_t bits_of(__m256 a, __m256 b) {
    return (uint32_t)_mm256_movemask_ps(a) | (uint32_t)_mm256_movemask_ps(b) << 8;
}
static inline uint32_t where_reached(F x, F y) {
    return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
static inline uint32_t where_nan(F x, F y) {
    return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
}
static inline __m256 where(uint32_t mask, __m256 a) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)mask), bit);
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)), a);
}
static inline F add_where(uint32_t mask, F x, F y) { return add(x, {where(mask, y.a), where(mask >> 8, y.b)}); }
static inline int pack(float* to, uint32_t mask, F x) {
    alignas(64) float from[LANES];
    store(from, x);
    int n = 0;
    // No branch on the mask's bits, which are as good as random.
    for (int i = 0; i < LANES; i++) to[n] = from[i], n += mask >> i & 1;
    return n;
}
static inline float most_of(F x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
#endif

// ---- Noise ----

// SplitMix64 as in core/sampling.py: state = mix(state + key + GAMMA) for each key in turn. A draw is
// u = (state >> 11) 2^-53, and the noise -log(-log u).
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr uint64_t PURPOSE = 11;  // core.sampling._NOISE

static inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * MIX_1;
    x = (x ^ x >> 27) * MIX_2;
    return x ^ x >> 31;
}

// What a row's tokens have in common: a token's state is mix(this + token).
static inline uint64_t key_of(const SampleRow& how) {
    uint64_t state = mix((uint64_t)how.seed + GAMMA);
    state = mix(state + PURPOSE + GAMMA);
    return mix(state + (uint64_t)how.position + GAMMA) + GAMMA;
}

static inline double noise(uint64_t key, int64_t token) {
    double u = (double)(mix(key + (uint64_t)token) >> 11) * 0x1p-53;
    return -std::log(-std::log(u < 0x1p-54 ? 0x1p-54 : u));
}

// No noise is larger: u is at most 1 - 2^-53, and -log(-log(1 - 2^-53)) = 53 log 2 = 36.74.
constexpr float MOST_NOISE = 36.8f;

// Which of sixteen successive tokens may reach a score, by an upper bound of their noise. Since
// -log u >= 1 - u, the noise is at most -log(1 - u), and 1 - u is the complement of the state's bits as
// a fraction. Its highest 31 bits become a float, whose own bits, read as a whole number, are 2^23
// times (127 + log2) but for the mantissa m in the place of log2(1 + m). That is too small by at most
// 0.086, so the bound holds, and where noise is large it is hardly larger: a dozen tokens of 50,000 pass.
constexpr float LOG_2 = 0.69314718f;
constexpr float SLACK = 1e-3f;  // more than the roundings of float32 numbers up to 110
#ifdef __AVX512DQ__
static inline __m512i half_mixed(__m512i x) {
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64((int64_t)MIX_1));
    // The last round of mix() changes the upper half only in its lowest bit, which is not used.
    return _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64((int64_t)MIX_2));
}
static inline __m512 bound(__m512i upper, __m512 distance) {
    __m512i rest = _mm512_sub_epi32(_mm512_set1_epi32(0x7fffffff), _mm512_srli_epi32(upper, 1));
    __m512 logarithm = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(rest)));
    return _mm512_fmadd_ps(logarithm, _mm512_set1_ps(-LOG_2 / (1 << 23)), distance);
}
static inline uint32_t may_reach(uint64_t key, int64_t token, F distance, float score) {
    const __m512i count = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    __m512i first = _mm512_add_epi64(_mm512_set1_epi64((int64_t)(key + (uint64_t)token)), count);
    __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(8));
    __m512i upper = _mm512_permutex2var_epi32(half_mixed(first), odd, half_mixed(second));
    return where_reached(bound(upper, distance), all(score - (127 + 31) * LOG_2 - SLACK));
}
#else
// AVX2 has no product of 64 bits: it is put together from three of 32.
static inline __m256i times(__m256i x, uint64_t factor) {
    const __m256i low = _mm256_set1_epi64x((int64_t)(factor & 0xffffffff));
    const __m256i high = _mm256_set1_epi64x((int64_t)(factor >> 32));
    __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(x, high), _mm256_mul_epu32(_mm256_srli_epi64(x, 32), low));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(crossed, 32));
}
static inline __m256i half_mixed(uint64_t first) {
    __m256i x = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)first), _mm256_setr_epi64x(0, 1, 2, 3));
    x = times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), MIX_1);
    return times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), MIX_2);
}
static inline __m256 bound(uint64_t first, __m256 distance) {
    // Upper halves of 0 to 3 and 4 to 7, then in order: shuffles work within 128 bits.
    __m256 halves = _mm256_shuffle_ps(_mm256_castsi256_ps(half_mixed(first)),
                                      _mm256_castsi256_ps(half_mixed(first + 4)), 0xdd);
    __m256i upper = _mm256_permute4x64_epi64(_mm256_castps_si256(halves), 0xd8);
    __m256i rest = _mm256_sub_epi32(_mm256_set1_epi32(0x7fffffff), _mm256_srli_epi32(upper, 1));
    __m256 logarithm = _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(rest)));
    return _mm256_fmadd_ps(logarithm, _mm256_set1_ps(-LOG_2 / (1 << 23)), distance);
}
static inline uint32_t may_reach(uint64_t key, int64_t token, F distance, float score) {
    uint64_t first = key + (uint64_t)token;
    F most{bound(first, distance.a), bound(first + 8, distance.b)};
    return where_reached(most, all(score - (127 + 31) * LOG_2 - SLACK));
}
#endif

// ---- Selection ----

struct Border {
    float value;
    int64_t equal;  // how many of the values equal to it are kept
    bool is_shared;  // whether others equal to it are not
};

// The smallest set of the largest values whose weights reach `need`, but at least the largest. Values
// and weights, of which there must be one or more and room for 16 more, are used up.
//
// Halves as quickselect does, at the median of some values; the weight above is summed, not sorted.
static Border border(float* value, float* weight, int64_t n, double need) {
    constexpr int64_t FEW = 64, SAMPLE = 31;
    double above = 0;  // weight of the values that were left behind because they are in the set
    while (n > FEW) {
        float some[SAMPLE];
        for (int64_t i = 0; i < SAMPLE; i++) some[i] = value[i * n / SAMPLE];
        std::nth_element(some, some + SAMPLE / 2, some + SAMPLE);
        float pivot = some[SAMPLE / 2];
        for (int64_t i = n; i < n + LANES; i++) value[i] = NAN, weight[i] = 0;  // reaches nothing
        auto upper = [&](double* mass) {
            int64_t count = 0;
            *mass = 0;
            for (int64_t i = 0; i < n;) {
                F part = all(0);  // of few, so that float32 is exact enough
                for (int64_t end = std::min(n, i + 16 * LANES); i < end; i += LANES) {
                    uint32_t mask = where_reached(load(value + i), all(pivot));
                    count += __builtin_popcount(mask);
                    part = add_where(mask, part, load(weight + i));
                }
                *mass += sum(part);
            }
            return count;
        };
        double mass;
        int64_t count = upper(&mass);
        if (count == n) {  // the pivot is the least value: part it from the others
            pivot = std::nextafter(pivot, INFINITY);
            count = upper(&mass);
            if (count == 0) break;  // there are no others
        }
        bool is_in_upper = above + mass >= need;
        if (!is_in_upper) above += mass;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i += LANES) {
            uint32_t mask = where_reached(load(value + i), all(pivot));
            if (!is_in_upper) mask ^= n - i < LANES ? (1u << (n - i)) - 1 : 0xffff;
            F v = load(value + i), w = load(weight + i);
            pack(weight + kept, mask, w);
            kept += pack(value + kept, mask, v);
        }
        n = kept;
    }
    if (n <= FEW) {
        std::pair<float, float> pair[FEW];
        for (int64_t i = 0; i < n; i++) pair[i] = {value[i], weight[i]};
        std::sort(pair, pair + n, [](const auto& a, const auto& b) { return a.first > b.first; });
        for (int64_t i = 0; i < n; i++) value[i] = pair[i].first, weight[i] = pair[i].second;
    }
    int64_t last = 0;
    for (above += weight[0]; last + 1 < n && above < need; above += weight[last]) last++;
    int64_t equal = 1;
    while (equal <= last && value[last - equal] == value[last]) equal++;
    return {value[last], equal, last + 1 < n && value[last + 1] == value[last]};
}

// ---- A row ----

constexpr int64_t BLOCK = 4 * LANES;
constexpr int LIMITS = 8;

// Room that a thread keeps for the rows it works on.
struct Room {
    std::vector<float> most, value, weight;
    void fit(int64_t blocks) {
        if ((int64_t)most.size() >= blocks) return;
        most.resize(blocks), value.resize(blocks * BLOCK + LANES), weight.resize(blocks * BLOCK + LANES);
    }
};
static thread_local Room room_of_thread;

class Row {
public:
    Row(const float* logits, int64_t columns, const SampleRow& how)
        : logits_(logits), columns_(columns), how_(how), room_(room_of_thread), key_(key_of(how)) {
        // As torch does with float32: colder ones would overflow (core.sampling._COLDEST).
        is_greedy_ = how.temperature == 0;
        temperature_ = is_greedy_ ? 1 : (float)std::max(how.temperature, 0x1p-64);
        inverse_ = 1 / temperature_;
        // Passes go by whole blocks, so the last one gets a copy that is filled up.
        for (int64_t i = 0; i < BLOCK; i++) tail_[i] = -INFINITY;
        memcpy(tail_, logits + columns / BLOCK * BLOCK, columns % BLOCK * sizeof(float));
        is_number_ = find_most();
        if (is_number_ && !is_greedy_) {
            if (0 < how.top_k && how.top_k < columns) cut_by_rank();
            if ((float)how.top_p < 1) cut_by_mass();
            if (how.min_p > 0 && top_ + (float)std::log(how.min_p) > cut_) {
                cut_ = top_ + (float)std::log(how.min_p);
                last_ = columns;
            }
        }
    }

    // Whether there is a best token. With noise there is none beside an infinity either.
    bool is_number() const { return is_number_; }

    int64_t most_column() const { return most_column_; }

    // The score of a column, but for a constant of the row; `token` is the noise's.
    double score(int64_t column, int64_t token) const {
        if (is_greedy_) return logits_[column];
        float value = value_of(logits_[column]);
        if (!is_number_) return NAN;
        if (!(value >= cut_) || (value == cut_ && column > last_)) return -INFINITY;
        return value - top_ + noise(key_, token);
    }

    // The token with the best score, and that.
    int64_t best(double* most) const {
        int64_t found = most_column_;
        *most = score(found, found);
        if (is_greedy_ || !is_number_) return found;
        for (int64_t b = 0; b < blocks(); b++) {
            float limit = std::max(cut_, top_ + (float)*most - MOST_NOISE);
            if (!reaches(b, limit)) continue;
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                F value = values(b, i);
                uint32_t mask = where_reached(value, all(cut_));
                mask &= may_reach(key_, b * BLOCK + i, sub(value, all(top_)), (float)*most);
                for (; mask; mask &= mask - 1) {
                    int64_t column = b * BLOCK + i + __builtin_ctz(mask);
                    double own = score(column, column);
                    if (own > *most) *most = own, found = column;
                }
            }
        }
        return found;
    }

private:
    int64_t blocks() const { return (columns_ + BLOCK - 1) / BLOCK; }
    const float* block(int64_t b) const { return (b + 1) * BLOCK <= columns_ ? logits_ + b * BLOCK : tail_; }
    // Logits divided by the temperature, rounded as a division rounds, but several times faster: a
    // product with the inverse, corrected by what is left of x (Markstein's theorem). Of -inf it
    // makes NaN, which reaches no limit either.
    F values(int64_t b, int64_t i) const {
        F x = load(block(b) + i), q = mul(x, all(inverse_));
        return fma(fma(q, all(-temperature_), x), all(inverse_), q);
    }
    float value_of(float x) const {
        float q = x * inverse_;
        return std::fma(std::fma(q, -temperature_, x), inverse_, q);
    }
    bool reaches(int64_t b, float limit) const { return value_of(room_.most[b]) >= limit; }

    // Each block's largest logit, and the row's with its first column; whether there is a best token.
    bool find_most() {
        room_.fit(blocks());
        uint32_t nan = 0;
        float most = -INFINITY;
        for (int64_t b = 0; b < blocks(); b++) {
            const float* p = block(b);
            F x = load(p), y = load(p + LANES), z = load(p + 2 * LANES), w = load(p + 3 * LANES);
            nan |= where_nan(x, y) | where_nan(z, w);
            float own = most_of(larger(larger(x, y), larger(z, w)));
            room_.most[b] = own;
            if (own > most) most = own;
        }
        if (nan) return false;
        int64_t b = 0;
        while (room_.most[b] < most) b++;
        const float* p = block(b);
        int64_t i = 0;
        while (p[i] < most) i++;
        most_column_ = b * BLOCK + i;
        top_ = value_of(most);
        return is_greedy_ || std::isfinite(top_);
    }

    // Packs all values from `low` on and below `high`; returns how many.
    int64_t collect(float low, float high) {
        int64_t count = 0;
        for (int64_t b = 0; b < blocks(); b++) {
            if (!reaches(b, low)) continue;
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                F value = values(b, i);
                uint32_t mask = where_reached(value, all(low)) & ~where_reached(value, all(high));
                count += pack(room_.value.data() + count, mask, value);
            }
        }
        return count;
    }

    void cut_by_rank() {
        // With k blocks or more, k tokens reach the k-th largest of the blocks' maxima.
        float limit = -FLT_MAX;
        if (how_.top_k <= blocks()) {
            std::copy_n(room_.most.begin(), blocks(), room_.value.begin());
            std::fill_n(room_.weight.begin(), blocks(), 1.0f);
            limit = border(room_.value.data(), room_.weight.data(), blocks(), (double)how_.top_k).value;
            limit = limit > -INFINITY ? value_of(limit) : -FLT_MAX;
        }
        int64_t count = collect(limit, INFINITY);
        if (count < how_.top_k) return;
        std::fill_n(room_.weight.begin(), count, 1.0f);
        cut_ = border(room_.value.data(), room_.weight.data(), count, (double)how_.top_k).value;
    }

    // Mass is the sum of exp(value - top) over what is not cut yet. Two passes over the row bring the
    // border between two limits so close to each other that few values lie there, in a flat row too.
    void cut_by_mass() {
        // Below the maximum; most borders are where masses are not small.
        static const float FIRST[LIMITS] = {0, 1, 2, 3, 4, 6, 9, INFINITY};
        float limit[LIMITS], low = cut_, high = INFINITY, share = (float)how_.top_p;
        double mass[LIMITS], above = 0, need = 0;
        for (int i = 0; i < LIMITS; i++) limit[i] = std::max(cut_, top_ - FIRST[i]);
        for (int round = 0; round < 2; round++) {
            sum_masses(limit, mass);
            if (round == 0) {
                need = share * mass[LIMITS - 1];
                // Were all tokens below this, their mass would still be less than what may be cut.
                double least = std::log(0.99 * (1 - share) * mass[LIMITS - 1] / (double)columns_);
                limit[LIMITS - 1] = std::max(cut_, top_ + (float)least);
            }
            int i = 0;
            while (i < LIMITS - 1 && mass[i] < need) i++;
            if (i) high = limit[i - 1], above = mass[i - 1];
            low = limit[i];
            if (high == INFINITY) break;
            for (i = 0; i < LIMITS; i++) limit[i] = high - (high - low) * (float)(i + 1) / LIMITS;
            limit[LIMITS - 1] = low;
        }
        int64_t count = collect(low, high);
        if (count == 0) {  // only rounding left something to find
            cut_ = high;
            return;
        }
        for (int64_t i = 0; i < count; i += LANES)
            store(room_.weight.data() + i, exp(sub(load(room_.value.data() + i), all(top_))));
        Border found = border(room_.value.data(), room_.weight.data(), count, need - above);
        cut_ = found.value;
        if (!found.is_shared) return;
        // Of equal tokens the first ones are kept, as by torch's stable sort.
        for (last_ = 0;; last_++)
            if (value_of(logits_[last_]) == cut_ && --found.equal == 0) return;
    }

    // The mass of the values that reach each limit; the limits fall.
    void sum_masses(const float* limit, double* mass) const {
        // Tokens below have less than 10^-12 each: blocks of such do not count.
        float least = std::max(limit[LIMITS - 1], top_ - 30);
        F part[LIMITS];
        for (int k = 0; k < LIMITS; k++) part[k] = all(0), mass[k] = 0;
        int parts = 0;
        auto flush = [&] {
            for (int k = 0; k < LIMITS; k++) mass[k] += sum(part[k]), part[k] = all(0);
        };
        for (int64_t b = 0; b < blocks(); b++) {
            if (!reaches(b, least)) continue;
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                F value = values(b, i), e = exp(sub(value, all(top_)));
                // Most tokens of a peaked row count for the last limit only.
                bool is_high = where_reached(value, all(limit[LIMITS - 2])) != 0;
                for (int k = is_high ? 0 : LIMITS - 1; k < LIMITS; k++)
                    part[k] = add_where(where_reached(value, all(limit[k])), part[k], e);
            }
            // Float32 for two thousand tokens, whose errors stay small; float64 for all.
            if (++parts % 32 == 0) flush();
        }
        flush();
    }

    const float* logits_;
    int64_t columns_;
    const SampleRow& how_;
    Room& room_;
    uint64_t key_;
    bool is_greedy_, is_number_;
    float temperature_, inverse_;
    // Values are logits divided by the temperature. Those below the cut are out, and so are those at
    // it behind the last column.
    float top_ = 0, cut_ = -FLT_MAX;
    int64_t most_column_ = 0, last_ = INT64_MAX;
    float tail_[BLOCK];
};

// The token of a row, -1 if its best score is not a number. For each pair of this row and a token,
// `ratio` becomes exp(the token's score - the best one).
static inline int64_t sample_row(const float* logits, int64_t columns, const SampleRow& how, int64_t index,
                                 const Pairs& pairs, float* ratio) {
    Row row(logits, columns, how);
    double most;
    int64_t best = row.best(&most);
    for (int64_t i = 0; i < pairs.count; i++)
        if (pairs.row[i] == index) {
            int64_t token = pairs.token[i];
            ratio[i] = row.is_number() ? (float)std::exp(row.score(token, token) - most) : NAN;
        }
    return row.is_number() ? best : -1;
}

// The place among candidates of the one with the score of this rank, from 0, and its share of the
// softmax of all scores, 0 if there is none. `token` are the candidates.
static inline int64_t ranked(float* logits, int64_t columns, const int64_t* token, const SampleRow& how,
                             int64_t rank, float* share) {
    std::vector<double> score(logits, logits + columns);
    if (how.temperature != 0) {
        Row row(logits, columns, how);
        for (int64_t i = 0; i < columns; i++) score[i] = row.score(i, token[i]);
    }
    std::vector<int64_t> order(columns);
    for (int64_t i = 0; i < columns; i++) order[i] = i;
    auto is_better = [&](int64_t a, int64_t b) { return score[a] > score[b]; };
    bool is_there = rank < columns;
    rank = std::min(rank, columns - 1);
    std::partial_sort(order.begin(), order.begin() + rank + 1, order.end(), is_better);
    double all = 0;
    for (double one : score) all += std::exp(one - score[order[0]]);
    double own = std::exp(score[order[rank]] - score[order[0]]) / all;
    *share = is_there && own == own ? (float)own : 0;
    return order[rank];
}

// The tokens with the largest logits, in no order; none whose logit is -inf, unless all are.
static inline std::vector<int64_t> likeliest(const float* logits, int64_t columns, int64_t count) {
    std::vector<float> most;
    for (int64_t i = 0; i < columns; i += BLOCK) {
        F best = all(-INFINITY);
        int64_t j = i, end = std::min(columns, i + BLOCK);
        for (; j + LANES <= end; j += LANES) best = larger(best, load(logits + j));
        float own = most_of(best);
        for (; j < end; j++) own = std::max(own, logits[j]);
        most.push_back(own);
    }
    // So many blocks reach the limit, so at least as many tokens do.
    float limit = -FLT_MAX;
    if (count < (int64_t)most.size()) {
        std::vector<float> sorted(most);
        std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
        limit = std::max(limit, sorted[count - 1]);
    }
    std::vector<int64_t> found;
    for (size_t b = 0; b < most.size(); b++)
        for (int64_t i = (int64_t)b * BLOCK; most[b] >= limit && i < std::min(columns, (int64_t)(b + 1) * BLOCK); i++)
            if (logits[i] >= limit) found.push_back(i);
    if ((int64_t)found.size() > count) {
        auto is_better = [&](int64_t a, int64_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
        std::nth_element(found.begin(), found.begin() + count - 1, found.end(), is_better);
        found.resize(count);
    }
    if (found.empty()) found.push_back(0);
    return found;
}

}  // namespace sampling
