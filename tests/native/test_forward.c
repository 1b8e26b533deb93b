/* Forwards of small models in every way there is to compute a text: in pieces, as a tree, beside
   other requests, behind shared rows, by some of the layers, on 1 to 3 threads. A node's logits
   must be those of its text token by token on one thread, by the portable kernels. */

#include "checks.h"

#include <stdio.h>
#include <stdlib.h>

#define VOCAB 41
#define LAYERS 3
#define WINDOW 6 /* of the layer in the middle */
#define TEXT 67  /* tokens */
#define LONG_TEXT 530
#define POSITIONS (LONG_TEXT + 32)

static int32_t text[LONG_TEXT], places[LONG_TEXT];

/* --- small models, their caches and texts */

/* How layers are built, apart from sizes. */
enum {
    NORMED = 1,      /* heads have norms */
    BIASED = 2,
    CENTERED = 4,    /* norms take the mean away and add a bias */
    AFTER = 8,       /* halves have norms after them */
    PARALLEL = 16,
    UNGATED = 32,
    PARTIAL = 64,    /* a part of each head turns */
    INTERLEAVED = 128,
    CAPPED = 256,    /* scores and logits */
    SINKS = 512,
    WHOLE_HEADS = 1024,
    MULTIPLIED = 2048, /* what a layer adds; and its last one turns nothing */
    LEARNED = 4096,  /* positions have rows */
    UNNORMED = 8192, /* no norm before halves */
    EXPERTS = 16384, /* in place of an MLP, but in the first layer */
    SHARED = 32768,  /* beside a share of it */
    GROUPED = 65536
};

typedef struct {
    int32_t hidden, heads, kv_heads, width, inner, activation, build;
    float logit_scale;
} shape;

typedef struct {
    ft_model model;
    ft_layer layer[LAYERS];
    ft_experts experts[LAYERS];
    ft_rotation rotation[2];
} network;

enum { COUNT_OF_EXPERTS = 8, CHOSEN_EXPERTS = 3 };

/* Keys and values (layers, heads, capacity, width), and the position of each row. */
typedef struct {
    uint16_t *keys, *values;
    int32_t *positions, capacity;
} cache;

static ft_norm make_norm(int32_t count, float eps, int32_t centered) {
    return (ft_norm){random_floats(count, 1), centered ? random_floats(count, 1) : NULL, eps,
                     centered};
}

static void drop_norm(const ft_norm *norm) {
    free((void *)norm->weight);
    free((void *)norm->bias);
}

static ft_rotation make_rotation(int32_t turned, int32_t interleaved, double base) {
    const int32_t half = turned / 2;
    float *cosines = room((size_t)POSITIONS * half * 4), *sines = room((size_t)POSITIONS * half * 4);
    for (int32_t i = 0; i < POSITIONS * half; i++) {
        double angle = i / half * pow(base, -(double)(i % half) / half);
        cosines[i] = (float)cos(angle);
        sines[i] = (float)sin(angle);
    }
    return (ft_rotation){cosines, sines, turned, interleaved};
}

static void make_layer(ft_layer *layer, const shape *of, int index, int form) {
    const int32_t build = of->build, centered = !!(build & CENTERED), hidden = of->hidden;
    const int32_t biased = !!(build & BIASED), whole = !!(build & WHOLE_HEADS);
    const int32_t queries = of->heads * of->width, keys = of->kv_heads * of->width;
    *layer = (ft_layer){
        .whole_heads = whole, .window = index == 1 ? WINDOW : 0,
        .rotation = index == 2 && build & MULTIPLIED ? -1 : index == 1,
        .parallel = !!(build & PARALLEL), .activation = of->activation, .scale = 0.2f,
        .score_cap = build & CAPPED ? 0.7f : 0.0f, .residual = build & MULTIPLIED ? 0.3f : 1.0f,
        .sinks = build & SINKS ? random_floats(of->heads, 1) : NULL,
        .query = make_matrix(form, queries, hidden, biased),
        .key = make_matrix(form, keys, hidden, biased),
        .value = make_matrix(form, keys, hidden, biased),
        .out = make_matrix(form, hidden, queries, biased),
        .up = make_matrix(form, of->inner, hidden, biased),
        .down = make_matrix(form, hidden, of->inner, biased)};
    if (!(build & UNGATED))
        layer->gate = make_matrix(form, of->inner, hidden, biased);
    if (!(build & UNNORMED)) {
        layer->before_attention = make_norm(hidden, 1e-5f, centered);
        layer->before_mlp = make_norm(hidden, 1e-5f, centered);
    }
    if (build & AFTER) {
        layer->after_attention = make_norm(hidden, 1e-5f, centered);
        layer->after_mlp = make_norm(hidden, 1e-5f, centered);
    }
    if (build & (NORMED | WHOLE_HEADS)) {
        layer->query_norm = make_norm(whole ? queries : of->width, 1e-6f, 0);
        layer->key_norm = make_norm(whole ? keys : of->width, 1e-6f, 0);
    }
}

