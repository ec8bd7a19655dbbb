/* The passes over items that codecs 3, 4 and 5 are made of, compiled.
 *
 * Each does what a few NumPy calls in formulas.py, lanes.py, changes.py or difference.py do, to the same bits: those
 * define what a record means, and kernels.py compares both before it lets these be used. Rules:
 *
 * - IEEE 754 single operations in the written order: no contraction, no reassociation (the flags are in
 *   kernels_build.py). A fused multiply-add is a double product, exact, a sum, and a cast, as there.
 * - Nothing is allocated, nothing is kept, no other library is called. Memory need not be aligned.
 * - Bounds are the caller's: every array has as many items as `count` says.
 * - Numbers are little-endian; kernels.py does not load this anywhere else.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(CASCKPT_CLONES)
#define DISPATCHED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DISPATCHED
#endif
#define INLINED static inline __attribute__((always_inline))
#define LOOSE __attribute__((aligned(1), may_alias))

typedef float f32 LOOSE;
typedef uint8_t u8 __attribute__((may_alias));
typedef uint16_t u16 LOOSE;
typedef uint32_t u32 LOOSE;
typedef uint64_t u64 LOOSE;

enum { BLOCK = 1024 }; /* items at a time: 4 KiB of float32 for each of up to five rows, in the first cache */
enum { OPERANDS_MAX = 4 };
enum {
    SECOND_MOMENT = 1, ADAM_WEIGHT, FIRST_MOMENT, ROUNDING, MOMENTUM_WEIGHT, NESTEROV_WEIGHT, AVERAGE, DRIFTING_AVERAGE,
    SQUARES, CENTERED_STEP
};
enum { DONE = 0, UNKNOWN = 1 };

int kernels_version(void) { return 1; } /* of the arguments below, as kernels.py knows them */

static const uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, BF16_NAN = 0x7FC0;
static const float SMALLEST_NORMAL = 0x1p-126f, SMALLEST_GRADIENT = 0x1p-60f, SMALLEST_VARIANCE = 0x1p-96f;

INLINED uint32_t bits_of(float x) { uint32_t bits; __builtin_memcpy(&bits, &x, sizeof bits); return bits; }
INLINED float float_of(uint32_t bits) { float x; __builtin_memcpy(&x, &bits, sizeof x); return x; }
INLINED float at_least(float x, float low) { return x < low ? low : x; } /* a NaN stays */
INLINED float multiply_add(float x, float y, float z) { return (float)((double)x * (double)y + (double)z); }

/* The upper half of a float32 rounded to bf16, ties to even. */
INLINED uint32_t rounded(float x) {
    uint32_t bits = bits_of(x), upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (bits & MAGNITUDE) > INFINITE ? BF16_NAN : upper;
}
INLINED float narrow(float x) { return float_of(rounded(x) << 16); }
INLINED float stepped(int is_fused, float from, float direction, float step) {
    return is_fused ? multiply_add(direction, step, from) : from + direction * step;
}

#define EACH for (size_t i = 0; i < count; i++)

/* --- formulas: operands a, b, c, d and constants k in the order of models.py --- */

INLINED void second_moment(int variant, int rounding, const float *k, const f32 *v, const f32 *m, const f32 *new_m,
                           float *restrict out, size_t count) {
    const float weight = k[0], decay = k[1], share = k[2];
    EACH {
        float g = (new_m[i] - m[i]) / weight + m[i];
        if (rounding) g = narrow(g);
        float product = variant == 1 ? g * g : g * share;
        if (variant == 2) { out[i] = multiply_add(v[i], decay, product * g); continue; }
        float decayed = v[i] * decay;
        if (variant == 0) out[i] = multiply_add(product, g, decayed);
        else if (variant == 1) out[i] = multiply_add(product, share, decayed);
        else out[i] = (variant == 4 ? narrow(decayed) : decayed) + product * g;
    }
}

INLINED void adam_weight(int variant, const float *k, const f32 *w, const f32 *m, const f32 *v, float *restrict out,
                         size_t count) {
    const float keep = k[0], step = k[1], correction = k[2], eps = k[3];
    EACH {
        float divisor = __builtin_sqrtf(at_least(v[i], SMALLEST_NORMAL)), kept = w[i] * keep;
        if (variant == 2) {
            divisor = narrow(narrow(narrow(divisor) / correction) + eps);
            kept = narrow(kept);
        } else {
            divisor = divisor / correction + eps;
        }
        out[i] = variant == 1 ? multiply_add(m[i] / divisor, step, kept) : kept + m[i] * step / divisor;
    }
}

