/* What Python hands to the library (foretell/native/library.py and steps.py have the same
   structures), and the kernels that every kind of processor has its own build of. */

#ifndef FORETELL_NATIVE_H
#define FORETELL_NATIVE_H

#include <stdint.h>

#define FT_VERSION 15
#define BLOCK 16      /* outputs that lie beside each other in a packed matrix */
#define GROUP 32      /* inputs that lie together, and share a scale as activations */
#define SUPER 256     /* inputs whose scales share a factor, see FT_SUPER */
#define STRIP 4       /* blocks of outputs that one task computes */
#define TILE 8        /* rows that share each weight that is read */
#define MOST_EXPERTS 1024
#define QUERIES 24    /* query heads that one call of attention computes, about */

/* How the numbers of a matrix are stored. */
enum {
    FT_WHOLE, FT_BFLOAT16, FT_FLOAT16, FT_FLOAT32,
    FT_SIGNED8, /* a sign, 4 bits of exponent and 3 of mantissa, in groups with a scale */
    FT_FORMATS
};
/* How the scales of whole numbers are, and their least values. Each kind has so many bytes of 16
   outputs, those of an output beside those of the next one:
   FT_HALF     2 a group: float16
   FT_SUPER    for 256 inputs 2 and 1 a group: a factor (float16) and whole numbers of 8 bits with a
               sign that it is multiplied by
   FT_SINGLE   4 a group: float32
   FT_POWER    1 a group, e: 2 to the power e - 128
   FT_FLOAT8   1 a group: 4 bits of exponent, 3 of mantissa, no sign; half of what they are
   FT_POINT    1 a group, least values alone: a zero point z from 0 to 255, which is -scale * z */
enum { FT_NONE, FT_HALF, FT_SUPER, FT_SINGLE, FT_POWER, FT_FLOAT8, FT_POINT };
/* How activations are as a product reads them, a bit each: see ft_rows. */
enum { FT_AS_WHOLE = 1, FT_AS_BFLOAT = 2, FT_AS_FLOAT = 4 };
/* Activations of a multilayer perceptron; FT_SQUARED_RELU: relu(x) squared. */
enum {
    FT_SILU, FT_GELU_TANH, FT_GELU, FT_RELU, FT_SQUARED_RELU,
    FT_CLAMPED_SILU, /* of two halves: (up + 1) * gate * logistic(1.702 gate), gate at most 7 and up
                        between -7 and 7 (gpt-oss) */
    FT_ACTIVATIONS
};
/* How experts are weighed: by the softmax of all their scores, of those that are chosen alone, or by
   the logistic function of each. */
enum { FT_SOFTMAX, FT_SOFTMAX_OF_CHOSEN, FT_LOGISTIC, FT_SCORINGS };
/* What a call returns. Refused are sizes that do not belong to each other, and numbers of tokens,
   rows, layers or positions beyond what there is; nothing is computed then, or nothing further. */
enum { FT_OUTSIDE = -2, FT_MISFIT = -1, FT_NO_MEMORY = 0, FT_DONE = 1 };

/* y = x W^T + bias, W (outputs, inputs), packed in blocks of 16 outputs; see packing.py.
   `inputs` is a multiple of 32, `blocks` is outputs / 16, rounded up. Whole numbers have 2, 3, 4, 5,
   6 or 8 bits; each stands for scale * (number - offset) + least or, where there is a table, for
   scale * table[number] + least. Inputs that share a scale, `group`, are 32, 64, 128 or 256, or 16
   where numbers have 2, 3 or 6 bits or a table from -16 to 15. With `fine` they stand for
   scale * (table[number] + fine[number] / 256), in groups of 32 or more. Floats of 8 bits are
   multiplied by the scale of their group, of 32 or more. */
typedef struct {
    int32_t format, outputs, inputs, blocks;
    int32_t bits, group, offset;   /* of whole numbers, as are those below but the bias; floats of
                                      8 bits have group, scaling and scales */
    int32_t scaling, least_scaling;
    const uint8_t *weights;
    const uint8_t *scales;         /* (blocks, ft_scale_bytes) */
    const uint8_t *minima;         /* the same, or NULL: added for each input */
    const int8_t *table;           /* (16,) for which numbers of 4 bits stand, or NULL */
    const int8_t *fine;            /* (16,) or NULL, beside `table` */
    const float *bias;             /* (outputs,) or NULL */
} ft_matrix;

