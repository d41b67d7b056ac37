/* A layer's experts: each row chooses some, and gets their weighted sum in ascending order of their numbers. Part of cpu.c.
 *
 * The pairs of row and expert are sorted by expert, and an expert's panels meet all its rows, so that weights are read once a
 * pass. An output is the same chain of multiply-adds as that of a dense matrix, whichever rows share the expert. */

/* Whether `new` comes before `old`, which may be none. The first of equals stays. */
static inline int beats(const float *key, int candidate, int old) { return old < 0 || key[candidate] > key[old]; }

/* Marks the `count` largest of `n` keys that are not ruled out; of equal ones the first. A mark is 1, ruled out is 2. */
static void mark_best(const float *key, int n, int count, uint8_t *marks) {
    for (; count > 0; count--) {
        int top = -1;
        for (int i = 0; i < n; i++)
            if (!marks[i] && beats(key, i, top)) top = i;
        if (top < 0) return;
        marks[top] = 1;
    }
}

/* Rules out the experts of all groups but the best, by the sum of a group's two largest keys. */
static void rule_out_groups(const Experts *e, const float *key, uint8_t *marks) {
    int each = e->count / e->groups;
    float sums[MOST_EXPERTS];
    uint8_t kept[MOST_EXPERTS] = {0};
    for (int g = 0; g < e->groups; g++) {
        const float *own = key + g * each;
        int first = 0, second = -1;
        for (int i = 1; i < each; i++) {
            if (own[i] > own[first])
                second = first, first = i;
            else if (beats(own, i, second))
                second = i;
        }
        sums[g] = own[first] + own[second];
    }
    mark_best(sums, e->groups, e->groups_kept, kept);
    for (int i = 0; i < e->count; i++) marks[i] = kept[i / each] ? 0 : 2;
}

/* One row's choice from its logits. */
static void choose(const Experts *e, const float *logits, int32_t *chosen, float *weights) {
    float scores[MOST_EXPERTS], keys[MOST_EXPERTS], top = logits[0], sum = 0;
    uint8_t marks[MOST_EXPERTS] = {0};
    for (int i = 1; i < e->count; i++) top = logits[i] > top ? logits[i] : top;
    for (int i = 0; i < e->count; i++) sum += scores[i] = e->sigmoid ? 1.0f / (1.0f + expf(-logits[i])) : expf(logits[i] - top);
    for (int i = 0; i < e->count && !e->sigmoid; i++) scores[i] /= sum;
    for (int i = 0; i < e->count; i++)
        keys[i] = (e->by_score ? scores[i] : logits[i]) + (e->correction ? e->correction[i] : 0);
    if (e->groups > 1) rule_out_groups(e, keys, marks);
    mark_best(keys, e->count, e->per_token, marks);
    int found = 0;
    sum = e->floor;
    for (int i = 0; i < e->count; i++)
        if (marks[i] == 1) chosen[found] = i, sum += weights[found++] = scores[i];
    for (int j = 0; j < found; j++) weights[j] = (e->normalise ? weights[j] / sum : weights[j]) * e->scale;
}

typedef struct {
    const Experts *e;
    const Shape *s;
    const Work *w;
    const float *inputs, *norm_weight;
    int gated_mlp; /* whether all rows share an MLP, too */
} Mixing;

static void choose_rows(void *job, int member, int begin, int end) {
    const Mixing *m = job;
    int k = m->e->per_token;
    (void)member;
    for (int r = begin; r < end; r++)
        choose(m->e, m->w->logits + (size_t)r * m->e->count, m->w->chosen + (size_t)r * k, m->w->weights + (size_t)r * k);
}

/* Sorts the pairs by expert; returns how many experts have any. */
static int sort_pairs(const Experts *e, const Work *w, int M) {
    int pairs = M * e->per_token, found = 0, begin = 0;
    int32_t next[MOST_EXPERTS] = {0};
    for (int p = 0; p < pairs; p++) next[w->chosen[p]]++;
    for (int i = 0; i < e->count; i++) {
        int rows = next[i];
        if (!rows) continue;
        w->touched[found] = i, w->starts[found++] = next[i] = begin;
        begin += rows;
    }
    w->starts[found] = begin;
    for (int p = 0; p < pairs; p++) {
        int place = next[w->chosen[p]]++;
        w->places[p] = place, w->sources[place] = p;
    }
    return found;
}

static void gather_pairs(void *job, int member, int begin, int end) {
    const Mixing *m = job;
    int H = m->s->hidden;
    (void)member;
    for (int place = begin; place < end; place++) {
        int pair = m->w->sources[place];
        const float *x = m->inputs + (size_t)(pair / m->e->per_token) * H;
        float *to = m->w->gathered + (size_t)place * H, weight = m->e->weighs_input ? m->w->weights[pair] : 1;
        for (int i = 0; i < H; i++) to[i] = weight * x[i];
    }
}

/* Panels of every touched expert against its rows: those of gate and up, or of down. */
typedef struct {
    Gated gated;
    const Experts *e;
    const Work *w;
    int panels, down;
    float *y; /* of down */
} Spread;

