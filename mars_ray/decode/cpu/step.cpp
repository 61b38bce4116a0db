// A decoding step of a model in one call: from token ids to hidden states and logits.
//
// Hidden states, norms, attention and logits are float32; what goes into a product, and keys and
// values, are rounded to the model's dtype. Shape letters: N rows, H hidden size, D head size.
#include <algorithm>
#include <cmath>
#include <memory>

#include "attention.h"
#include "sampling.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// A model's sizes, and what is not a matrix. All pointers here and below belong to the caller.
struct Shape {
    int64_t layers, hidden, inner, vocabulary, query_heads, key_heads, head_size;
    int64_t is_float32;  // else bfloat16
    float epsilon, head_epsilon, scale;
    int64_t threads, positions;
    const float *cosine, *sine;  // (positions, head_size / 2)
    const void* embedding;       // (vocabulary, hidden), or none if it is the head
};

// The matrices of a layer and the vectors beside them, by number.
enum { QKV, OUT, GATE, UP, DOWN, MATRICES };
enum { INPUT_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, VECTORS };

// One forward. Rows of real tokens come first, then those of masks.
struct Step {
    int64_t rows, masks, sequences;
    // Of each row: the token (of a mask with an adapter its depth), its position, where its key and
    // value are kept, its place in its sequence, and what it sees (`Sight`).
    const int64_t *id, *position, *slot, *place, *clean, *begin, *bits;
    const int64_t* order;  // the rows sequence by sequence, by their places
    const int64_t* width;  // rows of each sequence
    const int64_t* page;   // (sequences, pages)
    int64_t pages, page_size, slots;
    void* cache;  // (layers, slots, 2, key_heads, head_size)
};

// The masks of some sequences, from which drafts are chosen by the adapter's head, depth by depth.
struct Drafts {
    int64_t sequences, depths, candidates;
    // Of each sequence: its first mask's row in the step and among the logits, its number of masks,
    // the token before them, and how many tokens the first mask proposes. Its branches follow each
    // other in the result.
    const int64_t *row, *line, *masks, *before, *branches;
    const SampleRow* how;  // of the first mask; the positions of the others follow
    const float* logits;
    int64_t columns;  // from one row of logits to the next
    int64_t* token;   // (branches, depths)
    float* share;     // the head's probability of each, among the candidates
};