static ft_matrix *make_matrices(int form, int32_t outputs, int32_t inputs) {
    ft_matrix *made = room(COUNT_OF_EXPERTS * sizeof *made);
    for (int i = 0; i < COUNT_OF_EXPERTS; i++)
        made[i] = make_matrix(form, outputs, inputs, 0);
    return made;
}

static void drop_matrices(const ft_matrix *of) {
    for (int i = 0; of && i < COUNT_OF_EXPERTS; i++)
        drop_matrix((ft_matrix *)of + i);
    free((void *)of);
}

static void make_experts(ft_experts *experts, ft_layer *layer, const shape *of, int index,
                         int form) {
    const int32_t grouped = !!(of->build & GROUPED), gated = layer->gate.outputs > 0;
    const int32_t inner = of->inner / 2;
    *experts = (ft_experts){
        .count = COUNT_OF_EXPERTS, .chosen = CHOSEN_EXPERTS, .scoring = index % FT_SCORINGS,
        .groups = grouped ? 4 : 1, .chosen_groups = grouped ? 2 : 1, .group_best = 2,
        .renormalized = index == 1, .activation = gated ? FT_CLAMPED_SILU : FT_RELU,
        .scaling = 1.5f, .choice_bias = grouped ? random_floats(COUNT_OF_EXPERTS, 1) : NULL,
        .router = make_matrix(form, COUNT_OF_EXPERTS, of->hidden, 1),
        .gate = gated ? make_matrices(form, inner, of->hidden) : NULL,
        .up = make_matrices(form, inner, of->hidden),
        .down = make_matrices(form, of->hidden, inner)};
    layer->experts = experts;
    if (of->build & SHARED) {
        experts->share = make_matrix(form, 1, of->hidden, 0);
        return;
    }
    drop_matrix(&layer->gate);
    drop_matrix(&layer->up);
    drop_matrix(&layer->down);
    layer->gate = layer->up = layer->down = (ft_matrix){.outputs = 0};
}

static void drop_experts(const ft_experts *experts) {
    drop_matrix((ft_matrix *)&experts->router);
    drop_matrix((ft_matrix *)&experts->share);
    drop_matrices(experts->gate);
    drop_matrices(experts->up);
    drop_matrices(experts->down);
    free((void *)experts->choice_bias);
}

static void make_network(network *net, const shape *of, int form) {
    const int32_t width = of->width, build = of->build;
    const int32_t turned = build & PARTIAL ? width / 4 : width;
    net->model = (ft_model){
        .layers = LAYERS, .hidden = of->hidden, .heads = of->heads, .kv_heads = of->kv_heads,
        .width = width, .logit_scale = of->logit_scale, .logit_cap = build & CAPPED ? 2.0f : 0.0f,
        .norm = make_norm(of->hidden, 1e-5f, !!(build & CENTERED)), .layer = net->layer,
        .head = make_matrix(form, VOCAB, of->hidden, 0)};
    if (build & LEARNED) {
        net->model.position_rows = random_floats((int64_t)POSITIONS * of->hidden, 1);
        net->model.position_count = POSITIONS;
    }
    for (int i = 0; i < LAYERS; i++)
        make_layer(net->layer + i, of, i, form);
    for (int i = 1; i < LAYERS && build & EXPERTS; i++)
        make_experts(net->experts + i, net->layer + i, of, i, form);
    for (int i = 0; i < 2; i++)
        net->rotation[i] = make_rotation(turned, !!(build & INTERLEAVED), i ? 30.0 : 100.0);
}

static void drop_network(network *net) {
    for (int i = 0; i < LAYERS; i++) {
        ft_layer *layer = net->layer + i;
        ft_matrix *parts[] = {&layer->query, &layer->key, &layer->value, &layer->out,
                              &layer->gate, &layer->up, &layer->down};
        const ft_norm *norms[] = {&layer->before_attention, &layer->after_attention,
                                  &layer->before_mlp, &layer->after_mlp, &layer->query_norm,
                                  &layer->key_norm};
        for (int j = 0; j < COUNT(parts); j++)
            drop_matrix(parts[j]);
        for (int j = 0; j < COUNT(norms); j++)
            drop_norm(norms[j]);
        free((void *)layer->sinks);
        if (layer->experts)
            drop_experts(layer->experts);
    }
    drop_matrix(&net->model.head);
    drop_norm(&net->model.norm);
    free((void *)net->model.position_rows);
    for (int i = 0; i < 2; i++) {
        free((void *)net->rotation[i].cosines);
        free((void *)net->rotation[i].sines);
    }
}

static int64_t cache_numbers(const network *net, int32_t capacity) {
    return (int64_t)LAYERS * net->model.kv_heads * capacity * net->model.width;
}

