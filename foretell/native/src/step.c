/* One forward of a model over the new nodes of any number of requests, and the single operations
   that Python calls. All sums are those of kernels.h: a node's result is its own. */

#define _GNU_SOURCE
#include "foretell_native.h"
#include "pool.h"

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

/* The team's part of y (+)= rows W^T. */
static void multiply(ft_team *team, int thread, const ft_matrix *matrix, const ft_rows *rows,
                     int32_t count, float *y, int64_t stride, int add) {
    float tile[TILE * STRIP * BLOCK];
    int32_t blocks[STRIP], total = strips(matrix);
    const int64_t block_bytes = ft_weight_bytes(matrix);
    const int32_t tall = tile_rows(matrix, count);
    for (int32_t strip; (strip = ft_next(team, thread, total)) < total;) {
        int32_t width = strip_blocks(matrix, strip, blocks), part = width;
        /* What several tiles of rows read stays in the nearest cache. */
        while (count > TILE && part > 1 && part * block_bytes > NEAREST_BYTES)
            part /= 2;
        for (int32_t done = 0; done < width; done += part) {
            int32_t here = width - done < part ? width - done : part;
            for (int32_t row = 0; row < count; row += tall) {
                int32_t height = count - row < tall ? count - row : tall;
                kernels->product(matrix, blocks + done, here, rows, row, height, tile);
                int32_t begin = blocks[done] * BLOCK, wide = here * BLOCK;
                int32_t left = matrix->outputs - begin;
                kernels->deliver(tile, left < wide ? left : wide, wide, height,
                                 matrix->bias ? matrix->bias + begin : NULL,
                                 y + row * stride + begin, stride, add);
            }
        }
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

/* --- a whole step */

typedef struct {
    const ft_model *model;
    const ft_step *step;
    float *hidden;            /* (nodes, hidden): the residual stream */
    float *qkv;               /* (nodes, outputs of qkv) */
    ft_rows normed, normed_beside, attended; /* inputs of products, in the same memory: one is
                                                read, then the other is written */
    ft_rows inner;            /* what the gates gave */
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

typedef struct {
    float *normed;            /* (hidden,) */
    float *keys;              /* of two tiles */
    ft_rows few, few_beside;  /* rows of its own, where there are few; in the same memory */
    float *attention;
} private;

/* The forms of activations that a model's matrices read. */
static int32_t forms_of(const ft_model *model) { return model->forms | ft_forms(&model->head); }

static private private_of(const step_job *job, int thread) {
    char *memory = job->private_memory + thread * job->private_bytes;
    const ft_model *model = job->model;
    private own;
    own.normed = (float *)memory;
    memory += aligned(4 * (int64_t)model->hidden);
    own.keys = (float *)memory;
    memory += aligned(4 * 32 * (int64_t)model->width);
    const int32_t forms = forms_of(model);
    own.few = rows_at(memory, 2 * FEW, model->hidden, forms);
    own.few_beside = rows_at(memory, 2 * FEW, 2 * model->hidden, forms);
    memory += rows_bytes(2 * FEW, 2 * model->hidden, forms);
    own.attention = (float *)memory;
    return own;
}

/* x (count,) normed; as it is where there is no weight. */
static const float *normed(const float *x, const float *weight, float eps, int32_t count,
                           float *out) {
    if (!weight)
        return x;
    kernels->norm(x, weight, eps, count, out);
    return out;
}

/* Normed rows as a product reads them: each thread's own where they are few, else shared. */
static const ft_rows *normed_rows(ft_team *team, int thread, step_job *job, private *own,
                                  const float *weight, float eps) {
    const ft_model *model = job->model;
    int32_t nodes = job->step->nodes, few = nodes <= FEW;
    const ft_rows *rows = few ? &own->few : &job->normed;
    for (int32_t next = 0, row; (row = few ? next++ : ft_next(team, thread, nodes)) < nodes;) {
        const float *state = job->hidden + (int64_t)row * model->hidden;
        state = normed(state, weight, eps, model->hidden, own->normed);
        kernels->prepare(rows, row, 0, model->hidden, state, model->forms);
    }
    if (!few)
        ft_barrier(team);
    return rows;
}

/* The same of what attention reads; some layers read the tokens in front of the stream. */
static const ft_rows *attention_rows(ft_team *team, int thread, step_job *job, private *own,
                                     const ft_layer *layer) {
    if (!layer->token_norm)
        return normed_rows(team, thread, job, own, layer->before, layer->before_eps);
    const int32_t hidden = job->model->hidden, forms = job->model->forms;
    int32_t nodes = job->step->nodes, few = nodes <= FEW;
    const ft_rows *rows = few ? &own->few_beside : &job->normed_beside;
    for (int32_t next = 0, row; (row = few ? next++ : ft_next(team, thread, nodes)) < nodes;) {
        const float *token = job->step->tokens + (int64_t)row * hidden;
        const float *state = job->hidden + (int64_t)row * hidden;
        token = normed(token, layer->token_norm, layer->token_eps, hidden, own->normed);
        kernels->prepare(rows, row, 0, hidden, token, forms);
        state = normed(state, layer->before, layer->before_eps, hidden, own->normed);
        kernels->prepare(rows, row, hidden, hidden, state, forms);
    }
    if (!few)
        ft_barrier(team);
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
    if (layer->query_norm) {
        for (int32_t h = 0; h < group; h++)
            kernels->norm(queries + h * width, layer->query_norm, layer->head_eps, width,
                          queries + h * width);
        kernels->norm(key, layer->key_norm, layer->head_eps, width, key);
    }
    int64_t place = (int64_t)part->positions[node] * (width / 2);
    const float *cosines = job->step->cosines + place, *sines = job->step->sines + place;
    for (int32_t h = 0; h < group; h++)
        kernels->rotate(queries + h * width, cosines, sines, width);
    kernels->rotate(key, cosines, sines, width);
    int64_t to = layer_offset + kv_head * part->head_stride +
                 (int64_t)(part->start + node) * width;
    kernels->store(key, width, part->keys + to);
    kernels->store(value, width, part->values + to);
}

/* Sets a call up whose parts are given; its keys are stored, or will be before it is scored. */
static void set_up(const step_job *job, const ft_layer *layer, int32_t index, int32_t kv_head,
                   ft_attention *call, float *memory) {
    const ft_model *model = job->model;
    const int32_t width = model->width, group = model->heads / model->kv_heads;
    const int32_t outputs = layer->qkv.outputs;
    call->heads = (ft_heads){width, group, model->scale, layer->window, index, kv_head};
    for (int32_t p = 0; p < call->part_count; p++)
        call->parts[p].queries = job->qkv + (int64_t)call->parts[p].row * outputs +
                                 (int64_t)kv_head * group * width;
    kernels->set_up(call, outputs, memory);
}

/* Numbers `first` to `last - 1` of every head's result, as inputs of the next product. */
static void finish(const step_job *job, ft_attention *call, int32_t first, int32_t last) {
    const int32_t width = call->heads.width, group = call->heads.group;
    const float *mixed = call->mixed + first;
    kernels->mix(call, first, last);
    for (int32_t p = 0; p < call->part_count; p++)
        for (int32_t n = 0; n < call->parts[p].nodes; n++)
            for (int32_t h = 0; h < group; h++, mixed += width) {
                int32_t place = (call->heads.kv_head * group + h) * width + first;
                kernels->prepare(&job->attended, call->parts[p].row + n, place, last - first,
                                 mixed, job->model->forms);
            }
}

/* A call by one thread. */
static void attend(const step_job *job, private *own, const ft_layer *layer, int32_t index,
                   int32_t kv_head, ft_attention *call) {
    set_up(job, layer, index, kv_head, call, own->attention);
    kernels->score(call, 0, call->end, own->keys);
    kernels->soften(call);
    finish(job, call, 0, call->heads.width);
}

/* Calls that all threads share: rows of the scores, then numbers of the results, so that each has
   as much to do and no sum is taken in another order (the equal shares of LeanAttention). */
static void attend_together(ft_team *team, int thread, step_job *job, private *own) {
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
        finish(job, job->calls + task / slices, first, first + GROUP);
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
                           node, kv_head, job->qkv + (row + node) * layer->qkv.outputs);
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
        attend_together(team, thread, job, own);
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

/* Gates and what they let through, as inputs of the last product. */
static void gates(ft_team *team, int thread, step_job *job, const ft_layer *layer,
                  const ft_rows *rows) {
    const ft_model *model = job->model;
    const int32_t pairs = model->inner / GROUP, half = model->inner / BLOCK;
    const int32_t nodes = job->step->nodes, tall = tile_rows(&layer->gate_up, nodes);
    const float *bias = layer->gate_up.bias;
    float tile[TILE * STRIP * BLOCK], through[GROUP];
    for (int32_t pair; (pair = ft_next(team, thread, pairs)) < pairs;) {
        int32_t blocks[STRIP] = {2 * pair, 2 * pair + 1, half + 2 * pair, half + 2 * pair + 1};
        for (int32_t row = 0; row < nodes; row += tall) {
            int32_t height = nodes - row < tall ? nodes - row : tall;
            kernels->product(&layer->gate_up, blocks, STRIP, rows, row, height, tile);
            for (int32_t m = 0; m < height; m++) {
                float *both = tile + m * STRIP * BLOCK;
                if (bias)
                    for (int32_t i = 0; i < GROUP; i++) {
                        both[i] += bias[pair * GROUP + i];
                        both[GROUP + i] += bias[model->inner + pair * GROUP + i];
                    }
                kernels->gate(both, both + GROUP, GROUP, model->activation, through);
                kernels->prepare(&job->inner, row + m, pair * GROUP, GROUP, through,
                                 model->forms);
            }
        }
    }
    ft_barrier(team);
}

static void tap(ft_team *team, int thread, step_job *job, int32_t layer) {
    const ft_step *step = job->step;
    int64_t bytes = 4 * (int64_t)step->nodes * job->model->hidden;
    int wanted = 0;
    for (int32_t i = 0; i < step->tap_count; i++)
        wanted |= step->taps[i] == layer;
    if (!wanted)
        return;
    for (int32_t i; (i = ft_next(team, thread, step->tap_count)) < step->tap_count;)
        if (step->taps[i] == layer)
            memcpy((char *)step->tapped + i * bytes, job->hidden, (size_t)bytes);
    ft_barrier(team);
}

/* The rows of logits. Activations are the last ones to be rounded, and nothing evens it out: of
   whole numbers each row goes in as two, to 16 bits. */
static void head(ft_team *team, int thread, step_job *job, private *own) {
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const ft_matrix *matrix = &model->head;
    const int32_t few = step->row_count <= FEW, twice = matrix->format == FT_WHOLE;
    const ft_rows *rows = few ? &own->few : &job->normed;
    const int32_t wanted = step->row_count;
    for (int32_t next = 0, i; (i = few ? next++ : ft_next(team, thread, wanted)) < wanted;) {
        const float *state = job->hidden + (int64_t)step->rows[i] * model->hidden;
        state = normed(state, model->norm, model->norm_eps, model->hidden, own->normed);
        if (twice)
            kernels->prepare_twice(rows, i, model->hidden, state);
        else
            kernels->prepare(rows, i, 0, model->hidden, state, ft_forms(matrix));
    }
    if (!few)
        ft_barrier(team);
    const int32_t tall = twice ? TILE / 2 : TILE, total = strips(matrix);
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
            }
        }
    }
    ft_barrier(team);
    if (model->logit_scale == 1.0f)
        return;
    for (int32_t i; (i = ft_next(team, thread, step->row_count)) < step->row_count;)
        for (int32_t v = 0; v < matrix->outputs; v++)
            step->logits[(int64_t)i * matrix->outputs + v] *= model->logit_scale;
}