template <class T>
class Buffer {
public:
    // Grows to so many; what is new is 0.
    T* get(int64_t count) {
        if (count > size_) {
            size_ = rounded(count + count / 4, 64);
            memory_.reset((T*)aligned_alloc(64, rounded(size_ * sizeof(T), 64)));
            if (!memory_) throw std::bad_alloc();
            memset((void*)memory_.get(), 0, rounded(size_ * sizeof(T), 64));
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(T* p) const { free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    int64_t size_ = 0;
};

struct Model {
    virtual ~Model() {}
    virtual void set_matrix(int layer, int which, const void* rows, int outputs, int inputs, const float* bias) = 0;
    virtual void set_vector(int layer, int which, const float* values, int count) = 0;
    virtual void set_adapter(const void* mask_embedding) = 0;
    virtual void set_lora(int layer, int which, const void* down, const void* up, int rank) = 0;
    virtual int64_t step(const Step& step) = 0;
    virtual void hidden(const int64_t* row, int64_t rows, float* to) = 0;
    virtual void logits(const int64_t* row, int64_t rows, float* to, int64_t ldt) = 0;
    virtual void candidates(const float* hidden, int64_t rows, const int64_t* id, int64_t ids, float* to) = 0;
    virtual void embed(const int64_t* id, int64_t rows, float* to) = 0;
    virtual void set_head(const void* hidden, const void* token, const float* depth, const void* out, int size,
                          int depths) = 0;
    virtual void draft(const Drafts& drafts) = 0;
};

template <class W>
class ModelOf : public Model {
    typedef typename Input<W>::type X;

    struct Lora {
        Matrix<W> down, up;
    };
    struct Layer {
        Matrix<W> matrix[MATRICES];
        const float* vector[VECTORS] = {};
    };
    struct Scratch {
        alignas(64) float low[ROWS * PANEL], high[ROWS * PANEL];
        Block<W> block;
        std::vector<Part> part;
        std::vector<const float*> query;
        Buffer<float> out;
    };

public:
    explicit ModelOf(const Shape& shape) : s_(shape), layers_(shape.layers) {
        half_ = s_.head_size / 2;
        padded_size_ = rounded(s_.head_size, LANES);
        hidden_ = rounded(s_.hidden, INPUTS), inner_ = rounded(s_.inner, INPUTS);
        heads_ = s_.query_heads + 2 * s_.key_heads;
        attended_ = rounded(s_.query_heads * s_.head_size, INPUTS);
        joined_ = rounded(heads_ * s_.head_size, PANEL);
        if (s_.threads > MOST_THREADS) s_.threads = MOST_THREADS;
        for (int t = 0; t < s_.threads; t++) scratch_.emplace_back(new Scratch);
    }

    void set_matrix(int layer, int which, const void* rows, int outputs, int inputs, const float* bias) override {
        Matrix<W>& matrix = layer < 0 ? head_ : layers_[layer].matrix[which];
        // A step reads each panel of gates and then its panel of values.
        if (layer >= 0 && which == UP)
            matrix.shape_behind(layers_[layer].matrix[GATE]);
        else
            matrix.shape(arena_, outputs, inputs, layer >= 0 && which == GATE ? 2 : 1);
        pack(matrix, (const W*)rows, inputs);
        if (bias) matrix.bias = copy(bias, outputs);
    }

    void set_vector(int layer, int which, const float* values, int count) override {
        (layer < 0 ? norm_ : layers_[layer].vector[which]) = copy(values, count);
    }

    // Adapters change between two steps: theirs is memory of its own, and the model's stays as it is.
    void set_adapter(const void* mask_embedding) override {
        lora_.clear();
        adapter_.reset(), rank_ = 0, depth_.clear();
        mask_embedding_ = (const W*)mask_embedding;
        if (mask_embedding) adapter_.reset(new Arena), lora_.resize(s_.layers * MATRICES);
    }

    // `down` is (rank, inputs) and `up` (outputs, rank), of the joined matrix for queries, keys and values.
    void set_lora(int layer, int which, const void* down, const void* up, int rank) override {
        Lora& lora = lora_[layer * MATRICES + which];
        const Matrix<W>& matrix = layers_[layer].matrix[which];
        rank_ = std::max<int64_t>(rank_, rounded(rank, INPUTS));
        // Of layers that share an input the first factors lie in the first one's.
        if (down) pack(*adapter_, lora.down, (const W*)down, rank, inputs_of(which));
        pack(*adapter_, lora.up, (const W*)up, matrix.outputs, rank);
        lora.up.find_spans();
    }

    // The adapter's head (core/draft_head.py); `depth` is (depths, size).
    void set_head(const void* hidden, const void* token, const float* depth, const void* out, int size,
                  int depths) override {
        pack(*adapter_, head_hidden_, (const W*)hidden, size, (int)s_.hidden);
        pack(*adapter_, head_token_, (const W*)token, size, (int)s_.hidden);
        pack(*adapter_, head_out_, (const W*)out, (int)s_.hidden, size);
        inside_ = rounded(size, INPUTS);
        depth_.assign(depths * inside_, 0);
        for (int d = 0; d < depths; d++) std::copy_n(depth + d * size, size, depth_.data() + d * inside_);
    }

    // The number of rows whose hidden states are not finite.
    int64_t step(const Step& step) override {
        prepare(step);
        process_pool().run((int)s_.threads, [&](Worker& worker) { forward(worker, step); });
        int64_t bad = 0;
        for (int64_t n = 0; n < step.rows; n++) bad += !finite_.get(0)[n];
        return bad;
    }

    void hidden(const int64_t* row, int64_t rows, float* to) override {
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + r * s_.hidden, x_.get(0) + row[r] * hidden_, s_.hidden * sizeof(float));
    }

    void logits(const int64_t* row, int64_t rows, float* to, int64_t ldt) override {
        X* in = read_.get((rows + PANEL) * hidden_);
        for (int64_t r = 0; r < rows; r++)
            memcpy(in + r * hidden_, h_.get(0) + row[r] * hidden_, hidden_ * sizeof(X));
        process_pool().run((int)s_.threads, [&](Worker& worker) {
            Products products;
            worker.phase(head_.panels(), [&](int panel) {
                int columns = (int)std::min<int64_t>(PANEL, s_.vocabulary - panel * PANEL);
                multiply(worker, head_, panel, in, hidden_, rows, [&](int64_t first, int count, const float* y) {
                    for (int m = 0; m < count; m++)
                        memcpy(to + (first + m) * ldt + panel * PANEL, y + m * PANEL, columns * sizeof(float));
                });
            });
        });
    }

    // Logits of `ids` tokens of each row.
    void candidates(const float* hidden, int64_t rows, const int64_t* id, int64_t ids, float* to) override {
        process_pool().run((int)s_.threads, [&](Worker& worker) {
            worker.phase((int)(rows * ids), [&](int task) {
                float* row = scratch_[worker.index]->out.get(hidden_);
                const float* h = hidden + task / ids * s_.hidden;
                head_.row(id[task], row);
                F a = all(0);
                int64_t i = 0;
                for (; i + LANES <= s_.hidden; i += LANES) a = fma(load(row + i), load(h + i), a);
                float rest = 0;
                for (; i < s_.hidden; i++) rest += row[i] * h[i];
                to[task] = sum(a) + rest;
            });
        });
    }

    void draft(const Drafts& d) override {
        // The masks one behind the other, and the branches that each depth has.
        struct Member {
            int64_t branch, mask, sequence, rank;
        };
        std::vector<int64_t> row, line;
        std::vector<std::vector<Member>> members(d.depths);
        int64_t branches = 0;
        for (int64_t s = 0; s < d.sequences; s++) {
            for (int64_t b = 0; b < d.branches[s]; b++, branches++)
                for (int64_t i = 0; i < d.masks[s]; i++)
                    members[i].push_back({branches, (int64_t)row.size() + i, s, i ? 0 : b});
            for (int64_t i = 0; i < d.masks[s]; i++) row.push_back(d.row[s] + i), line.push_back(d.line[s] + i);
        }
        const int64_t masks = (int64_t)row.size(), most = d.candidates, room = std::max(masks, branches) + 2 * PANEL;
        X *in = read_.get(room * std::max(hidden_, inside_)), *inner = inner_X_.get(room * std::max(inner_, inside_));
        float *kept = up_.get(room * std::max(inner_, inside_)), *corrected = gate_.get(room * std::max(inner_, hidden_));
        std::vector<std::vector<int64_t>> candidate(masks);
        std::vector<float> logit(branches * most);
        std::vector<int64_t> before(branches);
        for (int64_t s = 0, b = 0; s < d.sequences; s++)
            for (int64_t i = 0; i < d.branches[s]; i++) before[b++] = d.before[s];
        process_pool().run((int)s_.threads, [&](Worker& worker) {
            Products products;
            worker.phase((int)masks, [&](int m) {
                candidate[m] = sampling::likeliest(d.logits + line[m] * d.columns, s_.vocabulary, most);
                unit(x_.get(0) + row[m] * hidden_, in + m * hidden_);
            });
            worker.phase(head_hidden_.panels(), [&](int panel) {
                multiply(worker, head_hidden_, panel, in, hidden_, masks, [&](int64_t first, int count, const float* y) {
                    for (int m = 0; m < count; m++)
                        memcpy(kept + (first + m) * inside_ + panel * PANEL, y + m * PANEL, PANEL * sizeof(float));
                });
            });
            for (int64_t depth = 0; depth < d.depths; depth++) {
                const auto& own = members[depth];
                const int64_t count = (int64_t)own.size();
                worker.phase((int)count, [&](int x) {
                    float* row = scratch_[worker.index]->out.get(hidden_);
                    memset(row, 0, hidden_ * sizeof(float));
                    embed_row(before[own[x].branch], row);
                    unit(row, in + x * hidden_);
                });
                worker.phase(head_token_.panels(), [&](int panel) {
                    auto take = [&](int64_t first, int rows, const float* y) {
                        for (int64_t x = first; x < first + rows; x++, y += PANEL) {
                            const float* hidden = kept + own[x].mask * inside_ + panel * PANEL;
                            const float* add_ = depth_.data() + depth * inside_ + panel * PANEL;
                            float z[PANEL];
                            for (int i = 0; i < PANEL; i += LANES) {
                                F a = add(add(load(y + i), load(hidden + i)), load(add_ + i));
                                store(z + i, divide(a, add(all(1), exp(sub(all(0), a)))));
                            }
                            put<W>(z, inner + x * inside_ + panel * PANEL, PANEL);
                        }
                    };
                    multiply(worker, head_token_, panel, in, hidden_, count, take);
                });
                worker.phase(head_out_.panels(), [&](int panel) {
                    auto take = [&](int64_t first, int rows, const float* y) {
                        for (int64_t x = first; x < first + rows; x++, y += PANEL) {
                            const float* h = x_.get(0) + row[own[x].mask] * hidden_ + panel * PANEL;
                            float* to = corrected + x * hidden_ + panel * PANEL;
                            for (int i = 0; i < PANEL; i += LANES) store(to + i, add(load(h + i), load(y + i)));
                        }
                    };
                    multiply(worker, head_out_, panel, inner, inside_, count, take);
                });
                // In pieces, since a candidate's weights lie far from each other and take time to fetch.
                const int64_t pieces = (most + PIECE - 1) / PIECE;
                worker.phase((int)(count * pieces), [&](int task) {
                    int64_t x = task / pieces, first = task % pieces * PIECE;
                    const auto& ids = candidate[own[x].mask];
                    for (int64_t c = first; c < std::min<int64_t>(first + PIECE, (int64_t)ids.size()); c++)
                        logit[x * most + c] = head_.dot(ids[c], corrected + x * hidden_);
                });
                worker.phase((int)count, [&](int x) {
                    auto [branch, mask, sequence, rank] = own[x];
                    SampleRow how = d.how[sequence];
                    how.position += depth;
                    const auto& ids = candidate[mask];
                    int64_t at = sampling::ranked(logit.data() + x * most, (int64_t)ids.size(), ids.data(), how, rank,
                                                  d.share + branch * d.depths + depth);
                    d.token[branch * d.depths + depth] = before[branch] = ids[at];
                });
            }
        });
    }

    void embed(const int64_t* id, int64_t rows, float* to) override {
        std::vector<float> row(hidden_);
        for (int64_t r = 0; r < rows; r++) {
            embed_row(id[r], row.data());
            memcpy(to + r * s_.hidden, row.data(), s_.hidden * sizeof(float));
        }
    }

private:
    int inputs_of(int which) const {
        if (which == OUT) return (int)(s_.query_heads * s_.head_size);
        return (int)(which == DOWN ? s_.inner : s_.hidden);
    }

    void pack(Arena& arena, Matrix<W>& matrix, const W* rows, int outputs, int inputs) {
        matrix.shape(arena, outputs, inputs);
        pack(matrix, rows, inputs);
    }
    void pack(Matrix<W>& matrix, const W* rows, int inputs) {
        process_pool().run((int)s_.threads, [&](Worker& worker) {
            worker.phase(matrix.panels(), [&](int panel) { matrix.fill(panel, rows, inputs); });
        });
    }

    const float* copy(const float* values, int count) {
        float* to = (float*)arena_.get(rounded(count, PANEL) * sizeof(float));
        memcpy(to, values, count * sizeof(float));
        return to;
    }

    void embed_row(int64_t id, float* to) const {
        if (!s_.embedding) return head_.row(id, to);
        const W* from = (const W*)s_.embedding + id * s_.hidden;
        for (int64_t i = 0; i < s_.hidden; i++) to[i] = widened(from[i]);
    }

    // Room for a forward's rows, and how its attention is split.
    void prepare(const Step& step) {
        int64_t rows = step.rows + 2 * PANEL;  // tiles read and write whole ones
        x_.get(rows * hidden_), h_.get(rows * hidden_), qkv_.get(rows * joined_);
        query_.get(rows * s_.query_heads * padded_size_), attended_X_.get(rows * attended_);
        inner_X_.get(rows * inner_), finite_.get(rows);
        if (lora_.size()) gate_.get(rows * inner_), up_.get(rows * inner_), low_rank_.get(rows * rank_);
        group_.clear(), split_row_.clear(), part_of_.resize(step.rows + 1);
        int64_t parts = 0;
        const int64_t* row = step.order;
        int most = (int)std::max<int64_t>(1, QUERIES / (s_.query_heads / s_.key_heads));
        for (int64_t q = 0; q < step.sequences; row += step.width[q++]) {
            const int64_t* page = step.page + q * step.pages;
            int64_t width = step.width[q], shared = INT64_MAX;
            for (int64_t r = 0; r < width; r++) {
                Sight sight = sight_of(step, row[r]);
                int64_t common = sight == Sight{0, 0, 0} ? step.place[row[r]] + 1 : sight.clean;
                shared = std::min(shared, common / KEYS);
            }
            // Few rows: tasks are single blocks. A prompt's are all blocks of some rows.
            bool is_split = width <= MOST_SPLIT || !(sight_of(step, row[width - 1]) == Sight{0, 0, 0});
            if (!is_split) shared = 0;
            for (int64_t r = 0; r < width && shared; r += most) {
                int count = (int)std::min<int64_t>(most, width - r);
                group_.push_back({row + r, page, count, 0, shared, sight_of(step, row[r]), true});
            }
            for (int64_t r = 0, end; r < width; r = end) {
                Sight sight = sight_of(step, row[r]);
                for (end = r + 1; end < width && end < r + most && sight_of(step, row[end]) == sight; end++) {}
                int64_t last = (sight.seen_at(step.place[row[end - 1]]) + KEYS - 1) / KEYS;
                group_.push_back({row + r, page, (int)(end - r), shared, last, sight, is_split});
            }
            for (int64_t r = 0; is_split && r < width; r++) {
                part_of_[row[r]] = parts;
                int64_t seen = sight_of(step, row[r]).seen_at(step.place[row[r]]);
                parts += (seen + KEYS - 1) / KEYS;
                split_row_.push_back(row[r]);
            }
        }
        part_size_ = padded_size_ + LANES;
        part_.get(parts * s_.query_heads * part_size_);
        task_.clear();
        for (int g = 0; g < (int)group_.size(); g++)
            for (int64_t b = group_[g].first_block; b < group_[g].last_block; b++) {
                task_.push_back({g, b});
                if (!group_[g].is_split) break;
            }
    }

    static Sight sight_of(const Step& step, int64_t row) {
        return {step.clean[row], step.begin[row], step.bits[row]};
    }

    void forward(Worker& worker, const Step& step) {
        Products products;
        float* x = x_.get(0);
        const int64_t first_mask = step.rows - step.masks;
        const bool has_lora = step.masks && lora_.size();
        worker.phase((int)step.rows, [&](int n) {
            float* row = x + n * hidden_;
            if (n < first_mask || !mask_embedding_) return embed_row(step.id[n], row);
            for (int64_t i = 0; i < s_.hidden; i++) row[i] = widened(mask_embedding_[step.id[n] * s_.hidden + i]);
        });
        for (int l = 0; l < s_.layers; l++) {
            const Layer& layer = layers_[l];
            const Lora* lora = has_lora ? &lora_[l * MATRICES] : nullptr;
            normalise(worker, step.rows, layer.vector[INPUT_NORM]);
            linear(worker, step, layer.matrix[QKV], lora ? lora + QKV : nullptr, h_.get(0), hidden_, qkv_.get(0),
                   joined_, false);
            worker.phase((int)step.rows, [&](int n) { turn_and_store(layer, step, l, n); });
            attend(worker, step, l);
            linear(worker, step, layer.matrix[OUT], lora ? lora + OUT : nullptr, attended_X_.get(0), attended_, x,
                   hidden_, true);
            normalise(worker, step.rows, layer.vector[MLP_NORM]);
            gate_and_up(worker, step, layer, lora);
            linear(worker, step, layer.matrix[DOWN], lora ? lora + DOWN : nullptr, inner_X_.get(0), inner_, x,
                   hidden_, true);
        }
        worker.phase((int)step.rows, [&](int n) {
            float* row = x + n * hidden_;
            normalise_row(row, norm_, s_.hidden, s_.epsilon, row);
            finite_.get(0)[n] = std::isfinite(sum_of(row));
            put<W>(row, h_.get(0) + n * hidden_, hidden_);
        });
    }

    float sum_of(const float* row) const {
        F a = all(0);
        for (int64_t i = 0; i < hidden_; i += LANES) a = add(a, load(row + i));
        return sum(a);
    }

    void normalise(Worker& worker, int64_t rows, const float* weight) {
        worker.phase((int)rows, [&](int n) {
            alignas(64) float row[4096];
            const float* from = x_.get(0) + n * hidden_;
            // In pieces, as rows may be long; the root mean square is of the whole row.
            float factor = root(from, s_.hidden, s_.epsilon);
            for (int64_t i = 0; i < hidden_; i += 4096) {
                int64_t count = std::min<int64_t>(4096, hidden_ - i);
                scale(from + i, weight + i, factor, count, row);
                put<W>(row, h_.get(0) + n * hidden_ + i, count);
            }
        });
    }

    // What normalises a row of `size`, whose padding is 0.
    static float root(const float* row, int64_t size, float epsilon) {
        F a = all(0);
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) a = fma(load(row + i), load(row + i), a);
        float rest[LANES] = {};
        for (int64_t j = i; j < size; j++) rest[j - i] = row[j];
        if (i < size) a = fma(load(rest), load(rest), a);
        return 1 / std::sqrt(sum(a) / (float)size + epsilon);
    }
    // A row divided by its root mean square, as what goes into a product.
    void unit(const float* row, X* to) const {
        float factor = root(row, s_.hidden, 1e-6f);
        for (int64_t i = 0; i < hidden_; i++) Input<W>::put(row[i] * factor, to + i);
    }
    static void scale(const float* row, const float* weight, float factor, int64_t size, float* to) {
        for (int64_t i = 0; i < size; i++) to[i] = row[i] * factor * weight[i];
    }
    static void normalise_row(const float* row, const float* weight, int64_t size, float epsilon, float* to) {
        scale(row, weight, root(row, size, epsilon), size, to);
    }

    // Rows times a panel, in pieces; `take` gets the first row, how many, and their results.
    template <class Take>
    void multiply(Worker& worker, const Matrix<W>& matrix, int panel, const X* in, int64_t ldi, int64_t rows,
                  const Take& take) {
        float* y = scratch_[worker.index]->low;
        for (int64_t first = 0; first < rows; first += ROWS) {
            int count = (int)std::min<int64_t>(ROWS, rows - first);
            product(matrix, panel, in + first * ldi, ldi, count, y, first == 0);
            take(first, count, y);
        }
    }

    // First factors of an adapter are panels of their own in the model's product.
    void first_factor(Worker& worker, const Step& step, const Matrix<W>& down, int panel, const X* in, int64_t ldi) {
        int64_t first_mask = step.rows - step.masks;
        X* to = low_rank_.get(0);
        multiply(worker, down, panel, in + first_mask * ldi, ldi, step.masks,
                 [&](int64_t first, int count, const float* y) {
                     for (int m = 0; m < count; m++)
                         put<W>(y + m * PANEL, to + (first + m) * rank_ + panel * PANEL, PANEL);
                 });
    }

    // out = in times the matrix, with the adapter's part for masks; or that added to `out`.
    void linear(Worker& worker, const Step& step, const Matrix<W>& matrix, const Lora* lora, const X* in, int64_t ldi,
                float* out, int64_t ldo, bool is_added) {
        if (lora && !lora->up.weights) lora = nullptr;
        auto put = [&](int panel, int64_t from, int64_t rows, bool adds) {
            return [=](int64_t first, int count, const float* y) {
                float* to = out + (from + first) * ldo + panel * PANEL;
                for (int m = 0; m < count; m++, to += ldo, y += PANEL) {
                    if (!adds) {
                        memcpy(to, y, PANEL * sizeof(float));
                        continue;
                    }
                    store(to, add(load(to), load(y))), store(to + 16, add(load(to + 16), load(y + 16)));
                }
            };
        };
        int factors = lora ? lora->down.panels() : 0;
        worker.phase(factors + matrix.panels(), [&](int task) {
            if (task < factors) return first_factor(worker, step, lora->down, task, in, ldi);
            int panel = task - factors;
            multiply(worker, matrix, panel, in, ldi, step.rows, put(panel, 0, step.rows, is_added));
        });
        if (!lora) return;
        int64_t first_mask = step.rows - step.masks;
        worker.phase(matrix.panels(), [&](int panel) {
            multiply(worker, lora->up, panel, low_rank_.get(0), rank_, step.masks,
                     put(panel, first_mask, step.masks, true));
        });
    }

    // The feed-forward layer up to its inner activations. A panel of gates meets its panel of values
    // while both are in the cache; masks with an adapter get their second factors first.
    void gate_and_up(Worker& worker, const Step& step, const Layer& layer, const Lora* lora) {
        const Matrix<W>&gate = layer.matrix[GATE], &up = layer.matrix[UP];
        const X* in = h_.get(0);
        int64_t first_mask = step.rows - step.masks;
        if (lora && !lora[GATE].up.weights) lora = nullptr;
        int factors = lora ? lora[GATE].down.panels() : 0;
        auto activate = [&](int64_t row, int panel, const float* g, const float* u) {
            float y[PANEL];
            for (int i = 0; i < PANEL; i += LANES) {
                F z = load(g + i);
                store(y + i, mul(divide(z, add(all(1), exp(sub(all(0), z)))), load(u + i)));
            }
            put<W>(y, inner_X_.get(0) + row * inner_ + panel * PANEL, PANEL);
        };
        worker.phase(factors + gate.panels(), [&](int task) {
            if (task < factors) return first_factor(worker, step, lora[GATE].down, task, in, hidden_);
            int panel = task - factors;
            Scratch& own = *scratch_[worker.index];
            for (int64_t first = 0; first < step.rows; first += ROWS) {
                int count = (int)std::min<int64_t>(ROWS, step.rows - first);
                product(gate, panel, in + first * hidden_, hidden_, count, own.low, first == 0);
                product(up, panel, in + first * hidden_, hidden_, count, own.high, first == 0);
                for (int m = 0; m < count; m++) {
                    const float *g = own.low + m * PANEL, *u = own.high + m * PANEL;
                    if (!lora || first + m < first_mask) {
                        activate(first + m, panel, g, u);
                        continue;
                    }
                    int64_t to = (first + m) * inner_ + panel * PANEL;
                    memcpy(gate_.get(0) + to, g, PANEL * sizeof(float));
                    memcpy(up_.get(0) + to, u, PANEL * sizeof(float));
                }
            }
        });
        if (!lora) return;
        worker.phase(gate.panels(), [&](int panel) {
            Scratch& own = *scratch_[worker.index];
            for (int64_t first = 0; first < step.masks; first += ROWS) {
                int count = (int)std::min<int64_t>(ROWS, step.masks - first);
                const X* low = low_rank_.get(0) + first * rank_;
                product(lora[GATE].up, panel, low, rank_, count, own.low, first == 0);
                product(lora[UP].up, panel, low, rank_, count, own.high, first == 0);
                for (int m = 0; m < count; m++) {
                    int64_t row = first_mask + first + m, at = row * inner_ + panel * PANEL;
                    float *g = own.low + m * PANEL, *u = own.high + m * PANEL;
                    for (int i = 0; i < PANEL; i += LANES) {
                        store(g + i, add(load(gate_.get(0) + at + i), load(g + i)));
                        store(u + i, add(load(up_.get(0) + at + i), load(u + i)));
                    }
                    activate(row, panel, g, u);
                }
            }
        });
    }

    // A row's head norms and rotation; its key and value go into the cache as they will be read.
    void turn_and_store(const Layer& layer, const Step& step, int l, int n) {
        float* from = qkv_.get(0) + (int64_t)n * joined_;
        int64_t size = s_.head_size;
        const float *cosine = s_.cosine + step.position[n] * half_, *sine = s_.sine + step.position[n] * half_;
        W* keys = (W*)step.cache + ((int64_t)l * step.slots + step.slot[n]) * 2 * s_.key_heads * size;
        float* queries = query_.get(0) + (int64_t)n * s_.query_heads * padded_size_;
        for (int64_t head = 0; head < heads_; head++, from += size) {
            int64_t key = head - s_.query_heads;
            if (key >= s_.key_heads) {
                narrow(from, keys + key * size, (int)size);
                continue;
            }
            const float* weight = layer.vector[key < 0 ? QUERY_NORM : KEY_NORM];
            if (weight) normalise_row(from, weight, size, s_.head_epsilon, from);
            float turned[SIZE_MOST];
            for (int64_t i = 0; i < half_; i++) {
                float a = from[i], b = from[i + half_];
                turned[i] = a * cosine[i] - b * sine[i];
                turned[i + half_] = b * cosine[i] + a * sine[i];
            }
            if (key >= 0) {
                narrow(turned, keys + key * size, (int)size);
                continue;
            }
            for (int64_t i = 0; i < size; i++) queries[head * padded_size_ + i] = turned[i] * s_.scale;
        }
    }

    void attend(Worker& worker, const Step& step, int l) {
        const W* cache = (const W*)step.cache + (int64_t)l * step.slots * 2 * s_.key_heads * s_.head_size;
        int heads = (int)s_.key_heads, shared = (int)(s_.query_heads / s_.key_heads);
        worker.phase((int)task_.size() * heads, [&](int task) {
            const Group& group = group_[task_[task / heads].first];
            int64_t block = task_[task / heads].second;
            int head = task % heads, queries = group.rows * shared;
            Scratch& own = *scratch_[worker.index];
            own.query.resize(queries), own.part.resize(2 * queries);
            float* out = own.out.get(2 * queries * padded_size_);
            for (int q = 0; q < queries; q++) {
                int64_t row = group.row[q / shared], at = row * s_.query_heads + head * shared + q % shared;
                own.query[q] = query_.get(0) + at * padded_size_;
                own.part[q] = {0, 0, out + q * padded_size_};
                own.part[queries + q] = {0, 0, out + (queries + q) * padded_size_};
            }
            int64_t end = group.is_split ? block + 1 : group.last_block;
            for (; block < end; block++) {
                own.block.compute(cache, step.page_size, heads, head, (int)s_.head_size, group, block, step.place,
                                  shared, own.query.data(), own.part.data());
                for (int q = 0; q < queries; q++)
                    if (group.is_split)
                        keep(step, group, block, q, head * shared + q % shared, shared, own.part[q]);
                    else
                        join(own.part[queries + q], own.part[q], (int)padded_size_);
            }
            for (int q = 0; q < queries && !group.is_split; q++)
                finish(group.row[q / shared], head * shared + q % shared, own.part[queries + q]);
        });
        worker.phase((int)split_row_.size(), [&](int index) {
            int64_t row = split_row_[index];
            int64_t seen = sight_of(step, row).seen_at(step.place[row]);
            float out[SIZE_MOST];
            for (int head = 0; head < s_.query_heads; head++) {
                Part all_{0, 0, out};
                for (int64_t b = 0; b * KEYS < seen; b++) {
                    float* kept = kept_at(row, b, head);
                    join(all_, Part{kept[0], kept[1], kept + LANES}, (int)padded_size_);
                }
                finish(row, head, all_);
            }
        });
    }

    float* kept_at(int64_t row, int64_t block, int64_t head) {
        return part_.get(0) + ((part_of_[row] + block) * s_.query_heads + head) * part_size_;
    }

    void keep(const Step& step, const Group& group, int64_t block, int q, int head, int shared, const Part& part) {
        int64_t row = group.row[q / shared];
        if (block * KEYS >= sight_of(step, row).seen_at(step.place[row])) return;
        float* to = kept_at(row, block, head);
        to[0] = part.most, to[1] = part.sum;
        memcpy(to + LANES, part.out, padded_size_ * sizeof(float));
    }

    void finish(int64_t row, int head, const Part& part) {
        float out[SIZE_MOST];
        for (int64_t d = 0; d < s_.head_size; d++) out[d] = part.out[d] / part.sum;
        put<W>(out, attended_X_.get(0) + row * attended_ + head * s_.head_size, s_.head_size);
    }

    // Rows of a sequence up to which its blocks are tasks of their own.
    static constexpr int64_t MOST_SPLIT = 64;
    static constexpr int64_t PIECE = 16;

    Shape s_;
    int64_t half_, padded_size_, hidden_, inner_, heads_, attended_, joined_, part_size_ = 0;
    int64_t rank_ = 0;  // largest summed rank of an adapter's layers with one input, with padding
    Arena arena_;
    std::vector<Layer> layers_;
    Matrix<W> head_;
    const float* norm_ = nullptr;
    std::unique_ptr<Arena> adapter_;
    std::vector<Lora> lora_;
    const W* mask_embedding_ = nullptr;
    Matrix<W> head_hidden_, head_token_, head_out_;
    std::vector<float> depth_;  // empty without a head
    int64_t inside_ = 0;        // the head's inner size, with padding
    // x_ are hidden states, h_ what goes into the next product.
    Buffer<float> x_, qkv_, query_, gate_, up_, part_;
    Buffer<X> h_, attended_X_, inner_X_, low_rank_, read_;
    Buffer<uint8_t> finite_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
    std::vector<Group> group_;
    std::vector<std::pair<int, int64_t>> task_;
    std::vector<int64_t> split_row_, part_of_;
};

EXPORT Model* mars_model(const Shape* shape) {
    if (shape->is_float32) return new ModelOf<float>(*shape);
    return new ModelOf<bf16>(*shape);
}
EXPORT void mars_free(Model* model) { delete model; }
EXPORT void mars_set_matrix(Model* model, int layer, int which, const void* rows, int outputs, int inputs,
                            const float* bias) {
    model->set_matrix(layer, which, rows, outputs, inputs, bias);
}
EXPORT void mars_set_vector(Model* model, int layer, int which, const float* values, int count) {
    model->set_vector(layer, which, values, count);
}
EXPORT void mars_set_adapter(Model* model, const void* mask_embedding) { model->set_adapter(mask_embedding); }
EXPORT void mars_set_lora(Model* model, int layer, int which, const void* down, const void* up, int rank) {
    model->set_lora(layer, which, down, up, rank);
}
EXPORT int64_t mars_step(Model* model, const Step* step) { return model->step(*step); }
EXPORT void mars_hidden(Model* model, const int64_t* row, int64_t rows, float* to) { model->hidden(row, rows, to); }
EXPORT void mars_logits(Model* model, const int64_t* row, int64_t rows, float* to, int64_t ldt) {
    model->logits(row, rows, to, ldt);
}
EXPORT void mars_candidates(Model* model, const float* hidden, int64_t rows, const int64_t* id, int64_t ids,
                            float* to) {
    model->candidates(hidden, rows, id, ids, to);
}
EXPORT void mars_set_head(Model* model, const void* hidden, const void* token, const float* depth, const void* out,
                          int size, int depths) {
    model->set_head(hidden, token, depth, out, size, depths);
}
EXPORT void mars_draft(Model* model, const Drafts* drafts) { model->draft(*drafts); }
// The token of each row, -1 where scores are not numbers, and the ratio of each pair (`sampling.h`).
EXPORT void mars_choose(int threads, const float* logits, int64_t rows, int64_t columns, const SampleRow* how,
                        const Pairs* pairs, int64_t* token, float* ratio) {
    process_pool().run(threads, [&](Worker& worker) {
        worker.phase((int)rows, [&](int row) {
            token[row] = sampling::sample_row(logits + row * columns, columns, how[row], row, *pairs, ratio);
        });
    });
}
// Asks the kernel for the tiles of AMX, which it gives to processes that ask; 0 if it does.
EXPORT long mars_allow_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18); }
EXPORT void mars_embed(Model* model, const int64_t* id, int64_t rows, float* to) { model->embed(id, rows, to); }
