/* Mixtures of experts: which ones compute a token, and their part of a layer. Included by step.c.

   Tokens of one expert lie beside each other, so that its weights are read once for all of them. A
   token's result is the sum of what its experts give, in the order of their scores: it depends on no
   other token. */

/* The `wanted` experts with the highest scores, best first, of equal ones the first; -INFINITY: none.
   Returns how many there are. */
static int32_t highest_experts(const float *scores, int32_t count, int32_t wanted, int32_t *found) {
    int32_t size = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!(scores[i] > -INFINITY) || (size == wanted && scores[i] <= scores[found[size - 1]]))
            continue;
        int32_t place = size < wanted ? size++ : size - 1;
        for (; place > 0 && scores[found[place - 1]] < scores[i]; place--)
            found[place] = found[place - 1];
        found[place] = i;
    }
    return size;
}

/* Leaves the scores of the best groups, and -INFINITY in the place of the others. */
static void keep_groups(const ft_experts *experts, float *scores) {
    const int32_t size = experts->count / experts->groups;
    float sums[MOST_EXPERTS];
    int32_t best[MOST_EXPERTS];
    for (int32_t group = 0; group < experts->groups; group++) {
        const float *own = scores + group * size;
        int32_t found = highest_experts(own, size, experts->group_best, best);
        sums[group] = 0.0f;
        for (int32_t i = 0; i < found; i++)
            sums[group] += own[best[i]];
    }
    int32_t kept = highest_experts(sums, experts->groups, experts->chosen_groups, best);
    uint8_t stays[MOST_EXPERTS] = {0};
    for (int32_t i = 0; i < kept; i++)
        stays[best[i]] = 1;
    for (int32_t i = 0; i < experts->count; i++)
        if (!stays[i / size])
            scores[i] = -INFINITY;
}

/* The softmax of some scores, in place. */
static void soften_scores(float *scores, int32_t count) {
    float highest = -INFINITY, sum = 0.0f;
    for (int32_t i = 0; i < count; i++)
        highest = scores[i] > highest ? scores[i] : highest;
    for (int32_t i = 0; i < count; i++)
        sum += scores[i] = expf(scores[i] - highest);
    for (int32_t i = 0; i < count; i++)
        scores[i] /= sum;
}

/* The experts of a token, and their weights. Scores that are no numbers leave the first experts. */
static void choose_experts(const ft_experts *experts, const float *scores, int32_t *chosen,
                           float *weights) {
    float each[MOST_EXPERTS], choice[MOST_EXPERTS], sum = 0.0f;
    const int32_t count = experts->count, wanted = experts->chosen;
    memcpy(each, scores, 4 * (size_t)count);
    if (experts->scoring == FT_SOFTMAX)
        soften_scores(each, count);
    for (int32_t i = 0; experts->scoring == FT_LOGISTIC && i < count; i++)
        each[i] = 1.0f / (1.0f + expf(-each[i]));
    for (int32_t i = 0; i < count; i++)
        choice[i] = each[i] + (experts->choice_bias ? experts->choice_bias[i] : 0.0f);
    if (experts->groups > 1)
        keep_groups(experts, choice);
    for (int32_t found = highest_experts(choice, count, wanted, chosen); found < wanted; found++)
        chosen[found] = found;
    for (int32_t i = 0; i < wanted; i++)
        weights[i] = each[chosen[i]];
    if (experts->scoring == FT_SOFTMAX_OF_CHOSEN)
        soften_scores(weights, wanted);
    for (int32_t i = 0; i < wanted; i++)
        sum += weights[i];
    for (int32_t i = 0; i < wanted; i++)
        weights[i] *= experts->renormalized ? experts->scaling / (sum + 1e-20f) : experts->scaling;
}

/* Puts the tokens of each expert beside each other. */
static void sort_slots(mixture *mix, const ft_experts *experts, int32_t nodes) {
    const int32_t count = experts->count, total = nodes * experts->chosen;
    memset(mix->first, 0, 4 * (size_t)(count + 1));
    for (int32_t i = 0; i < total; i++)
        mix->first[mix->chosen[i] + 1]++;
    mix->active_count = 0;
    for (int32_t i = 0; i < count; i++) {
        if (mix->first[i + 1])
            mix->active[mix->active_count++] = i;
        mix->first[i + 1] += mix->first[i];
    }
    for (int32_t i = 0; i < total; i++) {
        const int32_t place = mix->first[mix->chosen[i]]++;
        mix->slots[place] = (slot){i / experts->chosen, i % experts->chosen};
        mix->places[i] = place;
    }
    for (int32_t i = count; i > 0; i--)
        mix->first[i] = mix->first[i - 1];
    mix->first[0] = 0;
}