static cache make_cache(const network *net, int32_t capacity) {
    size_t bytes = 2 * (size_t)cache_numbers(net, capacity);
    cache made = {room(bytes), room(bytes), room((size_t)capacity * 4), capacity};
    memset(made.keys, 0xff, bytes); /* NaN: what is not there must not be read */
    memset(made.values, 0xff, bytes);
    return made;
}

static void drop_cache(cache *of) {
    free(of->keys);
    free(of->values);
    free(of->positions);
}

/* The job of `nodes` new tokens at these positions, behind `start` rows. */
static ft_job job_of(const network *net, cache *of, int32_t start, int32_t base, int32_t nodes,
                     const int32_t *positions, const uint8_t *seen) {
    for (int32_t i = 0; i < nodes; i++)
        of->positions[start + i] = positions[i];
    int64_t stride = (int64_t)of->capacity * net->model.width;
    return (ft_job){nodes, start, base, positions, seen, of->positions, of->keys, of->values,
                    stride * net->model.kv_heads, stride, of->capacity, 0, NULL};
}

typedef struct {
    const int32_t *layers;
    int32_t layer_count;
    float *logits, *tapped; /* of all nodes; (4, nodes, hidden), or NULL */
    int32_t threads;
} wish;

/* One forward of these jobs; `tokens` are those of all their nodes. */
static void forward(const network *net, const ft_job *jobs, int32_t count, const int32_t *tokens,
                    wish what) {
    static const int32_t all[] = {0, 1, 2}, taps[] = {0, 1, 2, 3};
    int32_t nodes = 0, hidden = net->model.hidden;
    for (int32_t i = 0; i < count; i++)
        nodes += jobs[i].nodes;
    float *states = room((size_t)nodes * hidden * 4);
    int32_t *rows = room((size_t)nodes * 4);
    for (int32_t i = 0; i < nodes; i++) {
        uint32_t before = seed;
        seed = (uint32_t)tokens[i] * 2654435761u + 1;
        for (int32_t k = 0; k < hidden; k++)
            states[i * hidden + k] = random_float();
        seed = before;
        rows[i] = i;
    }
    ft_step step = {
        .jobs = jobs, .job_count = count, .nodes = nodes, .states = states,
        .rotations = net->rotation, .rotation_count = 2, .positions = POSITIONS,
        .layers = what.layers ? what.layers : all,
        .layer_count = what.layers ? what.layer_count : LAYERS,
        .rows = rows, .row_count = nodes, .logits = what.logits,
        .taps = taps, .tap_count = what.tapped ? COUNT(taps) : 0, .tapped = what.tapped};
    if (ft_forward(&net->model, &step, what.threads) != FT_DONE)
        fail("it is not done", "forward");
    free(states);
    free(rows);
}

/* Logits (to - from, VOCAB) of a part of a text, token by token on one thread. */
static void alone(const network *net, cache *of, const int32_t *tokens, int32_t from, int32_t to,
                  float *logits) {
    for (int32_t i = from; i < to; i++) {
        ft_job job = job_of(net, of, i, i, 1, places + i, NULL);
        wish what = {.logits = logits + (i - from) * VOCAB, .threads = 1};
        forward(net, &job, 1, tokens + i, what);
    }
}

/* The first largest of a row, and its share of the row's law. */
static int32_t best_of(const float *logits, float *chance) {
    int32_t best = 0;
    double sum = 0;
    for (int32_t i = 1; i < VOCAB; i++)
        best = logits[i] > logits[best] ? i : best;
    for (int32_t i = 0; i < VOCAB; i++)
        sum += exp((double)logits[i] - logits[best]);
    *chance = (float)(1 / sum);
    return best;
}

static void compare(const float *ours, const float *wanted, int32_t rows, const char *where) {
    if (memcmp(ours, wanted, (size_t)rows * VOCAB * 4))
        fail("a node has other logits than alone", where);
}

/* --- the ways to compute a text */

static void check_pieces(const network *net, const float *wanted, int32_t threads) {
    static const int32_t cuts[][6] = {{TEXT}, {24, 43}, {25, 1, 7, 2, 32}, {1, 6, 60}};
    float logits[TEXT * VOCAB];
    for (int i = 0; i < COUNT(cuts); i++) {
        cache own = make_cache(net, TEXT);
        for (int32_t j = 0, from = 0; from < TEXT; from += cuts[i][j++]) {
            ft_job job = job_of(net, &own, from, from, cuts[i][j], places + from, NULL);
            wish what = {.logits = logits + from * VOCAB, .threads = threads};
            forward(net, &job, 1, text + from, what);
        }
        compare(logits, wanted, TEXT, "pieces of a text");
        drop_cache(&own);
    }
}

/* A tree of two forwards: of each node its parent, -1 the text. */
static const int32_t parents[] = {-1, 0, 0, 1, 1, 2, 5, 3, 6, 0};
enum { NODES = COUNT(parents), FIRST = 6, BEFORE = 40 };