INLINED void first_moment(int variant, const float *k, const f32 *m, const f32 *g, float *restrict out, size_t count) {
    const float decay = k[0], weight = k[1];
    EACH {
        if (variant == 2) out[i] = multiply_add(g[i], weight, m[i] * decay);
        else out[i] = stepped(variant == 0, m[i], g[i] - m[i], weight);
    }
}

INLINED void momentum_weight(int variant, const float *k, const f32 *w, const f32 *buffer, float *restrict out,
                             size_t count) {
    EACH out[i] = stepped(variant == 0, w[i], buffer[i], k[0]);
}

INLINED void nesterov_weight(int variant, const float *k, const f32 *w, const f32 *buffer, const f32 *new_buffer,
                             float *restrict out, size_t count) {
    const float step = k[0], momentum = k[1];
    EACH {
        float g = new_buffer[i] - buffer[i] * momentum;
        out[i] = stepped(variant == 0, w[i], multiply_add(new_buffer[i], momentum, g), step);
    }
}

INLINED void average(int variant, const float *k, const f32 *w, const f32 *source, float *restrict out, size_t count) {
    const float keep = k[0], share = k[1];
    EACH {
        if (variant == 2 || variant == 3) { out[i] = stepped(variant == 2, w[i], source[i] - w[i], share); continue; }
        float kept = variant == 4 ? narrow(w[i] * keep) : w[i] * keep;
        out[i] = variant == 0 ? multiply_add(source[i], share, kept) : kept + source[i] * share;
    }
}

INLINED void drifting_average(const float *k, const f32 *w, const f32 *old_source, const f32 *source,
                              float *restrict out, size_t count) {
    EACH out[i] = multiply_add(source[i], k[2], multiply_add(old_source[i], k[1], w[i] * k[0]));
}

INLINED void squares(int variant, const float *k, const f32 *s, const f32 *x, const f32 *new_x, float *restrict out,
                     size_t count) {
    const float decay = k[0], share = k[1], eps = k[2], keep = k[3], step = k[4], eps_squared = eps * eps;
    EACH {
        float way = (new_x[i] - x[i] * keep) / step;
        float c = way * way * share, rest = 1.0f - c, kept = s[i] * decay;
        if (variant == 1) { out[i] = kept + (kept + eps) * (c / rest); continue; }
        float root = at_least(rest * kept + c * eps_squared, SMALLEST_NORMAL);
        root = (__builtin_sqrtf(root) + eps) / rest;
        out[i] = kept + root * c * root;
    }
}

INLINED void centered_step(int variant, const float *k, const f32 *x, const f32 *a, const f32 *new_a, const f32 *s,
                           float *restrict out, size_t count) {
    const float share = k[0], eps = k[1], keep = k[2], step = k[3];
    EACH {
        float g = (new_a[i] - a[i]) / share + a[i];
        g = __builtin_fabsf(g) < SMALLEST_GRADIENT ? 0.0f : g;
        float variance = s[i] - new_a[i] * new_a[i];
        if (variant == 1) variance = variance + eps;
        float divisor = __builtin_sqrtf(at_least(variance, SMALLEST_VARIANCE));
        if (variant == 0) divisor = divisor + eps;
        out[i] = x[i] * keep + g * step / divisor;
    }
}

/* One variant after the other as a constant, so that each loop is compiled without a branch. */
#define VARIANT(number, call) case number: { enum { variant = number }; call; return DONE; }

INLINED int evaluate(int kind, int chosen, int rounding, const float *k, const f32 *const *o, float *out, size_t count) {
    switch (kind * 8 + chosen) {
#define MOMENT(number) VARIANT(SECOND_MOMENT * 8 + number, \
    if (rounding) second_moment(number, 1, k, o[0], o[1], o[2], out, count); \
    else second_moment(number, 0, k, o[0], o[1], o[2], out, count))
    MOMENT(0) MOMENT(1) MOMENT(2) MOMENT(3) MOMENT(4)
#define WEIGHT(number) VARIANT(ADAM_WEIGHT * 8 + number, adam_weight(number, k, o[0], o[1], o[2], out, count))
    WEIGHT(0) WEIGHT(1) WEIGHT(2)
#define FIRST(number) VARIANT(FIRST_MOMENT * 8 + number, first_moment(number, k, o[0], o[1], out, count))
    FIRST(0) FIRST(1) FIRST(2)
#define MOMENTUM(number) VARIANT(MOMENTUM_WEIGHT * 8 + number, momentum_weight(number, k, o[0], o[1], out, count))
    MOMENTUM(0) MOMENTUM(1)
#define NESTEROV(number) \
    VARIANT(NESTEROV_WEIGHT * 8 + number, nesterov_weight(number, k, o[0], o[1], o[2], out, count))
    NESTEROV(0) NESTEROV(1)
#define MEAN(number) VARIANT(AVERAGE * 8 + number, average(number, k, o[0], o[1], out, count))
    MEAN(0) MEAN(1) MEAN(2) MEAN(3) MEAN(4)
#define SQUARE(number) VARIANT(SQUARES * 8 + number, squares(number, k, o[0], o[1], o[2], out, count))
    SQUARE(0) SQUARE(1)
#define CENTERED(number) \
    VARIANT(CENTERED_STEP * 8 + number, centered_step(number, k, o[0], o[1], o[2], o[3], out, count))
    CENTERED(0) CENTERED(1)
    case DRIFTING_AVERAGE * 8: drifting_average(k, o[0], o[1], o[2], out, count); return DONE;
    case ROUNDING * 8: EACH out[i] = o[0][i]; return DONE;
    default: return UNKNOWN;
    }
}