/* A layer up to its attention. */
static void enter_layer(ft_team *team, int thread, step_job *job, private *own, int32_t index) {
    const ft_layer *layer = job->model->layer + index;
    const ft_rows *rows = attention_rows(team, thread, job, own, layer);
    multiply(team, thread, &layer->qkv, rows, job->step->nodes, job->qkv, layer->qkv.outputs, 0);
    ft_barrier(team);
}

/* What a layer makes of what its attention gave. */
static void leave_layer(ft_team *team, int thread, step_job *job, private *own, int32_t index) {
    const ft_model *model = job->model;
    const ft_layer *layer = model->layer + index;
    const int32_t nodes = job->step->nodes;
    multiply(team, thread, &layer->out, &job->attended, nodes, job->hidden, model->hidden, 1);
    ft_barrier(team);
    const ft_rows *rows = normed_rows(team, thread, job, own, layer->after, layer->after_eps);
    gates(team, thread, job, layer, rows);
    multiply(team, thread, &layer->down, &job->inner, nodes, job->hidden, model->hidden, 1);
    ft_barrier(team);
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
                tap(team, thread, job, skipped);
        last = index;
        enter_layer(team, thread, job, &own, index);
        attention(team, thread, job, &own, model->layer + index, index);
        leave_layer(team, thread, job, &own, index);
    }
    if (step->tap_count)
        for (int32_t after = last + 1; after <= model->layers; after++)
            tap(team, thread, job, after);
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
    const int32_t numbers = model->heads * model->width;
    if (between->after >= 0) {
        for (int32_t node; (node = ft_next(team, thread, step->nodes)) < step->nodes;)
            kernels->prepare(&job->attended, node, 0, numbers,
                             between->attended + (int64_t)node * numbers, model->forms);
        ft_barrier(team);
        leave_layer(team, thread, job, &own, between->after);
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
                   job->qkv + (int64_t)row * layer->qkv.outputs);
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

