/* What Python hands to the library, looked at before any of it is used: sizes that do not belong to
   each other, and numbers of tokens, rows, layers and positions beyond what there is. */

#include "foretell_native.h"

#include <stddef.h>

#define WIDEST 1024 /* levels, and nodes of one, of a tree */

static int within(int64_t number, int64_t count) { return number >= 0 && number < count; }

static int32_t all_within(const int32_t *numbers, int32_t count, int32_t below) {
    for (int32_t i = 0; i < count; i++)
        if (!within(numbers[i], below))
            return FT_OUTSIDE;
    return FT_DONE;
}

/* Whether scales, or least values, can be of this kind: whole factors need whole super-blocks. */
static int scaled(const ft_matrix *matrix, int32_t scaling) {
    return within(scaling, FT_POINT + 1) &&
           (scaling != FT_SUPER || !(matrix->inputs % SUPER));
}

/* Whether floats of 8 bits have scales as the kernels read them. */
static int check_signed8(const ft_matrix *matrix) {
    const int32_t group = matrix->group, scaling = matrix->scaling;
    const int grouped = group == 32 || group == 64 || group == 128 || group == 256;
    return grouped && !(matrix->inputs % group) && matrix->scales &&
           (scaling == FT_HALF || scaling == FT_SINGLE) && matrix->least_scaling == FT_NONE &&
           !matrix->minima;
}

/* Whether what whole numbers stand for is said as the kernels read it. */
static int check_whole(const ft_matrix *matrix) {
    const int32_t bits = matrix->bits, group = matrix->group;
    const int known = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
    const int grouped = group == 16 || group == 32 || group == 64 || group == 128 || group == 256;
    if (!known || !grouped || matrix->inputs % group || !within(matrix->offset, 256))
        return 0;
    if (matrix->table && (bits != 4 || matrix->offset))
        return 0;
    if (matrix->fine && (!matrix->table || group == 16 || matrix->minima))
        return 0;
    if (group == 16 && (matrix->table ? !ft_is_narrow(matrix->table)
                                      : bits == 4 || bits == 5 || bits == 8))
        return 0;
    return matrix->scales && scaled(matrix, matrix->scaling) && matrix->scaling != FT_NONE &&
           matrix->scaling != FT_POINT && scaled(matrix, matrix->least_scaling) &&
           !matrix->minima == (matrix->least_scaling == FT_NONE);
}

/* `outputs` and `inputs` that are wanted; 0: any. */
int32_t ft_check_matrix(const ft_matrix *matrix, int64_t outputs, int64_t inputs) {
    const int known = within(matrix->format, FT_FORMATS);
    const int sized = matrix->outputs > 0 && matrix->inputs > 0 && !(matrix->inputs % GROUP) &&
                      matrix->blocks == matrix->outputs / BLOCK + (matrix->outputs % BLOCK > 0);
    const int fits = (!outputs || matrix->outputs == outputs) &&
                     (!inputs || matrix->inputs == inputs);
    return known && sized && fits && matrix->weights &&
                   (matrix->format != FT_WHOLE || check_whole(matrix)) &&
                   (matrix->format != FT_SIGNED8 || check_signed8(matrix))
               ? FT_DONE
               : FT_MISFIT;
}

int32_t ft_check_rows(const ft_matrix *matrix, const int64_t *outputs, int32_t count) {
    if (count < 0 || ft_check_matrix(matrix, 0, 0) != FT_DONE)
        return FT_MISFIT;
    for (int32_t i = 0; i < count; i++)
        if (!within(outputs[i], matrix->outputs))
            return FT_OUTSIDE;
    return FT_DONE;
}

static int is_number(float value) { return value - value == 0.0f; }

static int32_t check_experts(const ft_experts *experts, int64_t hidden) {
    const int32_t count = experts->count;
    if (count < 1 || count > MOST_EXPERTS || experts->chosen < 1 || experts->chosen > count ||
        !within(experts->scoring, FT_SCORINGS) || !within(experts->activation, FT_ACTIVATIONS) ||
        experts->groups < 1 || count % experts->groups || experts->chosen_groups < 1 ||
        experts->chosen_groups > experts->groups || experts->group_best < 1 ||
        !is_number(experts->scaling) || !experts->up || !experts->down ||
        ft_check_matrix(&experts->router, count, hidden) != FT_DONE)
        return FT_MISFIT;
    if (experts->share.outputs && ft_check_matrix(&experts->share, 1, hidden) != FT_DONE)
        return FT_MISFIT;
    if (experts->activation == FT_CLAMPED_SILU && !experts->gate)
        return FT_MISFIT;
    const int64_t inner = experts->down->inputs;
    for (int32_t i = 0; i < count; i++)
        if (ft_check_matrix(experts->up + i, inner, hidden) != FT_DONE ||
            ft_check_matrix(experts->down + i, hidden, inner) != FT_DONE ||
            ft_forms(experts->up + i) != ft_forms(experts->up) ||
            (experts->gate && (ft_check_matrix(experts->gate + i, inner, hidden) != FT_DONE ||
                               ft_forms(experts->gate + i) != ft_forms(experts->gate))))
            return FT_MISFIT;
    return FT_DONE;
}

