/* The inner loop of compaction.py: moves of single runs, each judged by live bytes and by the arena of simulate.py.  Read those first.
 *
 * A shared library without Python's headers, loaded by ctypes, so that the interpreter's lock is free while it works.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define API __declspec(dllexport)
API void *PyInit__arena(void) { return 0; } /* the linker there insists on it */
#else
#define API __attribute__((visibility("default")))
#endif

#define GRANULE 256
#define UNLIMITED ((int64_t)1 << 62)
#define NONE (-1)
#define MOST_EARLY 8

typedef struct { const int32_t *start, *v; } Table; /* rows of a ragged table */

typedef struct {
    int ops, tensors;
    int64_t resident, small;
    /* what a first run and a recompute read (storages that are there before the step left out), and make views of */
    Table first_reads, again_reads, first_old, again_old, first_views, again_views;
    /* per op: outputs as they stand in the file, outputs with a storage of their own, what it replaces, in-place pairs */
    Table outputs, own, written, inplace;
    const int64_t *bytes, *workspace;
    const int32_t *alias;
    const uint8_t *persistent, *output, *optional;
    const uint8_t *early; /* per op: equal blocks of scratch that are taken before its outputs; 0 for one block, after them */
} Problem;

typedef struct {
    int cap, steps;
    int *held, *runs, *first, *last, *pairs, *at, *order;
    int64_t *size, *change;
    uint8_t *flags, *replaced;
} Scratch;

enum { READ = 1, OUT = 2, ABSENT = 4, MERGED = 8 };

/* ---- chance: splitmix64 */