/* A group of 32 activations as whole numbers: each is `scale` times its number. */
typedef struct {
    float scale;
    float sum, halves[2];          /* of the numbers, and of the first and the last 16; whole */
} ft_group;

/* Rows of activations as products read them, each (inputs,), in up to three forms. */
typedef struct {
    int8_t *numbers;               /* FT_AS_WHOLE: 8 bits, for weights that are whole numbers */
    ft_group *groups;              /* (rows, inputs / 32) */
    uint16_t *narrow;              /* FT_AS_BFLOAT: bfloat16, for weights of bfloat16 */
    float *wide;                   /* FT_AS_FLOAT: float32, for weights of float16 and float32 */
    int32_t inputs;
} ft_rows;

/* A norm of some numbers: they are divided by their root mean square; where it is `centered`, their
   mean is taken away before. `weight`: NULL, there is no norm; `bias`: may be NULL. */
typedef struct {
    const float *weight, *bias;
    float eps;
    int32_t centered;
} ft_norm;

/* Experts, in place of a layer's MLP or beside it. A token is computed by the `chosen` experts with
   the highest scores (router(y), and what `choice_bias` adds for the choice alone), of equal ones
   the first; of experts in groups only those in the `chosen_groups` groups whose `group_best`
   highest sum to the most. What they give is multiplied by their weights and added. */
typedef struct {
    int32_t count, chosen, scoring;
    int32_t groups, chosen_groups, group_best;
    int32_t renormalized;          /* the weights of those chosen are divided by their sum */
    int32_t activation;
    float scaling;                 /* of the weights */
    const float *choice_bias;      /* (count,) or NULL */
    ft_matrix router;              /* (count, hidden) */
    ft_matrix share;               /* (1, hidden): the layer's own MLP is multiplied by the logistic
                                      function of it; no outputs: it is not */
    const ft_matrix *gate, *up, *down; /* (count,) each, all of one size */
} ft_experts;

/* What a layer does. x is what enters it, a sum over layers:

       x += residual * after_attention(out(attention(before_attention(x))))
       x += residual * after_mlp(mlp(before_mlp(x)))

   `parallel`: both halves read the x that enters, and are added at once; none of them has a norm
   after it then. mlp(y) = down(activation(gate(y)) * up(y)), or down(activation(up(y))) where
   `gate` has no outputs. */
typedef struct {
    ft_norm before_attention, after_attention, before_mlp, after_mlp;
    ft_norm query_norm, key_norm;  /* of each head, (width,); both or none */
    ft_norm token_norm;            /* attention reads the step's tokens, normed, in front of x, 2 *
                                      hidden numbers in all; or no norm */
    int32_t whole_heads;           /* query_norm is of all query heads at once, (heads * width,),
                                      key_norm of all key heads */
    int32_t window;                /* positions a node sees, itself included; 0: all */
    int32_t rotation;              /* the one of the step's that turns its heads; -1: none */
    int32_t parallel, activation;
    float scale, score_cap;        /* of scores; score_cap * tanh(score / score_cap), 0: no cap */
    float residual;
    const float *sinks;            /* (heads,): scores of rows without values; or NULL */
    ft_matrix query, key, value, out, gate, up, down; /* `up` and `down` without outputs: no MLP */
    const ft_experts *experts;     /* or NULL */
} ft_layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, width;
    float logit_scale, logit_cap;  /* cap: as of scores */
    ft_norm norm;                  /* before the head */
    const ft_layer *layer;
    ft_matrix head;
    const float *position_rows;    /* (position_count, hidden): added to what enters at a position;
                                      or NULL */
    int32_t position_count;
} ft_model;

/* Angles by which heads are turned at each position: numbers 0 to turned - 1 of a head, number i
   with number turned / 2 + i, or where they are `interleaved` number 2 i with 2 i + 1. */
typedef struct {
    const float *cosines, *sines;  /* (positions, turned / 2) */
    int32_t turned, interleaved;
} ft_rotation;

/* Committed rows that several caches share. Row i of head h of layer l lies at
   keys + l * layer_stride + h * head_stride + i * width; all are bfloat16. */