/* Whether an MLP fits, or there is none. */
static int check_mlp(const ft_layer *layer, int64_t hidden) {
    const int64_t inner = layer->down.inputs;
    if (!layer->up.outputs && !layer->down.outputs)
        return !layer->gate.outputs && layer->experts;
    return ft_check_matrix(&layer->down, hidden, 0) == FT_DONE &&
           ft_check_matrix(&layer->up, inner, hidden) == FT_DONE &&
           (!layer->gate.outputs || ft_check_matrix(&layer->gate, inner, hidden) == FT_DONE);
}

/* Whether matrices, norms and numbers of a layer belong to a model. */
static int32_t check_layer(const ft_model *model, const ft_layer *layer) {
    const int64_t hidden = model->hidden, queries = (int64_t)model->heads * model->width;
    const int64_t keys = (int64_t)model->kv_heads * model->width;
    const int64_t read = layer->token_norm.weight ? 2 * hidden : hidden;
    const int fits = ft_check_matrix(&layer->query, queries, read) == FT_DONE &&
                     ft_check_matrix(&layer->key, keys, read) == FT_DONE &&
                     ft_check_matrix(&layer->value, keys, read) == FT_DONE &&
                     ft_check_matrix(&layer->out, hidden, queries) == FT_DONE &&
                     check_mlp(layer, hidden) &&
                     (!layer->experts || check_experts(layer->experts, hidden) == FT_DONE);
    const int normed = !layer->query_norm.weight == !layer->key_norm.weight &&
                       (!layer->whole_heads || layer->query_norm.weight);
    const int apart = !layer->parallel || (!layer->after_attention.weight &&
                                           !layer->after_mlp.weight &&
                                           !layer->token_norm.weight && !layer->experts);
    const int split = layer->activation != FT_CLAMPED_SILU || layer->gate.outputs;
    return fits && normed && apart && split && layer->rotation >= -1 && layer->window >= 0 &&
                   within(layer->activation, FT_ACTIVATIONS) && is_number(layer->scale) &&
                   is_number(layer->score_cap) && is_number(layer->residual)
               ? FT_DONE
               : FT_MISFIT;
}

static int32_t check_model(const ft_model *model) {
    const int32_t width = model->width, heads = model->heads, keys = model->kv_heads;
    if (model->layers < 1 || heads < 1 || keys < 1 || heads % keys || heads / keys > MOST_NODES ||
        model->hidden < 1 || model->hidden % GROUP || width < 1 || width % GROUP ||
        !model->layer || !is_number(model->logit_scale) || !is_number(model->logit_cap))
        return FT_MISFIT;
    for (int32_t l = 0; l < model->layers; l++)
        if (check_layer(model, model->layer + l) != FT_DONE)
            return FT_MISFIT;
    return ft_check_matrix(&model->head, 0, model->hidden);
}

static int32_t check_rotations(const ft_model *model, const ft_step *step) {
    if (step->positions < 0 || step->rotation_count < 0)
        return FT_MISFIT;
    for (int32_t i = 0; i < step->rotation_count; i++) {
        const ft_rotation *rotation = step->rotations + i;
        if (!rotation->cosines || !rotation->sines || rotation->turned < 2 ||
            rotation->turned % 2 || rotation->turned > model->width)
            return FT_MISFIT;
    }
    for (int32_t l = 0; l < model->layers; l++)
        if (!within(model->layer[l].rotation + 1, (int64_t)step->rotation_count + 1))
            return FT_OUTSIDE;
    if (model->position_rows && step->positions > model->position_count)
        return FT_OUTSIDE;
    return FT_DONE;
}

