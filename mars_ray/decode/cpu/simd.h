// Sixteen floats at a time, for AVX2 and AVX-512, and the few functions of them that the step needs.
//
// A result never depends on the compiler's choices: products are fused where fma() is written and
// nowhere else (-ffp-contract=off), sums over lanes have one order, and exp() is our own, because
// libm's vector and scalar forms differ.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

typedef uint16_t bf16;
constexpr int LANES = 16;
// Before a loop over an array that shall stay in registers: GCC unrolls longer loops too late for it,
// and then keeps all sums of a product in memory as well (4 rows and more took 2.6 times the time).
#define UNROLL _Pragma("GCC unroll 16")

#ifdef __AVX512F__
typedef __m512 F;
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline F all(float a) { return _mm512_set1_ps(a); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// The second if either is NaN, so that a NaN in the second is kept.
static inline F larger(F a, F b) { return _mm512_max_ps(a, b); }
static inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
static inline F nearest(F a) { return _mm512_roundscale_ps(a, 8); }
// a * 2^b for whole numbers b from -126 to 127.
static inline F times_power(F a, F b) {
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(b), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(a, _mm512_castsi512_ps(e));
}
static inline F widen(const bf16* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
#else
struct F {
    __m256 a, b;
};
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
static inline __m256 times_power(__m256 a, __m256 b) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(b), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
static inline F times_power(F x, F y) { return {times_power(x.a, y.a), times_power(x.b, y.b)}; }
static inline __m256 widen_half(const bf16* p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
static inline F widen(const bf16* p) { return {widen_half(p), widen_half(p + 8)}; }
#endif
static inline F widen(const float* p) { return load(p); }

static inline float widened(float x) { return x; }
static inline float widened(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

// Rounded to the nearest, ties to even; a NaN stays one.
static inline void narrow(float x, bf16* y) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *y = x == x ? (bf16)rounded : 0x7fc0;
}
static inline void narrow(float x, float* y) { *y = x; }
template <class T>
static inline void narrow(const float* x, T* y, int n) {
    for (int i = 0; i < n; i++) narrow(x[i], y + i);
}

static inline float sum(F x) {
    alignas(64) float a[LANES];
    store(a, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
}
static inline float largest(F x) {
    alignas(64) float a[LANES];
    store(a, x);
    float most = a[0];
    for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
    return most;
}

// e^x to 2 units in the last place, and exactly 1 for 0: 2^n e^r with |r| <= ln 2 / 2, and e^r by its
// Taylor polynomial. Below -87 it is as for -87, which is as good as 0 beside e^0.
static inline F exp(F x) {
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    F n = nearest(mul(x, all(1.44269504f)));
    F r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    F p = all(1.0f / 5040);
    p = fma(p, r, all(1.0f / 720));
    p = fma(p, r, all(1.0f / 120));
    p = fma(p, r, all(1.0f / 24));
    p = fma(p, r, all(1.0f / 6));
    p = fma(p, r, all(0.5f));
    p = fma(p, r, all(1.0f));
    p = fma(p, r, all(1.0f));
    return times_power(p, n);
}
static inline float exp_of(float x) {
    alignas(64) float a[LANES];
    store(a, exp(all(x)));
    return a[0];
}

// Sixteen rows of 64 bytes to columns of 32 bits: the i-th of all rows lie side by side at `to` + i *
// `stride`.
static inline void transpose(const void* const* from, float* to, int64_t stride) {
#ifdef __AVX512F__
    // A row's quarters stay together until the last two rounds, which move whole quarters.
    __m512 r[LANES], t[LANES];
    UNROLL for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_ps(from[i]);
    UNROLL for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    UNROLL for (int i = 0; i < LANES; i += 8)
        UNROLL for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    UNROLL for (int j = 0; j < 8; j++) {
        _mm512_storeu_ps(to + j * stride, _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88));
        _mm512_storeu_ps(to + (j + 8) * stride, _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) memcpy(to + j * stride + i, (const char*)from[i] + 4 * j, 4);
#endif
}
