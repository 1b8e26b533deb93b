/* One forward of a model over the new nodes of any number of requests, and the single operations
   that Python calls. All sums are those of kernels.h: a node's result is its own. */

#define _GNU_SOURCE
#include "foretell_native.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__) && defined(FT_BUILDS_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define FEW 2     /* nodes whose norms every thread computes for itself: it saves a barrier */
#define LONG 512  /* rows from which on threads share each call of attention, where calls are few */
#define PIECE 512 /* rows whose scores are one task then */
#define NEAREST_BYTES 65536 /* of weights that several tiles of rows share */

static const ft_kernels *kernels = &ft_portable;

const ft_kernels *ft_chosen(void) { return kernels; }

/* --- the processor */

EXPORT int32_t ft_version(void) { return FT_VERSION; }

EXPORT const char *ft_kind(void) { return kernels->name; }

#if defined(__x86_64__)
/* A bit of what the processor says of itself, for what older versions of clang have no name. */
static int processor_bit(unsigned leaf, unsigned part, int place, int bit) {
    unsigned said[4];
    return __get_cpuid_count(leaf, part, said, said + 1, said + 2, said + 3) &&
           (said[place] >> bit & 1);
}
#endif

static const ft_kernels *find(const char *name) {
    if (!strcmp(name, "portable"))
        return &ft_portable;
#if defined(__x86_64__)
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx512_bf16") && avx512 && processor_bit(7, 1, 0, 5))
        return &ft_avx512_bf16;
    if (!strcmp(name, "avx512") && avx512)
        return &ft_avx512;
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        processor_bit(1, 0, 2, 29)) /* f16c */
        return &ft_avx2;
#elif defined(FT_BUILDS_NEON)
#if defined(__APPLE__)
    int dot_products = 1;
#elif defined(__linux__)
    int dot_products = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    int dot_products = 0;
#endif
    if (!strcmp(name, "neon") && dot_products)
        return &ft_neon;
#endif
    return NULL;
}

/* Chooses the kernels of this kind from now on; 0: this processor cannot run them. */
EXPORT int32_t ft_choose(const char *name) {
    const ft_kernels *found = find(name);
    if (found)
        kernels = found;
    return found != NULL;
}

/* --- rows of activations, laid out in one piece of memory */

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Room for rows in these forms. */
static int64_t rows_bytes(int64_t count, int64_t inputs, int32_t forms) {
    const int64_t numbers = count * inputs;
    return (forms & FT_AS_WHOLE
                ? aligned(numbers) + aligned(numbers / GROUP * (int64_t)sizeof(ft_group))
                : 0) +
           (forms & FT_AS_BFLOAT ? aligned(2 * numbers) : 0) +
           (forms & FT_AS_FLOAT ? aligned(4 * numbers) : 0);
}

static ft_rows rows_at(char *memory, int64_t count, int32_t inputs, int32_t forms) {
    const int64_t numbers = count * inputs;
    ft_rows rows = {.inputs = inputs};
    if (forms & FT_AS_WHOLE) {
        rows.numbers = (int8_t *)memory;
        memory += aligned(numbers);
        rows.groups = (ft_group *)memory;
        memory += aligned(numbers / GROUP * (int64_t)sizeof(ft_group));
    }
    if (forms & FT_AS_BFLOAT) {
        rows.narrow = (uint16_t *)memory;
        memory += aligned(2 * numbers);
    }
    if (forms & FT_AS_FLOAT)
        rows.wide = (float *)memory;
    return rows;
}

/* The same memory, for rows of no more inputs: layers may have gates of several widths. */
static ft_rows rows_of_width(const ft_rows *rows, int32_t inputs) {
    ft_rows narrower = *rows;
    narrower.inputs = inputs;
    return narrower;
}

static void *memory_of(int64_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, (size_t)aligned(bytes)) ? NULL : memory;
}

/* --- a product by itself */

typedef struct {
    const ft_matrix *matrix;
    const float *x;
    int32_t rows;
    float *y;
    ft_rows prepared;
} product_job;

static int32_t strips(const ft_matrix *matrix) { return (matrix->blocks + STRIP - 1) / STRIP; }

/* Blocks of strip `index`; returns how many. */
static int32_t strip_blocks(const ft_matrix *matrix, int32_t index, int32_t *blocks) {
    int32_t count = matrix->blocks - index * STRIP;
    count = count < STRIP ? count : STRIP;
    for (int32_t i = 0; i < count; i++)
        blocks[i] = index * STRIP + i;
    return count;
}

/* Rows of a tile where there are `count`: products of whole numbers over many rows want few, for
   their sums and those of the groups to stay in registers. */
static int32_t tile_rows(const ft_matrix *matrix, int32_t count) {
    return matrix->format == FT_WHOLE && count > 2 * TILE ? TILE / 2 : TILE;
}

/* Strip `index` of y (+)= rows W^T, of `count` rows from `first` on. */
static void multiply_strip(const ft_matrix *matrix, int32_t index, const ft_rows *rows,
                           int32_t first, int32_t count, float *y, int64_t stride, int add) {
    float tile[TILE * STRIP * BLOCK];
    int32_t blocks[STRIP], width = strip_blocks(matrix, index, blocks), part = width;
    const int32_t tall = tile_rows(matrix, count);
    const int64_t block_bytes = ft_weight_bytes(matrix);
    /* What several tiles of rows read stays in the nearest cache. */
    while (count > TILE && part > 1 && part * block_bytes > NEAREST_BYTES)
        part /= 2;
    for (int32_t done = 0; done < width; done += part) {
        int32_t here = width - done < part ? width - done : part;
        for (int32_t row = 0; row < count; row += tall) {
            int32_t height = count - row < tall ? count - row : tall;
            kernels->product(matrix, blocks + done, here, rows, first + row, height, tile);
            int32_t begin = blocks[done] * BLOCK, wide = here * BLOCK;
            int32_t left = matrix->outputs - begin;
            kernels->deliver(tile, left < wide ? left : wide, wide, height,
                             matrix->bias ? matrix->bias + begin : NULL,
                             y + row * stride + begin, stride, add);
        }
    }
}

