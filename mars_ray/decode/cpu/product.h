// Products of rows with a weight matrix, in one arithmetic for any number of rows.
//
// The sum over the inputs runs in one order for each row and output, whatever other rows, outputs and
// threads there are. So a row's result is the same in a prompt, in a step of one row, and beside
// drafts: `verified` says what `exact` says, bit for bit. Nor does it depend on the instructions, but
// for AMX: a dot product of pairs of bfloat16 adds the second product, then the first, each rounded as
// a fused product and sum, and takes denormal numbers for 0. So do the others, while `Products` lives.
//
// Weights lie in panels of 32 outputs: [outputs / 32][inputs / 2][2][16][2] of bfloat16, so that one
// 64-byte load has two inputs of 16 outputs, as dot products of pairs and AMX tiles want them; of
// float32 [outputs / 32][inputs][32]. A panel is read once, from its beginning to its end.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "simd.h"

constexpr int PANEL = 32;
// Inputs are padded with zeros to a multiple of this: a tile of AMX has 32 of bfloat16.
constexpr int INPUTS = 32;
// Products of a part of a matrix have a multiple of so many inputs.
#ifdef __AMX_BF16__
constexpr int SPAN = INPUTS;
#else
constexpr int SPAN = 2;
#endif
// Rows of a product at once: what the caller's scratch has room for.
constexpr int ROWS = 48;
// Bytes by which reading is ahead of computing.
constexpr int AHEAD = 4096;

static inline int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What rows are stored as between products: rounded to the model's dtype, but in float32 where there
// are no products of bfloat16.
template <class W>
struct Input {
    typedef float type;
    static void put(float x, float* y) {
        W rounded;
        narrow(x, &rounded);
        *y = widened(rounded);
    }
};
#ifdef __AVX512BF16__
template <>
struct Input<bf16> {
    typedef bf16 type;
    static void put(float x, bf16* y) { narrow(x, y); }
};
#endif
template <class W>
static inline void put(const float* x, typename Input<W>::type* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) Input<W>::put(x[i], y + i);
}

// Memory for weights in large pages: a step reads all of it, and small pages would each cost a walk of
// the page table.
class Arena {
public:
    ~Arena() {
        for (auto& chunk : chunks_) munmap(chunk.first, chunk.second);
    }
    void* get(int64_t bytes) {
        bytes = rounded(bytes, 64);
        if (!chunks_.size() || used_ + bytes > chunks_.back().second) {
            int64_t size = rounded(bytes > CHUNK ? bytes : CHUNK, LARGE_PAGE);
            void* memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) throw std::bad_alloc();
            madvise(memory, size, MADV_HUGEPAGE);
            chunks_.push_back({memory, size});
            used_ = 0;
        }
        used_ += bytes;
        return (char*)chunks_.back().first + used_ - bytes;
    }

private:
    static constexpr int64_t LARGE_PAGE = 2 << 20, CHUNK = 16 << 20;
    std::vector<std::pair<void*, int64_t>> chunks_;
    int64_t used_ = 0;
};

template <class W>
struct Matrix {
    int outputs = 0, inputs = 0;  // inputs with their padding
    int64_t stride = 0;           // from a panel to the next
    const W* weights = nullptr;
    const float* bias = nullptr;  // with the outputs' padding, or none
    // The inputs that are not zero for all outputs of a panel, for matrices of several blocks.
    std::vector<std::pair<int, int>> spans;

    int panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t place(int64_t output, int64_t input) const {
        int64_t panel = output / PANEL * stride, lane = output % PANEL;
        if (sizeof(W) == 4) return panel + input * PANEL + lane;
        return panel + input / 2 * 2 * PANEL + lane / 16 * 32 + lane % 16 * 2 + input % 2;
    }