/* Evaluate a formula: formulas.predict. `sizes` are the bytes per item of the operands (4, or 2 for bf16) and of `out`
 * (the last). Results under `floor`, infinite or NaN become the first operand's bits; there is no floor if it is 0. */
DISPATCHED int predict(int kind, int variant, int rounding, float floor, const float *constants,
                       const void *const *operands, const u8 *sizes, int operand_count, void *out, size_t total) {
    float result[BLOCK], widened[OPERANDS_MAX][BLOCK];
    const uint32_t low = bits_of(floor);
    const int out_size = sizes[operand_count];
    for (size_t start = 0; start < total; start += BLOCK) {
        const size_t count = total - start < BLOCK ? total - start : BLOCK;
        const f32 *inputs[OPERANDS_MAX];
        for (int at = 0; at < operand_count; at++) {
            if (sizes[at] == 4) { inputs[at] = (const f32 *)operands[at] + start; continue; }
            const u16 *items = (const u16 *)operands[at] + start;
            EACH widened[at][i] = float_of((uint32_t)items[i] << 16);
            inputs[at] = widened[at];
        }
        if (evaluate(kind, variant, rounding, constants, inputs, result, count) != DONE) return UNKNOWN;
        if (out_size == 4) {
            const u32 *first = (const u32 *)operands[0] + start;
            u32 *items = (u32 *)out + start;
            EACH {
                uint32_t bits = bits_of(result[i]), size = bits & MAGNITUDE;
                items[i] = size >= low && size < INFINITE ? bits : first[i];
            }
        } else if (low) {
            const u16 *first = (const u16 *)operands[0] + start;
            u16 *items = (u16 *)out + start;
            EACH {
                uint32_t size = bits_of(result[i]) & MAGNITUDE;
                items[i] = (uint16_t)(size >= low && size < INFINITE ? rounded(result[i]) : first[i]);
            }
        } else {
            u16 *items = (u16 *)out + start;
            EACH items[i] = (uint16_t)rounded(result[i]);
        }
    }
    return DONE;
}

/* formulas.find_gradient. */
DISPATCHED void find_gradient(int variant, const float *constants, const f32 *m, const f32 *new_m, u16 *restrict out,
                              size_t count) {
    const double decay = constants[0], weight = constants[1];
    if (variant == 2) {
        EACH out[i] = (uint16_t)rounded((float)(((double)new_m[i] - (double)m[i] * decay) / weight));
    } else {
        EACH out[i] = (uint16_t)rounded((float)(((double)new_m[i] - (double)m[i]) / weight + (double)m[i]));
    }
}

/* --- items of 1, 2, 4 or 8 bytes as unsigned integers --- */

/* out = new - old + bias, or new + old - bias; `out` may be one of them. */
#define DEFINE_SUM(T, size) \
    DISPATCHED void subtract_##size(const T *new, const T *old, uint64_t bias, T *out, size_t count) { \
        EACH out[i] = (T)(new[i] - old[i] + (T)bias); \
    } \
    DISPATCHED void add_##size(const T *new, const T *old, uint64_t bias, T *out, size_t count) { \
        EACH out[i] = (T)(new[i] + old[i] - (T)bias); \
    }
DEFINE_SUM(u8, 1)
DEFINE_SUM(u16, 2)
DEFINE_SUM(u32, 4)
DEFINE_SUM(u64, 8)

/* One lane of items cut out, lanes.split; and lanes joined with the `mask` of those that are constant, lanes.merge. */
#define CUT(width, W) case width: { W *cut = lane; EACH cut[i] = (W)(items[i] >> shift); break; }
#define JOIN(width, W, V) case width: { \
    const W *lane = (const W *)lanes[at] + start; EACH joined[i] |= (V)((V)lane[i] << shift); break; }