/* The team's part of y (+)= rows W^T. */
static void multiply(ft_team *team, int thread, const ft_matrix *matrix, const ft_rows *rows,
                     int32_t count, float *y, int64_t stride, int add) {
    const int32_t total = strips(matrix);
    for (int32_t strip; (strip = ft_next(team, thread, total)) < total;)
        multiply_strip(matrix, strip, rows, 0, count, y, stride, add);
}

/* The same of several matrices with the same inputs, whose outputs lie beside each other. */
static void multiply_parts(ft_team *team, int thread, const ft_matrix *const *parts,
                           int32_t part_count, const ft_rows *rows, int32_t count, float *y,
                           int64_t stride) {
    int32_t total = 0;
    for (int32_t i = 0; i < part_count; i++)
        total += strips(parts[i]);
    for (int32_t strip; (strip = ft_next(team, thread, total)) < total;) {
        int32_t which = 0, before = 0, place = strip;
        for (; place >= strips(parts[which]); which++) {
            place -= strips(parts[which]);
            before += parts[which]->outputs;
        }
        multiply_strip(parts[which], place, rows, 0, count, y + before, stride, 0);
    }
}

static void product_work(ft_team *team, int thread, void *argument) {
    product_job *job = argument;
    int32_t inputs = job->matrix->inputs;
    for (int32_t row; (row = ft_next(team, thread, job->rows)) < job->rows;)
        kernels->prepare(&job->prepared, row, 0, inputs, job->x + (int64_t)row * inputs,
                         ft_forms(job->matrix));
    ft_barrier(team);
    multiply(team, thread, job->matrix, &job->prepared, job->rows, job->y, job->matrix->outputs, 0);
}

EXPORT int32_t ft_product(const ft_matrix *matrix, const float *x, int32_t rows, float *y,
                          int32_t threads) {
    if (rows < 0 || ft_check_matrix(matrix, 0, 0) != FT_DONE)
        return FT_MISFIT;
    const int32_t forms = ft_forms(matrix);
    char *memory = memory_of(rows_bytes(rows, matrix->inputs, forms));
    if (!memory)
        return FT_NO_MEMORY;
    product_job job = {matrix, x, rows, y, rows_at(memory, rows, matrix->inputs, forms)};
    ft_run(product_work, &job, threads);
    free(memory);
    return FT_DONE;
}

/* --- weights */

#define GROUPS_A_TASK 1024

typedef struct {
    const float *weights;
    int64_t groups;
    uint8_t *peaks;          /* for 8 bits; or NULL, and */
    uint8_t *numbers;        /* for 4 bits */
    float *scales, *minima;
} rounding_job;

static void rounding_work(ft_team *team, int thread, void *argument) {
    rounding_job *job = argument;
    int32_t tasks = (int32_t)((job->groups + GROUPS_A_TASK - 1) / GROUPS_A_TASK);
    for (int32_t task; (task = ft_next(team, thread, tasks)) < tasks;) {
        int64_t first = (int64_t)task * GROUPS_A_TASK, left = job->groups - first;
        int64_t count = left < GROUPS_A_TASK ? left : GROUPS_A_TASK;
        const float *weights = job->weights + first * GROUP;
        if (job->peaks)
            kernels->choose_peaks(weights, count, job->peaks + first);
        else
            kernels->choose_ranges(weights, count, job->numbers + first * GROUP,
                                   job->scales + first, job->minima + first);
    }
}

EXPORT void ft_peaks(const float *weights, int64_t groups, uint8_t *peaks, int32_t threads) {
    rounding_job job = {weights, groups, peaks, NULL, NULL, NULL};
    ft_run(rounding_work, &job, threads);
}

EXPORT void ft_ranges(const float *weights, int64_t groups, uint8_t *numbers, float *scales,
                      float *minima, int32_t threads) {
    rounding_job job = {weights, groups, NULL, numbers, scales, minima};
    ft_run(rounding_work, &job, threads);
}

/* --- a whole step

   What the products that end a layer's halves give is not added to the residual stream at once: it
   waits in `branch` until somebody reads the stream, who norms it and adds it first. Of few nodes
   every thread has a residual stream of its own, so that no barrier is spent on it. */

/* A token's place among those of an expert. */
typedef struct {
    int32_t node, rank; /* the expert is the token's `rank`-th */
} slot;

typedef struct {
    float *scores;      /* (nodes, count + 1) of the router, and of the layer's own MLP */
    int32_t *chosen;    /* (nodes, chosen) experts */
    float *weights;     /* (nodes, chosen) */
    int32_t *first;     /* (count + 1,): where the slots of each expert begin */
    int32_t *active;    /* (count,): experts with slots */
    int32_t active_count;
    slot *slots;        /* (nodes * chosen,) */
    int32_t *places;    /* (nodes, chosen): the slot of each */
    ft_rows gathered;   /* rows of the slots of experts with several */
    ft_rows inner;      /* (slots, inner): what the gates gave */
    float *given;       /* (slots, hidden) */
} mixture;

typedef struct {
    const ft_model *model;
    const ft_step *step;
    int32_t forms;            /* of activations that are read */
    float *hidden;            /* (nodes, hidden): the residual stream; of few nodes each thread's */
    float *branch;            /* (nodes, hidden): what is to be added to it */
    float *qkv;               /* (nodes, (heads + 2 * kv_heads) * width) */
    ft_rows normed, normed_beside, attended; /* inputs of products, in the same memory: one is
                                                read, then the other is written */
    ft_rows beside;           /* what the second half of a parallel layer reads */
    ft_rows inner;            /* what the gates gave */
    mixture mix;              /* of the layer that runs */
    char *private_memory;     /* of each thread */
    int64_t private_bytes, attention_floats;
    int32_t *first_node;      /* of each job in the forward */
    int32_t *order, *packs;   /* jobs, those of a pack side by side; where each pack begins */
    uint8_t *packed;          /* jobs that are in a pack already */
    int32_t pack_count;       /* jobs of a pack have the same segments, and few nodes in all */
    int32_t node_block;       /* nodes of one task of attention */
    int32_t attention_tasks;  /* of jobs with more nodes than that */
    ft_attention *calls;      /* of each pack and key head, where threads share each; or NULL */
    float *call_memory;
    int32_t longest;          /* rows that a node sees */
    const ft_between *between; /* of the part that runs; NULL: the whole step */
} step_job;