typedef struct {
    const uint16_t *keys, *values;
    int64_t layer_stride, head_stride;
    int32_t start, rows;           /* position of its first row; how many */
} ft_segment;

typedef struct {
    int32_t nodes, start, base;    /* new nodes; rows before them; rows that every node sees: the
                                      committed ones, or of a canvas all, the new ones included */
    const int32_t *positions;      /* (nodes,) in the text */
    const uint8_t *seen;           /* (nodes, start - base + nodes) or NULL: a chain, or a
                                      canvas, whose base is start + nodes */
    const int32_t *row_positions;  /* (start + nodes,) or NULL: where no layer has a window */
    uint16_t *keys, *values;
    int64_t layer_stride, head_stride;
    int32_t room;                  /* rows that there is memory for */
    int32_t segments;              /* MOST_SPANS at most */
    const ft_segment *segment;
} ft_job;

typedef struct {
    const ft_job *jobs;
    int32_t job_count, nodes;      /* of all jobs */
    const float *states;           /* (nodes, hidden) what enters the first layer that runs */
    const float *tokens;           /* (nodes, hidden) embeddings, for layers that read them */
    const ft_rotation *rotations;
    int32_t rotation_count, positions; /* positions of each rotation */
    const int32_t *layers;         /* that run, in order */
    int32_t layer_count;
    const int32_t *rows;           /* nodes whose logits are wanted */
    int32_t row_count;
    float *logits;                 /* (row_count, outputs of the head) */
    const int32_t *taps;           /* layers whose entering states are wanted */
    int32_t tap_count;
    float *tapped;                 /* (tap_count, nodes, hidden) */
} ft_step;

/* What lies between the attention of two layers, for jobs whose attention the caller computes: the
   rest of layer `after` behind what its attention gave (-1: the step begins), then layer `before`
   up to where its rotated queries stand in `qkv` and its keys and values in the caches (-1: the
   logits). */
typedef struct {
    int32_t after, before;
    float *hidden;                 /* (nodes, hidden): the residual stream, kept between calls */
    float *qkv;                    /* (nodes, (heads + 2 * kv_heads) * width) */
    const float *attended;         /* (nodes, heads * width) */
} ft_between;

/* Attention of queries over some rows of a cache. Numbers of a row lie beside each other (or
   `key_number` apart, for products alone: then rows lie beside each other); strides count numbers.
   Which rows a node reads is said for each query head, or for each key head
   (`owners` of them): by `lists` of pages, rows list * page to list * page + page - 1, ascending,
   and all rows from `first` on; or by `read`; or it reads all of them, where both are NULL. A row
   that the mask hides is read by nobody. */
typedef struct {
    int32_t heads, kv_heads, nodes, rows, width, value_width;
    int32_t wide;                  /* 1: keys and values are float32; 0: bfloat16 */
    int32_t owners, longest, page, first;
    const void *keys, *values;
    int64_t key_head, key_row, key_number, value_head, value_row;
    const float *q;                /* (heads, nodes, width) */
    const int32_t *lists;          /* (owners, nodes, longest) or NULL */
    const uint8_t *read;           /* (owners, nodes, rows) or NULL */
    const float *mask;             /* added to scores, (nodes, rows), or NULL */
    int64_t mask_head;             /* between the masks of two query heads; 0: they share one */
    float scale;
    float *out;                    /* (nodes, heads, value_width) */
    int64_t out_row;               /* of products: between the rows of (heads, nodes, rows) */
    float *weights;                /* (kv_heads, nodes, rows) or NULL: their means over query heads
                                      that share keys */
    float *log_sums;               /* (nodes, heads) or NULL: logs of the sums of exponentials */
} ft_reading;

/* How a step goes on: each job by the best token of its one row, `count` tokens in all. What enters
   for a token is its row of `embeddings` times `scale`. */
typedef struct {
    const ft_matrix *embeddings;
    float scale;
    const int64_t *names;          /* tokens of the head's outputs, or NULL: as counted */
    int32_t count;
    int64_t *tokens;               /* (count, jobs) */
    float *chances;                /* (count, jobs) of these tokens */
} ft_following;