typedef struct {
    int32_t tokens[NODES], positions[NODES];
    uint8_t seen[NODES][NODES];
    float wanted[NODES * VOCAB];
} tree;

/* `own` holds what is before the tree. */
static void make_tree(const network *net, cache *own, tree *made) {
    memset(made->seen, 0, sizeof made->seen);
    int32_t path[BEFORE + NODES];
    float logits[NODES * VOCAB];
    for (int32_t i = 0; i < NODES; i++) {
        int32_t depth = 0;
        made->tokens[i] = 100 + i;
        for (int32_t node = i; node >= 0; node = parents[node], depth++)
            made->seen[i][node] = 1;
        made->positions[i] = BEFORE + depth - 1;
        for (int32_t node = i; node >= 0; node = parents[node])
            path[made->positions[node]] = made->tokens[node];
        alone(net, own, path, BEFORE, BEFORE + depth, logits);
        memcpy(made->wanted + i * VOCAB, logits + (depth - 1) * VOCAB, VOCAB * 4);
    }
}

/* `seen` of nodes `from` to `to - 1` as a job has it, (to - from, to). */
static const uint8_t *seen_of(const tree *of, int32_t from, int32_t to, uint8_t *seen) {
    for (int32_t i = from; i < to; i++)
        memcpy(seen + (i - from) * to, of->seen[i], (size_t)to);
    return seen;
}

static void check_trees(const network *net, const tree *of, const float *wanted,
                        int32_t threads) {
    float logits[(BEFORE + NODES + TEXT) * VOCAB];
    uint8_t seen[NODES * NODES];
    cache own = make_cache(net, BEFORE + NODES), other = make_cache(net, TEXT);
    ft_job jobs[3] = {job_of(net, &own, 0, 0, BEFORE, places, NULL)};
    forward(net, jobs, 1, text, (wish){.logits = logits, .threads = threads});
    jobs[0] = job_of(net, &own, BEFORE, BEFORE, FIRST, of->positions, seen_of(of, 0, FIRST, seen));
    forward(net, jobs, 1, of->tokens, (wish){.logits = logits, .threads = threads});
    compare(logits, of->wanted, FIRST, "a tree");
    /* The rest of the tree beside another request's piece of a text. */
    int32_t tokens[NODES + TEXT], rest = NODES - FIRST;
    memcpy(tokens, text, BEFORE * 4);
    memcpy(tokens + BEFORE, of->tokens + FIRST, (size_t)rest * 4);
    jobs[0] = job_of(net, &other, 0, 0, BEFORE, places, NULL);
    jobs[1] = job_of(net, &own, BEFORE + FIRST, BEFORE, rest, of->positions + FIRST,
                     seen_of(of, FIRST, NODES, seen));
    forward(net, jobs, 2, tokens, (wish){.logits = logits, .threads = threads});
    compare(logits, wanted, BEFORE, "a text beside a tree");
    compare(logits + BEFORE * VOCAB, of->wanted + FIRST * VOCAB, rest, "a tree that grows");
    drop_cache(&own);
    drop_cache(&other);
}

/* The first rows of a text lie in two segments, and a tree and a text see them. */
static void check_segments(const network *net, const tree *of, const float *wanted,
                           int32_t threads) {
    enum { ONE = 13, TWO = 8, SHARED = ONE + TWO, MORE = BEFORE - SHARED };
    float logits[(MORE + NODES) * VOCAB];
    uint8_t seen[NODES * NODES];
    const int32_t width = net->model.width;
    cache shared = make_cache(net, SHARED), own = make_cache(net, MORE + NODES);
    ft_job job = job_of(net, &shared, 0, 0, SHARED, places, NULL);
    forward(net, &job, 1, text, (wish){.logits = logits, .threads = threads});
    ft_segment segments[2] = {
        {shared.keys, shared.values, job.layer_stride, job.head_stride, 0, ONE},
        {shared.keys + ONE * width, shared.values + ONE * width, job.layer_stride,
         job.head_stride, ONE, TWO}};
    job = job_of(net, &own, 0, 0, MORE, places + SHARED, NULL);
    job.segments = 2;
    job.segment = segments;
    forward(net, &job, 1, text + SHARED, (wish){.logits = logits, .threads = threads});
    compare(logits, wanted + SHARED * VOCAB, MORE, "a text behind segments");
    job = job_of(net, &own, MORE, MORE, NODES, of->positions, seen_of(of, 0, NODES, seen));
    job.segments = 2;
    job.segment = segments;
    forward(net, &job, 1, of->tokens, (wish){.logits = logits, .threads = threads});
    compare(logits, of->wanted, NODES, "a tree behind segments");
    drop_cache(&shared);
    drop_cache(&own);
}

