/* The inner loop of offsets.py: one dive of the search, up to a number of nodes.  Read that first: the Python twin there says what is done and why.
 *
 * A shared library without Python's headers, loaded by ctypes, so that the interpreter's lock is free while it works.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define API __declspec(dllexport)
API void *PyInit__offsets(void) { return 0; } /* the linker there insists on it */
#else
#define API __attribute__((visibility("default")))
#endif

#define NEVER ((int64_t)1 << 60)

enum { FAILED = 0, FOUND = 1, CUT = -1, NO_MEMORY = -2 };

typedef struct {
    int32_t cliques;
    const int32_t *begin, *end, *start, *near, *rank; /* cliques of a buffer, its neighbours (ragged), ties */
    const int64_t *size, *noise;
    int64_t capacity, weight, nodes, limit, *offset;
    int64_t *least, *bound, *load, *base;
    int32_t *cross;
    uint8_t *placed, *held;
    struct { int64_t least; int32_t buffer; uint8_t held; } *trail;
    int64_t marks, room;
} Search;

static int note(Search *s, int b) {
    if (s->marks == s->room) {
        void *grown = realloc(s->trail, sizeof *s->trail * (size_t)(2 * s->room));
        if (!grown) return 0;
        s->trail = grown, s->room *= 2;
    }
    s->trail[s->marks].least = s->least[b], s->trail[s->marks].buffer = b, s->trail[s->marks++].held = s->held[b];
    return 1;
}
static void undo(Search *s, int64_t mark) {
    while (s->marks > mark) {
        s->marks--;
        int b = s->trail[s->marks].buffer;
        s->least[b] = s->trail[s->marks].least, s->held[b] = s->trail[s->marks].held;
    }
}

/* The neighbour whose top may be the lowest; NEVER where there is none left. */
static int64_t lowest_top(const Search *s, int b, int *which) {
    int64_t lowest = NEVER;
    for (int i = s->start[b]; i < s->start[b + 1]; i++) {
        int c = s->near[i];
        if (!s->placed[c] && s->bound[c] + s->size[c] < lowest) lowest = s->bound[c] + s->size[c], *which = c;
    }
    return lowest;
}

static void set_bounds(Search *s, const int32_t *left, int count) {
    for (int i = 0; i < count; i++) s->bound[left[i]] = s->held[left[i]] ? NEVER : s->least[left[i]];
    for (int changed = 1; changed;) {
        changed = 0;
        for (int i = 0; i < count; i++) {
            int b = left[i], at;
            if (!s->held[b]) continue;
            int64_t found = lowest_top(s, b, &at);
            if (found < s->least[b]) found = s->least[b];
            if (found < s->bound[b]) s->bound[b] = found, changed = 1;
        }
    }
}

static void sort(const Search *s, int32_t *left, int count) { /* nearly sorted already; stable */
    for (int i = 1; i < count; i++) {
        int b = left[i], j = i;
        for (; j > 0 && s->bound[left[j - 1]] > s->bound[b]; j--) left[j] = left[j - 1];
        left[j] = b;
    }
}

/* Whether every clique may still hold what is left; fills load, base and cross from clique lo to hi. */
static int fits(Search *s, const int32_t *left, int count, int lo, int hi) {
    for (int k = lo; k <= hi; k++) s->load[k] = 0, s->cross[k] = 0;
    for (int i = count - 1; i >= 0; i--) {
        int b = left[i];
        int64_t room = s->capacity - s->bound[b];
        for (int k = s->begin[b]; k < s->end[b]; k++) {
            s->load[k] += s->size[b], s->base[k] = s->bound[b];
            if (s->load[k] > room) return 0;
        }
        s->cross[s->begin[b] + 1]++, s->cross[s->end[b]]--;
    }
    return 1;
}

static int choose(const Search *s, const int32_t *left, int count, int lo, int hi) {
    int tight = -1, b = -1;
    int64_t best = INT64_MAX;
    for (int k = lo; k < hi; k++) {
        if (!s->load[k]) continue;
        int64_t score = s->base[k] + s->weight * (s->capacity - s->base[k] - s->load[k]) + s->noise[k];
        if (score < best) best = score, tight = k;
    }
    for (int i = 0; i < count; i++) {
        int c = left[i];
        if (s->begin[c] > tight || tight >= s->end[c]) continue;
        if (b >= 0 && s->bound[c] > s->bound[b]) break;
        if (b < 0 || s->rank[c] < s->rank[b]) b = c;
    }
    for (;;) {
        int under = -1;
        int64_t top = lowest_top(s, b, &under);
        if (under < 0 || (!s->held[b] && top > s->least[b])) return b;
        b = under;
    }
}

static int dive(Search *s, int32_t *left, int count);