/* What one thread has for itself. */
typedef struct {
    float *hidden;            /* (FEW, hidden): the residual stream of few nodes */
    float *state, *normed;    /* (hidden,) */
    float *keys;              /* of two tiles */
    ft_rows few, few_beside;  /* rows of its own, where there are few; in the same memory */
    ft_rows few_second;       /* those of the second half of a parallel layer */
    float *attention;
    const ft_norm *waiting;   /* the norm of what waits in `branch`; NULL: nothing waits */
    float factor;             /* of that */
} private;

static int32_t forms_of_mlp(const ft_matrix *gate, const ft_matrix *up, const ft_matrix *down) {
    int32_t forms = gate && gate->outputs ? ft_forms(gate) : 0;
    forms |= up->outputs ? ft_forms(up) : 0;
    return forms | (down->outputs ? ft_forms(down) : 0);
}

/* The forms of activations that a model's matrices read. */
static int32_t forms_of(const ft_model *model) {
    int32_t forms = ft_forms(&model->head);
    for (int32_t l = 0; l < model->layers; l++) {
        const ft_layer *layer = model->layer + l;
        const ft_experts *experts = layer->experts;
        forms |= ft_forms(&layer->query) | ft_forms(&layer->key) | ft_forms(&layer->value);
        forms |= ft_forms(&layer->out) | forms_of_mlp(&layer->gate, &layer->up, &layer->down);
        if (!experts)
            continue;
        forms |= ft_forms(&experts->router);
        forms |= experts->share.outputs ? ft_forms(&experts->share) : 0;
        for (int32_t i = 0; i < experts->count; i++)
            forms |= forms_of_mlp(experts->gate ? experts->gate + i : NULL, experts->up + i,
                                  experts->down + i);
    }
    return forms;
}

static int is_few(const step_job *job) { return job->step->nodes <= FEW; }

static private private_of(const step_job *job, int thread) {
    char *memory = job->private_memory + thread * job->private_bytes;
    const ft_model *model = job->model;
    const int64_t state = aligned(4 * (int64_t)model->hidden);
    private own = {.waiting = NULL, .hidden = (float *)memory};
    memory += FEW * state;
    own.state = (float *)memory;
    own.normed = (float *)(memory + state);
    memory += 2 * state;
    own.keys = (float *)memory;
    memory += aligned(4 * 32 * (int64_t)model->width);
    own.few = rows_at(memory, 2 * FEW, model->hidden, job->forms);
    own.few_beside = rows_at(memory, 2 * FEW, 2 * model->hidden, job->forms);
    memory += rows_bytes(2 * FEW, 2 * model->hidden, job->forms);
    own.few_second = rows_at(memory, FEW, model->hidden, job->forms);
    memory += rows_bytes(FEW, model->hidden, job->forms);
    own.attention = (float *)memory;
    if (is_few(job))
        for (int32_t row = 0; row < job->step->nodes; row++)
            memcpy(own.hidden + (int64_t)row * (state / 4),
                   job->hidden + (int64_t)row * model->hidden, 4 * (size_t)model->hidden);
    return own;
}

/* A node's residual stream, without what waits. */
static float *stream_of(const step_job *job, const private *own, int32_t row) {
    if (!is_few(job))
        return job->hidden + (int64_t)row * job->model->hidden;
    return own->hidden + (int64_t)row * (aligned(4 * (int64_t)job->model->hidden) / 4);
}

/* x (count,) normed; as it is where there is no weight. */
static const float *normed(const float *x, const ft_norm *norm, int32_t count, float *out) {
    if (!norm->weight)
        return x;
    kernels->norm(x, norm, count, out);
    return out;
}

/* Adds what waits to a node's state. */
static void add_waiting(const step_job *job, private *own, int32_t row, float *state) {
    const int32_t hidden = job->model->hidden;
    if (!own->waiting)
        return;
    const float *more = job->branch + (int64_t)row * hidden;
    kernels->add(state, normed(more, own->waiting, hidden, own->normed), own->factor, hidden);
}

/* Adds what waits to the residual stream of all nodes, shared or each thread's. */
static void settle(ft_team *team, int thread, step_job *job, private *own) {
    const int32_t nodes = job->step->nodes, few = is_few(job);
    for (int32_t next = 0, row; (row = few ? next++ : ft_next(team, thread, nodes)) < nodes;)
        add_waiting(job, own, row, stream_of(job, own, row));
    if (!few)
        ft_barrier(team);
    own->waiting = NULL;
}

/* What a layer's half reads of a node: its state normed, behind its token normed where attention
   reads that as well. */
static void prepare_node(const step_job *job, private *own, const ft_rows *rows, int32_t row,
                         const float *state, const ft_norm *norm, const ft_norm *token_norm,
                         int32_t forms) {
    const int32_t hidden = job->model->hidden;
    int32_t place = 0;
    if (token_norm->weight) {
        const float *token = job->step->tokens + (int64_t)row * hidden;
        token = normed(token, token_norm, hidden, own->normed);
        kernels->prepare(rows, row, 0, hidden, token, forms);
        place = hidden;
    }
    state = normed(state, norm, hidden, own->normed);
    kernels->prepare(rows, row, place, hidden, state, forms);
}

static int32_t forms_of_attention(const ft_layer *layer) {
    return ft_forms(&layer->query) | ft_forms(&layer->key) | ft_forms(&layer->value);
}

static int32_t forms_of_second(const ft_layer *layer) {
    const ft_experts *experts = layer->experts;
    int32_t forms = layer->up.outputs ? ft_forms(&layer->up) : 0;
    forms |= layer->gate.outputs ? ft_forms(&layer->gate) : 0;
    if (!experts)
        return forms;
    forms |= experts->share.outputs ? ft_forms(&experts->share) : 0;
    forms |= experts->gate ? ft_forms(experts->gate) : 0;
    return forms | ft_forms(&experts->router) | ft_forms(experts->up);
}