    // Makes room for rows (outputs, inputs) that follow each other; `fill` packs a panel of them.
    // Behind each of its panels there is room for one of `joined` - 1 more matrices.
    void shape(Arena& arena, int outputs_, int inputs_, int joined = 1) {
        outputs = outputs_, inputs = (int)rounded(inputs_, INPUTS), stride = (int64_t)joined * PANEL * inputs;
        weights = (W*)arena.get(panels() * stride * sizeof(W));
    }
    // Takes the room behind the panels of a matrix of the same size: both are read in one go.
    void shape_behind(const Matrix& other) {
        outputs = other.outputs, inputs = other.inputs, stride = other.stride;
        weights = other.weights + PANEL * inputs;
    }
    void fill(int panel, const W* rows, int inputs_) {
        constexpr int together = sizeof(W) == 4 ? 1 : 2;  // inputs of an output that lie side by side
        int count = outputs - panel * PANEL < PANEL ? outputs - panel * PANEL : PANEL;
        for (int i = 0; i < inputs_; i += together)
            for (int o = 0; o < count; o++)
                for (int j = 0; j < together && i + j < inputs_; j++)
                    ((W*)weights)[place(panel * PANEL + o, i + j)] =
                        rows[(int64_t)(panel * PANEL + o) * inputs_ + i + j];
    }

    // One output's weights, as when the head is the embedding too.
    void row(int64_t output, float* to) const {
        for (int i = 0; i < inputs; i++) to[i] = widened(weights[place(output, i)]);
    }

    // The product of an output's weights with a row of float32, padded to `inputs`.
    float dot(int64_t output, const float* x) const {
        constexpr int together = sizeof(W) == 4 ? 1 : 2;
        const W* w = weights + place(output, 0);
        float sum[4] = {};
        for (int i = 0; i < inputs; i += 2 * together, w += 2 * together * PANEL)
            for (int j = 0; j < together; j++) {
                sum[j] = std::fma(widened(w[j]), x[i + j], sum[j]);
                sum[2 + j] = std::fma(widened(w[together * PANEL + j]), x[i + together + j], sum[2 + j]);
            }
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    void find_spans() {
        for (int p = 0; p < panels(); p++) {
            int first = inputs, last = 0;
            for (int i = 0; i < inputs; i++)
                for (int o = p * PANEL; o < (p + 1) * PANEL; o++)
                    if (widened(weights[place(o, i)]) != 0) {
                        if (i < first) first = i;
                        last = i + 1;
                    }
            first = first / SPAN * SPAN;
            spans.push_back({first, last > first ? (int)rounded(last, SPAN) : first});
        }
    }
};

// Asks for both lines of an input's weights, or of a pair's, also where a block reads one of them: the
// next block reads the other. Many rows take so long for a line that the processor's own foresight ends,
// so they ask for lines far ahead, into the outer cache; from there they would come too late for few.
template <int M, class W>
static inline void ask_ahead(const W* w) {
    if (M < 6) {
        _mm_prefetch((const char*)w + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char*)w + AHEAD + 64, _MM_HINT_T0);
    } else {
        _mm_prefetch((const char*)w + 2 * AHEAD, _MM_HINT_T1);
        _mm_prefetch((const char*)w + 2 * AHEAD + 64, _MM_HINT_T1);
    }
}

// M rows times 16 * V outputs of a panel, by the processor's vectors.
template <int M, int V>
static inline void block(const float* w, const float* x, int64_t ldx, int inputs, float* y) {
    F a[M][V], row[V];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) a[m][v] = all(0);
    for (int k = 0; k < inputs; k++, w += PANEL) {
        ask_ahead<M>(w);
        UNROLL for (int v = 0; v < V; v++) row[v] = load(w + v * 16);
        UNROLL for (int m = 0; m < M; m++) {
            F b = all(x[m * ldx + k]);
            UNROLL for (int v = 0; v < V; v++) a[m][v] = fma(row[v], b, a[m][v]);
        }
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) store(y + m * PANEL + v * 16, a[m][v]);
}

// A pair's first input lies in the low half of each 32 bits, its second in the high half.
#ifdef __AVX512F__
static inline F first_of(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
static inline F second_of(const bf16* p) {
    __m512i high = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}
#else
static inline __m256 half(const bf16* p) { return _mm256_loadu_ps((const float*)p); }
static inline __m256 shifted(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16));
}
static inline __m256 masked(__m256 a) {
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}
static inline F first_of(const bf16* p) { return {shifted(half(p)), shifted(half(p + 16))}; }
static inline F second_of(const bf16* p) { return {masked(half(p)), masked(half(p + 16))}; }
#endif