#define DEFINE_LANES(T, V, size) \
    DISPATCHED void cut_##size(const T *restrict items, int width, int offset, void *restrict lane, size_t count) { \
        const int shift = 8 * offset; \
        switch (width) { CUT(1, u8) CUT(2, u16) CUT(4, u32) CUT(8, u64) } \
    } \
    DISPATCHED void join_##size(const void *const *lanes, const u8 *widths, const u8 *offsets, int lane_count, \
                                uint64_t mask, T *out, size_t total) { \
        V joined[BLOCK]; \
        for (size_t start = 0; start < total; start += BLOCK) { \
            const size_t count = total - start < BLOCK ? total - start : BLOCK; \
            T *items = out + start; \
            EACH joined[i] = (V)mask; \
            for (int at = 0; at < lane_count; at++) { \
                const int shift = 8 * offsets[at]; \
                switch (widths[at]) { JOIN(1, u8, V) JOIN(2, u16, V) JOIN(4, u32, V) JOIN(8, u64, V) } \
            } \
            EACH items[i] = joined[i]; \
        } \
    }
DEFINE_LANES(u16, uint16_t, 2)
DEFINE_LANES(u32, uint32_t, 4)
DEFINE_LANES(u64, uint64_t, 8)

/* How many whole words of 8 bytes differ: changes.changed_words. */
DISPATCHED size_t count_changed(const u64 *one, const u64 *other, size_t count) {
    size_t changed = 0;
    EACH changed += one[i] != other[i];
    return changed;
}

/* Changed items: their gaps and differences (changes.find); how many, or more than `limit`. Both arrays have room for
 * `limit` + GROUP items. Groups without a change are passed over; in others every item is written, and the next one
 * over it unless it has changed. */
enum { GROUP = 16, GROUPS = 8 };
#define DEFINE_CHANGES(T, V, size) \
    INLINED int differ_##size(const T *new, const T *old, size_t count) { \
        V changed = 0; \
        EACH changed |= (V)(new[i] ^ old[i]); \
        return changed != 0; \
    } \
    DISPATCHED size_t find_changes_##size(const T *new, const T *old, size_t total, size_t limit, \
                                          u32 *restrict gaps, T *restrict differences) { \
        size_t found = 0, start = 0; \
        uint32_t last = (uint32_t)-1; \
        while (start < total && found <= limit) { \
            const size_t left = total - start; \
            if (left >= GROUP * GROUPS && !differ_##size(new + start, old + start, GROUP * GROUPS)) { \
                start += GROUP * GROUPS; \
                continue; \
            } \
            const size_t stop = start + (left < GROUP * GROUPS ? left : GROUP * GROUPS); \
            for (; start < stop && found <= limit; start += GROUP) { \
                const size_t count = stop - start < GROUP ? stop - start : GROUP; \
                V each[GROUP], changed = 0; \
                if (count == GROUP) \
                    for (size_t i = 0; i < GROUP; i++) changed |= each[i] = (V)(new[start + i] - old[start + i]); \
                else \
                    EACH changed |= each[i] = (V)(new[start + i] - old[start + i]); \
                if (!changed) continue; \
                EACH { \
                    const uint32_t place = (uint32_t)(start + i); \
                    const int is_changed = each[i] != 0; \
                    gaps[found] = place - last; \
                    differences[found] = each[i]; \
                    last = is_changed ? place : last; \
                    found += is_changed; \
                } \
            } \
        } \
        return found; \
    } \
    void add_changes_##size(T *items, const void *gaps, int width, const T *differences, size_t count) { \
        size_t place = (size_t)-1; \
        EACH { \
            place += width == 1 ? ((const u8 *)gaps)[i] : width == 2 ? ((const u16 *)gaps)[i] : ((const u32 *)gaps)[i]; \
            items[place] = (T)(items[place] + differences[i]); \
        } \
    }
DEFINE_CHANGES(u8, uint8_t, 1)
DEFINE_CHANGES(u16, uint16_t, 2)
DEFINE_CHANGES(u32, uint32_t, 4)
DEFINE_CHANGES(u64, uint64_t, 8)

/* Whether gaps are positions inside `total` items: none is 0, and they do not lead further. */
DISPATCHED int are_gaps(const void *gaps, int width, size_t count, size_t total) {
    uint64_t sum = 0;
    int has_zero = 0;
    if (width == 1) EACH { uint32_t gap = ((const u8 *)gaps)[i]; sum += gap; has_zero |= gap == 0; }
    else if (width == 2) EACH { uint32_t gap = ((const u16 *)gaps)[i]; sum += gap; has_zero |= gap == 0; }
    else EACH { uint32_t gap = ((const u32 *)gaps)[i]; sum += gap; has_zero |= gap == 0; }
    return !has_zero && sum <= total;
}