/* Lays out what a step works in: `shared` more bytes, and `attention` of each thread. Returns the
   memory, NULL: there is none, and where the shared bytes are. */
static char *lay_out(step_job *job, int32_t threads, int64_t shared, int64_t attention,
                     char **shared_at) {
    const ft_model *model = job->model;
    const ft_step *step = job->step;
    const int64_t nodes = step->nodes > 2 * step->row_count ? step->nodes : 2 * step->row_count;
    const int32_t forms = forms_of(model);
    int32_t widest = model->heads * model->width;
    int32_t read = model->hidden;
    for (int32_t l = 0; l < model->layers; l++)
        if (model->layer[l].token_norm)
            read = 2 * model->hidden;
    widest = widest > read ? widest : read;
    job->private_bytes = aligned(4 * (int64_t)model->hidden) +
                         aligned(4 * 32 * (int64_t)model->width) +
                         rows_bytes(2 * FEW, 2 * model->hidden, forms) + aligned(attention);
    int64_t hidden = aligned(4 * nodes * model->hidden);
    int64_t qkv = aligned(4 * nodes * (model->heads + 2 * model->kv_heads) * model->width);
    int64_t rows = rows_bytes(nodes, widest, forms), inner = rows_bytes(nodes, model->inner, forms);
    int64_t firsts = aligned(4 * (int64_t)step->job_count + 4);
    if (job->between)
        hidden = qkv = 0;
    char *memory =
        memory_of(hidden + qkv + rows + inner + 4 * firsts + shared + threads * job->private_bytes);
    if (!memory)
        return NULL;
    char *place = memory;
    job->hidden = job->between ? job->between->hidden : (float *)place;
    job->qkv = job->between ? job->between->qkv : (float *)(place + hidden);
    place += hidden + qkv;
    job->normed = job->normed_beside = job->attended = rows_at(place, nodes, widest, forms);
    job->normed.inputs = model->hidden;
    job->normed_beside.inputs = 2 * model->hidden;
    job->attended.inputs = model->heads * model->width;
    job->inner = rows_at(place += rows, nodes, model->inner, forms);
    job->first_node = (int32_t *)(place += inner);
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
        next.logits = logits;
        found = logits;
        done = ft_forward(model, &next, threads);
    }
    free(memory);
    return done;
}
