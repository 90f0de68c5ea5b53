/* Simulated annealing on the sequence of runs; scheduler/twin.py is the same in Python, move for move.  Read that one first.
 *
 * A shared library without Python's headers, loaded by ctypes, so that the interpreter's lock is free while it works.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define API __declspec(dllexport)
API void *PyInit__annealer(void) { return 0; } /* the linker there insists on it */
#else
#define API __attribute__((visibility("default")))
#endif

#define CONE 40
#define REPAIRS 8
#define RESPREAD 20000
#define RELIEVE 70 /* the lowest draw that stands for relieving the peak */

typedef struct { int n, cap, *v; } Vec;
typedef struct { int a, b; } Span;
typedef struct { int n, cap; Span *v; } Spans;
typedef struct { int put, o, x; } Change;
typedef struct { const int *start, *v; } Table; /* rows of a ragged table */

typedef struct {
    int n, m, spread, length, slots, leaves;
    int64_t resident;
    double *cost;
    int64_t *workspace, *size;
    int *producer;
    unsigned char *rerun, *movable, *held, *swappable;
    Table reads, again, outs, killers_first, killers_again, takeover;
    int heavies, *heavy;
    int *own; /* copies of all integer tables */
    /* the sequence */
    int *at;
    Vec *runs, *read;
    Spans *spans;
    int64_t *top, *add;
    double seconds;
    int *extra, extras, *extra_at; /* ops that run more than once */
    /* the change under way */
    Change *log;
    int logged, log_cap;
    int *touched, touches;
    unsigned char *marked;
    Span *scratch;
    int scratch_cap;
    int *visit, stamp, visits;
    int cone[CONE + 2], cone_n, cone_low;
    double cone_cost;
    /* chance and memory of the search */
    uint64_t rng;
    int64_t moves;
    int *best_at, best_length, failed;
    double best_seconds;
    int64_t best_peak;
} State;

/* ---- chance */

