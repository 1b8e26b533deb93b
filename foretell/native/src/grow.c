/* Trees of a head on a target's states: the best children of the best nodes, level by level, and of
   all of them the best at the end (EAGLE-2, section 4). */

#define _GNU_SOURCE
#include "foretell_native.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A node that was drafted; `total`: log of the chance of its whole path. */
typedef struct {
    int64_t token;
    int32_t parent, level, row; /* row: where the layers keep it, -1: nowhere */
    float chance, total;
} grown;

typedef struct {
    grown *nodes;       /* in the order in which they came about */
    int32_t count;
    int32_t *frontier;  /* those that the last level computed */
    int32_t width;      /* how many */
    int32_t rows;       /* of the layers, below the text */
    int32_t fresh;      /* the first node of the newest level */
    uint8_t *seen;      /* of the frontier */
    float *root, *states; /* what the text's last node and the computed nodes left */
} tree;

/* Adds the best children of a node (-1: the text) whose logits are given. */
static void add_children(tree *of, int32_t parent, const float *logits, int32_t outputs,
                         const ft_growth *growth, int32_t *found) {
    float best;
    int32_t first = ft_chosen()->best(logits, outputs, &best);
    int32_t count = ft_best_of(logits, outputs, growth->breadth, found);
    for (int32_t i = 0; i < count; i++) {
        grown *node = of->nodes + of->count++;
        node->token = growth->names ? growth->names[found[i]] : found[i];
        node->parent = parent;
        node->level = parent < 0 ? 0 : of->nodes[parent].level + 1;
        node->row = -1;
        node->chance = best * expf(logits[found[i]] - logits[first]);
        node->total = logf(node->chance) + (parent < 0 ? 0.0f : of->nodes[parent].total);
    }
}

/* The nodes from `first` on with the highest totals, at most `count`; those of equal totals in the
   order in which they came about. */
static int32_t highest(const tree *of, int32_t first, int32_t count, int32_t *found) {
    int32_t size = 0;
    for (int32_t i = first; i < of->count; i++) {
        if (size == count && of->nodes[i].total <= of->nodes[found[size - 1]].total)
            continue;
        int32_t place = size < count ? size++ : size - 1;
        for (; place > 0 && of->nodes[found[place - 1]].total < of->nodes[i].total; place--)
            found[place] = found[place - 1];
        found[place] = i;
    }
    return size;
}

/* The nodes of the newest level that have children: none where the best is too unlikely. */
static void look_ahead(tree *of, const ft_growth *growth) {
    of->width = highest(of, of->fresh, growth->breadth, of->frontier);
    if (of->width && expf(of->nodes[of->frontier[0]].total) < growth->least)
        of->width = 0;
}

static int by_number(const void *one, const void *other) {
    return *(const int32_t *)one - *(const int32_t *)other;
}

/* Of a grown tree the nodes that are chosen, parents before children. */
static void choose(const tree *of, const ft_growth *growth, int32_t job, int32_t *found,
                   int32_t *places) {
    int32_t count = highest(of, 0, growth->chosen, found);
    int64_t at = (int64_t)job * growth->chosen;
    qsort(found, (size_t)count, sizeof(int32_t), by_number);
    for (int32_t i = 0; i < count; i++) {
        const grown *node = of->nodes + found[i];
        places[found[i]] = i;
        growth->tokens[at + i] = node->token;
        growth->parents[at + i] = node->parent < 0 ? -1 : places[node->parent];
        growth->chances[at + i] = node->chance;
    }
    growth->counts[job] = count;
}

/* x (count,) normed; as it is where there is no norm. */
static void normed_into(const float *x, const ft_norm *norm, int32_t count, float *out) {
    if (norm->weight)
        ft_chosen()->norm(x, norm, count, out);
    else
        memcpy(out, x, 4 * (size_t)count);
}