/* The rows that attention reads, and in a parallel layer those of the second half as well. */
static const ft_rows *enter_first(ft_team *team, int thread, step_job *job, private *own,
                                  const ft_layer *layer) {
    const int32_t nodes = job->step->nodes, few = is_few(job);
    const ft_rows *rows = few ? &own->few : &job->normed;
    if (layer->token_norm.weight)
        rows = few ? &own->few_beside : &job->normed_beside;
    const ft_rows *second = few ? &own->few_second : &job->beside;
    const ft_norm none = {.weight = NULL};
    for (int32_t next = 0, row; (row = few ? next++ : ft_next(team, thread, nodes)) < nodes;) {
        float *state = stream_of(job, own, row);
        add_waiting(job, own, row, state);
        prepare_node(job, own, rows, row, state, &layer->before_attention, &layer->token_norm,
                     forms_of_attention(layer));
        if (layer->parallel)
            prepare_node(job, own, second, row, state, &layer->before_mlp, &none,
                         forms_of_second(layer));
    }
    if (!few)
        ft_barrier(team);
    own->waiting = NULL;
    return rows;
}

/* The rows that the second half of a layer reads. */
static const ft_rows *enter_second(ft_team *team, int thread, step_job *job, private *own,
                                   const ft_layer *layer) {
    const int32_t nodes = job->step->nodes, few = is_few(job);
    const ft_norm none = {.weight = NULL};
    if (layer->parallel)
        return few ? &own->few_second : &job->beside;
    const ft_rows *rows = few ? &own->few : &job->normed;
    for (int32_t next = 0, row; (row = few ? next++ : ft_next(team, thread, nodes)) < nodes;) {
        float *state = stream_of(job, own, row);
        add_waiting(job, own, row, state);
        prepare_node(job, own, rows, row, state, &layer->before_mlp, &none,
                     forms_of_second(layer));
    }
    if (!few)
        ft_barrier(team);
    own->waiting = NULL;
    return rows;
}

/* Norms and turns a key head's queries and its key, and stores key and value. */
static void store_node(const step_job *job, const ft_layer *layer, int64_t layer_offset,
                       const ft_job *part, int32_t node, int32_t kv_head, float *row) {
    const ft_model *model = job->model;
    const int32_t width = model->width, group = model->heads / model->kv_heads;
    float *queries = row + (int64_t)kv_head * group * width;
    float *key = row + (int64_t)(model->heads + kv_head) * width;
    float *value = key + (int64_t)model->kv_heads * width;
    if (layer->query_norm.weight && !layer->whole_heads) {
        for (int32_t h = 0; h < group; h++)
            kernels->norm(queries + h * width, &layer->query_norm, width, queries + h * width);
        kernels->norm(key, &layer->key_norm, width, key);
    }
    if (layer->rotation >= 0) {
        const ft_rotation *rotation = job->step->rotations + layer->rotation;
        const int32_t position = part->positions[node];
        for (int32_t h = 0; h < group; h++)
            kernels->rotate(queries + h * width, rotation, position);
        kernels->rotate(key, rotation, position);
    }
    int64_t to = layer_offset + kv_head * part->head_stride +
                 (int64_t)(part->start + node) * width;
    kernels->store(key, width, part->keys + to);
    kernels->store(value, width, part->values + to);
}

static int64_t qkv_numbers(const ft_model *model) {
    return (int64_t)(model->heads + 2 * model->kv_heads) * model->width;
}

/* Sets a call up whose parts are given; its keys are stored, or will be before it is scored. */
static void set_up(const step_job *job, const ft_layer *layer, int32_t index, int32_t kv_head,
                   ft_attention *call, float *memory) {
    const ft_model *model = job->model;
    const int32_t width = model->width, group = model->heads / model->kv_heads;
    const int64_t numbers = qkv_numbers(model);
    const float *sinks = layer->sinks ? layer->sinks + kv_head * group : NULL;
    call->heads = (ft_heads){width, group, layer->scale, layer->score_cap, layer->window, index,
                             kv_head, sinks};
    for (int32_t p = 0; p < call->part_count; p++)
        call->parts[p].queries = job->qkv + call->parts[p].row * numbers +
                                 (int64_t)kv_head * group * width;
    kernels->set_up(call, numbers, memory);
}

/* Numbers `first` to `last - 1` of every head's result, as inputs of the next product. */
static void finish(const step_job *job, const ft_layer *layer, ft_attention *call, int32_t first,
                   int32_t last) {
    const int32_t width = call->heads.width, group = call->heads.group;
    const int32_t forms = ft_forms(&layer->out);
    const float *mixed = call->mixed + first;
    kernels->mix(call, first, last);
    for (int32_t p = 0; p < call->part_count; p++)
        for (int32_t n = 0; n < call->parts[p].nodes; n++)
            for (int32_t h = 0; h < group; h++, mixed += width) {
                int32_t place = (call->heads.kv_head * group + h) * width + first;
                kernels->prepare(&job->attended, call->parts[p].row + n, place, last - first,
                                 mixed, forms);
            }
}

/* A call by one thread. */
static void attend(const step_job *job, private *own, const ft_layer *layer, int32_t index,
                   int32_t kv_head, ft_attention *call) {
    set_up(job, layer, index, kv_head, call, own->attention);
    kernels->score(call, 0, call->end, own->keys);
    kernels->soften(call);
    finish(job, layer, call, 0, call->heads.width);
}

/* Calls that all threads share: rows of the scores, then numbers of the results, so that each has
   as much to do and no sum is taken in another order (the equal shares of LeanAttention). */
static void attend_together(ft_team *team, int thread, step_job *job, private *own,
                            const ft_layer *layer) {
    const int32_t calls = job->pack_count * job->model->kv_heads, width = job->model->width;
    const int32_t pieces = (job->longest + PIECE - 1) / PIECE, slices = width / GROUP;
    for (int32_t task; (task = ft_next(team, thread, calls * pieces)) < calls * pieces;) {
        ft_attention *call = job->calls + task / pieces;
        int32_t from = task % pieces * PIECE, left = call->end - from;
        if (left > 0)
            kernels->score(call, from, from + (left < PIECE ? left : PIECE), own->keys);
    }
    ft_barrier(team);
    for (int32_t task; (task = ft_next(team, thread, calls)) < calls;)
        kernels->soften(job->calls + task);
    ft_barrier(team);
    for (int32_t task; (task = ft_next(team, thread, calls * slices)) < calls * slices;) {
        int32_t first = task % slices * GROUP;
        finish(job, layer, job->calls + task / slices, first, first + GROUP);
    }
    ft_barrier(team);
}