template <int M, int V, class X>
static inline void block(const bf16* w, const X* x, int64_t ldx, int inputs, float* y) {
    F a[M][V];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) a[m][v] = all(0);
    for (int k = 0; k < inputs; k += 2, w += 2 * PANEL) {
        ask_ahead<M>(w);
#ifdef __AVX512BF16__
        __m512bh pair[V];
        UNROLL for (int v = 0; v < V; v++) pair[v] = (__m512bh)_mm512_loadu_si512(w + v * 32);
        UNROLL for (int m = 0; m < M; m++) {
            int both;
            memcpy(&both, x + m * ldx + k, 4);
            __m512bh b = (__m512bh)_mm512_set1_epi32(both);
            UNROLL for (int v = 0; v < V; v++) a[m][v] = _mm512_dpbf16_ps(a[m][v], pair[v], b);
        }
#else
        UNROLL for (int j = 1; j >= 0; j--) {
            F row[V];
            UNROLL for (int v = 0; v < V; v++) row[v] = j ? second_of(w + v * 32) : first_of(w + v * 32);
            UNROLL for (int m = 0; m < M; m++) {
                F b = all(x[m * ldx + k + j]);
                UNROLL for (int v = 0; v < V; v++) a[m][v] = fma(row[v], b, a[m][v]);
            }
        }
#endif
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) store(y + m * PANEL + v * 16, a[m][v]);
}

// The most rows of a block of 32 outputs, and of one of 16: as many as the registers hold sums of.
// Where they are few, more rows share what is read of bfloat16, and a panel is read twice.
#ifdef __AVX512F__
template <class W> constexpr int WHOLE = 12;
template <class W> constexpr int HALF = 12;
#else
template <class W> constexpr int WHOLE = sizeof(W) == 4 ? 3 : 2;
template <class W> constexpr int HALF = sizeof(W) == 4 ? 3 : 5;
#endif

template <int M, class W, class X>
static inline void blocks(const W* w, const X* x, int64_t ldx, int inputs, int rows, float* y) {
    for (; rows >= M; rows -= M, x += M * ldx, y += M * PANEL) {
        if constexpr (M > WHOLE<W>)
            block<M, 1>(w, x, ldx, inputs, y), block<M, 1>(w + (sizeof(W) == 4 ? 16 : 32), x, ldx, inputs, y + 16);
        else
            block<M, 2>(w, x, ldx, inputs, y);
    }
    if constexpr (M > 1)
        if (rows) blocks<M - 1>(w, x, ldx, inputs, rows, y);
}