/* Parts of the layers, with the states that enter them, at once and token by token. */
static void check_layers(const network *net, int32_t threads) {
    enum { SOME = 9 };
    static const int32_t layers[] = {0, 2};
    const int32_t hidden = net->model.hidden;
    float *tapped = room(4 * SOME * (size_t)hidden * 4), *one = room(4 * (size_t)hidden * 4);
    float logits[SOME * VOCAB], logit[VOCAB];
    cache own = make_cache(net, SOME), other = make_cache(net, SOME);
    ft_job job = job_of(net, &own, 0, 0, SOME, places, NULL);
    forward(net, &job, 1, text, (wish){layers, 2, logits, tapped, threads});
    for (int32_t i = 0; i < SOME; i++) {
        job = job_of(net, &other, i, i, 1, places + i, NULL);
        forward(net, &job, 1, text + i, (wish){layers, 2, logit, one, 1});
        compare(logits + i * VOCAB, logit, 1, "parts of the layers");
        for (int32_t tap = 0; tap < 4; tap++)
            if (memcmp(tapped + (tap * SOME + i) * hidden, one + tap * hidden, 4 * (size_t)hidden))
                fail("a node has other states than alone", "taps");
    }
    drop_cache(&own);
    drop_cache(&other);
    free(tapped);
    free(one);
}

/* Two texts go on by their best tokens, in one call and token by token on one thread. What enters
   for a token is its row of the head; `names` turns the outputs round. */
static void check_following(const network *net, int32_t threads) {
    enum { MORE = 5, TEXTS = 2 };
    static const int32_t lengths[TEXTS] = {9, 4};
    static const int32_t layers[] = {0, 1, 2};
    const int32_t hidden = net->model.hidden;
    const float scale = 1.5f;
    cache own[TEXTS], other[TEXTS];
    int64_t names[VOCAB], tokens[MORE * TEXTS], alone_tokens[MORE];
    float chances[MORE * TEXTS], logits[TEXTS * VOCAB], logit[VOCAB], chance;
    for (int32_t i = 0; i < VOCAB; i++)
        names[i] = VOCAB - 1 - i;
    int32_t nodes = 0, rows[TEXTS], one = 0;
    ft_job jobs[TEXTS];
    for (int32_t j = 0; j < TEXTS; j++) {
        own[j] = make_cache(net, lengths[j] + MORE);
        other[j] = make_cache(net, lengths[j] + MORE);
        jobs[j] = job_of(net, own + j, 0, 0, lengths[j], places, NULL);
        for (int32_t i = 0; i < own[j].capacity; i++)
            own[j].positions[i] = places[i];
        nodes += lengths[j];
        rows[j] = nodes - 1;
    }
    float *states = random_floats((int64_t)nodes * hidden, 1);
    float *entering = room((size_t)hidden * 4);
    ft_step step = {
        .jobs = jobs, .job_count = TEXTS, .nodes = nodes, .states = states,
        .rotations = net->rotation, .rotation_count = 2, .positions = POSITIONS, .layers = layers,
        .layer_count = LAYERS,
        .rows = rows, .row_count = TEXTS, .logits = logits};
    ft_following following = {&net->model.head, scale, names, MORE, tokens, chances};
    if (ft_follow(&net->model, &step, &following, threads) != FT_DONE)
        fail("it is not done", "ft_follow");
    for (int32_t j = 0, from = 0; j < TEXTS; from += lengths[j++]) {
        ft_job job = job_of(net, other + j, 0, 0, lengths[j], places, NULL);
        int32_t last = lengths[j] - 1;
        step.jobs = &job;
        step.job_count = step.row_count = 1;
        step.nodes = lengths[j];
        step.states = states + from * hidden;
        step.rows = &last;
        step.logits = logit;
        for (int32_t i = 0; i < MORE; i++) {
            if (ft_forward(&net->model, &step, 1) != FT_DONE)
                fail("it is not done", "ft_forward");
            if (!i && memcmp(logit, logits + j * VOCAB, sizeof logit))
                fail("the first row is another than alone", "ft_follow");
            alone_tokens[i] = names[best_of(logit, &chance)];
            if (tokens[i * TEXTS + j] != alone_tokens[i])
                fail("a text goes on otherwise than alone", "ft_follow");
            if (fabsf(chances[i * TEXTS + j] - chance) > 1e-5f)
                fail("a token has another chance than alone", "ft_follow");
            ft_rows_of(&net->model.head, alone_tokens + i, 1, entering);
            int32_t place = lengths[j] + i;
            for (int32_t k = 0; k < hidden; k++) {
                entering[k] *= scale;
                if (net->model.position_rows)
                    entering[k] += net->model.position_rows[place * hidden + k];
            }
            job = job_of(net, other + j, place, 0, 1, places + place, NULL);
            step.nodes = 1;
            step.states = entering;
            step.rows = &one;
        }
        drop_cache(own + j);
        drop_cache(other + j);
    }
    free(states);
    free(entering);
}

/* --- trees that a head grows */

enum { DEPTH = 4, BREADTH = 3, CHOSEN = 11, TEXTS = 2 };