static ft_part part_of(const step_job *job, int32_t which, int32_t first, int32_t nodes) {
    return (ft_part){.job = job->step->jobs + which, .first = first, .nodes = nodes,
                     .row = job->first_node[which] + first};
}

static void attention(ft_team *team, int thread, step_job *job, private *own,
                      const ft_layer *layer, int32_t index) {
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const int32_t kv_heads = model->kv_heads, block = job->node_block;
    const int32_t heads = job->pack_count * kv_heads;
    ft_attention alone;
    for (int32_t task; (task = ft_next(team, thread, heads)) < heads;) {
        int32_t pack = task / kv_heads, kv_head = task % kv_heads, few = 1;
        ft_attention *call = job->calls ? job->calls + task : &alone;
        call->part_count = 0;
        for (int32_t i = job->packs[pack]; i < job->packs[pack + 1]; i++) {
            int32_t which = job->order[i], nodes = step->jobs[which].nodes;
            int64_t row = job->first_node[which];
            for (int32_t node = 0; node < nodes; node++)
                store_node(job, layer, index * step->jobs[which].layer_stride, step->jobs + which,
                           node, kv_head, job->qkv + (row + node) * qkv_numbers(model));
            few = nodes <= block;
            if (few)
                call->parts[call->part_count++] = part_of(job, which, 0, nodes);
        }
        if (job->calls)
            set_up(job, layer, index, kv_head, call,
                   job->call_memory + task * job->attention_floats);
        else if (few)
            attend(job, own, layer, index, kv_head, call);
    }
    ft_barrier(team);
    if (job->calls) {
        attend_together(team, thread, job, own, layer);
        return;
    }
    const int32_t total = job->attention_tasks;
    if (!total)
        return;
    /* Longer parts wait until all of their keys are stored. */
    for (int32_t task; (task = ft_next(team, thread, total)) < total;) {
        int32_t before = 0, which = 0;
        for (;; which++) {
            int32_t nodes = step->jobs[which].nodes;
            int32_t tasks = nodes <= block ? 0 : (nodes + block - 1) / block * kv_heads;
            if (task < before + tasks)
                break;
            before += tasks;
        }
        int32_t first = (task - before) / kv_heads * block;
        int32_t left = step->jobs[which].nodes - first;
        alone.part_count = 1;
        alone.parts[0] = part_of(job, which, first, left < block ? left : block);
        attend(job, own, layer, index, (task - before) % kv_heads, &alone);
    }
    ft_barrier(team);
}

/* Gates and what they let through, of `count` rows from `first` on: blocks 2 `pair` and the next of
   their outputs, as inputs of the last product in `forms`, rows of `out` from `to` on. */
static void gate_pair(const ft_matrix *gate, const ft_matrix *up, int32_t pair, const ft_rows *rows,
                      int32_t first, int32_t count, int32_t activation, const ft_rows *out,
                      int32_t to, int32_t forms) {
    const ft_matrix *both[] = {gate, up};
    const int32_t blocks[2] = {2 * pair, 2 * pair + 1}, tall = tile_rows(up, count);
    float tiles[2][TILE * GROUP], through[GROUP];
    for (int32_t row = 0; row < count; row += tall) {
        const int32_t height = count - row < tall ? count - row : tall;
        for (int32_t i = !gate; i < 2; i++) {
            const float *bias = both[i]->bias;
            kernels->product(both[i], blocks, 2, rows, first + row, height, tiles[i]);
            for (int32_t m = 0; bias && m < height; m++)
                kernels->add(tiles[i] + m * GROUP, bias + pair * GROUP, 1.0f, GROUP);
        }
        for (int32_t m = 0; m < height; m++) {
            const float *gates = tiles[!gate] + m * GROUP;
            const float *values = gate ? tiles[1] + m * GROUP : NULL;
            kernels->gate(gates, values, GROUP, activation, through);
            kernels->prepare(out, to + row + m, pair * GROUP, GROUP, through, forms);
        }
    }
}

#include "experts.h"

static void gates(ft_team *team, int thread, step_job *job, const ft_layer *layer,
                  const ft_rows *rows) {
    const ft_matrix *gate = layer->gate.outputs ? &layer->gate : NULL;
    const ft_rows inner = rows_of_width(&job->inner, layer->down.inputs);
    const int32_t pairs = layer->down.inputs / GROUP, forms = ft_forms(&layer->down);
    for (int32_t pair; (pair = ft_next(team, thread, pairs)) < pairs;)
        gate_pair(gate, &layer->up, pair, rows, 0, job->step->nodes, layer->activation, &inner, 0,
                  forms);
    ft_barrier(team);
}

static void tap(ft_team *team, int thread, step_job *job, private *own, int32_t layer) {
    const ft_step *step = job->step;
    const int64_t hidden = job->model->hidden;
    int wanted = 0;
    for (int32_t i = 0; i < step->tap_count; i++)
        wanted |= step->taps[i] == layer;
    if (!wanted)
        return;
    settle(team, thread, job, own);
    for (int32_t i; (i = ft_next(team, thread, step->tap_count)) < step->tap_count;)
        for (int32_t row = 0; step->taps[i] == layer && row < step->nodes; row++)
            memcpy(step->tapped + ((int64_t)i * step->nodes + row) * hidden,
                   stream_of(job, own, row), 4 * (size_t)hidden);
    ft_barrier(team);
}

/* The rows of logits. Activations are the last ones to be rounded, and nothing evens it out: of
   whole numbers each row goes in as two, to 16 bits. */