/* How a head on a target's states drafts below the last node of its job's text. A node's state is
   what its parent left, its token's embedding a row of `embeddings` times `scale`. They enter the
   layers by `enter`, which reads both, embedding first; or, where it has no outputs, the state
   alone does, and the first layer reads the embedding beside it. */
typedef struct {
    const ft_matrix *embeddings;
    float scale;
    const int64_t *names;          /* tokens that the output matrix's rows stand for, or NULL */
    ft_matrix enter;
    ft_norm token_norm, state_norm; /* of what `enter` reads */
    int32_t hands_on_normed;       /* whether a state is handed on behind the last norm */
    /* Levels, nodes of a level that have children, and how many each has; nodes that are chosen at
       the end, those with the highest chances. */
    int32_t depth, breadth, chosen;
    float least;                   /* chance of a path below which no level follows its level */
    /* Of each job (jobs, chosen), in the order in which they came about: token, parent (-1: the
       text), chance given the parent. Returned `counts` (jobs,). */
    int64_t *tokens;
    int32_t *parents, *counts;
    float *chances;
} ft_growth;

/* Rows of a matrix as a .gguf file has them, `type` by the number that it names them by. */
typedef struct {
    int32_t type, inputs, row_count;
    const uint8_t *rows;           /* (row_count, row_bytes) */
    int64_t row_bytes;
    const int64_t *order;          /* (outputs,) the row that each output is, or NULL: as they lie */
} ft_raw;

/* What attention needs to know of one key head and the query heads that share it. */
typedef struct {
    int32_t width, group;          /* of a head; query heads that share keys */
    float scale, cap;
    int32_t window;
    int32_t layer, kv_head;
    const float *sinks;            /* (group,) or NULL */
} ft_heads;

/* Nodes of one job that a call of attention computes. */
typedef struct {
    const ft_job *job;
    int32_t first, nodes;
    const float *queries;          /* of the first node */
    int32_t row;                   /* of the first node, in the forward */
} ft_part;

/* Rows that lie beside each other, and the place of the first in the list of all that are seen. */
typedef struct {
    const uint16_t *keys, *values;
    int32_t rows, begin;
} ft_span;

#define MOST_SPANS 32              /* segments of a text */
#define MOST_NODES (QUERIES + 16)  /* of one call of attention */

/* One call of attention: nodes of several jobs that have the same segments, and one key head.
   `before` rows stand in segments; a node's list begins at `begins`, and once its scores are
   softened it has `lengths` places. `lowest` and `highest` are the first and the last beginning. */
typedef struct {
    ft_heads heads;
    ft_part parts[MOST_NODES];
    int32_t part_count, nodes, before, end, lowest, highest;
    int64_t stride;                /* between the scores of two queries */
    ft_span shared[MOST_SPANS], own[MOST_NODES];
    int32_t begins[MOST_NODES], lengths[MOST_NODES];
    float sums[4 * MOST_NODES];
    float *scaled, *mixed, *scores;
} ft_attention;

/* The kernels of one kind of processor. */
typedef struct {
    const char *name;
    void (*prepare)(const ft_rows *rows, int32_t row, int32_t first, int32_t count,
                    const float *x, int32_t forms);
    void (*prepare_twice)(const ft_rows *rows, int32_t row, int32_t count, const float *x);
    void (*choose_peaks)(const float *weights, int64_t groups, uint8_t *peaks);
    void (*choose_ranges)(const float *weights, int64_t groups, uint8_t *numbers, float *scales,
                          float *minima);
    void (*product)(const ft_matrix *matrix, const int32_t *blocks, int32_t count,
                    const ft_rows *rows, int32_t first, int32_t height, float *out);
    void (*deliver)(const float *tile, int32_t width, int32_t tile_width, int32_t height,
                    const float *bias, float *y, int64_t stride, int32_t add);
    void (*norm)(const float *x, const ft_norm *norm, int32_t count, float *out);
    /* x += factor * more */
    void (*add)(float *x, const float *more, float factor, int32_t count);
    void (*rotate)(float *head, const ft_rotation *rotation, int32_t position);
    /* activation(gate) * up; `up` NULL: activation(gate) */
    void (*gate)(const float *gate, const float *up, int32_t count, int32_t activation,
                 float *out);
    /* x = cap * tanh(scale * x / cap); cap 0: scale * x */
    void (*limit)(float *x, float scale, float cap, int32_t count);
    void (*store)(const float *x, int32_t count, uint16_t *out);
    int64_t (*attention_floats)(int32_t longest, int32_t width, int32_t queries);
    /* Attention in its steps: `parts` are set; then scores of places `from` to `to - 1` of the
       list, sums, and numbers `first` to `last - 1` of every head's result. */
    void (*set_up)(ft_attention *call, int64_t query_stride, float *memory);
    void (*score)(ft_attention *call, int32_t from, int32_t to, float *memory);
    void (*soften)(ft_attention *call);
    void (*mix)(ft_attention *call, int32_t first, int32_t last);
    float (*top)(const float *logits, int32_t count);
    float (*sum_above)(const float *logits, int32_t count, float highest);
    void (*exponentials)(const float *logits, int32_t count, float from, float *out);
    int32_t (*best)(const float *logits, int32_t count, float *chance);
    int32_t (*reaching)(const float *scores, int32_t count, float least, int32_t *places);
    int64_t (*reading_bytes)(const ft_reading *reading);
    void (*read_listed)(const ft_reading *reading, int32_t node, int32_t first, int32_t last,
                        void *memory);
    void (*multiply_rows)(const ft_reading *reading, int32_t kv_head, int32_t node, int32_t from,
                          int32_t to);
} ft_kernels;