static int dive_parts(Search *s, const int32_t *left, int count, int lo, int hi, int cuts) {
    int64_t mark = s->marks;
    int32_t *part = malloc(sizeof *part * (size_t)(count + 2 * cuts)), *cut = part + count, *members = cut + cuts;
    if (!part) return NO_MEMORY;
    int found = 0, crossing = 0;
    for (int k = lo + 1; k <= hi; k++)
        if (!(crossing += s->cross[k])) cut[found++] = k;
    memset(members, 0, sizeof *members * (size_t)cuts);
    for (int i = 0; i < count; i++) {
        int p = 0;
        while (s->begin[left[i]] >= cut[p]) p++;
        members[p]++;
    }
    int result = FOUND;
    for (int done = 0; done < cuts && result == FOUND; done++) {
        int p = -1, size = 0;
        for (int i = 0; i < cuts; i++)
            if (members[i] >= 0 && (p < 0 || members[i] < members[p])) p = i;
        members[p] = -1;
        for (int i = 0; i < count; i++)
            if (s->begin[left[i]] < cut[p] && (!p || s->begin[left[i]] >= cut[p - 1])) part[size++] = left[i];
        if (size) result = dive(s, part, size);
    }
    free(part);
    if (result == FAILED) {
        undo(s, mark);
        for (int i = 0; i < count; i++) s->placed[left[i]] = 0;
    }
    return result;
}

static int dive(Search *s, int32_t *left, int count) {
    int64_t mark = s->marks;
    int lo = INT32_MAX, hi = 0, result = FAILED;
    int32_t *rest = malloc(sizeof *rest * (size_t)count);
    if (!rest) return NO_MEMORY;
    for (int i = 0; i < count; i++) {
        if (s->begin[left[i]] < lo) lo = s->begin[left[i]];
        if (s->end[left[i]] > hi) hi = s->end[left[i]];
    }
    for (;;) {
        if (s->nodes++ >= s->limit) { result = CUT; break; }
        set_bounds(s, left, count);
        sort(s, left, count);
        if (!fits(s, left, count, lo, hi)) break;
        if (count == 1) {
            s->offset[left[0]] = s->bound[left[0]], s->placed[left[0]] = 1, result = FOUND;
            break;
        }
        int cuts = 0, crossing = 0;
        for (int k = lo + 1; k <= hi; k++) cuts += !(crossing += s->cross[k]);
        if (cuts > 1) {
            result = dive_parts(s, left, count, lo, hi, cuts);
            break;
        }
        int b = choose(s, left, count, lo, hi), others = 0;
        int64_t here = s->marks, top = s->least[b] + s->size[b];
        for (int i = 0; i < count; i++)
            if (left[i] != b) rest[others++] = left[i];
        s->placed[b] = 1, s->offset[b] = s->least[b];
        for (int i = s->start[b]; i < s->start[b + 1]; i++) {
            int c = s->near[i];
            if (s->placed[c] || s->least[c] >= top) continue;
            if (!note(s, c)) { result = NO_MEMORY; break; }
            s->least[c] = top, s->held[c] = 0;
        }
        if (result != NO_MEMORY) result = dive(s, rest, others);
        if (result != FAILED) break;
        undo(s, here);
        s->placed[b] = 0;
        if (!note(s, b)) { result = NO_MEMORY; break; }
        s->held[b] = 1;
    }
    if (result == FAILED) undo(s, mark);
    free(rest);
    return result;
}

/* One dive over ``buffers`` buffers; ``order`` is permuted. Returns FOUND, FAILED, CUT or NO_MEMORY, and the nodes that it took. */
API int offsets_dive(int32_t buffers, int32_t cliques, const int32_t *begin, const int32_t *end, const int64_t *size, const int32_t *start,
                     const int32_t *near, const int32_t *rank, const int64_t *noise, int64_t capacity, int64_t weight, int64_t limit, int32_t *order,
                     int64_t *offset, int64_t *nodes) {
    Search s = {.cliques = cliques, .begin = begin, .end = end, .start = start, .near = near, .rank = rank, .size = size, .noise = noise,
                .capacity = capacity, .weight = weight, .limit = limit, .offset = offset, .room = 1024};
    size_t b = (size_t)buffers + 1, k = (size_t)cliques + 2;
    s.least = calloc(b, sizeof(int64_t)), s.bound = calloc(b, sizeof(int64_t));
    s.load = calloc(k, sizeof(int64_t)), s.base = calloc(k, sizeof(int64_t)), s.cross = calloc(k, sizeof(int32_t));
    s.placed = calloc(b, 1), s.held = calloc(b, 1), s.trail = malloc(sizeof *s.trail * (size_t)s.room);
    int result = NO_MEMORY;
    if (s.least && s.bound && s.load && s.base && s.cross && s.placed && s.held && s.trail) result = dive(&s, order, buffers);
    *nodes = s.nodes;
    void *all[] = {s.least, s.bound, s.load, s.base, s.cross, s.placed, s.held, s.trail};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return result;
}
