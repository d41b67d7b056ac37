/* Part of cpu.c: an EAGLE head (draft/eagle_head.py), whose chains are drafted in one call. What it computes is what the
 * single kernels compute in turn; draft/eagle.py does so where drafts branch. */

typedef struct {
    Matrix embedding, fuse, words; /* words: what gives logits */
    const float *ones;             /* scales features in groups of `together`; 0: they are taken as they are */
    const float *embed_norm, *first_norm, *norm;
    const Layer *const *layers;
    float *const *keys, *const *values; /* by layer */
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

/* Sequences by falling depth. */
typedef struct {
    int32_t count, depth, words, filtered; /* depth: of the deepest; words: so many are drafted */
    const int32_t *depths;                 /* [count], as all that follow */
    const uint8_t *sampled;
    const int64_t *seeds, *known; /* known: tokens */
    const float *divisors;        /* of logits */
    const int64_t *top_k;
    const float *top_p, *log_min_p;
    const int32_t *slots;                   /* [depth - 1][count]: for the tokens of all levels but the last */
    float *hidden;                          /* [count][H], after the known tokens; it is overwritten */
    float *inputs, *normed, *logits, *wide; /* scratch: [count][2 H], [count][H], [count][words], [count][vocab] */
    int32_t *positions;
    int64_t *ancestors, *at;
    Best *best;      /* [count][CHUNKS] */
    int64_t *tokens; /* [depth][count] */
} Chains;

/* The first outputs of a matrix. */
static Matrix first_of(Matrix w, int outputs) {
    for (int p = 0; p < PARTS; p++) {
        w.parts[p].outputs = least(w.parts[p].outputs, outputs);
        outputs -= w.parts[p].outputs;
    }
    return w;
}

/* Chains by the law of sampling. The rows of `b` are those of the first level: the sequences' last known tokens. Words that
 * the head does not know keep minus infinity in `wide`. */
int outrider_eagle_chains(const Eagle *h, const Shape *s, const Rows *b, const Work *w, const Chains *c) {
    int H = s->hidden, live = c->count, threads = s->threads;
    Matrix words = first_of(h->words, c->words);
    for (int level = 0; level < c->depth; level++) {
        int64_t *tokens = c->tokens + (size_t)level * c->count;
        while (c->depths[live - 1] <= level) live--;
        if (level) {
            Rows rows = *b;
            rows.rows = live, rows.positions = c->positions, rows.ancestors = c->ancestors;
            rows.slots = c->slots + (size_t)(level - 1) * c->count;
            for (int i = 0; i < live; i++)
                c->positions[i] = b->prefix[i] + level - 1, c->ancestors[i] = ((int64_t)1 << level) - 1;
            if (!outrider_eagle_forward(h, s, &rows, w, tokens - c->count, c->hidden, c->inputs, c->hidden)) return 0;
        }
        const float *normed = c->hidden;
        if (!h->norm_output) {
            norm(threads, live, (Norm){c->hidden, 0, h->norm, H, s->eps, c->normed, 0});
            normed = c->normed;
        }
        if (!linear(threads, (Linear){words, 0, normed, live, c->words, H, c->logits, 0, {0}})) return 0;
        float *logits = c->logits;
        int vocab = c->words;
        if (h->to_target) {
            logits = c->wide, vocab = h->vocab;
            for (int i = 0; i < live; i++)
                for (int v = 0; v < c->words; v++)
                    logits[(size_t)i * vocab + h->to_target[v]] = c->logits[(size_t)i * c->words + v];
        }
        for (int i = 0; i < live; i++) {
            c->at[i] = c->known[i] + level;
            for (int v = 0; v < vocab && c->divisors[i] != 1; v++) logits[(size_t)i * vocab + v] /= c->divisors[i];
        }
        if (c->filtered) outrider_filter(logits, live, vocab, c->top_k, c->top_p, c->log_min_p, threads);
        outrider_draw(logits, live, vocab, c->sampled, c->seeds, c->at, threads, c->best, tokens);
    }
    return 1;
}