static void head(ft_team *team, int thread, step_job *job, private *own) {
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const ft_matrix *matrix = &model->head;
    const int32_t forms = ft_forms(matrix), twice = matrix->format == FT_WHOLE;
    const int32_t few = step->row_count <= FEW;
    const ft_rows *rows = few ? &own->few : &job->normed;
    const int32_t wanted = step->row_count;
    for (int32_t next = 0, i; (i = few ? next++ : ft_next(team, thread, wanted)) < wanted;) {
        memcpy(own->state, stream_of(job, own, step->rows[i]), 4 * (size_t)model->hidden);
        add_waiting(job, own, step->rows[i], own->state);
        const float *state = normed(own->state, &model->norm, model->hidden, own->normed);
        if (twice)
            kernels->prepare_twice(rows, i, model->hidden, state);
        else
            kernels->prepare(rows, i, 0, model->hidden, state, forms);
    }
    if (!few)
        ft_barrier(team);
    const int32_t tall = twice ? TILE / 2 : TILE, total = strips(matrix);
    const int limits = model->logit_scale != 1.0f || model->logit_cap;
    float tile[TILE * STRIP * BLOCK];
    int32_t blocks[STRIP];
    for (int32_t strip; (strip = ft_next(team, thread, total)) < total;) {
        int32_t width = strip_blocks(matrix, strip, blocks), wide = width * BLOCK;
        int32_t begin = blocks[0] * BLOCK, left = matrix->outputs - begin;
        for (int32_t row = 0; row < step->row_count; row += tall) {
            int32_t height = step->row_count - row < tall ? step->row_count - row : tall;
            kernels->product(matrix, blocks, width, rows, row << twice, height << twice, tile);
            const float *bias = matrix->bias ? matrix->bias + begin : NULL;
            for (int32_t m = 0; m < height; m++) {
                float *to = step->logits + (int64_t)(row + m) * matrix->outputs + begin;
                int32_t count = left < wide ? left : wide;
                kernels->deliver(tile + (m << twice) * wide, count, wide, 1, bias, to, 0, 0);
                if (twice)
                    kernels->deliver(tile + (2 * m + 1) * wide, count, wide, 1, NULL, to, 0, 1);
                if (limits)
                    kernels->limit(to, model->logit_scale, model->logit_cap, count);
            }
        }
    }
    ft_barrier(team);
}

/* Norms of layers that norm all query heads at once, and all key heads. */
static void norm_whole_heads(ft_team *team, int thread, step_job *job, const ft_layer *layer) {
    const ft_model *model = job->model;
    const int32_t nodes = job->step->nodes, queries = model->heads * model->width;
    for (int32_t row; (row = ft_next(team, thread, nodes)) < nodes;) {
        float *numbers = job->qkv + row * qkv_numbers(model), *keys = numbers + queries;
        kernels->norm(numbers, &layer->query_norm, queries, numbers);
        kernels->norm(keys, &layer->key_norm, model->kv_heads * model->width, keys);
    }
    ft_barrier(team);
}

/* A layer up to its attention. */
static void enter_layer(ft_team *team, int thread, step_job *job, private *own, int32_t index) {
    const ft_model *model = job->model;
    const ft_layer *layer = model->layer + index;
    const ft_rows *rows = enter_first(team, thread, job, own, layer);
    const ft_matrix *parts[] = {&layer->query, &layer->key, &layer->value};
    multiply_parts(team, thread, parts, 3, rows, job->step->nodes, job->qkv, qkv_numbers(model));
    ft_barrier(team);
    if (layer->whole_heads)
        norm_whole_heads(team, thread, job, layer);
}

/* What a layer makes of what its attention gave. */
static void leave_layer(ft_team *team, int thread, step_job *job, private *own, int32_t index) {
    const ft_model *model = job->model;
    const ft_layer *layer = model->layer + index;
    const int32_t nodes = job->step->nodes, hidden = model->hidden;
    multiply(team, thread, &layer->out, &job->attended, nodes, job->branch, hidden, 0);
    ft_barrier(team);
    own->factor = layer->residual;
    if (!layer->parallel)
        own->waiting = &layer->after_attention;
    const ft_rows *rows = enter_second(team, thread, job, own, layer);
    if (layer->experts)
        route(team, thread, job, layer->experts, rows);
    if (layer->up.outputs) {
        const ft_rows inner = rows_of_width(&job->inner, layer->down.inputs);
        gates(team, thread, job, layer, rows);
        multiply(team, thread, &layer->down, &inner, nodes, job->branch, hidden, layer->parallel);
        ft_barrier(team);
    }
    if (layer->experts)
        mix_experts(team, thread, job, layer, rows);
    own->waiting = &layer->after_mlp;
}

static void step_work(ft_team *team, int thread, void *argument) {
    step_job *job = argument;
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    private own = private_of(job, thread);
    int32_t last = -1;
    for (int32_t i = 0; i < step->layer_count; i++) {
        int32_t index = step->layers[i];
        if (step->tap_count)
            for (int32_t skipped = last + 1; skipped <= index; skipped++)
                tap(team, thread, job, &own, skipped);
        last = index;
        enter_layer(team, thread, job, &own, index);
        attention(team, thread, job, &own, model->layer + index, index);
        leave_layer(team, thread, job, &own, index);
    }
    if (step->tap_count)
        for (int32_t after = last + 1; after <= model->layers; after++)
            tap(team, thread, job, &own, after);
    if (step->row_count)
        head(team, thread, job, &own);
}

/* A part of a step, see ft_between. */
static void between_work(ft_team *team, int thread, void *argument) {
    step_job *job = argument;
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const ft_between *between = job->between;
    private own = private_of(job, thread);
    ft_barrier(team); /* all have read what one of them will write */
    const int32_t numbers = model->heads * model->width;
    if (between->after >= 0) {
        const int32_t forms = ft_forms(&model->layer[between->after].out);
        for (int32_t node; (node = ft_next(team, thread, step->nodes)) < step->nodes;)
            kernels->prepare(&job->attended, node, 0, numbers,
                             between->attended + (int64_t)node * numbers, forms);
        ft_barrier(team);
        leave_layer(team, thread, job, &own, between->after);
        settle(team, thread, job, &own);
        for (int32_t row = 0; is_few(job) && !thread && row < step->nodes; row++)
            memcpy(job->hidden + (int64_t)row * model->hidden, stream_of(job, &own, row),
                   4 * (size_t)model->hidden);
    }
    if (between->before < 0) {
        if (step->row_count)
            head(team, thread, job, &own);
        return;
    }
    const ft_layer *layer = model->layer + between->before;
    enter_layer(team, thread, job, &own, between->before);
    const int32_t tasks = step->nodes * model->kv_heads;
    for (int32_t task; (task = ft_next(team, thread, tasks)) < tasks;) {
        int32_t row = task / model->kv_heads, which = 0;
        while (which + 1 < step->job_count && job->first_node[which + 1] <= row)
            which++;
        const ft_job *part = step->jobs + which;
        store_node(job, layer, between->before * part->layer_stride, part,
                   row - job->first_node[which], task % model->kv_heads,
                   job->qkv + row * qkv_numbers(model));
    }
}