static int32_t check_job(const ft_job *job, int32_t positions) {
    if (job->nodes < 1 || job->start < 0 || job->start > job->room - job->nodes ||
        !within(job->base, (int64_t)job->start + job->nodes + 1) || !job->positions ||
        !job->keys || !job->values || !within(job->segments, MOST_SPANS + 1) ||
        (job->segments && !job->segment))
        return FT_MISFIT;
    for (int32_t s = 0; s < job->segments; s++)
        if (job->segment[s].rows < 0 || !job->segment[s].keys || !job->segment[s].values)
            return FT_MISFIT;
    return all_within(job->positions, job->nodes, positions);
}

/* `between`: whether the caller computes attention. */
int32_t ft_check_step(const ft_model *model, const ft_step *step, int between) {
    int64_t nodes = 0;
    if (check_model(model) != FT_DONE || step->job_count < 1 || !step->jobs ||
        (step->rotation_count && !step->rotations) || (!between && !step->states) || step->row_count < 0 ||
        step->layer_count < 0 || step->tap_count < 0 || (step->row_count && !step->logits) ||
        (step->tap_count && !step->tapped))
        return FT_MISFIT;
    const int32_t turned = check_rotations(model, step);
    if (turned != FT_DONE)
        return turned;
    for (int32_t j = 0; j < step->job_count; j++) {
        const int32_t found = check_job(step->jobs + j, step->positions);
        if (found != FT_DONE)
            return found;
        nodes += step->jobs[j].nodes;
    }
    if (nodes != step->nodes || step->row_count > nodes)
        return FT_MISFIT;
    for (int32_t l = 0; l < model->layers && !step->tokens; l++)
        if (model->layer[l].token_norm.weight)
            return FT_MISFIT;
    if (all_within(step->rows, step->row_count, step->nodes) != FT_DONE ||
        all_within(step->layers, step->layer_count, model->layers) != FT_DONE ||
        all_within(step->taps, step->tap_count, model->layers + 1) != FT_DONE)
        return FT_OUTSIDE;
    return FT_DONE;
}

int32_t ft_check_between(const ft_model *model, const ft_between *between) {
    if (!between->hidden || !between->qkv || (between->after >= 0 && !between->attended))
        return FT_MISFIT;
    return within(between->after + 1, model->layers + 1) &&
                   within(between->before + 1, model->layers + 1)
               ? FT_DONE
               : FT_OUTSIDE;
}

/* What goes on reads rows of `embeddings` as states, and has one row of logits a job. */
static int32_t check_going_on(const ft_model *model, const ft_step *step,
                              const ft_matrix *embeddings) {
    if (!embeddings || step->row_count != step->job_count)
        return FT_MISFIT;
    return ft_check_matrix(embeddings, 0, model->hidden);
}

int32_t ft_check_following(const ft_model *model, const ft_step *step,
                           const ft_following *following) {
    if (following->count < 1 || !following->tokens || !following->chances)
        return FT_MISFIT;
    return check_going_on(model, step, following->embeddings);
}

int32_t ft_check_growth(const ft_model *model, const ft_step *step, const ft_growth *growth) {
    const ft_matrix *enter = &growth->enter;
    if (growth->depth < 1 || growth->depth > WIDEST || growth->breadth < 1 ||
        growth->breadth > WIDEST || growth->chosen < 1 || !growth->tokens || !growth->parents ||
        !growth->counts || !growth->chances)
        return FT_MISFIT;
    if (enter->outputs &&
        ft_check_matrix(enter, model->hidden, 2 * (int64_t)model->hidden) != FT_DONE)
        return FT_MISFIT;
    return check_going_on(model, step, growth->embeddings);
}

int32_t ft_check_reading(const ft_reading *reading) {
    const int32_t rows = reading->rows, page = reading->page;
    if (reading->heads < 1 || reading->kv_heads < 1 || reading->heads % reading->kv_heads ||
        reading->nodes < 0 || rows < 0 || reading->width < 1 || !within(reading->wide, 2) ||
        !reading->keys || !reading->q || !reading->out)
        return FT_MISFIT;
    if (reading->owners != reading->heads && reading->owners != reading->kv_heads)
        return FT_MISFIT;
    if (!reading->lists)
        return FT_DONE;
    /* Of each node there is room for every row once. */
    if (page < 1 || reading->longest < 0 || !within(reading->first, (int64_t)rows + 1) ||
        (int64_t)reading->longest * page > reading->first)
        return FT_MISFIT;
    const int64_t count = (int64_t)reading->owners * reading->nodes * reading->longest;
    const int32_t pages = rows / page;
    for (int64_t i = 0; i < count; i++)
        if (!within(reading->lists[i], pages))
            return FT_OUTSIDE;
    return FT_DONE;
}
