/* Part of cpu.c: an EAGLE head (draft/eagle_head.py), whose drafts are made in one call. What it computes is what the
 * single kernels compute in turn, as draft/eagle.py calls them for drafts of other kinds. */

typedef struct {
    Matrix embedding, fuse, words; /* words: what gives logits */
    const float *ones;             /* scales features in groups of `together`; 0: they are taken as they are */
    const float *embed_norm, *first_norm, *norm;
    const Layer *const *layers;
    char *const *keys, *const *values; /* by layer */
    const int64_t *to_target;           /* [its words], their ids in the target; null: they are the target's */
    int32_t count, taps, together, normed_residual, norm_output, vocab;
    float embedding_scale;
} Eagle;

typedef struct {
    const Eagle *head;
    const Rows *b;
    const int64_t *ids;
    const float *hidden;
    int H;
    float eps;
    float *inputs, *x; /* [rows][2 H] and [rows][H]; x may be `hidden` */
} Joining;

/* What the first layer reads: a token's embedding and the hidden state before it, each normed. */
static void join_rows(void *job, int member, int begin, int end) {
    const Joining *j = job;
    const Eagle *h = j->head;
    int H = j->H;
    for (int r = begin; r < end; r++) {
        const float *hidden = j->hidden + (size_t)r * H;
        float *inputs = j->inputs + (size_t)r * 2 * H, *x = j->x + (size_t)r * H;
        embed_rows(&(Embedding){&h->embedding, j->ids + r, H, h->embedding_scale, inputs}, member, 0, 1);
        rms_norm(inputs, h->embed_norm, H, j->eps, inputs);
        rms_norm(hidden, h->first_norm, H, j->eps, inputs + H);
        memmove(x, h->normed_residual ? inputs + H : hidden, H * sizeof(float));
    }
}

/* All layers over hidden states [rows][H] and the embeddings of `ids`: x [rows][H], which may be `hidden`. */
int outrider_eagle_forward(const Eagle *h, const Shape *s, const Rows *b, const Work *given, const int64_t *ids,
                           const float *hidden, float *inputs, float *x) {
    int rows = b->rows, H = s->hidden, threads = rows > FEW ? s->threads : 1;
    Work w = *given;
    w.x = w.sums = x;
    team_run(threads, rows, join_rows, &(Joining){h, b, ids, hidden, H, s->eps, inputs, x});
    for (int i = 0; i < h->count; i++)
        if (!outrider_layer_from(h->layers[i], s, b, &w, i ? 0 : inputs, 2 * H, h->keys[i], h->values[i])) return 0;
    if (h->norm_output) norm(s->threads, rows, (Norm){x, 0, h->norm, H, s->eps, x, 0});
    return 1;
}

/* The same of known tokens, from the target's hidden states before them: features [slots][taps][H], of these slots. */
int outrider_eagle_read(const Eagle *h, const Shape *s, const Rows *b, const Work *w, const int64_t *ids,
                        const float *features, const int32_t *slots, float *gathered, float *inputs, float *x) {
    int rows = b->rows, width = h->taps * s->hidden;
    for (int r = 0; r < rows; r++)
        memcpy(gathered + (size_t)r * width, features + (size_t)slots[r] * width, width * sizeof(float));
    if (h->together)
        norm(s->threads, rows * (width / h->together), (Norm){gathered, 0, h->ones, h->together, s->eps, gathered, 0});
    if (!linear(s->threads, (Linear){h->fuse, 0, gathered, rows, s->hidden, width, x, 0, {0}})) return 0;
    return outrider_eagle_forward(h, s, b, w, ids, x, inputs, x);
}

#define BRANCH 4      /* as in draft/tree.py: children of a node where drafts branch, */
#define CANDIDATES 64 /* and the likeliest tokens, which alone take part in their draw */

/* What is drafted for some sequences, which are in the order of falling depth. */
typedef struct {
    int32_t count, depth, words, filtered; /* depth: of the deepest; words: so many are drafted */
    const int32_t *depths, *children;      /* [count], as all that follow; children: 1, or BRANCH */
    const uint8_t *sampled;
    const int64_t *seeds, *known; /* known: tokens */
    const float *divisors;        /* of logits */
    const int64_t *top_k;
    const float *top_p, *log_min_p;
    const int32_t *slots, *last; /* [depth - 1][count]: for the best tokens of all levels but the last; rows of `read` */
    const float *features;
    const int64_t *read_ids;
    const int32_t *before; /* slots of the tokens before those that are read */
    float *gathered, *x, *inputs; /* scratch: by rows of `read` */
    float *hidden, *normed, *logits, *wide; /* [count][H], [count][H], [count][words], [count][vocab] */
    int32_t *positions;
    int64_t *ancestors, *at, *ids;
    Best *best;      /* [count][CHUNKS] */
    int64_t *tokens; /* [depth][count][BRANCH], the best first */
    float *shares;   /* the same: of the draw; 0: the drafter rules the token out */
} Drafts;

/* The first outputs of a matrix. */
static Matrix first_of(Matrix w, int outputs) {
    for (int p = 0; p < PARTS; p++) {
        w.parts[p].outputs = least(w.parts[p].outputs, outputs);
        outputs -= w.parts[p].outputs;
    }
    return w;
}

/* The likeliest tokens, in any order; returns how many. */
static int likeliest(const float *logits, int vocab, Best found[CANDIDATES]) {
    int count = 0, worst = 0;
    for (int v = 0; v < vocab; v += 16) {
        int n = least(16, vocab - v);
        float most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int i = 0; i < n; i++) most = logits[v + i] > most ? logits[v + i] : most;
        if (most == -INFINITY || (count == CANDIDATES && most <= found[worst].score)) continue;
        for (int i = 0; i < n; i++) {
            float score = logits[v + i];
            if (score == -INFINITY || (count == CANDIDATES && score <= found[worst].score)) continue;
            found[count < CANDIDATES ? count++ : worst] = (Best){score, v + i};
            for (int c = 0; c < count; c++)
                if (c == 0 || found[c].score < found[worst].score) worst = c;
        }
    }
    return count;
}