static void expert_panels(void *job, int member, int begin, int end) {
    const Spread *spread = job;
    const Gated *g = &spread->gated;
    (void)member;
    for (int unit = begin, last; unit < end; unit = last) {
        int tile = unit / spread->panels, first = tile * spread->panels;
        int from = spread->w->starts[tile], count = spread->w->starts[tile + 1] - from;
        const Mlp *mlp = spread->e->each + spread->w->touched[tile];
        void *rooms[2] = {room_for(spread->down ? &mlp->down : &mlp->gate, g->K, count),
                          spread->down ? 0 : room_for(&mlp->up, g->K, count)};
        last = least(end, first + spread->panels);
        for (int n = unit - first; n < last - first; n++) {
            if (spread->down)
                linear_panel(&mlp->down, mlp->down_bias, n, &g->in, from, count, g->N, spread->y, 0, rooms[0]);
            else
                gated_panel(mlp, n, g, from, count, rooms);
        }
        free(rooms[0]);
        free(rooms[1]);
    }
}

static int spread(int threads, int tiles, Spread job) {
    int blocks = 0, N = job.gated.N;
    for (int t = 0; t < tiles; t++) {
        const Mlp *mlp = job.e->each + job.w->touched[t];
        blocks |= job.down ? in_blocks(&mlp->down) : in_blocks(&mlp->gate) || in_blocks(&mlp->up);
    }
    job.panels = panels_of(N);
    if (!inputs_for(threads, job.gated.x, job.gated.M, job.gated.K, job.w->starts, blocks, &job.gated.in)) return 0;
    team_run(threads, tiles * job.panels, expert_panels, &job);
    release(&job.gated.in);
    return 1;
}

/* How many experts have rows, as `sort_pairs` left it. */
static int tiles_of(const Work *w, int pairs) {
    int tiles = 0;
    while (w->starts[tiles] < pairs) tiles++;
    return tiles;
}

/* Chooses, and leaves what the experts' own matrices down read, and the weight of the MLP of all rows. */
static int activate_experts(const Layer *layer, const Shape *s, const Work *w, int M, const float *inputs) {
    const Experts *e = layer->experts;
    int threads = s->threads, pairs = M * e->per_token;
    Mixing job = {e, s, w, inputs, 0, 0};
    if (!linear(threads, (Linear){e->router, e->router_bias, inputs, M, e->count, s->hidden, w->logits, 0, {0}})) return 0;
    if (e->shared_gate.parts[0].outputs) {
        if (!linear(threads, (Linear){e->shared_gate, 0, inputs, M, 1, s->hidden, w->shared_weight, 0, {0}})) return 0;
        for (int r = 0; r < M; r++) w->shared_weight[r] = 1.0f / (1.0f + expf(-w->shared_weight[r]));
    }
    team_run(M > FEW ? threads : 1, M, choose_rows, &job);
    int tiles = sort_pairs(e, w, M);
    *w->read += tiles;
    team_run(pairs > FEW ? threads : 1, pairs, gather_pairs, &job);
    Gated gated = {0, w->gathered, pairs, e->width, s->hidden, layer->gelu, layer->clamp, w->expert_act, {0}};
    return spread(threads, tiles, (Spread){gated, e, w, 0, 0, 0});
}

/* y += residual times the mixture, or becomes it where a norm follows. A row is one chain over its experts. */
static void mix_rows(void *job, int member, int begin, int end) {
    const Mixing *m = job;
    const Work *w = m->w;
    int N = m->s->sums, k = m->e->per_token;
    (void)member;
    for (int r = begin; r < end; r++) {
        const int32_t *places = w->places + (size_t)r * k;
        const float *weights = w->weights + (size_t)r * k, *shared = w->mixture + (size_t)r * N;
        float gate = m->e->shared_gate.parts[0].outputs ? w->shared_weight[r] : 1;
        float *y = (m->norm_weight && alone(w) ? w->mixture : w->sums) + (size_t)r * N;
        for (int i = 0; i < N; i++) {
            float sum = 0;
            for (int j = 0; j < k; j++) {
                float part = w->gathered[(size_t)places[j] * N + i];
                sum += m->e->weighs_input ? part : weights[j] * part;
            }
            if (m->gated_mlp) sum += gate * shared[i];
            y[i] = m->norm_weight ? sum : y[i] + m->s->residual * sum;
        }
    }
}

static int add_experts(const Layer *layer, const Shape *s, const Work *w, int M) {
    const Experts *e = layer->experts;
    const Mlp *mlp = &layer->mlp;
    int threads = s->threads, pairs = M * e->per_token;
    Mixing job = {e, s, w, 0, layer->down_norm, layer->intermediate > 0};
    Gated down = {0, w->all_expert_act, pairs, s->sums, e->all_width, 0, 0, 0, {0}};
    if (!spread(threads, tiles_of(w, pairs), (Spread){down, e, w, 0, 1, w->gathered})) return 0;
    if (layer->intermediate &&
        !linear(threads, (Linear){mlp->down, mlp->down_bias, w->all_act, M, s->sums, layer->all_act, w->mixture, 0, {0}}))
        return 0;
    team_run(M > 1 ? threads : 1, M, mix_rows, &job);
    if (layer->down_norm && alone(w))
        norm(threads, M, (Norm){w->mixture, 0, layer->down_norm, s->hidden, s->eps, w->x, s->residual});
    return 1;
}