static uint64_t draw(uint64_t *rng) {
    uint64_t z = (*rng += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static int below(uint64_t *rng, int k) { return (int)(((draw(rng) >> 33) * (uint64_t)k) >> 31); }

static int64_t rounded(int64_t size) { return size < 1 ? GRANULE : (size + GRANULE - 1) / GRANULE * GRANULE; }

static int among(const Table *t, int row, int x) {
    for (int i = t->start[row]; i < t->start[row + 1]; i++)
        if (t->v[i] == x) return 1;
    return 0;
}

/* ---- the evaluator: peak of live bytes, NONE where the order is not valid */

static int64_t live_peak(const Problem *p, Scratch *s, const int32_t *seq, int n) {
    int count = 0, pairs = 0;
    for (int t = 0; t < p->tensors; t++) s->held[t] = p->persistent[t] ? -2 : NONE;
    memset(s->runs, 0, sizeof(int) * (size_t)p->ops);
    if (p->tensors > 0) memset(s->replaced, 0, (size_t)p->tensors);
    for (int k = 0; k < n; k++) {
        int o = seq[k], again = s->runs[o] > 0;
        const Table *reads = again ? &p->again_reads : &p->first_reads, *old = again ? &p->again_old : &p->first_old;
        const Table *views = again ? &p->again_views : &p->first_views;
        s->runs[o]++;
        for (int i = reads->start[o]; i < reads->start[o + 1]; i++) {
            int at = s->held[reads->v[i]];
            if (at >= 0) s->last[at] = k;
            else if (at == NONE) return NONE;
        }
        for (int i = old->start[o]; i < old->start[o + 1]; i++)
            if (s->replaced[old->v[i]]) return NONE;
        int mark = pairs;
        for (int i = p->inplace.start[o]; i < p->inplace.start[o + 1]; i += 2) {
            int from = p->inplace.v[i], to = p->inplace.v[i + 1];
            if (!among(reads, o, from)) continue;
            s->pairs[3 * pairs] = k, s->pairs[3 * pairs + 1] = s->held[from], s->pairs[3 * pairs + 2] = to, pairs++;
        }
        for (int i = p->own.start[o]; i < p->own.start[o + 1]; i++) {
            int t = p->own.v[i];
            s->held[t] = count;
            s->first[count] = s->last[count] = k;
            s->size[count] = p->bytes[t];
            s->flags[count++] = 0;
        }
        for (int i = views->start[o]; i < views->start[o + 1]; i += 2) s->held[views->v[i]] = s->held[views->v[i + 1]];
        int kept = mark;
        for (int i = mark; i < pairs; i++) {
            int from = s->pairs[3 * i + 1], to = s->pairs[3 * i + 2];
            if (from < 0 || !among(&p->own, o, to)) continue;
            s->pairs[3 * kept] = k, s->pairs[3 * kept + 1] = from, s->pairs[3 * kept + 2] = s->held[to], kept++;
        }
        pairs = kept;
        for (int i = p->written.start[o]; i < p->written.start[o + 1]; i++) s->replaced[p->written.v[i]] = 1;
    }
    for (int t = 0; t < p->tensors; t++)
        if (p->output[t] && s->held[t] >= 0) s->flags[s->held[t]] |= OUT, s->last[s->held[t]] = n - 1;
    for (int i = 0; i < pairs; i++) {
        int k = s->pairs[3 * i], from = s->pairs[3 * i + 1], to = s->pairs[3 * i + 2];
        if (s->last[from] == k && !(s->flags[from] & OUT) && s->first[from] < k && s->size[from] == s->size[to] && !(s->flags[to] & MERGED))
            s->last[from] = k - 1, s->flags[to] |= MERGED;
    }
    memset(s->change, 0, sizeof(int64_t) * (n + 1));
    for (int i = 0; i < count; i++) s->change[s->first[i]] += s->size[i], s->change[s->last[i] + 1] -= s->size[i];
    int64_t live = 0, peak = 0;
    for (int k = 0; k < n; k++) {
        live += s->change[k];
        int64_t now = live + p->workspace[seq[k]];
        if (now > peak) peak = now;
    }
    return peak + p->resident;
}

/* ---- the arena: blocks linked by address, free ones sorted by size, then by address */

typedef struct { int64_t offset, size; int before, after, free; } Block;
typedef struct { Block *b; int blocks, cap, spare, *sorted, free; int64_t high, capacity; } Arena;

static int position(const Arena *a, int64_t size, int64_t offset) {
    int lo = 0, hi = a->free;
    while (lo < hi) {
        int mid = (lo + hi) >> 1;
        const Block *m = &a->b[a->sorted[mid]];
        if (m->size < size || (m->size == size && m->offset < offset)) lo = mid + 1; else hi = mid;
    }
    return lo;
}
static void offer(Arena *a, int i) {
    int at = position(a, a->b[i].size, a->b[i].offset);
    memmove(a->sorted + at + 1, a->sorted + at, sizeof(int) * (a->free - at));
    a->sorted[at] = i, a->free++, a->b[i].free = 1;
}
static void withdraw(Arena *a, int i) {
    int at = position(a, a->b[i].size, a->b[i].offset);
    memmove(a->sorted + at, a->sorted + at + 1, sizeof(int) * (a->free - at - 1));
    a->free--, a->b[i].free = 0;
}
static int fresh(Arena *a) {
    if (a->spare != NONE) {
        int i = a->spare;
        a->spare = a->b[i].after;
        return i;
    }
    return a->blocks++;
}
static int allocate(Arena *a, int64_t size) {
    size = rounded(size);
    int i = a->sorted[position(a, size, NONE)]; /* the last region is endless */
    withdraw(a, i);
    if (a->b[i].size > size) {
        int rest = fresh(a);
        Block *r = &a->b[rest], *b = &a->b[i];
        r->offset = b->offset + size, r->size = b->size - size, r->before = i, r->after = b->after;
        if (r->after != NONE) a->b[r->after].before = rest;
        b->size = size, b->after = rest;
        offer(a, rest);
    }
    if (a->b[i].offset + size > a->high) a->high = a->b[i].offset + size;
    return i;
}
static void merge(Arena *a, int i, int j) { /* j follows i */
    a->b[i].size += a->b[j].size, a->b[i].after = a->b[j].after;
    if (a->b[j].after != NONE) a->b[a->b[j].after].before = i;
    a->b[j].after = a->spare, a->spare = j;
}
static void release(Arena *a, int i) {
    int after = a->b[i].after, before = a->b[i].before;
    if (after != NONE && a->b[after].free) withdraw(a, after), merge(a, i, after);
    if (before != NONE && a->b[before].free) withdraw(a, before), merge(a, before, i), i = before;
    offer(a, i);
}

/* ---- simulate.place with overflow: the highest used address */

static int64_t arena_bytes(const Problem *p, Scratch *s, Arena *a, const int32_t *seq, int n) {
    int count = 0, pairs = 0;
    for (int t = 0; t < p->tensors; t++) s->held[t] = NONE;
    memset(s->runs, 0, sizeof(int) * (size_t)p->ops);
    for (int k = 0; k < n; k++) {
        int o = seq[k];
        const Table *reads = s->runs[o]++ ? &p->again_reads : &p->first_reads;
        for (int i = reads->start[o]; i < reads->start[o + 1]; i++) {
            int at = s->held[reads->v[i]];
            if (at >= 0) s->last[at] = k, s->flags[at] |= READ;
        }
        int mark = pairs;
        for (int i = p->inplace.start[o]; i < p->inplace.start[o + 1]; i += 2)
            if (s->held[p->inplace.v[i]] >= 0 && among(reads, o, p->inplace.v[i]))
                s->pairs[3 * pairs] = k, s->pairs[3 * pairs + 1] = s->held[p->inplace.v[i]], s->pairs[3 * pairs + 2] = p->inplace.v[i + 1], pairs++;
        int kept = mark;
        for (int i = p->outputs.start[o]; i < p->outputs.start[o + 1]; i++) {
            int t = p->outputs.v[i], base = p->alias[t];
            if (base >= 0) {
                if (s->held[base] >= 0) s->held[t] = s->held[base];
            } else {
                s->held[t] = count;
                s->first[count] = s->last[count] = k;
                s->size[count] = p->bytes[t];
                s->flags[count++] = p->optional[t] ? ABSENT : 0;
            }
            if (p->output[t] && s->held[t] >= 0) s->flags[s->held[t]] |= OUT;
        }
        for (int i = mark; i < pairs; i++) {
            int to = s->pairs[3 * i + 2];
            if (!among(&p->own, o, to)) continue;
            s->pairs[3 * kept] = k, s->pairs[3 * kept + 1] = s->pairs[3 * i + 1], s->pairs[3 * kept + 2] = s->held[to], kept++;
        }
        pairs = kept;
    }
    for (int i = 0; i < count; i++) {
        if (s->flags[i] & (READ | OUT)) s->flags[i] &= ~ABSENT;
        if ((s->flags[i] & OUT) || (!(s->flags[i] & READ) && s->size[i] <= p->small)) s->change[i] = n; /* the end of its life */
        else s->change[i] = s->last[i];
    }
    for (int i = pairs - 1; i >= 0; i--) {
        int k = s->pairs[3 * i], from = s->pairs[3 * i + 1], to = s->pairs[3 * i + 2];
        int dying = s->last[from] == k && !((s->flags[from] | s->flags[to]) & OUT) && s->first[from] < k;
        if (dying && s->size[from] == s->size[to] && !(s->flags[to] & MERGED)) s->change[from] = s->change[to], s->flags[to] |= MERGED;
    }
    /* the pen */
    int64_t live = 0, pen = 0;
    int next = 0;
    int *heads = s->order; /* steps: list of the buffers that die there */
    for (int k = 0; k <= n; k++) heads[k] = NONE;
    int *chain = s->at; /* buffer -> next one that dies at the same step, then its block */
    for (int i = count - 1; i >= 0; i--) {
        if (s->flags[i] & (ABSENT | MERGED)) continue;
        chain[i] = heads[s->change[i]];
        heads[s->change[i]] = i;
    }
    for (int k = 0; k < n; k++) {
        for (; next < count && s->first[next] == k; next++)
            if (!(s->flags[next] & (ABSENT | MERGED)) && s->size[next] <= p->small) live += rounded(s->size[next]);
        if (live > pen) pen = live;
        for (int i = heads[k]; i != NONE; i = chain[i])
            if (s->size[i] <= p->small) live -= rounded(s->size[i]);
    }
    pen = rounded(pen + pen / 10);
    a->blocks = 1, a->free = 0, a->spare = NONE, a->high = 0;
    a->b[0] = (Block){0, a->capacity, NONE, NONE, 0};
    offer(a, 0);
    if (a->capacity < UNLIMITED) { /* what does not fit goes behind it, a granule apart so that the two never coalesce */
        a->b[a->blocks] = (Block){a->capacity + GRANULE, UNLIMITED, NONE, NONE, 0};
        offer(a, a->blocks++);
    }
    int at = allocate(a, pen);
    allocate(a, GRANULE);
    release(a, at);
    int *block = s->runs + p->ops; /* buffer -> its block */
    next = 0;
    for (int k = 0; k < n; k++) {
        int64_t workspace = p->workspace[seq[k]];
        int early = workspace ? p->early[seq[k]] : 0, blocks[MOST_EARLY];
        for (int i = 0; i < early; i++) blocks[i] = allocate(a, workspace / early);
        for (; next < count && s->first[next] == k; next++)
            if (!(s->flags[next] & (ABSENT | MERGED))) block[next] = allocate(a, s->size[next]);
        if (workspace && !early) release(a, allocate(a, workspace));
        for (int i = 0; i < early; i++) release(a, blocks[i]);
        for (int i = heads[k]; i != NONE; i = chain[i]) release(a, block[i]);
    }
    return a->high;
}

/* ---- interface */

static void shift(int32_t *seq, int from, int to) {
    int32_t x = seq[from];
    if (from < to) memmove(seq + from, seq + from + 1, sizeof(int32_t) * (to - from));
    else memmove(seq + to + 1, seq + to, sizeof(int32_t) * (from - to));
    seq[to] = x;
}

/* Try ``moves`` moves on ``seq`` (n runs), which is improved in place; ``rng`` is the state of chance. Returns the arena's bytes. */
API int64_t arena_compact(const Problem *p, int n, int32_t *seq, int64_t live_limit, int64_t arena_limit, int64_t capacity, int64_t moves, const int32_t *reach, int reaches, uint64_t *rng) {
    int64_t made = 0, writes = 0;
    for (int k = 0; k < n; k++) {
        made += p->outputs.start[seq[k] + 1] - p->outputs.start[seq[k]];
        writes += (p->inplace.start[seq[k] + 1] - p->inplace.start[seq[k]]) / 2;
    }
    Scratch s = {0};
    s.held = malloc(sizeof(int) * (p->tensors + 1));
    s.runs = malloc(sizeof(int) * (p->ops + made + 1));
    s.first = malloc(sizeof(int) * (made + 1));
    s.last = malloc(sizeof(int) * (made + 1));
    s.at = malloc(sizeof(int) * (made + 1));
    s.order = malloc(sizeof(int) * (n + 2));
    s.pairs = malloc(sizeof(int) * 3 * (writes + 1));
    s.size = malloc(sizeof(int64_t) * (made + 1));
    s.change = malloc(sizeof(int64_t) * (made > n ? made + 2 : n + 2));
    s.flags = malloc(made + 1);
    s.replaced = malloc(p->tensors + 1);
    Arena a = {.capacity = capacity};
    a.b = malloc(sizeof(Block) * (2 * (made + MOST_EARLY) + 8));
    a.sorted = malloc(sizeof(int) * (2 * (made + MOST_EARLY) + 8));
    int64_t smallest = NONE;
    if (s.held && s.runs && s.first && s.last && s.at && s.order && s.pairs && s.size && s.change && s.flags && s.replaced && a.b && a.sorted) {
        smallest = arena_bytes(p, &s, &a, seq, n);
        for (int64_t move = 0; move < moves && smallest > arena_limit; move++) {
            int source = below(rng, n), distance = 1 + below(rng, reach[below(rng, reaches)]);
            int target = below(rng, 2) ? source + distance : source - distance;
            target = target < 0 ? 0 : target >= n ? n - 1 : target;
            if (source == target) continue;
            shift(seq, source, target);
            int64_t peak = live_peak(p, &s, seq, n);
            int64_t size = peak == NONE || peak > live_limit ? NONE : arena_bytes(p, &s, &a, seq, n);
            if (size != NONE && size <= smallest) smallest = size;
            else shift(seq, target, source);
        }
    }
    void *all[] = {s.held, s.runs, s.first, s.last, s.at, s.order, s.pairs, s.size, s.change, s.flags, s.replaced, a.b, a.sorted};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return smallest;
}