/* Whether two jobs follow the same shared rows. */
static int share_segments(const ft_job *one, const ft_job *other) {
    if (!one->segments || one->segments != other->segments)
        return 0;
    for (int32_t s = 0; s < one->segments; s++)
        if (one->segment[s].keys != other->segment[s].keys ||
            one->segment[s].rows != other->segment[s].rows)
            return 0;
    return 1;
}

/* Puts jobs with the same segments beside each other, as far as one call of attention goes: what
   they share is read once for all of them (Hydragen, section 3). A job without is a pack alone. */
static void make_packs(step_job *job) {
    const ft_step *step = job->step;
    int32_t placed = 0;
    memset(job->packed, 0, (size_t)step->job_count);
    for (int32_t i = 0; i < step->job_count; i++) {
        if (job->packed[i])
            continue;
        const ft_job *leader = step->jobs + i;
        int32_t nodes = 0;
        job->packs[job->pack_count++] = placed;
        for (int32_t k = i; k < step->job_count; k++) {
            const ft_job *other = step->jobs + k;
            int joins = k == i || (!job->packed[k] && share_segments(leader, other) &&
                                   nodes + other->nodes <= job->node_block);
            if (!joins)
                continue;
            job->packed[k] = 1;
            job->order[placed++] = k;
            nodes += other->nodes;
        }
    }
    job->packs[job->pack_count] = placed;
}

/* Lays out what layers with experts work in, from `memory` on; NULL: nothing is laid out. Returns how
   many bytes that takes. */
static int64_t lay_out_mixture(step_job *job, char *memory) {
    const ft_model *model = job->model;
    const int64_t nodes = job->step->nodes;
    int64_t count = 0, slots = 0, inner = 0, used = 0;
    for (int32_t l = 0; l < model->layers; l++) {
        const ft_experts *experts = model->layer[l].experts;
        if (!experts)
            continue;
        count = experts->count > count ? experts->count : count;
        slots = nodes * experts->chosen > slots ? nodes * experts->chosen : slots;
        inner = experts->down->inputs > inner ? experts->down->inputs : inner;
    }
    if (!count)
        return 0;
    const int64_t sizes[] = {4 * nodes * (count + 1), 4 * slots, 4 * slots, 4 * (count + 1),
                             4 * count, slots * (int64_t)sizeof(slot), 4 * slots,
                             rows_bytes(slots, model->hidden, job->forms),
                             rows_bytes(slots, inner, job->forms),
                             4 * slots * model->hidden};
    char *at[sizeof sizes / sizeof *sizes];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        at[i] = memory ? memory + used : NULL;
        used += aligned(sizes[i]);
    }
    if (memory)
        job->mix = (mixture){
            .scores = (float *)at[0], .chosen = (int32_t *)at[1], .weights = (float *)at[2],
            .first = (int32_t *)at[3], .active = (int32_t *)at[4], .slots = (slot *)at[5],
            .places = (int32_t *)at[6], .gathered = rows_at(at[7], slots, model->hidden, job->forms),
            .inner = rows_at(at[8], slots, (int32_t)inner, job->forms), .given = (float *)at[9]};
    return used;
}

/* Lays out what a step works in: `shared` more bytes, and `attention` of each thread. Returns the
   memory, NULL: there is none, and where the shared bytes are. */
static char *lay_out(step_job *job, int32_t threads, int64_t shared, int64_t attention,
                     char **shared_at) {
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const int64_t nodes = step->nodes > 2 * step->row_count ? step->nodes : 2 * step->row_count;
    const int32_t attended = model->heads * model->width;
    const int32_t forms = job->forms = forms_of(model);
    int32_t read = model->hidden, inner_width = 0, parallel = 0;
    for (int32_t l = 0; l < model->layers; l++) {
        const ft_layer *layer = model->layer + l;
        read = layer->token_norm.weight ? 2 * model->hidden : read;
        if (layer->down.outputs && layer->down.inputs > inner_width)
            inner_width = layer->down.inputs;
        parallel |= layer->parallel;
    }
    const int32_t widest = attended > read ? attended : read;
    job->private_bytes = (FEW + 2) * aligned(4 * (int64_t)model->hidden) +
                         aligned(4 * 32 * (int64_t)model->width) +
                         rows_bytes(2 * FEW, 2 * model->hidden, forms) +
                         rows_bytes(FEW, model->hidden, forms) + aligned(attention);
    const int64_t branch = aligned(4 * nodes * model->hidden);
    const int64_t hidden = job->between ? 0 : branch;
    const int64_t qkv = job->between ? 0 : aligned(4 * nodes * qkv_numbers(model));
    const int64_t rows = rows_bytes(nodes, widest, forms);
    const int64_t inner = rows_bytes(nodes, inner_width, forms);
    const int64_t mixed = lay_out_mixture(job, NULL);
    const int64_t beside = parallel ? rows_bytes(nodes, model->hidden, forms) : 0;
    const int64_t firsts = aligned(4 * (int64_t)step->job_count + 4);
    char *memory = memory_of(hidden + branch + qkv + rows + beside + inner + mixed + 4 * firsts +
                             shared + threads * job->private_bytes);
    if (!memory)
        return NULL;
    char *place = memory;
    job->hidden = job->between ? job->between->hidden : (float *)place;
    job->branch = (float *)(place += hidden);
    job->qkv = job->between ? job->between->qkv : (float *)(place + branch);
    place += branch + qkv;
    job->normed = job->normed_beside = job->attended = rows_at(place, nodes, widest, forms);
    job->normed.inputs = model->hidden;
    job->normed_beside.inputs = 2 * model->hidden;
    job->attended.inputs = attended;
    job->beside = rows_at(place += rows, nodes, model->hidden, forms);
    job->inner = rows_at(place += beside, nodes, inner_width, forms);
    lay_out_mixture(job, place += inner);
    job->first_node = (int32_t *)(place += mixed);
    job->order = (int32_t *)(place += firsts);
    job->packs = (int32_t *)(place += firsts);
    job->packed = (uint8_t *)(place += firsts);
    *shared_at = place += firsts;
    job->private_memory = place + shared;
    for (int32_t i = 0, first = 0; i < step->job_count; first += step->jobs[i++].nodes)
        job->first_node[i] = first;
    return memory;
}