static int32_t forms_of_experts(const ft_experts *experts) {
    return ft_forms(experts->up) | (experts->gate ? ft_forms(experts->gate) : 0);
}

/* The rows of an expert's tokens, and the first of them; `rows` has those of all tokens. */
static const ft_rows *rows_of_expert(const mixture *mix, int32_t expert, const ft_rows *rows,
                                     int32_t *first, int32_t *count) {
    *first = mix->first[expert];
    *count = mix->first[expert + 1] - *first;
    if (*count > 1)
        return &mix->gathered;
    *first = mix->slots[*first].node;
    return rows;
}

/* What the router and the choice of experts give; `rows` are those that the layer's half reads. */
static void route(ft_team *team, int thread, step_job *job, const ft_experts *experts,
                  const ft_rows *rows) {
    mixture *mix = &job->mix;
    const int32_t nodes = job->step->nodes, count = experts->count, chosen = experts->chosen;
    const ft_matrix *parts[] = {&experts->router, &experts->share};
    multiply_parts(team, thread, parts, experts->share.outputs ? 2 : 1, rows, nodes, mix->scores,
                   count + 1);
    ft_barrier(team);
    for (int32_t row; (row = ft_next(team, thread, nodes)) < nodes;)
        choose_experts(experts, mix->scores + (int64_t)row * (count + 1),
                       mix->chosen + row * chosen, mix->weights + row * chosen);
    ft_barrier(team);
    if (!thread)
        sort_slots(mix, experts, nodes);
    ft_barrier(team);
    const int32_t total = nodes > 1 ? nodes * chosen : 0;
    for (int32_t i; (i = ft_next(team, thread, total)) < total;) {
        const slot *own = mix->slots + i;
        const int32_t expert = mix->chosen[own->node * chosen + own->rank];
        if (mix->first[expert + 1] - mix->first[expert] > 1)
            ft_copy_row(rows, own->node, &mix->gathered, i, forms_of_experts(experts));
    }
    if (total)
        ft_barrier(team);
}

/* Tokens of one expert: `pair` of the blocks of its gates, as inputs of its last product. */
static void gate_expert(step_job *job, const ft_experts *experts, int32_t expert, int32_t pair,
                        const ft_rows *rows) {
    mixture *mix = &job->mix;
    int32_t first, count, slots = mix->first[expert];
    rows = rows_of_expert(mix, expert, rows, &first, &count);
    const ft_matrix *gate = experts->gate ? experts->gate + expert : NULL;
    const ft_rows inner = rows_of_width(&mix->inner, experts->down->inputs);
    gate_pair(gate, experts->up + expert, pair, rows, first, count, experts->activation, &inner,
              slots, ft_forms(experts->down + expert));
}

/* The experts' part of a layer, into `branch`: in place of what is there, or added to the share of
   it that the layer's own MLP has. */
static void mix_experts(ft_team *team, int thread, step_job *job, const ft_layer *layer,
                        const ft_rows *rows) {
    const ft_experts *experts = layer->experts;
    mixture *mix = &job->mix;
    const int32_t hidden = job->model->hidden, nodes = job->step->nodes, chosen = experts->chosen;
    const int32_t pairs = experts->down->inputs / GROUP, active = mix->active_count;
    const int32_t total_strips = strips(experts->down);
    const ft_rows inner = rows_of_width(&mix->inner, experts->down->inputs);
    for (int32_t task; (task = ft_next(team, thread, active * pairs)) < active * pairs;)
        gate_expert(job, experts, mix->active[task / pairs], task % pairs, rows);
    ft_barrier(team);
    const int32_t tasks = active * total_strips;
    for (int32_t task; (task = ft_next(team, thread, tasks)) < tasks;) {
        const int32_t expert = mix->active[task / total_strips], first = mix->first[expert];
        multiply_strip(experts->down + expert, task % total_strips, &inner, first,
                       mix->first[expert + 1] - first, mix->given + (int64_t)first * hidden,
                       hidden, 0);
    }
    ft_barrier(team);
    for (int32_t row; (row = ft_next(team, thread, nodes)) < nodes;) {
        float *to = job->branch + (int64_t)row * hidden;
        const float share = mix->scores[(int64_t)row * (experts->count + 1) + experts->count];
        if (!layer->up.outputs)
            memset(to, 0, 4 * (size_t)hidden);
        else if (experts->share.outputs)
            kernels->limit(to, 1.0f / (1.0f + expf(-share)), 0.0f, hidden);
        for (int32_t i = 0; i < chosen; i++)
            kernels->add(to, mix->given + (int64_t)mix->places[row * chosen + i] * hidden,
                         mix->weights[row * chosen + i], hidden);
    }
    ft_barrier(team);
}