// While it lives, this thread takes denormal numbers for 0, and has the tiles of AMX where there are some.
class Products {
public:
    Products() : before_(_mm_getcsr()) {
        _mm_setcsr(before_ | 0x8040);
#ifdef __AMX_BF16__
        struct alignas(64) Config {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        };
        static const Config config = {
            1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        _tile_loadconfig(&config);
#endif
    }
    ~Products() {
#ifdef __AMX_BF16__
        _tile_release();
#endif
        _mm_setcsr(before_);
    }

private:
    const unsigned before_;
};

#ifdef __AMX_BF16__
// A tile has 16 rows of 64 bytes: sums of 16 rows and 16 outputs, 32 inputs of 16 rows, or 16 pairs of
// inputs of 16 outputs. Its instruction adds up the first products of the pairs, and the second ones,
// and adds both sums to the result. A row alone does the same by vectors: they read memory faster.
static inline void row_as_tile(const bf16* w, const bf16* x, int inputs, float* y) {
    F a[2] = {all(0), all(0)};
    for (int first = 0; first < inputs; first += 32) {
        F low[2] = {all(0), all(0)}, high[2] = {all(0), all(0)};
        for (int k = first; k < first + 32; k += 2) {
            const bf16* p = w + (int64_t)k * PANEL;
            _mm_prefetch((const char*)p + AHEAD, _MM_HINT_T1);
            _mm_prefetch((const char*)p + AHEAD + 64, _MM_HINT_T1);
            F b = all(widened(x[k])), c = all(widened(x[k + 1]));
            low[0] = fma(first_of(p), b, low[0]), low[1] = fma(second_of(p), c, low[1]);
            high[0] = fma(first_of(p + 32), b, high[0]), high[1] = fma(second_of(p + 32), c, high[1]);
        }
        a[0] = add(a[0], add(low[0], low[1])), a[1] = add(a[1], add(high[0], high[1]));
    }
    store(y, a[0]), store(y + 16, a[1]);
}

// The weights of 32 inputs. From memory vectors fetch them line by line, faster than a tile's load,
// which takes every second line.
static inline const bf16* fetched(const bf16* w, bool is_far, bf16* near) {
    if (!is_far) return w;
    for (int i = 0; i < 32 * PANEL; i += 32) {
        _mm_prefetch((const char*)(w + i) + AHEAD, _MM_HINT_T1);
        _mm512_store_si512(near + i, _mm512_load_si512(w + i));
    }
    // The compiler does not know that tiles are loaded from memory.
    asm volatile("" ::: "memory");
    return near;
}

// Rows up to the next multiple of 16 are read and written too: there is room for them.
static inline void product(const bf16* w, const bf16* x, int64_t ldx, int inputs, int rows, float* y, bool is_far) {
    if (rows == 1 && is_far) return row_as_tile(w, x, inputs, y);
    alignas(64) bf16 near[2][32 * PANEL];
    asm volatile("" ::: "memory");
    for (; rows > 16; rows -= 32, x += 32 * ldx, y += 32 * PANEL, is_far = false) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int k = 0; k < inputs; k += 32) {
            const bf16* p = fetched(w + (int64_t)k * PANEL, is_far, near[k / 32 % 2]);
            _tile_loadd(6, p, 128); _tile_loadd(4, x + k, ldx * 2); _tile_loadd(7, p + 32, 128);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 16 * ldx + k, ldx * 2);
            _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, y, 128); _tile_stored(1, y + 16, 128);
        _tile_stored(2, y + 16 * PANEL, 128); _tile_stored(3, y + 16 * PANEL + 16, 128);
    }
    if (rows <= 0) return;
    _tile_zero(0); _tile_zero(1);
    for (int k = 0; k < inputs; k += 32) {
        const bf16* p = fetched(w + (int64_t)k * PANEL, is_far, near[k / 32 % 2]);
        _tile_loadd(6, p, 128); _tile_loadd(4, x + k, ldx * 2); _tile_loadd(7, p + 32, 128);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, y, 128); _tile_stored(1, y + 16, 128);
}
#else
static inline void product(const bf16* w, const Input<bf16>::type* x, int64_t ldx, int inputs, int rows, float* y,
                           bool) {
    blocks<HALF<bf16>>(w, x, ldx, inputs, rows, y);
}
#endif
static inline void product(const float* w, const float* x, int64_t ldx, int inputs, int rows, float* y, bool) {
    blocks<HALF<float>>(w, x, ldx, inputs, rows, y);
}

// Some rows, at most ROWS, times the outputs of a panel: y has PANEL columns. The panel is far if it is
// not in the cache, but in memory.
template <class W, class X>
static inline void product(const Matrix<W>& matrix, int panel, const X* x, int64_t ldx, int rows, float* y,
                           bool is_far) {
    int first = 0, last = matrix.inputs;
    if (matrix.spans.size()) first = matrix.spans[panel].first, last = matrix.spans[panel].second;
    const W* w = matrix.weights + panel * matrix.stride + (int64_t)first * PANEL;
    product(w, x + first, ldx, last - first, rows, y, is_far);
    if (matrix.bias) {
        F low = load(matrix.bias + panel * PANEL), high = load(matrix.bias + panel * PANEL + 16);
        for (int m = 0; m < rows; m++, y += PANEL)
            store(y, add(load(y), low)), store(y + 16, add(load(y + 16), high));
    }
}
