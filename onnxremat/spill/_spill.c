/* The operator pair that swaps tensors to a file: onnxremat.spill::SpillOut and onnxremat.spill::SpillIn, version 1.
 *
 *     token = SpillOut(x)                     attribute reads: how many SpillIns will read this copy
 *     x'    = SpillIn(token, like)            attribute shape: of x; like is any tensor of x's type, such as an empty constant
 *
 * A custom operator library for ONNX Runtime 1.16 and later.  The runtime hands out its functions as a table that only ever grows at its
 * end, and reads of an operator's description only what was there in the version that the description names; so the few entries that are
 * needed are declared here, and one binary serves every version.
 *
 * All sessions made from one SessionOptions share a store: one file, unlinked when it is made, in which every copy has an extent of its
 * own.  Space is reserved before it is written to.  The folder is the session option `onnxremat.spill_dir`, or the environment variable
 * ONNXREMAT_SPILL_DIR, or TMPDIR, or /var/tmp.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* ---- the runtime's interface: https://onnxruntime.ai/docs/api/c, "OrtApi" and "OrtCustomOp" */

enum { API_VERSION = 16, ORT_FAIL = 1, TYPE_ANY = 0, TYPE_INT64 = 7, REQUIRED = 0 };
typedef struct Status Status;
typedef struct { const void *const *(*get_api)(uint32_t version); const char *(*version)(void); } ApiBase;

/* Positions in the table of functions. */
enum {
    CREATE_STATUS = 0, GET_ERROR_MESSAGE = 2, CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, TENSOR_DATA = 51, TENSOR_TYPE = 60,
    ELEMENT_COUNT = 64, TYPE_AND_SHAPE = 65, ATTRIBUTE_INT = 86, CONTEXT_INPUT = 90, CONTEXT_OUTPUT = 91, RELEASE_STATUS = 93,
    RELEASE_TYPE_AND_SHAPE = 99, ATTRIBUTE_INTS = 163, HAS_CONFIG = 237, GET_CONFIG = 238, NODE_NAME = 244
};

typedef struct CustomOp {
    uint32_t version;
    void *create_v1;
    const char *(*name)(const struct CustomOp *);
    const char *(*provider)(const struct CustomOp *);
    int (*input_type)(const struct CustomOp *, size_t);
    size_t (*inputs)(const struct CustomOp *);
    int (*output_type)(const struct CustomOp *, size_t);
    size_t (*outputs)(const struct CustomOp *);
    void *compute_v1;
    void (*destroy)(void *kernel);
    int (*input_kind)(const struct CustomOp *, size_t);
    int (*output_kind)(const struct CustomOp *, size_t);
    int (*memory_type)(const struct CustomOp *, size_t);
    int (*variadic[4])(const struct CustomOp *);
    Status *(*create)(const struct CustomOp *, const void *const *api, const void *info, void **kernel);
    Status *(*compute)(void *kernel, void *context);
    void *reserved[3]; /* shape inference and version range: looked at by later versions only */
} CustomOp;

#define CALL(api, position, type) ((type)(api)[position])

static Status *failed(const void *const *api, const char *text) {
    return CALL(api, CREATE_STATUS, Status *(*)(int, const char *))(ORT_FAIL, text);
}

/* ---- the store */

#define PAGE 4096
#define INDEX_BITS 24

typedef struct { int64_t offset, bytes; } Extent;
typedef struct {
    Extent where;
    int64_t bytes, generation;
    int64_t reads; /* left; 0 marks a free slot */
    const void *owner;
    pthread_t thread;
} Slot;

typedef struct {
    pthread_mutex_t lock;
    char folder[4096];
    int file, kernels, slots, holes;
    int64_t end, generation;
    Slot *slot;
    Extent *hole; /* free extents by offset, none adjacent to another */
} Store;

static const char HINT[] = "free space there or choose another folder with --spill-dir or ONNXREMAT_SPILL_DIR";

static void explain(const Store *s, char *text, size_t size, const char *what, int64_t bytes, int error) {
    char reason[128] = "";
    const char *found = strerror_r(error, reason, sizeof reason); /* glibc's form returns the text */
    char amount[32] = "a file";
    if (bytes >= 0) snprintf(amount, sizeof amount, "%lld bytes", (long long)bytes);
    snprintf(text, size, "onnxremat.spill: %s %s in %s failed: %s; %s", what, amount, s->folder, found, HINT);
}