static int64_t apart(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static void *piece(char **memory, int64_t bytes) {
    void *found = *memory;
    *memory += apart(bytes);
    return found;
}

EXPORT int32_t ft_grow(const ft_model *model, const ft_step *step, const ft_growth *growth,
                       int32_t threads) {
    int32_t done = ft_check_step(model, step, 0);
    if (done == FT_DONE)
        done = ft_check_growth(model, step, growth);
    if (done != FT_DONE)
        return done;
    const int32_t jobs = step->job_count, hidden = model->hidden, outputs = model->head.outputs;
    const int32_t breadth = growth->breadth, most = jobs * breadth;
    const int32_t per_tree = breadth + (growth->depth - 1) * breadth * breadth;
    const int32_t below = growth->depth * breadth; /* rows of the layers below a text */
    int32_t longest = 0;
    for (int32_t j = 0; j < jobs; j++) {
        int32_t own = step->jobs[j].start - step->jobs[j].base + step->jobs[j].nodes;
        longest = own > longest ? own : longest;
    }
    const int64_t state_bytes = 4 * (int64_t)hidden, masks = (int64_t)breadth * (longest + below);
    int64_t bytes = apart(jobs * (int64_t)sizeof(tree)) + apart(jobs * (int64_t)sizeof(ft_job)) +
                    jobs * (apart(per_tree * (int64_t)sizeof(grown)) + apart(4 * breadth) +
                            apart(masks) + apart(below * state_bytes)) +
                    apart(8 * (int64_t)most) + 3 * apart(4 * (int64_t)most) +
                    apart(4 * (int64_t)(per_tree + growth->chosen + breadth)) +
                    apart(4 * (int64_t)per_tree) + 4 * apart(most * state_bytes) +
                    apart(2 * most * state_bytes) + jobs * apart(state_bytes) +
                    apart(step->nodes * state_bytes) + apart(4 * (int64_t)most * outputs);
    char *memory = NULL, *place;
    if (posix_memalign((void **)&memory, 64, (size_t)bytes))
        return FT_NO_MEMORY;
    place = memory;
    tree *trees = piece(&place, jobs * (int64_t)sizeof(tree));
    ft_job *parts = piece(&place, jobs * (int64_t)sizeof(ft_job));
    int64_t *tokens = piece(&place, 8 * (int64_t)most);
    int32_t *positions = piece(&place, 4 * (int64_t)most);
    int32_t *rows = piece(&place, 4 * (int64_t)most);
    int32_t *owners = piece(&place, 4 * (int64_t)most);
    int32_t *found = piece(&place, 4 * (int64_t)(per_tree + growth->chosen + breadth));
    int32_t *places = piece(&place, 4 * (int64_t)per_tree);
    float *embedded = piece(&place, most * state_bytes);
    float *entering = piece(&place, most * state_bytes);
    float *left = piece(&place, most * state_bytes);
    float *states = piece(&place, most * state_bytes);
    float *both = piece(&place, 2 * most * state_bytes);
    float *first_states = piece(&place, step->nodes * state_bytes);
    float *logits = piece(&place, 4 * (int64_t)most * outputs);
    const int32_t last_tap = model->layers;
    const ft_norm none = {.weight = NULL};
    const ft_norm *out_norm = growth->hands_on_normed ? &model->norm : &none;

    ft_step next = *step;
    next.taps = &last_tap;
    next.tap_count = 1;
    next.tapped = first_states;
    done = ft_forward(model, &next, threads);
    for (int32_t j = 0; done == FT_DONE && j < jobs; j++) {
        tree *of = trees + j;
        *of = (tree){.nodes = piece(&place, per_tree * (int64_t)sizeof(grown)),
                     .frontier = piece(&place, 4 * breadth),
                     .seen = piece(&place, masks),
                     .root = piece(&place, state_bytes),
                     .states = piece(&place, below * state_bytes)};
        add_children(of, -1, step->logits + (int64_t)j * outputs, outputs, growth, found);
        look_ahead(of, growth);
        normed_into(first_states + (int64_t)step->rows[j] * hidden, out_norm, hidden,
                    of->root);
    }
    int32_t forwards = 1;
    for (int32_t level = 1; done == FT_DONE && level < growth->depth; level++) {
        int32_t nodes = 0, growing = 0;
        for (int32_t j = 0; j < jobs; j++) {
            const ft_job *text = step->jobs + j;
            tree *of = trees + j;
            of->fresh = of->count;
            if (!of->width)
                continue;
            const int32_t own = text->start - text->base + text->nodes;
            const int32_t columns = own + of->rows + of->width;
            ft_job *part = parts + growing++;
            *part = *text;
            part->start = text->start + text->nodes + of->rows;
            part->nodes = of->width;
            part->positions = positions + nodes;
            part->seen = of->seen;
            memset(of->seen, 0, (size_t)of->width * (size_t)columns);
            for (int32_t i = 0; i < of->width; i++, nodes++) {
                grown *node = of->nodes + of->frontier[i];
                const float *state = of->root;
                if (node->parent >= 0)
                    state = of->states + (int64_t)of->nodes[node->parent].row * hidden;
                memcpy(entering + (int64_t)nodes * hidden, state, (size_t)state_bytes);
                tokens[nodes] = node->token;
                positions[nodes] = text->positions[text->nodes - 1] + level;
                rows[nodes] = nodes;
                owners[nodes] = j;
                node->row = of->rows + i;
                uint8_t *sees = of->seen + (int64_t)i * columns;
                memset(sees, 1, (size_t)own);
                for (int32_t at = of->frontier[i]; at >= 0; at = of->nodes[at].parent)
                    sees[own + of->nodes[at].row] = 1;
            }
        }
        if (!growing)
            break;
        done = ft_rows_of(growth->embeddings, tokens, nodes, embedded);
        if (done != FT_DONE)
            break;
        for (int64_t k = 0; growth->scale != 1.0f && k < (int64_t)nodes * hidden; k++)
            embedded[k] *= growth->scale;
        const float *enters = entering;
        if (growth->enter.outputs) {
            for (int32_t i = 0; i < nodes; i++) {
                float *to = both + 2 * (int64_t)i * hidden;
                normed_into(embedded + (int64_t)i * hidden, &growth->token_norm, hidden, to);
                normed_into(entering + (int64_t)i * hidden, &growth->state_norm, hidden,
                            to + hidden);
            }
            done = ft_product(&growth->enter, both, nodes, states, threads);
            enters = states;
        }
        next.jobs = parts;
        next.job_count = growing;
        next.nodes = next.row_count = nodes;
        next.states = enters;
        next.tokens = embedded;
        next.rows = rows;
        next.logits = logits;
        next.tapped = left;
        if (done == FT_DONE)
            done = ft_forward(model, &next, threads);
        forwards++;
        for (int32_t i = 0, k = 0; done == FT_DONE && i < nodes; i++) {
            tree *of = trees + owners[i];
            k = i && owners[i] == owners[i - 1] ? k + 1 : 0;
            int32_t parent = of->frontier[k];
            normed_into(left + (int64_t)i * hidden, out_norm, hidden,
                        of->states + (int64_t)of->nodes[parent].row * hidden);
            add_children(of, parent, logits + (int64_t)i * outputs, outputs, growth, found);
        }
        for (int32_t j = 0; done == FT_DONE && j < jobs; j++) {
            tree *of = trees + j;
            of->rows += of->width;
            look_ahead(of, growth);
        }
    }
    for (int32_t j = 0; done == FT_DONE && j < jobs; j++)
        choose(trees + j, growth, j, found, places);
    free(memory);
    return done == FT_DONE ? forwards : done;
}