/* A head of one layer; `beside`: its attention reads tokens beside states, else `enter` does. */
typedef struct {
    ft_model model;
    ft_layer layer;
    ft_growth growth;
    int64_t names[VOCAB];
    int32_t beside;
} grower;

static void make_grower(grower *made, const network *net, int form, int32_t beside) {
    const int32_t hidden = net->model.hidden, width = net->model.width;
    made->beside = beside;
    made->layer = net->layer[0];
    made->model = net->model;
    made->model.layers = 1;
    made->model.layer = &made->layer;
    for (int32_t i = 0; i < VOCAB; i++)
        made->names[i] = VOCAB - 1 - i;
    made->growth = (ft_growth){.embeddings = &net->model.head, .scale = 1.5f,
                               .names = made->names, .depth = DEPTH,
                               .breadth = BREADTH, .chosen = CHOSEN};
    if (beside) {
        const int32_t keys = net->model.kv_heads * width;
        made->layer.query = make_matrix(form, net->model.heads * width, 2 * hidden, 0);
        made->layer.key = make_matrix(form, keys, 2 * hidden, 0);
        made->layer.value = make_matrix(form, keys, 2 * hidden, 0);
        made->layer.token_norm = make_norm(hidden, 1e-5f, 0);
        made->growth.hands_on_normed = 1;
    } else {
        made->layer.before_attention = made->model.norm = (ft_norm){.weight = NULL};
        made->growth.enter = make_matrix(form, hidden, 2 * hidden, 1);
        made->growth.state_norm = make_norm(hidden, 1e-5f, 0);
    }
}

static void drop_grower(grower *made) {
    if (made->beside) {
        drop_matrix(&made->layer.query);
        drop_matrix(&made->layer.key);
        drop_matrix(&made->layer.value);
        drop_norm(&made->layer.token_norm);
    } else {
        drop_matrix(&made->growth.enter);
        drop_norm(&made->growth.state_norm);
    }
}

/* What enters for a token below a state (hidden,): `states`, and `tokens` beside them. */
static void enter_below(const grower *head, int64_t token, const float *state, float *states,
                        float *tokens) {
    const int32_t hidden = head->model.hidden;
    ft_rows_of(head->growth.embeddings, &token, 1, tokens);
    for (int32_t k = 0; k < hidden; k++)
        tokens[k] *= head->growth.scale;
    if (head->beside) {
        memcpy(states, state, 4 * (size_t)hidden);
        return;
    }
    float *both = room(8 * (size_t)hidden);
    memcpy(both, tokens, 4 * (size_t)hidden);
    ft_chosen()->norm(state, &head->growth.state_norm, hidden, both + hidden);
    if (ft_product(&head->growth.enter, both, 1, states, 1) != FT_DONE)
        fail("it is not done", "ft_product");
    free(both);
}

/* The chance of each token of a path below a text, each by a forward of its own. */
static void chances_alone(const grower *head, const network *net, int32_t length,
                          const float *states, const float *embedded, const int64_t *path,
                          int32_t count, float *chances) {
    static const int32_t layer = 0, tap = 1;
    const int32_t hidden = head->model.hidden;
    int32_t last = length - 1;
    float logits[VOCAB];
    float *left = room((size_t)length * hidden * 4), *state = room((size_t)hidden * 4);
    float *entering = room((size_t)hidden * 4), *token = room((size_t)hidden * 4);
    cache own = make_cache(net, length + DEPTH);
    ft_job job = job_of(net, &own, 0, 0, length, places, NULL);
    ft_step step = {.jobs = &job, .job_count = 1, .nodes = length, .states = states,
                    .tokens = embedded, .rotations = net->rotation, .rotation_count = 2,
                    .positions = POSITIONS,
                    .layers = &layer, .layer_count = 1, .rows = &last, .row_count = 1,
                    .logits = logits, .taps = &tap, .tap_count = 1, .tapped = left};
    for (int32_t i = 0; i < count; i++) {
        if (ft_forward(&head->model, &step, 1) != FT_DONE)
            fail("it is not done", "ft_forward");
        float best = -INFINITY, sum = 0;
        for (int32_t v = 0; v < VOCAB; v++)
            best = logits[v] > best ? logits[v] : best;
        for (int32_t v = 0; v < VOCAB; v++)
            sum += expf(logits[v] - best);
        chances[i] = expf(logits[VOCAB - 1 - path[i]] - best) / sum;
        const float *from = left + (int64_t)last * hidden;
        if (head->growth.hands_on_normed)
            ft_chosen()->norm(from, &head->model.norm, hidden, state);
        else
            memcpy(state, from, 4 * (size_t)hidden);
        enter_below(head, path[i], state, entering, token);
        job = job_of(net, &own, length + i, 0, 1, places + length + i, NULL);
        step.nodes = 1;
        step.states = entering;
        step.tokens = token;
        last = 0;
    }
    drop_cache(&own);
    free(left);
    free(state);
    free(entering);
    free(token);
}