/* The form of activations that a matrix reads. */
static inline int32_t ft_forms(const ft_matrix *matrix) {
    return matrix->format == FT_WHOLE      ? FT_AS_WHOLE
           : matrix->format == FT_BFLOAT16 ? FT_AS_BFLOAT
                                           : FT_AS_FLOAT;
}

/* Bytes of the weights of 16 outputs. */
static inline int64_t ft_weight_bytes(const ft_matrix *matrix) {
    const int32_t bits = matrix->format == FT_WHOLE     ? matrix->bits
                         : matrix->format == FT_FLOAT32 ? 32
                         : matrix->format == FT_SIGNED8 ? 8
                                                        : 16;
    return (int64_t)matrix->inputs * 2 * bits;
}

/* Bytes of the scales, or least values, of 16 outputs. */
static inline int64_t ft_scale_bytes(const ft_matrix *matrix, int32_t scaling) {
    const int64_t groups = matrix->inputs / matrix->group;
    switch (scaling) {
    case FT_HALF: return groups * 2 * BLOCK;
    case FT_SUPER: return matrix->inputs / SUPER * 2 * BLOCK + groups * BLOCK;
    case FT_SINGLE: return groups * 4 * BLOCK;
    case FT_NONE: return 0;
    default: return groups * BLOCK;
    }
}

/* Whether a table's numbers are all from -16 to 15. */
static inline int ft_is_narrow(const int8_t *table) {
    int narrow = 1;
    for (int i = 0; i < 16; i++)
        narrow &= table[i] >= -16 && table[i] < 16;
    return narrow;
}

/* Whether this compiler builds the kernels for ARM. Older versions of clang know dot products only
   where the whole program may use them, as on Apple's processors. */
#if defined(__aarch64__) && !defined(__AARCH64EB__)
#if !defined(__clang__) || __clang_major__ >= 17 || defined(__ARM_FEATURE_DOTPROD)
#define FT_BUILDS_NEON
#endif
#endif

/* The kernels that were chosen. */
const ft_kernels *ft_chosen(void);

/* The `wanted` best of logits, best first, of equals the first; returns how many there are. */
int32_t ft_best_of(const float *logits, int32_t count, int32_t wanted, int32_t *places);

/* Copies row `row` to row `to` of others, in these forms. */
void ft_copy_row(const ft_rows *rows, int32_t row, const ft_rows *out, int32_t to, int32_t forms);

/* Whether what a call is given can be computed: FT_DONE, or why it is refused. */
int32_t ft_check_matrix(const ft_matrix *matrix, int64_t outputs, int64_t inputs);
int32_t ft_check_rows(const ft_matrix *matrix, const int64_t *outputs, int32_t count);
int32_t ft_check_step(const ft_model *model, const ft_step *step, int between);
int32_t ft_check_between(const ft_model *model, const ft_between *between);
int32_t ft_check_following(const ft_model *model, const ft_step *step,
                           const ft_following *following);