/* Beyond a limit on file sizes the kernel sends a signal that would end the process; the error code says enough. */
typedef struct { sigset_t before; } Quiet;
static Quiet quiet(void) {
    Quiet q;
    sigset_t block;
    sigemptyset(&block);
    sigaddset(&block, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &block, &q.before);
    return q;
}
static void loud(Quiet q) {
    if (!sigismember(&q.before, SIGXFSZ)) {
        sigset_t block;
        struct timespec none = {0, 0};
        sigemptyset(&block);
        sigaddset(&block, SIGXFSZ);
        while (sigtimedwait(&block, NULL, &none) == SIGXFSZ) continue;
    }
    pthread_sigmask(SIG_SETMASK, &q.before, NULL);
}

static int open_file(Store *s) {
#ifdef O_TMPFILE
    s->file = open(s->folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (s->file >= 0) return 0;
#endif
    char name[sizeof s->folder + 32];
    snprintf(name, sizeof name, "%s/onnxremat-spill-XXXXXX", s->folder);
    s->file = mkstemp(name);
    if (s->file < 0) return errno;
    fcntl(s->file, F_SETFD, FD_CLOEXEC);
    if (unlink(name)) {
        int error = errno;
        close(s->file), s->file = -1;
        return error;
    }
    return 0;
}

/* An extent for so many bytes, its space reserved; 0 or an error number. */
static int take(Store *s, int64_t bytes, Extent *found) {
    int64_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    if (!size) size = PAGE;
    for (int i = 0; i < s->holes; i++) {
        if (s->hole[i].bytes < size) continue;
        *found = (Extent){s->hole[i].offset, size};
        s->hole[i].offset += size, s->hole[i].bytes -= size;
        if (!s->hole[i].bytes) memmove(s->hole + i, s->hole + i + 1, sizeof(Extent) * (size_t)(--s->holes - i));
        return 0;
    }
    /* The hole at the end of the file, if any, is grown. */
    int last = s->holes && s->hole[s->holes - 1].offset + s->hole[s->holes - 1].bytes == s->end;
    int64_t from = last ? s->hole[s->holes - 1].offset : s->end;
    Quiet q = quiet();
    int error;
    do error = posix_fallocate(s->file, s->end, from + size - s->end);
    while (error == EINTR);
    if (error && ftruncate(s->file, s->end)) { /* what was reserved of it goes back; if not, it is found reserved next time */ }
    loud(q);
    if (error) return error;
    *found = (Extent){from, size};
    s->end = from + size;
    if (last) s->holes--;
    return 0;
}

/* Give an extent back; there is room in the table of holes, see spare(). */
static void give(Store *s, Extent e) {
    int i = 0;
    while (i < s->holes && s->hole[i].offset < e.offset) i++;
    memmove(s->hole + i + 1, s->hole + i, sizeof(Extent) * (size_t)(s->holes++ - i));
    s->hole[i] = e;
    if (i + 1 < s->holes && s->hole[i].offset + s->hole[i].bytes == s->hole[i + 1].offset) {
        s->hole[i].bytes += s->hole[i + 1].bytes;
        memmove(s->hole + i + 1, s->hole + i + 2, sizeof(Extent) * (size_t)(--s->holes - i - 1));
    }
    if (i && s->hole[i - 1].offset + s->hole[i - 1].bytes == s->hole[i].offset) {
        s->hole[i - 1].bytes += s->hole[i].bytes;
        memmove(s->hole + i, s->hole + i + 1, sizeof(Extent) * (size_t)(--s->holes - i));
    }
}

/* A free slot, with room for the holes that all slots can leave; -1 without memory. */
static int spare(Store *s) {
    for (int i = 0; i < s->slots; i++)
        if (!s->slot[i].reads) return i;
    if (s->slots >= (1 << INDEX_BITS) - 1) return -1;
    int count = s->slots ? 2 * s->slots : 16;
    Slot *slot = realloc(s->slot, sizeof(Slot) * (size_t)count);
    if (!slot) return -1;
    s->slot = slot;
    Extent *hole = realloc(s->hole, sizeof(Extent) * (size_t)(count + 2));
    if (!hole) return -1;
    s->hole = hole;
    memset(slot + s->slots, 0, sizeof(Slot) * (size_t)(count - s->slots));
    int found = s->slots;
    s->slots = count;
    return found;
}

static void drop(Store *s, Slot *slot) {
    give(s, slot->where);
    slot->reads = 0;
}

static Store *new_store(const char *folder) {
    Store *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    pthread_mutex_init(&s->lock, NULL);
    const char *names[] = {folder, getenv("ONNXREMAT_SPILL_DIR"), getenv("TMPDIR"), "/var/tmp"};
    for (int i = 3; i >= 0; i--)
        if (names[i] && *names[i]) snprintf(s->folder, sizeof s->folder, "%s", names[i]);
    s->file = -1;
    return s;
}

/* ---- the kernels */

typedef struct { CustomOp op; Store *store; int out; } SpillOp;
typedef struct {
    const void *const *api;
    Store *store;
    int64_t reads;      /* SpillOut */
    int64_t shape[64];  /* SpillIn */
    size_t rank;
    char node[256];
} Kernel;

static int64_t element_bytes(int type) {
    /* float u8 i8 u16 i16 i32 i64 string bool f16 f64 u32 u64 complex64 complex128 bfloat16 and the 8-bit floats */
    static const signed char size[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 8, 16, 2, 1, 1, 1, 1};
    return type >= 0 && (size_t)type < sizeof size ? size[type] : 0;
}

static Status *tensor_bytes(const void *const *api, const void *value, int64_t *bytes) {
    void *info = NULL;
    int type = 0;
    size_t count = 0;
    Status *bad = CALL(api, TYPE_AND_SHAPE, Status *(*)(const void *, void **))(value, &info);
    if (bad) return bad;
    bad = CALL(api, TENSOR_TYPE, Status *(*)(const void *, int *))(info, &type);
    if (!bad) bad = CALL(api, ELEMENT_COUNT, Status *(*)(const void *, size_t *))(info, &count);
    CALL(api, RELEASE_TYPE_AND_SHAPE, void (*)(void *))(info);
    if (bad) return bad;
    *bytes = (int64_t)count * element_bytes(type);
    return element_bytes(type) ? NULL : failed(api, "onnxremat.spill: only tensors of numbers can be swapped");
}

static Status *create(const CustomOp *op, const void *const *api, const void *info, void **kernel) {
    const SpillOp *spill = (const SpillOp *)op;
    Store *s = spill->store;
    Kernel *k = calloc(1, sizeof *k);
    if (!k) return failed(api, "onnxremat.spill: out of memory");
    k->api = api, k->store = s, k->rank = sizeof k->shape / sizeof *k->shape;
    size_t length = sizeof k->node;
    Status *bad = CALL(api, NODE_NAME, Status *(*)(const void *, char *, size_t *))(info, k->node, &length);
    if (bad) CALL(api, RELEASE_STATUS, void (*)(Status *))(bad), snprintf(k->node, sizeof k->node, "?");
    if (spill->out) bad = CALL(api, ATTRIBUTE_INT, Status *(*)(const void *, const char *, int64_t *))(info, "reads", &k->reads);
    else bad = CALL(api, ATTRIBUTE_INTS, Status *(*)(const void *, const char *, int64_t *, size_t *))(info, "shape", k->shape, &k->rank);
    if (!bad && spill->out && k->reads < 1) bad = failed(api, "onnxremat.spill: SpillOut's attribute 'reads' must be 1 or more");
    if (!bad) {
        pthread_mutex_lock(&s->lock);
        int error = s->file < 0 ? open_file(s) : 0;
        if (!error) s->kernels++;
        pthread_mutex_unlock(&s->lock);
        if (error) {
            char text[sizeof s->folder + 512];
            explain(s, text, sizeof text, "making", -1, error);
            bad = failed(api, text);
        }
    }
    if (bad) free(k), k = NULL;
    *kernel = k;
    return bad;
}

static void destroy(void *kernel) {
    Kernel *k = kernel;
    Store *s = k->store;
    pthread_mutex_lock(&s->lock);
    if (!--s->kernels) { /* the operators may serve further sessions, which start with a file of their own */
        close(s->file);
        free(s->slot), free(s->hole);
        s->file = -1, s->slot = NULL, s->hole = NULL, s->slots = s->holes = 0, s->end = 0;
    }
    pthread_mutex_unlock(&s->lock);
    free(k);
}

static Status *spill_out(void *kernel, void *context) {
    Kernel *k = kernel;
    Store *s = k->store;
    const void *const *api = k->api;
    const void *value = NULL;
    void *data = NULL, *token = NULL, *written = NULL;
    int64_t bytes = 0, one = 1;
    char text[sizeof s->folder + 512];
    Status *bad = CALL(api, CONTEXT_INPUT, Status *(*)(const void *, size_t, const void **))(context, 0, &value);
    if (!bad) bad = tensor_bytes(api, value, &bytes);
    if (!bad) bad = CALL(api, TENSOR_DATA, Status *(*)(const void *, void **))(value, &data);
    if (!bad) bad = CALL(api, CONTEXT_OUTPUT, Status *(*)(void *, size_t, const int64_t *, size_t, void **))(context, 0, &one, 1, &token);
    if (!bad) bad = CALL(api, TENSOR_DATA, Status *(*)(const void *, void **))(token, &written);
    if (bad) return bad;

    pthread_mutex_lock(&s->lock);
    /* A copy of this node that this thread made before and that was never read to its end is left from a step that failed. */
    for (int i = 0; i < s->slots; i++)
        if (s->slot[i].reads && s->slot[i].owner == k && pthread_equal(s->slot[i].thread, pthread_self())) drop(s, &s->slot[i]);
    Extent where = {0, 0};
    int at = spare(s);
    int error = at < 0 ? ENOMEM : take(s, bytes, &where);
    int64_t generation = ++s->generation;
    if (!error) s->slot[at] = (Slot){where, bytes, generation, k->reads, k, pthread_self()};
    pthread_mutex_unlock(&s->lock);
    if (error) {
        explain(s, text, sizeof text, "reserving", bytes, error);
        return failed(api, text);
    }
    Quiet q = quiet();
    for (int64_t done = 0; done < bytes && !error;) {
        ssize_t n = pwrite(s->file, (const char *)data + done, (size_t)(bytes - done), where.offset + done);
        if (n > 0) done += n;
        else if (!n) error = EIO;
        else if (errno != EINTR) error = errno;
    }
    loud(q);
    if (error) {
        pthread_mutex_lock(&s->lock);
        if (s->slot[at].generation == generation && s->slot[at].reads) drop(s, &s->slot[at]);
        pthread_mutex_unlock(&s->lock);
        explain(s, text, sizeof text, "writing", bytes, error);
        return failed(api, text);
    }
    *(int64_t *)written = generation << INDEX_BITS | at;
    return NULL;
}

/* The slot of a token, or NULL where it has been given back; the lock is held. */
static Slot *slot_of(Store *s, int64_t token) {
    int64_t at = token & ((1 << INDEX_BITS) - 1);
    if (at >= s->slots || s->slot[at].generation != token >> INDEX_BITS || !s->slot[at].reads) return NULL;
    return &s->slot[at];
}

static Status *spill_in(void *kernel, void *context) {
    Kernel *k = kernel;
    Store *s = k->store;
    const void *const *api = k->api;
    const void *token = NULL;
    void *key = NULL, *value = NULL, *data = NULL;
    int64_t bytes = 0, whole = 0;
    char text[sizeof s->folder + 512];
    Status *bad = CALL(api, CONTEXT_INPUT, Status *(*)(const void *, size_t, const void **))(context, 0, &token);
    if (!bad) bad = tensor_bytes(api, token, &bytes);
    if (!bad && bytes != 8) bad = failed(api, "onnxremat.spill: SpillIn's first input is not a token of SpillOut");
    if (!bad) bad = CALL(api, TENSOR_DATA, Status *(*)(const void *, void **))(token, &key);
    if (!bad) bad = CALL(api, CONTEXT_OUTPUT, Status *(*)(void *, size_t, const int64_t *, size_t, void **))(context, 0, k->shape, k->rank, &value);
    if (!bad) bad = tensor_bytes(api, value, &bytes);
    if (!bad) bad = CALL(api, TENSOR_DATA, Status *(*)(const void *, void **))(value, &data);
    if (bad) return bad;

    int64_t name = *(const int64_t *)key;
    pthread_mutex_lock(&s->lock);
    Slot *slot = slot_of(s, name);
    int64_t offset = slot ? slot->where.offset : 0;
    if (slot) whole = slot->bytes;
    pthread_mutex_unlock(&s->lock);
    if (!slot || whole != bytes) {
        snprintf(text, sizeof text, slot ? "onnxremat.spill: '%s' wants %lld bytes of a copy of %lld" : "onnxremat.spill: '%s' reads a copy that is gone",
                 k->node, (long long)bytes, (long long)whole);
        return failed(api, text);
    }
    int error = 0;
    for (int64_t done = 0; done < bytes && !error;) {
        ssize_t n = pread(s->file, (char *)data + done, (size_t)(bytes - done), offset + done);
        if (n > 0) done += n;
        else if (!n) error = EIO;
        else if (errno != EINTR) error = errno;
    }
    pthread_mutex_lock(&s->lock);
    slot = slot_of(s, name); /* still the same copy, or what was read may be another's */
    if (slot && !error && !--slot->reads) give(s, slot->where);
    pthread_mutex_unlock(&s->lock);
    if (error) {
        explain(s, text, sizeof text, "reading", bytes, error);
        return failed(api, text);
    }
    if (!slot) {
        snprintf(text, sizeof text, "onnxremat.spill: the copy that '%s' reads was given up meanwhile: run concurrent steps in sequential mode", k->node);
        return failed(api, text);
    }
    return NULL;
}

static const char *name(const CustomOp *op) { return ((const SpillOp *)op)->out ? "SpillOut" : "SpillIn"; }
static const char *provider(const CustomOp *op) { (void)op; return NULL; }
static size_t inputs(const CustomOp *op) { return ((const SpillOp *)op)->out ? 1 : 2; }
static size_t outputs(const CustomOp *op) { (void)op; return 1; }
static int input_type(const CustomOp *op, size_t i) { return !((const SpillOp *)op)->out && !i ? TYPE_INT64 : TYPE_ANY; }
static int output_type(const CustomOp *op, size_t i) { (void)i; return ((const SpillOp *)op)->out ? TYPE_INT64 : TYPE_ANY; }
static int kind(const CustomOp *op, size_t i) { (void)op, (void)i; return REQUIRED; }
static int memory(const CustomOp *op, size_t i) { (void)op, (void)i; return 0; }
static int arity(const CustomOp *op) { (void)op; return 1; }

static void describe(SpillOp *spill, Store *store, int out) {
    spill->store = store, spill->out = out;
    spill->op = (CustomOp){
        .version = API_VERSION, .name = name, .provider = provider, .input_type = input_type, .inputs = inputs, .output_type = output_type,
        .outputs = outputs, .destroy = destroy, .input_kind = kind, .output_kind = kind, .memory_type = memory,
        .variadic = {arity, arity, arity, arity}, .create = create, .compute = out ? spill_out : spill_in,
    };
}

/* Entry point that ONNX Runtime calls for SessionOptions.register_custom_ops_library and its like in other languages.  What it makes
 * belongs to the session options, which have no hook for their end: some hundred bytes stay for each. */
API Status *RegisterCustomOps(void *options, const ApiBase *base) {
    const void *const *api = base->get_api(API_VERSION);
    if (!api) return NULL; /* the runtime has said why */
    char folder[4096] = "";
    size_t size = sizeof folder;
    int given = 0;
    Status *bad = CALL(api, HAS_CONFIG, Status *(*)(const void *, const char *, int *))(options, "onnxremat.spill_dir", &given);
    if (!bad && given) bad = CALL(api, GET_CONFIG, Status *(*)(const void *, const char *, char *, size_t *))(options, "onnxremat.spill_dir", folder, &size);
    void *domain = NULL;
    if (!bad) bad = CALL(api, CREATE_DOMAIN, Status *(*)(const char *, void **))("onnxremat.spill", &domain);
    SpillOp *ops = bad ? NULL : calloc(2, sizeof *ops);
    Store *store = bad ? NULL : new_store(folder);
    if (!bad && (!ops || !store)) bad = failed(api, "onnxremat.spill: out of memory");
    for (int out = 0; out < 2 && !bad; out++) {
        describe(&ops[out], store, out);
        bad = CALL(api, DOMAIN_ADD, Status *(*)(void *, const void *))(domain, &ops[out]);
    }
    if (!bad) bad = CALL(api, ADD_DOMAIN, Status *(*)(void *, void *))(options, domain);
    return bad;
}