/* Two texts grow trees in one call: each node has the chance that a chain gives it, parents come
   first, and no call, text or thread changes another's tree. */
static void check_growing(const network *net, int form, int32_t beside, int32_t threads) {
    static const int32_t lengths[TEXTS] = {9, 4}, layer = 0;
    const int32_t hidden = net->model.hidden;
    grower head;
    make_grower(&head, net, form, beside);
    int64_t tokens[TEXTS * CHOSEN];
    int32_t parents[TEXTS * CHOSEN], counts[TEXTS], rows[TEXTS], nodes = 0;
    float chances[TEXTS * CHOSEN], logits[TEXTS * VOCAB];
    head.growth.tokens = tokens;
    head.growth.parents = parents;
    head.growth.counts = counts;
    head.growth.chances = chances;
    cache own[TEXTS];
    ft_job jobs[TEXTS];
    for (int32_t j = 0; j < TEXTS; j++) {
        own[j] = make_cache(net, lengths[j] + (DEPTH - 1) * BREADTH);
        jobs[j] = job_of(net, own + j, 0, 0, lengths[j], places, NULL);
        nodes += lengths[j];
        rows[j] = nodes - 1;
    }
    float *states = random_floats((int64_t)nodes * hidden, 1);
    float *embedded = random_floats((int64_t)nodes * hidden, 1);
    ft_step step = {.jobs = jobs, .job_count = TEXTS, .nodes = nodes, .states = states,
                    .tokens = embedded, .rotations = net->rotation, .rotation_count = 2,
                    .positions = POSITIONS,
                    .layers = &layer, .layer_count = 1, .rows = rows, .row_count = TEXTS,
                    .logits = logits};
    if (ft_grow(&head.model, &step, &head.growth, threads) != DEPTH)
        fail("another number of forwards", "ft_grow");
    for (int32_t j = 0, from = 0; j < TEXTS; from += lengths[j++]) {
        if (counts[j] != CHOSEN)
            fail("too few nodes", "ft_grow");
        for (int32_t i = 0; i < CHOSEN; i++) {
            const int64_t at = j * CHOSEN;
            int64_t path[DEPTH];
            float wanted[DEPTH];
            int32_t depth = 0;
            for (int32_t node = i; node >= 0; node = parents[at + node]) {
                if (parents[at + node] >= node)
                    fail("a child before its parent", "ft_grow");
                depth++;
            }
            for (int32_t node = i, left = depth; node >= 0; node = parents[at + node])
                path[--left] = tokens[at + node];
            chances_alone(&head, net, lengths[j], states + (int64_t)from * hidden,
                          embedded + (int64_t)from * hidden, path, depth, wanted);
            if (fabsf(chances[at + i] - wanted[depth - 1]) > 1e-5f)
                fail("a node has another chance than in a chain", "ft_grow");
        }
    }
    head.growth.least = 1.0f;
    head.growth.chosen = BREADTH + 1; /* one more than there are */
    if (ft_grow(&head.model, &step, &head.growth, threads) != 1 || counts[0] != BREADTH)
        fail("a level behind one that is too unlikely", "ft_grow");
    for (int32_t j = 0; j < TEXTS; j++)
        drop_cache(own + j);
    free(states);
    free(embedded);
    drop_grower(&head);
}

/* Every position of a canvas sees all others: the last ones, computed again beside rows that stand,
   are those of the whole. */
static ft_job canvas_of(const network *net, cache *own, int32_t from) {
    ft_job job = job_of(net, own, from, TEXT, TEXT - from, places + from, NULL);
    job.row_positions = NULL;
    return job;
}

static void find_canvas(const network *net, float *wanted) {
    cache own = make_cache(net, TEXT);
    ft_job job = canvas_of(net, &own, 0);
    forward(net, &job, 1, text, (wish){.logits = wanted, .threads = 1});
    drop_cache(&own);
}

static void check_canvas(const network *net, const float *wanted, int32_t threads) {
    static const int32_t lasts[] = {1, 7, 25};
    float logits[2 * TEXT * VOCAB];
    int32_t both[2 * TEXT];
    memcpy(both, text, TEXT * 4);
    memcpy(both + TEXT, text, TEXT * 4);
    cache own = make_cache(net, TEXT), chain = make_cache(net, TEXT);
    ft_job jobs[] = {canvas_of(net, &own, 0), job_of(net, &chain, 0, 0, TEXT, places, NULL)};
    forward(net, jobs, 2, both, (wish){.logits = logits, .threads = threads});
    compare(logits, wanted, TEXT, "a canvas beside a text");
    if (!memcmp(logits + TEXT * VOCAB, wanted, TEXT * VOCAB * 4))
        fail("a text has a canvas's logits", "a text beside a canvas");
    for (int i = 0; i < COUNT(lasts); i++) {
        int32_t from = TEXT - lasts[i];
        ft_job job = canvas_of(net, &own, from);
        forward(net, &job, 1, text + from, (wish){.logits = logits, .threads = threads});
        compare(logits, wanted + from * VOCAB, lasts[i], "the end of a canvas");
    }
    drop_cache(&own);
    drop_cache(&chain);
}