static uint64_t draw(State *s) {
    uint64_t z = (s->rng += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static int below(State *s, int k) { return (int)(((draw(s) >> 33) * (uint64_t)k) >> 31); }
static double unit(State *s) { return (double)(draw(s) >> 11) * (1.0 / 9007199254740992.0); }

/* ---- sorted vectors */

static int left(const Vec *v, int x) {
    int lo = 0, hi = v->n;
    while (lo < hi) {
        int mid = (lo + hi) >> 1;
        if (v->v[mid] < x) lo = mid + 1; else hi = mid;
    }
    return lo;
}
static int right(const Vec *v, int x) { return left(v, x + 1); }
static void *grow(State *s, void *p, size_t bytes) {
    void *q = realloc(p, bytes);
    if (!q) s->failed = 1;
    return q;
}
static void insort(State *s, Vec *v, int x) {
    if (v->n == v->cap) {
        int cap = v->cap ? 2 * v->cap : 4;
        int *q = grow(s, v->v, sizeof(int) * (size_t)cap);
        if (!q) return;
        v->v = q;
        v->cap = cap;
    }
    int k = left(v, x);
    memmove(v->v + k + 1, v->v + k, sizeof(int) * (size_t)(v->n - k));
    v->v[k] = x;
    v->n++;
}
static void drop(Vec *v, int x) {
    int k = left(v, x);
    memmove(v->v + k, v->v + k + 1, sizeof(int) * (size_t)(v->n - k - 1));
    v->n--;
}

/* ---- memory of every slot: range add, maximum */

static void range_add(State *s, int a, int b, int64_t size) { /* both ends included */
    int l = a + s->leaves, r = b + s->leaves + 1, l0 = l, r0 = r - 1;
    int64_t *t = s->top, *d = s->add;
    for (; l < r; l >>= 1, r >>= 1) {
        if (l & 1) { t[l] += size; if (l < s->leaves) d[l] += size; l++; }
        if (r & 1) { --r; t[r] += size; if (r < s->leaves) d[r] += size; }
    }
    for (int above = 0; l0 > 1;) {
        l0 >>= 1;
        r0 >>= 1;
        int64_t x = t[2 * l0], y = t[2 * l0 + 1], old = t[l0];
        t[l0] = (x > y ? x : y) + d[l0];
        if (l0 == r0) {
            if (above && t[l0] == old) break;
            above = 1; /* this common ancestor may have been added to itself; beyond it all goes through here */
            continue;
        }
        x = t[2 * r0];
        y = t[2 * r0 + 1];
        t[r0] = (x > y ? x : y) + d[r0];
    }
}
static int64_t peak(const State *s) { return s->top[1]; }
static int argmax(State *s) { /* the first or the last of the largest slots */
    int p = 1, last = below(s, 2);
    while (p < s->leaves) {
        int64_t a = s->top[2 * p], b = s->top[2 * p + 1];
        p = 2 * p + (last ? b >= a : b > a);
    }
    p -= s->leaves;
    return p < s->length ? p : s->length - 1;
}

/* ---- changes */

static const Table *reading(const State *s, int first) { return first ? &s->reads : &s->again; }
static void touch(State *s, int v) {
    if (!s->marked[v]) { s->marked[v] = 1; s->touched[s->touches++] = v; }
}
static void record(State *s, int put, int o, int x) {
    if (s->logged == s->log_cap) {
        Change *q = grow(s, s->log, sizeof(Change) * (size_t)(2 * s->log_cap));
        if (!q) return;
        s->log = q;
        s->log_cap *= 2;
    }
    s->log[s->logged].put = put;
    s->log[s->logged].o = o;
    s->log[s->logged++].x = x;
}
static void put(State *s, int o, int x) {
    Vec *runs = &s->runs[o];
    int first = !runs->n || x < runs->v[0];
    const Table *t = reading(s, first);
    s->at[x] = o;
    insort(s, runs, x);
    if (runs->n == 2) { s->extra_at[o] = s->extras; s->extra[s->extras++] = o; }
    for (int k = t->start[o]; k < t->start[o + 1]; k++) { insort(s, &s->read[t->v[k]], x); touch(s, t->v[k]); }
    for (int k = s->outs.start[o]; k < s->outs.start[o + 1]; k++) touch(s, s->outs.v[k]);
    if (s->workspace[o]) range_add(s, x, x, s->workspace[o]);
    s->seconds += s->cost[o];
    record(s, 1, o, x);
}
static void take(State *s, int o, int x) {
    Vec *runs = &s->runs[o];
    int first = runs->v[0] == x;
    const Table *t = reading(s, first);
    s->at[x] = -1;
    drop(runs, x);
    if (runs->n == 1) {
        int last = s->extra[--s->extras];
        s->extra[s->extra_at[o]] = last;
        s->extra_at[last] = s->extra_at[o];
    }
    for (int k = t->start[o]; k < t->start[o + 1]; k++) { drop(&s->read[t->v[k]], x); touch(s, t->v[k]); }
    for (int k = s->outs.start[o]; k < s->outs.start[o + 1]; k++) touch(s, s->outs.v[k]);
    if (s->workspace[o]) range_add(s, x, x, -s->workspace[o]);
    s->seconds -= s->cost[o];
    record(s, 0, o, x);
}
static int takes(const State *s, int o, int v) {
    for (int k = s->takeover.start[o]; k < s->takeover.start[o + 1]; k++)
        if (s->takeover.v[k] == v) return 1;
    return 0;
}
static void refresh(State *s) {
    for (int i = 0; i < s->touches; i++) {
        int v = s->touched[i];
        const Vec *runs = &s->runs[s->producer[v]], *read = &s->read[v];
        Spans *old = &s->spans[v];
        int64_t size = s->size[v];
        s->marked[v] = 0;
        if (runs->n > s->scratch_cap) {
            Span *q = grow(s, s->scratch, sizeof(Span) * 2 * (size_t)runs->n);
            if (!q) continue;
            s->scratch = q;
            s->scratch_cap = 2 * runs->n;
        }
        Span *now = s->scratch;
        for (int k = 0; k < runs->n; k++) {
            int a = runs->v[k], final = k + 1 == runs->n, b;
            if (final && s->held[v]) {
                b = s->length - 1;
            } else {
                int j = final ? read->n : left(read, runs->v[k + 1]);
                b = j && read->v[j - 1] > a ? read->v[j - 1] : a;
                if (b > a && takes(s, s->at[b], v)) b--;
            }
            now[k].a = a;
            now[k].b = b;
        }
        int p = 0, q = 0;
        while (p < old->n || q < runs->n) {
            if (q == runs->n || (p < old->n && old->v[p].a < now[q].a)) {
                if (size) range_add(s, old->v[p].a, old->v[p].b, -size);
                p++;
            } else if (p == old->n || now[q].a < old->v[p].a) {
                if (size) range_add(s, now[q].a, now[q].b, size);
                q++;
            } else {
                int b = old->v[p++].b, c = now[q++].b;
                if (size && b < c) range_add(s, b + 1, c, size);
                if (size && c < b) range_add(s, c + 1, b, -size);
            }
        }
        if (runs->n > old->cap) {
            Span *q2 = grow(s, old->v, sizeof(Span) * 2 * (size_t)runs->n);
            if (!q2) continue;
            old->v = q2;
            old->cap = 2 * runs->n;
        }
        memcpy(old->v, now, sizeof(Span) * (size_t)runs->n);
        old->n = runs->n;
    }
    s->touches = 0;
}
static void undo(State *s, double seconds) {
    while (s->logged) {
        Change c = s->log[--s->logged];
        if (c.put) take(s, c.o, c.x); else put(s, c.o, c.x);
        s->logged--;
    }
    refresh(s);
    s->seconds = seconds;
}

/* ---- parts of moves */

static int serving(const State *s, int v, int x) {
    const Vec *runs = &s->runs[s->producer[v]];
    int k = left(runs, x);
    return k ? runs->v[k - 1] : -1;
}
static int next_read(const State *s, int v, int x) {
    const Vec *read = &s->read[v];
    int j = right(read, x);
    return j < read->n ? read->v[j] : s->length;
}
static int next_run(const State *s, int o, int x) {
    const Vec *runs = &s->runs[o];
    int k = right(runs, x);
    return k < runs->n ? runs->v[k] : s->length;
}
static int unread(const State *s, int o, int x) {
    int until = next_run(s, o, x);
    for (int k = s->outs.start[o]; k < s->outs.start[o + 1]; k++)
        if (next_read(s, s->outs.v[k], x) < until) return 0;
    return 1;
}
static int removable(const State *s, int o, int x) {
    const Vec *runs = &s->runs[o];
    if (runs->n < 2) return 0;
    if (runs->v[0] == x) return s->swappable[o] && unread(s, o, x);
    return 1;
}
static void prune(State *s, int o, int x);
static void take_away(State *s, int o, int x) {
    const Table *t = reading(s, s->runs[o].v[0] == x);
    take(s, o, x);
    for (int k = t->start[o]; k < t->start[o + 1]; k++) {
        int v = t->v[k];
        prune(s, s->producer[v], serving(s, v, x));
    }
}
static void prune(State *s, int o, int x) {
    if (x >= 0 && s->at[x] == o && s->runs[o].n > 1 && unread(s, o, x) && removable(s, o, x)) take_away(s, o, x);
}
static int end_of(const State *s, int v, int a) {
    const Spans *spans = &s->spans[v];
    for (int k = 0; k < spans->n; k++)
        if (spans->v[k].a == a) return spans->v[k].b;
    return a;
}
static int kept_from(const State *s, const Table *killers, int o, int x) { /* a version it reads is replaced by then */
    for (int k = killers->start[o]; k < killers->start[o + 1]; k++) {
        const Vec *runs = &s->runs[killers->v[k]];
        if (runs->n && runs->v[0] <= x) return 1;
    }
    return 0;
}
static int visit(State *s, int o, int n, double deep, double limit) {
    s->visit[o] = s->stamp;
    s->visits++;
    s->cone_cost += s->cost[o];
    if (!s->rerun[o] || s->visits > CONE || s->cone_cost > limit || kept_from(s, &s->killers_again, o, n)) return 0;
    for (int k = s->again.start[o]; k < s->again.start[o + 1]; k++) {
        int v = s->again.v[k], p = s->producer[v];
        if (s->visit[p] == s->stamp) continue;
        int y = serving(s, v, n);
        if (y < 0) return 0;
        if (end_of(s, v, y) >= n - 1 || !s->rerun[p] || s->visits > CONE / 2 || unit(s) > deep) {
            if (y > s->cone_low) s->cone_low = y;
        } else if (!visit(s, p, n, deep, limit)) {
            return 0;
        }
    }
    s->cone[s->cone_n++] = o;
    return 1;
}
/* Make v again right before slot n, which reads it and lies after x, with inputs that are dead there. */
static int cone(State *s, int v, int x, int n, double deep, double limit) {
    int slots[CONE + 2], before[CONE + 2], k = 0;
    s->stamp++;
    s->visits = s->cone_n = 0;
    s->cone_low = x;
    s->cone_cost = 0.0;
    if (!visit(s, s->producer[v], n, deep, limit)) return 0;
    for (int y = n - 1; y > s->cone_low && k < s->cone_n; y--)
        if (s->at[y] < 0) slots[k++] = y;
    if (k < s->cone_n) return 0;
    for (k = 0; k < s->cone_n; k++) before[k] = serving(s, s->outs.v[s->outs.start[s->cone[k]]], n);
    for (k = 0; k < s->cone_n; k++) put(s, s->cone[k], slots[s->cone_n - 1 - k]);
    for (k = 0; k < s->cone_n; k++) prune(s, s->cone[k], before[k]);
    refresh(s);
    return 1;
}
/* Drop a storage that lies idle at slot x and make it again before its next read. */
static int relieve(State *s, int x, double limit) {
    static const double depths[3] = {0.0, 0.5, 1.0};
    if (!s->heavies) return 0;
    int i = below(s, s->heavies), step = below(s, 2) ? 1 : s->heavies - 1, wanted = 1 << below(s, 3), found = -1, at = 0;
    double price = 0.0;
    for (int k = 0; k < s->heavies && k < 64 && wanted; k++, i += step) {
        if (i >= s->heavies) i -= s->heavies;
        int v = s->heavy[i], y = serving(s, v, x);
        if (y < 0) continue;
        int n = next_read(s, v, x);
        if (n == s->length || next_run(s, s->producer[v], x) <= n) continue;
        const Vec *read = &s->read[v];
        int j = left(read, x);
        if (j < read->n && read->v[j] == x) continue;
        double p = (s->cost[s->producer[v]] + 1e-30) / (double)s->size[v];
        if (found < 0 || p < price) { found = v; price = p; at = n; }
        wanted--;
    }
    if (found < 0) return 0;
    return cone(s, found, x, at, depths[below(s, 3)], limit);
}
/* Move a run to another slot that its inputs and readers allow. */
static int shift(State *s, int o, int x) {
    const Vec *runs = &s->runs[o];
    int k = left(runs, x), first = k == 0, low = k ? runs->v[k - 1] : -1, until = k + 1 < runs->n ? runs->v[k + 1] : s->length;
    if (first && !s->movable[o]) return 0;
    const Table *t = reading(s, first), *killers = first ? &s->killers_first : &s->killers_again;
    for (k = t->start[o]; k < t->start[o + 1]; k++) {
        int y = serving(s, t->v[k], x);
        if (y > low) low = y;
    }
    for (k = s->outs.start[o]; k < s->outs.start[o + 1]; k++) {
        int y = next_read(s, s->outs.v[k], x);
        if (y < until) until = y;
    }
    for (k = killers->start[o]; k < killers->start[o + 1]; k++) {
        const Vec *w = &s->runs[killers->v[k]];
        if (w->n && w->v[0] < until) until = w->v[0];
    }
    if (until - low < 3) return 0;
    int style = below(s, 5), y, step = 1;
    if (style < 2) { y = until - 1; step = -1; }
    else if (style < 3) y = low + 1;
    else y = low + 1 + below(s, until - low - 1);
    for (; y > low && y < until; y += step) {
        if (y == x || s->at[y] >= 0) continue;
        take(s, o, x);
        put(s, o, y);
        if (y > x)
            for (k = t->start[o]; k < t->start[o + 1]; k++) prune(s, s->producer[t->v[k]], serving(s, t->v[k], x));
        refresh(s);
        return 1;
    }
    return 0;
}
static int any_run(State *s) {
    int o = s->extras && below(s, 2) ? s->extra[below(s, s->extras)] : below(s, s->n);
    return s->runs[o].n ? s->runs[o].v[below(s, s->runs[o].n)] : -1;
}
static int shift_any(State *s) {
    int x = -1;
    if (below(s, 2)) { /* the run at the peak, or one near it */
        x = argmax(s);
        int skip = below(s, 4);
        for (int k = 0; k < 8 * s->spread; k++) {
            if (s->at[x] >= 0 && !skip--) break;
            x = x + 1 < s->length ? x + 1 : 0;
        }
        if (s->at[x] < 0) x = -1;
    }
    if (x < 0) x = any_run(s);
    return x >= 0 && shift(s, s->at[x], x);
}
static int remove_any(State *s) {
    if (!s->extras) return 0;
    int o = s->extra[below(s, s->extras)], x = s->runs[o].v[below(s, s->runs[o].n)];
    if (!removable(s, o, x)) return 0;
    take_away(s, o, x);
    refresh(s);
    return 1;
}
static int insert_any(State *s, double limit) {
    int o = below(s, s->n), x = below(s, s->length);
    if (!s->rerun[o] || s->cost[o] > limit || s->at[x] >= 0 || !s->runs[o].n || x < s->runs[o].v[0]) return 0;
    if (kept_from(s, &s->killers_again, o, x)) return 0;
    for (int k = s->again.start[o]; k < s->again.start[o + 1]; k++)
        if (serving(s, s->again.v[k], x) < 0) return 0;
    int y = s->runs[o].v[left(&s->runs[o], x) - 1];
    put(s, o, x);
    prune(s, o, y);
    refresh(s);
    return 1;
}

/* ---- loading and saving */

static int load(State *s, const int *sequence, int count) {
    int length = count * s->spread + s->spread, leaves = 1;
    while (leaves < length) leaves *= 2;
    if (length > s->slots) {
        int *q = grow(s, s->at, sizeof(int) * (size_t)length);
        if (q) s->at = q;
        q = grow(s, s->best_at, sizeof(int) * (size_t)length);
        if (q) s->best_at = q;
        s->slots = length;
    }
    if (leaves != s->leaves) {
        int64_t *q = grow(s, s->top, sizeof(int64_t) * 2 * (size_t)leaves);
        if (q) s->top = q;
        q = grow(s, s->add, sizeof(int64_t) * 2 * (size_t)leaves);
        if (q) s->add = q;
    }
    if (s->failed) return 0;
    s->length = length;
    s->leaves = leaves;
    for (int k = 0; k < length; k++) s->at[k] = -1;
    for (int k = 0; k < 2 * leaves; k++) { s->top[k] = s->resident; s->add[k] = 0; }
    for (int o = 0; o < s->n; o++) s->runs[o].n = 0;
    for (int v = 0; v < s->m; v++) { s->read[v].n = 0; s->spans[v].n = 0; }
    s->extras = s->logged = s->touches = 0;
    s->seconds = 0.0;
    for (int k = 0; k < count; k++) { put(s, sequence[k], k * s->spread + s->spread - 1); s->logged = 0; }
    refresh(s);
    return !s->failed;
}
static int collect(const int *at, int length, int *out) {
    int count = 0;
    for (int x = 0; x < length; x++)
        if (at[x] >= 0) out[count++] = at[x];
    return count;
}
static void keep(State *s) {
    memcpy(s->best_at, s->at, sizeof(int) * (size_t)s->length);
    s->best_length = s->length;
    s->best_seconds = s->seconds;
    s->best_peak = peak(s);
}
static int respread(State *s, const int *at, int length) {
    int *sequence = malloc(sizeof(int) * (size_t)length + 1);
    if (!sequence) { s->failed = 1; return 0; }
    int done = load(s, sequence, collect(at, length, sequence));
    free(sequence);
    return done;
}

/* ---- what Python calls */

API State *annealer_new(int n, int m, int spread, int64_t resident, const double *cost, const int64_t *workspace, const int64_t *size,
                        const int *producer, const unsigned char *flags, const int *const *starts, const int *const *values) {
    /* flags: rerun[n], movable[n], swappable[n], held[m]; tables: reads, again, outs, killers_first, killers_again, takeover. */
    State *s = calloc(1, sizeof(State));
    if (!s) return 0;
    size_t ints = 0;
    for (int k = 0; k < 6; k++) ints += (size_t)n + 1 + (size_t)starts[k][n];
    s->n = n;
    s->m = m;
    s->spread = spread;
    s->resident = resident;
    s->log_cap = 256;
    s->cost = malloc(sizeof(double) * (size_t)(n + 1));
    s->workspace = malloc(sizeof(int64_t) * (size_t)(n + 1));
    s->size = malloc(sizeof(int64_t) * (size_t)(m + 1));
    s->producer = malloc(sizeof(int) * (size_t)(m + 1));
    s->rerun = malloc((size_t)(3 * n + m + 1));
    s->own = malloc(sizeof(int) * (ints + 1));
    s->runs = calloc((size_t)n + 1, sizeof(Vec));
    s->read = calloc((size_t)m + 1, sizeof(Vec));
    s->spans = calloc((size_t)m + 1, sizeof(Spans));
    s->extra = malloc(sizeof(int) * (size_t)(n + 1));
    s->extra_at = malloc(sizeof(int) * (size_t)(n + 1));
    s->log = malloc(sizeof(Change) * 256);
    s->touched = malloc(sizeof(int) * (size_t)(m + 1));
    s->marked = calloc((size_t)m + 1, 1);
    s->visit = calloc((size_t)n + 1, sizeof(int));
    s->heavy = malloc(sizeof(int) * (size_t)(m + 1));
    if (!s->cost || !s->workspace || !s->size || !s->producer || !s->rerun || !s->own || !s->runs || !s->read || !s->spans || !s->extra ||
        !s->extra_at || !s->log || !s->touched || !s->marked || !s->visit || !s->heavy) {
        s->failed = 1;
        return s;
    }
    memcpy(s->cost, cost, sizeof(double) * (size_t)n);
    memcpy(s->workspace, workspace, sizeof(int64_t) * (size_t)n);
    memcpy(s->size, size, sizeof(int64_t) * (size_t)m);
    memcpy(s->producer, producer, sizeof(int) * (size_t)m);
    memcpy(s->rerun, flags, (size_t)(3 * n + m));
    s->movable = s->rerun + n;
    s->swappable = s->movable + n;
    s->held = s->swappable + n;
    Table *tables[6] = {&s->reads, &s->again, &s->outs, &s->killers_first, &s->killers_again, &s->takeover};
    int *next = s->own;
    for (int k = 0; k < 6; k++) {
        memcpy(next, starts[k], sizeof(int) * (size_t)(n + 1));
        tables[k]->start = next;
        next += n + 1;
        memcpy(next, values[k], sizeof(int) * (size_t)starts[k][n]);
        tables[k]->v = next;
        next += starts[k][n];
    }
    for (int v = 0; v < m; v++)
        if (size[v] && s->rerun[producer[v]]) s->heavy[s->heavies++] = v;
    return s;
}
API void annealer_free(State *s) {
    if (!s) return;
    if (s->runs) for (int o = 0; o < s->n; o++) free(s->runs[o].v);
    if (s->read) for (int v = 0; v < s->m; v++) free(s->read[v].v);
    if (s->spans) for (int v = 0; v < s->m; v++) free(s->spans[v].v);
    void *all[] = {s->cost, s->workspace, s->size, s->producer, s->rerun, s->own, s->runs, s->read, s->spans, s->extra, s->extra_at, s->log,
                   s->touched, s->marked, s->visit, s->heavy, s->at, s->best_at, s->top, s->add, s->scratch};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
    free(s);
}
/* Start from a valid sequence; 0 where memory ran out. */
API int annealer_load(State *s, const int *sequence, int count, uint64_t seed) {
    if (s->failed || !load(s, sequence, count)) return 0;
    s->rng = seed;
    s->moves = 0;
    keep(s);
    return 1;
}
API double annealer_best(const State *s, int64_t *peak_bytes) { *peak_bytes = s->best_peak; return s->best_seconds; }
API int annealer_length(const State *s) { return s->best_length; }
API int annealer_sequence(const State *s, int *out) { return collect(s->best_at, s->best_length, out); }
API int annealer_restart(State *s) { return respread(s, s->best_at, s->best_length); }

static double energy(const State *s, int64_t budget, double room) {
    int64_t over = peak(s) - budget;
    return over > 0 ? s->seconds * (1.0 + (double)over / room) : s->seconds;
}
/* Do a number of moves while the temperature falls geometrically; 0 where memory ran out. */
API int annealer_run(State *s, int64_t moves, int64_t budget, double hot, double cold, double floor, int aim) {
    double room = (double)(budget - s->resident), heat = hot, now;
    if (room < 1.0) room = 1.0;
    if (!s->n) return 1;
    now = energy(s, budget, room);
    for (int64_t k = 0; k < moves && !s->failed; k++) {
        if (s->best_peak <= budget && s->best_seconds <= floor) break;
        if (++s->moves % RESPREAD == 0) {
            if (!respread(s, s->at, s->length)) break;
            now = energy(s, budget, room);
        }
        if (k % 256 == 0) heat = hot * pow(cold / hot, (double)k / (double)moves);
        double seconds = s->seconds, allowed = now - heat * log(1.0 - unit(s)), limit = allowed - seconds;
        int choice = below(s, 100), moved, repairs = 0;
        if (aim && peak(s) > budget && below(s, 4)) choice = RELIEVE;
        s->logged = 0;
        if (choice < 35) {
            moved = shift_any(s);
        } else if (choice < RELIEVE) {
            moved = remove_any(s);
            repairs = moved ? REPAIRS : 0;
        } else if (choice < 80) {
            moved = relieve(s, argmax(s), limit);
        } else if (choice < 95) {
            moved = relieve(s, below(s, s->length), limit + 0.05 * seconds);
            for (int j = 0; moved && j < 4 && s->seconds > allowed; j++) remove_any(s);
            repairs = moved ? REPAIRS / 2 : 0;
        } else {
            moved = insert_any(s, limit);
        }
        for (; repairs > 0 && peak(s) > budget && s->seconds < allowed; repairs--)
            if (!relieve(s, argmax(s), allowed - s->seconds)) break;
        if (!moved) continue;
        double then = energy(s, budget, room);
        if (then > allowed) {
            undo(s, seconds);
            continue;
        }
        now = then;
        int64_t bytes = peak(s);
        if (bytes <= budget ? s->best_peak > budget || s->seconds < s->best_seconds * (1 - 1e-12) : s->best_peak > budget && bytes < s->best_peak)
            keep(s);
    }
    return !s->failed;
}