int32_t ft_check_growth(const ft_model *model, const ft_step *step, const ft_growth *growth);
int32_t ft_check_reading(const ft_reading *reading);

extern const ft_kernels ft_portable, ft_avx2, ft_avx512, ft_avx512_bf16, ft_neon;

/* --- what Python calls: a whole number returned is one of those above, unless said otherwise */

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

EXPORT int32_t ft_version(void);
EXPORT const char *ft_kind(void);
/* Chooses the kernels of this kind from now on; 0: this processor cannot run them. */
EXPORT int32_t ft_choose(const char *name);
/* y (rows, outputs) = x (rows, inputs) W^T + bias. */
EXPORT int32_t ft_product(const ft_matrix *matrix, const float *x, int32_t rows, float *y,
                          int32_t threads);
/* One forward. */
EXPORT int32_t ft_forward(const ft_model *model, const ft_step *step, int32_t threads);
/* A forward, and those of the tokens that follow it. */
EXPORT int32_t ft_follow(const ft_model *model, const ft_step *step, const ft_following *following,
                         int32_t threads);
/* A forward with one row of logits a job, and a tree below its node. Returns how many forwards it
   took, where it is done. */
EXPORT int32_t ft_grow(const ft_model *model, const ft_step *step, const ft_growth *growth,
                       int32_t threads);
/* A part of a step, see ft_between. The step's `states` are read by nobody: they begin as
   `hidden`. */
EXPORT int32_t ft_go_between(const ft_model *model, const ft_step *step, const ft_between *between,
                             int32_t threads);
/* Attention over listed rows. */
EXPORT int32_t ft_read(const ft_reading *reading, int32_t threads);
/* Products of queries with all rows of their key head, out (heads, nodes, rows); nothing is scaled
   or hidden. */
EXPORT int32_t ft_products(const ft_reading *reading, int32_t threads);
/* Of each list of scores (lists, length) the places of the `count` highest, ascending (lists,
   count); of equal ones the first. */
EXPORT int32_t ft_highest(const float *scores, int32_t lists, int32_t length, int32_t count,
                          int32_t *places, int32_t threads);
/* Of each row of logits (rows, length), `stride` numbers apart, the `wanted` best, at most
   `length`, with their places, best first and of equals the first, (rows, wanted) each; and the
   logs of the rows' sums of exponentials (rows,), NULL: not wanted. NaN has no place among them. */
EXPORT int32_t ft_best(const float *logits, int64_t stride, int32_t rows, int32_t length,
                       int32_t wanted, float *values, int32_t *places, float *log_sums,
                       int32_t threads);
/* Into `out` the logits whose entry of `allowed` is not 0, and -inf in the place of the others. */
EXPORT void ft_masked(const float *logits, const uint8_t *allowed, int32_t length, float *out);
/* The first place at which the sum of weights (length,) up to it is above u times the whole sum,
   the last that has any where rounding leaves none; -1: the sum is not above 0, or not finite. */
EXPORT int32_t ft_draw(const float *weights, int32_t length, double u);
/* The fewest largest of some logits (length,) whose chances reach `share`, as they are, and -inf in
   the place of all others, kept (length,). 0: rounding could decide which they are, or the logits
   have no chances. */
EXPORT int32_t ft_nucleus(const float *logits, int32_t length, double share, float *kept);
/* Of each group of 32 weights the whole number (96 to 127) that its largest should become for the
   least squared error, peaks (groups,). */
EXPORT void ft_peaks(const float *weights, int64_t groups, uint8_t *peaks, int32_t threads);
/* Of each group of 32 weights the numbers of 4 bits (groups, 32), with the scale and the least
   value (groups,), that are nearest to it. */
EXPORT void ft_ranges(const float *weights, int64_t groups, uint8_t *numbers, float *scales,
                      float *minima, int32_t threads);
/* Puts rows of a file into the memory of a matrix that is described, but for its numbers. */
EXPORT int32_t ft_pack(const ft_raw *raw, const ft_matrix *matrix, int32_t threads);
/* Rows of a matrix by number, out (count, inputs). */
EXPORT int32_t ft_rows_of(const ft_matrix *matrix, const int64_t *outputs, int32_t count,
                          float *out);

#endif