EXPORT int32_t ft_forward(const ft_model *model, const ft_step *step, int32_t threads) {
    const int32_t checked = ft_check_step(model, step, 0);
    if (checked != FT_DONE)
        return checked;
    const int32_t group = model->heads / model->kv_heads;
    step_job job = {.model = model, .step = step};
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    int32_t longest = 0;
    for (int32_t i = 0; i < step->job_count; i++) {
        const ft_job *part = step->jobs + i;
        int32_t rows = part->start + part->nodes;
        for (int32_t s = 0; s < part->segments; s++)
            rows += part->segment[s].rows;
        longest = rows > longest ? rows : longest;
    }
    job.node_block = group > QUERIES ? 1 : QUERIES / group;
    for (int32_t i = 0; i < step->job_count; i++)
        if (step->jobs[i].nodes > job.node_block)
            job.attention_tasks += (step->jobs[i].nodes + job.node_block - 1) / job.node_block *
                                   model->kv_heads;
    const int32_t queries = job.node_block * group, calls = step->job_count * model->kv_heads;
    const int32_t together = longest > LONG && !job.attention_tasks && calls < 4 * threads &&
                             calls % threads;
    job.longest = longest;
    job.attention_floats = kernels->attention_floats(longest, model->width, queries);
    int64_t calls_bytes = aligned(calls * (int64_t)sizeof(ft_attention));
    int64_t shared = together ? calls_bytes + aligned(4 * calls * job.attention_floats) : 0;
    char *place, *memory = lay_out(&job, threads, shared, 4 * job.attention_floats, &place);
    if (!memory)
        return FT_NO_MEMORY;
    if (together) {
        job.calls = (ft_attention *)place;
        job.call_memory = (float *)(place + calls_bytes);
    }
    make_packs(&job);
    memcpy(job.hidden, step->states, 4 * (size_t)step->nodes * (size_t)model->hidden);
    ft_run(step_work, &job, threads);
    free(memory);
    return FT_DONE;
}

EXPORT int32_t ft_go_between(const ft_model *model, const ft_step *step, const ft_between *between,
                             int32_t threads) {
    int32_t checked = ft_check_step(model, step, 1);
    if (checked == FT_DONE)
        checked = ft_check_between(model, between);
    if (checked != FT_DONE)
        return checked;
    step_job job = {.model = model, .step = step, .between = between};
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    char *place, *memory = lay_out(&job, threads, 0, 0, &place);
    if (!memory)
        return FT_NO_MEMORY;
    ft_run(between_work, &job, threads);
    free(memory);
    return FT_DONE;
}

/* The jobs of a step whose nodes are the tokens that follow: one each, behind those before. */
static void go_on(ft_job *jobs, int32_t count, int32_t *positions) {
    for (int32_t j = 0; j < count; j++) {
        positions[j] = jobs[j].positions[jobs[j].nodes - 1] + 1;
        jobs[j].positions = positions + j;
        jobs[j].start += jobs[j].nodes;
        jobs[j].nodes = 1;
    }
}

EXPORT int32_t ft_follow(const ft_model *model, const ft_step *step, const ft_following *following,
                         int32_t threads) {
    const int32_t count = step->job_count, outputs = model->head.outputs, hidden = model->hidden;
    int32_t done = ft_check_following(model, step, following);
    if (done == FT_DONE)
        done = ft_forward(model, step, threads);
    if (done != FT_DONE)
        return done;
    int64_t jobs = aligned(count * (int64_t)sizeof(ft_job));
    int64_t states = aligned(4 * (int64_t)count * hidden), numbers = aligned(4 * (int64_t)count);
    char *memory = memory_of(jobs + states + 2 * numbers + 4 * (int64_t)count * outputs);
    if (!memory)
        return FT_NO_MEMORY;
    ft_step next = *step;
    ft_job *parts = (ft_job *)memory;
    float *entering = (float *)(memory + jobs);
    int32_t *positions = (int32_t *)(memory + jobs + states);
    int32_t *rows = (int32_t *)(memory + jobs + states + numbers);
    float *logits = (float *)(memory + jobs + states + 2 * numbers);
    memcpy(parts, step->jobs, (size_t)count * sizeof(ft_job));
    for (int32_t j = 0; j < count; j++)
        rows[j] = j;
    next.jobs = parts;
    next.nodes = next.row_count = count;
    next.states = entering;
    next.rows = rows;
    const float *found = step->logits;
    for (int32_t i = 0; done == FT_DONE && i < following->count; i++) {
        int64_t *tokens = following->tokens + (int64_t)i * count;
        float *chances = following->chances + (int64_t)i * count;
        for (int32_t j = 0; j < count; j++) {
            int32_t token = kernels->best(found + (int64_t)j * outputs, outputs, chances + j);
            tokens[j] = following->names ? following->names[token] : token;
        }
        if (i + 1 == following->count)
            break;
        done = ft_rows_of(following->embeddings, tokens, count, entering);
        if (done != FT_DONE)
            break;
        for (int64_t k = 0; k < (int64_t)count * hidden; k++)
            entering[k] *= following->scale;
        go_on(parts, count, positions);
        for (int32_t j = 0; model->position_rows && j < count; j++) {
            if (positions[j] >= model->position_count) {
                done = FT_OUTSIDE;
                break;
            }
            kernels->add(entering + (int64_t)j * hidden,
                         model->position_rows + (int64_t)positions[j] * hidden, 1.0f, hidden);
        }
        next.logits = logits;
        found = logits;
        if (done == FT_DONE)
            done = ft_forward(model, &next, threads);
    }
    free(memory);
    return done;
}