/* What a model's nodes are to be, by the kernels chosen. */
typedef struct {
    float wanted[TEXT * VOCAB], canvas[TEXT * VOCAB];
    tree branches;
} answers;

static void find_answers(const network *net, answers *found) {
    cache own = make_cache(net, TEXT);
    alone(net, &own, text, 0, TEXT, found->wanted);
    make_tree(net, &own, &found->branches);
    drop_cache(&own);
    find_canvas(net, found->canvas);
    for (int32_t i = 0; i < TEXT * VOCAB; i++)
        if (!isfinite(found->wanted[i]))
            fail("a logit is no number", "token by token");
}

static void check_model(const shape *of, int form) {
    network net;
    answers right;
    const char *found = "";
    float again[TEXT * VOCAB];
    seed = 7;
    make_network(&net, of, form);
    for (int i = 0; i < COUNT(kinds); i++) {
        if (!ft_choose(kinds[i]))
            continue;
        const char *twin = twin_of(kinds[i], form);
        if (strcmp(twin, found)) {
            choose(twin);
            find_answers(&net, &right);
            found = twin;
        }
        choose(kinds[i]);
        cache own = make_cache(&net, TEXT);
        alone(&net, &own, text, 0, TEXT, again);
        compare(again, right.wanted, TEXT, "token by token");
        drop_cache(&own);
        for (int32_t threads = 1; threads <= MOST_THREADS_HERE; threads++) {
            check_pieces(&net, right.wanted, threads);
            check_trees(&net, &right.branches, right.wanted, threads);
            check_canvas(&net, right.canvas, threads);
        }
        check_segments(&net, &right.branches, right.wanted, 2);
        check_layers(&net, 2);
        for (int32_t threads = 1; threads <= MOST_THREADS_HERE; threads++)
            check_following(&net, threads);
        if (of->build & PARALLEL)
            continue; /* no head is built so */
        check_growing(&net, form, 0, 2);
        check_growing(&net, form, 1, 3);
    }
    drop_network(&net);
}

/* Over long texts few nodes are shared out, where there are more threads than heads. */
static void check_long_text(const char *kind, const shape *of) {
    enum { LAST = 5 };
    network net;
    float *logits = room(LONG_TEXT * VOCAB * 4), few[LAST * VOCAB];
    choose(kind);
    make_network(&net, of, 0);
    cache own = make_cache(&net, LONG_TEXT);
    wish what = {.logits = logits, .threads = MOST_THREADS_HERE};
    ft_job job = job_of(&net, &own, 0, 0, LONG_TEXT, places, NULL);
    forward(&net, &job, 1, text, what);
    const int32_t from = LONG_TEXT - LAST;
    what.logits = few;
    job = job_of(&net, &own, from, from, LAST, places + from, NULL);
    forward(&net, &job, 1, text + from, what);
    compare(few, logits + from * VOCAB, LAST, "the end of a long text");
    drop_cache(&own);
    drop_network(&net);
    free(logits);
}

void check_forwards(void) {
    static const shape shapes[] = {
        {64, 4, 2, 32, 96, FT_SILU, NORMED, 1.0f},
        {96, 2, 2, 128, 64, FT_GELU_TANH, BIASED, 0.5f},
        {32, 40, 1, 32, 32, FT_SILU, 0, 1.0f},
        {64, 4, 2, 32, 64, FT_GELU, CENTERED | PARALLEL | UNGATED | PARTIAL | BIASED, 1.0f},
        {64, 4, 2, 64, 64, FT_RELU, AFTER | UNNORMED | WHOLE_HEADS | INTERLEAVED | MULTIPLIED, 1.0f},
        {64, 4, 2, 32, 128, FT_SILU, EXPERTS | SHARED, 1.0f},
        {64, 4, 2, 32, 64, FT_SILU, EXPERTS | GROUPED | UNGATED | AFTER, 1.0f},
        {32, 3, 1, 32, 64, FT_SQUARED_RELU, AFTER | CAPPED | SINKS | LEARNED | NORMED, 0.8f},
    };
    for (int32_t i = 0; i < LONG_TEXT; i++) {
        text[i] = i * i % 23;
        places[i] = i;
    }
    for (int form = 0; form < FORMS_OF_MODELS; form++)
        check_model(shapes, form);
    check_model(shapes + 1, 0);
    check_model(shapes + 1, 3);
    check_model(shapes + 2, 1);
    for (int i = 3; i < COUNT(shapes); i++)
        check_model(shapes + i, 0);
    check_model(shapes + 3, 3);
    check_model(shapes + 5, 3);
    for (int i = 0; i < COUNT(kinds); i++)
        if (ft_choose(kinds[i]))
            check_long_text(kinds[i], shapes);
    printf("forwards of small models are right\n");
}