/* The best few tokens of one row by the law, and their shares of all candidates. */
static void branch(const float *logits, int vocab, int sampled, uint64_t seed, uint32_t position, int64_t *tokens,
                   float *shares) {
    Best found[CANDIDATES], top = {-INFINITY, 0};
    int count = likeliest(logits, vocab, found);
    float sum = 0;
    for (int c = 0; c < count; c++) {
        uint32_t word[4];
        if (sampled) {
            philox((uint32_t)found[c].token / 4, position, seed, word);
            found[c].score += gumbel(uniform(word[found[c].token % 4]));
        }
        keep(&top, found[c].score, found[c].token);
    }
    for (int c = 0; c < count; c++) sum += expf(found[c].score - top.score);
    for (int child = 0; child < BRANCH; child++) {
        Best best = {-INFINITY, 0};
        int at = -1;
        for (int c = 0; c < count; c++) {
            Best before = best;
            keep(&best, found[c].score, found[c].token);
            if (best.token != before.token || best.score != before.score) at = c;
        }
        tokens[child] = best.token, shares[child] = at < 0 ? 0 : expf(best.score - top.score) / sum;
        if (at >= 0) found[at] = found[--count];
    }
}

typedef struct {
    const Drafts *d;
    const float *logits;
    int vocab;
    int64_t *tokens;
    float *shares;
} Branching;

static void branch_rows(void *job, int member, int begin, int end) {
    const Branching *b = job;
    const Drafts *d = b->d;
    (void)member;
    for (int i = begin; i < end; i++) {
        int64_t *tokens = b->tokens + (size_t)i * BRANCH;
        float *shares = b->shares + (size_t)i * BRANCH;
        if (d->children[i] == 1) tokens[0] = d->ids[i], shares[0] = 1;
        else branch(b->logits + (size_t)i * b->vocab, b->vocab, d->sampled[i], (uint64_t)d->seeds[i], (uint32_t)d->at[i], tokens, shares);
    }
}

/* Logits of the rows: of the words that are drafted, or of the target's vocabulary where the head has its own ids; those
 * that it does not know keep minus infinity. Returns null if there is no memory. */
static float *draft_logits(const Eagle *h, const Shape *s, const Drafts *d, Matrix words, int rows) {
    int H = s->hidden;
    const float *normed = d->hidden;
    if (!h->norm_output) {
        norm(s->threads, rows, (Norm){d->hidden, 0, h->norm, H, s->eps, d->normed, 0});
        normed = d->normed;
    }
    if (!linear(s->threads, (Linear){words, 0, normed, rows, d->words, H, d->logits, 0, {0}})) return 0;
    for (int i = 0; i < rows; i++) {
        float *logits = d->logits + (size_t)i * d->words, *wide = d->wide + (size_t)i * h->vocab;
        for (int v = 0; v < d->words && d->divisors[i] != 1; v++) logits[v] /= d->divisors[i];
        for (int v = 0; v < d->words && h->to_target; v++) wide[h->to_target[v]] = logits[v];
    }
    return h->to_target ? d->wide : d->logits;
}

/* Reads known tokens, then drafts chains by the law of sampling, beside each of their tokens the next best ones where
 * drafts branch. The rows of `b` say where a sequence's known tokens are. */
int outrider_eagle_draft(const Eagle *h, const Shape *s, const Rows *b, const Work *w, const Rows *read, const Drafts *d) {
    int live = d->count, threads = s->threads, vocab = h->to_target ? h->vocab : d->words, H = s->hidden;
    Matrix words = first_of(h->words, d->words);
    if (!outrider_eagle_read(h, s, read, w, d->read_ids, d->features, d->before, d->gathered, d->inputs, d->x)) return 0;
    for (int i = 0; i < live; i++) memcpy(d->hidden + (size_t)i * H, d->x + (size_t)d->last[i] * H, H * sizeof(float));
    for (int level = 0; level < d->depth; level++) {
        while (d->depths[live - 1] <= level) live--;
        if (level) {
            Rows rows = *b;
            rows.rows = live, rows.positions = d->positions, rows.ancestors = d->ancestors;
            rows.slots = d->slots + (size_t)(level - 1) * d->count;
            for (int i = 0; i < live; i++)
                d->positions[i] = b->prefix[i] + level - 1, d->ancestors[i] = ((int64_t)1 << level) - 1;
            if (!outrider_eagle_forward(h, s, &rows, w, d->ids, d->hidden, d->inputs, d->hidden)) return 0;
        }
        float *logits = draft_logits(h, s, d, words, live);
        if (!logits) return 0;
        if (d->filtered) outrider_filter(logits, live, vocab, d->top_k, d->top_p, d->log_min_p, threads);
        int64_t *tokens = d->tokens + (size_t)level * d->count * BRANCH;
        int chains = 0;
        for (int i = 0; i < live; i++) d->at[i] = d->known[i] + level, chains |= d->children[i] == 1;
        if (chains) outrider_draw(logits, live, vocab, d->sampled, d->seeds, d->at, threads, d->best, d->ids);
        Branching branching = {d, logits, vocab, tokens, d->shares + (size_t)level * d->count * BRANCH};
        team_run(live > 1 ? threads : 1, live, branch_rows, &branching);
        for (int i = 0; i < live; i++) d->ids[i] = tokens[i * BRANCH];
    }
    return 1;
}
