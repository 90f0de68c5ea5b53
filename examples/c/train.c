/* Train a compiled artifact through the C interface of ONNX Runtime; one loss a line.
 *
 *     cc -std=c11 -O2 -o train train.c json.c safetensors.c -ldl -lm
 *     ./train ARTIFACT --library libonnxruntime.so --data FILE [--steps N] [--threads N] [--save FILE] [--pause]
 *
 * The artifact is one of `onnxremat compile --target onnxruntime`.  The data file is a safetensors file with one tensor per input and label
 * of the model, samples along the first axis; batches are taken in order, again and again.  --save writes the trained parameters.  --pause
 * waits for Enter before the first step and after the last.
 *
 * Every output of the training model but the loss is the next value of one of its inputs ("writes" in the manifest).  So both are given the
 * same array: a step reads the parameters from it and leaves the new ones there, and nothing is copied.
 */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* madvise */
#include <dlfcn.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fail.h"
#include "json.h"
#include "safetensors.h"
#ifdef ONNXRUNTIME_HEADER
#include ONNXRUNTIME_HEADER
#else
#include "onnxruntime_subset.h"
#endif

/* Elements that an optimizer model updates at a time: what it needs is bounded by this, however large a parameter is. */
enum { SLICE = 1 << 16, MAX_ARENA_SETTINGS = 16 };

static const OrtApi *ort;
static OrtEnv *env;
static OrtMemoryInfo *memory;

static void check(OrtStatus *status) {
    if (status) fail("ONNX Runtime: %s", ort->GetErrorMessage(status));
}

/* ---- the runtime, as the manifest wants it */

static void load_runtime(const char *library, const Json *manifest) {
    void *handle = dlopen(library, RTLD_NOW);
    if (!handle) fail("%s", dlerror());
    const OrtApiBase *(*get_base)(void);
    *(void **)&get_base = dlsym(handle, "OrtGetApiBase");
    if (!get_base) fail("%s is not ONNX Runtime", library);
    ort = get_base()->GetApi(ORT_API_VERSION);
    if (!ort) fail("ONNX Runtime %s in %s is too old", get_base()->GetVersionString(), library);
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "train", &env));
    check(ort->CreateMemoryInfo("Cpu", OrtArenaAllocator, 0, OrtMemTypeDefault, &memory));
    /* One arena for all sessions; a step that would need more than the plan has fails. */
    const char *keys[MAX_ARENA_SETTINGS];
    size_t values[MAX_ARENA_SETTINGS], count = 0;
    for (const Json *setting = json_member(manifest, "arena", JSON_OBJECT)->first; setting && count < MAX_ARENA_SETTINGS; setting = setting->next)
        keys[count] = setting->key, values[count++] = (size_t)setting->number;
    OrtArenaCfg *arena;
    check(ort->CreateArenaCfgV2(keys, values, count, &arena));
    check(ort->CreateAndRegisterAllocator(env, memory, arena));
}

/* What the manifest says beyond these is not to be set from C, and not needed: the graph itself keeps the order and hands on no buffer. */
static OrtSessionOptions *session_options(const Json *manifest, int threads) {
    static const struct { const char *name; GraphOptimizationLevel level; } levels[] = {
        {"ORT_DISABLE_ALL", ORT_DISABLE_ALL}, {"ORT_ENABLE_BASIC", ORT_ENABLE_BASIC},
        {"ORT_ENABLE_EXTENDED", ORT_ENABLE_EXTENDED}, {"ORT_ENABLE_ALL", ORT_ENABLE_ALL},
    };
    const Json *wanted = json_member(manifest, "session_options", JSON_OBJECT);
    OrtSessionOptions *options;
    check(ort->CreateSessionOptions(&options));
    const char *level = json_member(wanted, "graph_optimization_level", JSON_STRING)->text;
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (!strcmp(levels[i].name, level)) check(ort->SetSessionGraphOptimizationLevel(options, levels[i].level));
    int parallel = !strcmp(json_member(wanted, "execution_mode", JSON_STRING)->text, "ORT_PARALLEL");
    check(ort->SetSessionExecutionMode(options, parallel ? ORT_PARALLEL : ORT_SEQUENTIAL));
    if (!json_member(wanted, "enable_mem_pattern", JSON_BOOL)->number) check(ort->DisableMemPattern(options));
    for (const Json *entry = json_member(wanted, "config", JSON_OBJECT)->first; entry; entry = entry->next)
        check(ort->AddSessionConfigEntry(options, entry->key, entry->text));
    check(ort->SetIntraOpNumThreads(options, threads));
    check(ort->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_ERROR));
    return options;
}

/* ---- tensors and models */

typedef struct {
    const char *name;
    ONNXTensorElementDataType type;
    size_t rank, elements, bytes;
    int64_t shape[MAX_RANK];
    void *data;
    OrtValue *value;
} Tensor;

typedef struct {
    OrtSession *session;
    size_t input_count, output_count;
    const char **input_names, **output_names;
    OrtValue **inputs, **outputs;
} Model;

static void *allocate_data(size_t bytes) {
    void *data = NULL;
    if (posix_memalign(&data, 64, bytes ? bytes : 64)) fail("there is no memory for %zu bytes", bytes);
    return memset(data, 0, bytes);
}

static OrtValue *as_value(void *data, size_t bytes, const int64_t *shape, size_t rank, ONNXTensorElementDataType type) {
    OrtValue *value;
    check(ort->CreateTensorWithDataAsOrtValue(memory, data, bytes, shape, rank, type, &value));
    return value;
}

/* A tensor of zeros for an input or output, of the type and shape that the session knows. */
static Tensor make_tensor(const char *name, OrtTypeInfo *info) {
    Tensor made = {.name = name, .elements = 1};
    const OrtTensorTypeAndShapeInfo *tensor;
    check(ort->CastTypeInfoToTensorInfo(info, &tensor));
    if (!tensor) fail("'%s' is no tensor", name);
    check(ort->GetTensorElementType(tensor, &made.type));
    check(ort->GetDimensionsCount(tensor, &made.rank));
    if (made.rank > MAX_RANK) fail("'%s' has more than %d dimensions", name, MAX_RANK);
    check(ort->GetDimensions(tensor, made.shape, made.rank));
    for (size_t i = 0; i < made.rank; i++) made.elements *= (size_t)made.shape[i];
    made.bytes = made.elements * element_bytes((int)made.type);
    made.data = allocate_data(made.bytes);
    made.value = as_value(made.data, made.bytes, made.shape, made.rank, made.type);
    ort->ReleaseTypeInfo(info);
    return made;
}

static Model open_model(const char *folder, const char *file, const OrtSessionOptions *options) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path) fail("the path of %s is too long", file);
    Model model = {0};
    OrtAllocator *allocator;
    check(ort->GetAllocatorWithDefaultOptions(&allocator));
    check(ort->CreateSession(env, path, options, &model.session));
    check(ort->SessionGetInputCount(model.session, &model.input_count));
    check(ort->SessionGetOutputCount(model.session, &model.output_count));
    model.input_names = allocate(model.input_count, sizeof(char *));
    model.output_names = allocate(model.output_count, sizeof(char *));
    model.inputs = allocate(model.input_count, sizeof(OrtValue *));
    model.outputs = allocate(model.output_count, sizeof(OrtValue *));
    for (size_t i = 0; i < model.input_count; i++) check(ort->SessionGetInputName(model.session, i, allocator, (char **)&model.input_names[i]));
    for (size_t i = 0; i < model.output_count; i++) check(ort->SessionGetOutputName(model.session, i, allocator, (char **)&model.output_names[i]));
    return model;
}

/* Let each output that replaces an input be written over it. */
static void connect(Model *model, const Json *writes) {
    for (size_t o = 0; o < model->output_count; o++) {
        const Json *target = json_find(writes, model->output_names[o]);
        for (size_t i = 0; target && i < model->input_count; i++)
            if (!strcmp(model->input_names[i], target->text)) model->outputs[o] = model->inputs[i];
    }
}

static void run(Model *model) {
    check(ort->Run(model->session, NULL, model->input_names, (const OrtValue *const *)model->inputs, model->input_count, model->output_names,
                   model->output_count, model->outputs));
}

/* The runtime counts the bytes of a chunk in an int, and would make several regions of an arena of 2 GiB and more, in which a buffer may
 * find no room.  So a model whose only buffer fills the arena is run first: that makes it one region.  What the run has written to goes
 * back to the system until it is used. */
static void claim_arena(const char *folder, const Json *claim, const OrtSessionOptions *options) {
    static const int64_t rank[] = {2};
    int64_t shape[2] = {0};
    const Json *size = json_member(claim, "shape", JSON_ARRAY)->first;
    for (int i = 0; i < 2 && size; i++, size = size->next) shape[i] = (int64_t)size->number;
    Model model = open_model(folder, json_member(claim, "model", JSON_STRING)->text, options);
    model.inputs[0] = as_value(shape, sizeof shape, rank, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
    run(&model);
    void *block;
    check(ort->GetTensorMutableData(model.outputs[0], &block));
    ort->ReleaseValue(model.outputs[0]);
    ort->ReleaseValue(model.inputs[0]);
    ort->ReleaseSession(model.session);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)block;
    uintptr_t end = (begin + (uintptr_t)(shape[0] * shape[1]) * sizeof(float)) / page * page;
    begin = (begin + page - 1) / page * page;
    madvise((void *)begin, end - begin, MADV_DONTNEED);
}

/* ---- the training run */

typedef struct {
    Model model;
    Tensor *parameter, *gradient; /* one of each per run of `model` */
} Update;

typedef struct {
    Model step;
    Tensor *tensors; /* inputs of the step */
    Tensor loss;
    Update *updates; /* runs of optimizer models; none where the update is part of the step */
    size_t update_count, update_room;
    float rate;
    int64_t number;
    double clip;
} Training;

static Tensor *tensor_named(const Training *t, const char *name) {
    for (size_t i = 0; i < t->step.input_count; i++)
        if (!strcmp(t->tensors[i].name, name)) return &t->tensors[i];
    return NULL;
}

static void add_update(Training *t, Update update) {
    if (t->update_count == t->update_room) {
        t->update_room = t->update_room ? 2 * t->update_room : 64;
        t->updates = realloc(t->updates, t->update_room * sizeof *t->updates);
        if (!t->updates) fail("there is no memory for %zu updates", t->update_room);
    }
    t->updates[t->update_count++] = update;
}

/* The runs of an optimizer model that update a parameter, slice by slice. */
static void add_updates(Training *t, const Model *model, const Json *writes, const char *parameter, const char *gradient) {
    static const int64_t one[] = {1};
    Tensor *values = tensor_named(t, parameter), *gradients = tensor_named(t, gradient);
    if (!values || !gradients) fail("the training model has no '%s' or no '%s'", parameter, gradient);
    float **arrays = allocate(model->input_count, sizeof *arrays); /* NULL: a number of its own */
    for (size_t i = 0; i < model->input_count; i++) {
        const char *name = model->input_names[i];
        if (!strcmp(name, "params")) arrays[i] = values->data;
        else if (!strcmp(name, "gradients")) arrays[i] = gradients->data;
        else if (strcmp(name, "learning_rate") && strcmp(name, "step")) arrays[i] = allocate_data(values->bytes); /* a moment */
    }
    for (size_t start = 0; start < values->elements; start += SLICE) {
        Update update = {*model, values, gradients};
        size_t left = values->elements - start, count = left < SLICE ? left : SLICE;
        update.model.inputs = allocate(model->input_count, sizeof(OrtValue *));
        update.model.outputs = allocate(model->output_count, sizeof(OrtValue *));
        for (size_t i = 0; i < model->input_count; i++) {
            if (arrays[i])
                update.model.inputs[i] = as_value(arrays[i] + start, count * sizeof(float), (int64_t[]){(int64_t)count}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
            else if (!strcmp(model->input_names[i], "step"))
                update.model.inputs[i] = as_value(&t->number, sizeof t->number, one, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
            else
                update.model.inputs[i] = as_value(&t->rate, sizeof t->rate, one, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
        }
        connect(&update.model, writes);
        add_update(t, update);
    }
    free(arrays);
}

static void prepare(Training *t, const char *folder, const Json *manifest, const TensorFile *checkpoint, const OrtSessionOptions *options) {
    const Json *optimizer = json_member(manifest, "optimizer", JSON_OBJECT);
    const char *loss = json_member(json_member(manifest, "roles", JSON_OBJECT), "loss", JSON_STRING)->text;
    t->rate = (float)json_member(optimizer, "learning_rate", JSON_NUMBER)->number;
    t->clip = json_member(optimizer, "clip_grad_norm", JSON_NUMBER)->number;
    t->step = open_model(folder, "training_model.onnx", options);
    t->tensors = allocate(t->step.input_count, sizeof *t->tensors);
    for (size_t i = 0; i < t->step.input_count; i++) {
        OrtTypeInfo *info;
        TensorPlace place;
        check(ort->SessionGetInputTypeInfo(t->step.session, i, &info));
        Tensor *made = &t->tensors[i];
        *made = make_tensor(t->step.input_names[i], info);
        if (find_tensor(checkpoint, made->name, &place)) read_tensor(checkpoint, made->name, &place, 0, made->data, made->bytes);
        t->step.inputs[i] = made->value;
    }
    connect(&t->step, json_member(manifest, "writes", JSON_OBJECT));
    for (size_t i = 0; i < t->step.output_count; i++) {
        if (strcmp(t->step.output_names[i], loss)) continue;
        OrtTypeInfo *info;
        check(ort->SessionGetOutputTypeInfo(t->step.session, i, &info));
        t->loss = make_tensor(loss, info);
        t->step.outputs[i] = t->loss.value;
    }
    if (t->loss.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) fail("the training model has no loss '%s' of float", loss);
    for (const Json *file = json_member(manifest, "optimizer_models", JSON_OBJECT)->first; file; file = file->next) {
        Model model = open_model(folder, file->key, options);
        const Json *writes = json_member(file, "writes", JSON_OBJECT);
        for (const Json *pair = json_member(file, "parameters", JSON_OBJECT)->first; pair; pair = pair->next)
            add_updates(t, &model, writes, pair->key, pair->text);
    }
}

/* Whether the update is the first of its parameter's: what is done once for each gradient is done there. */
static int first_slice(const Training *t, size_t i) { return !i || t->updates[i].gradient != t->updates[i - 1].gradient; }

/* Scale the gradients to the largest norm; 0 leaves them.  An update that is part of the step clips by itself. */
static void clip(const Training *t) {
    double squares = 0;
    if (!t->clip) return;
    for (size_t i = 0; i < t->update_count; i++) {
        const float *gradient = t->updates[i].gradient->data;
        for (size_t k = 0; first_slice(t, i) && k < t->updates[i].gradient->elements; k++) squares += (double)gradient[k] * gradient[k];
    }
    float scale = (float)(t->clip / (sqrt(squares) + 1e-6));
    for (size_t i = 0; scale < 1 && i < t->update_count; i++) {
        float *gradient = t->updates[i].gradient->data;
        for (size_t k = 0; first_slice(t, i) && k < t->updates[i].gradient->elements; k++) gradient[k] *= scale;
    }
}

/* One step over the batch that is in its tensors; returns the loss. */
static float train_step(Training *t) {
    t->number++;
    Tensor *rate = tensor_named(t, "learning_rate"), *number = tensor_named(t, "optimizer_step");
    if (rate) memcpy(rate->data, &t->rate, sizeof t->rate);
    if (number) memcpy(number->data, &t->number, sizeof t->number);
    for (size_t i = 0; i < t->update_count; i++) /* the model adds to what is there */
        if (first_slice(t, i)) memset(t->updates[i].gradient->data, 0, t->updates[i].gradient->bytes);
    run(&t->step);
    clip(t);
    for (size_t i = 0; i < t->update_count; i++) run(&t->updates[i].model);
    return *(const float *)t->loss.data;
}

/* ---- data */

typedef struct {
    TensorFile file;
    Tensor *tensors[2 * MAX_RANK];
    TensorPlace places[2 * MAX_RANK];
    size_t count;
    int64_t batches;
} Data;

static void add_data(Data *data, const Training *t, const Json *specs) {
    for (const Json *spec = specs->first; spec; spec = spec->next) {
        char *end = strchr(spec->text, '='); /* name=shape:dtype */
        if (end) *end = '\0';
        Tensor *tensor = tensor_named(t, spec->text);
        TensorPlace place;
        if (!tensor) continue; /* the model does not use it */
        if (data->count == 2 * MAX_RANK) fail("the model has more than %d inputs and labels", 2 * MAX_RANK);
        if (!find_tensor(&data->file, tensor->name, &place)) fail("%s has no '%s'", data->file.path, tensor->name);
        int same = place.type == (int)tensor->type && place.rank == tensor->rank && tensor->rank > 0;
        for (size_t i = 1; same && i < tensor->rank; i++) same = place.shape[i] == tensor->shape[i];
        if (!same) fail("'%s' in %s is not of the dtype and shape that the artifact was compiled for", tensor->name, data->file.path);
        int64_t batches = place.shape[0] / tensor->shape[0];
        if (!data->count || batches < data->batches) data->batches = batches;
        data->tensors[data->count] = tensor;
        data->places[data->count++] = place;
    }
    if (data->count && data->batches < 1) fail("%s has fewer samples than a batch", data->file.path);
}

static void read_batch(const Data *data, int64_t step) {
    for (size_t i = 0; i < data->count; i++) {
        const Tensor *tensor = data->tensors[i];
        read_tensor(&data->file, tensor->name, &data->places[i], step % data->batches * (int64_t)tensor->bytes, tensor->data, tensor->bytes);
    }
}

/* ---- the program */

static const void *trained(void *training, const char *name) {
    const Tensor *tensor = tensor_named(training, name);
    return tensor ? tensor->data : NULL;
}

static void pause_for_enter(void) {
    fflush(stdout);
    fprintf(stderr, "paused: process %ld; press Enter\n", (long)getpid());
    if (getchar() == EOF) return;
}

static _Noreturn void usage(void) {
    fputs("usage: train ARTIFACT --library FILE --data FILE [--steps N] [--threads N] [--save FILE] [--pause]\n", stderr);
    exit(2);
}

static int number_argument(const char *text, int missing) {
    char *end;
    if (!text) return missing;
    long number = strtol(text, &end, 10);
    if (!*text || *end || number < 0 || number > 1000000000) usage();
    return (int)number;
}

int main(int count, char **arguments) {
    static const char *const names[] = {"--library", "--data", "--steps", "--threads", "--save"};
    const char *given[5] = {0}, *folder = NULL;
    int paused = 0;
    for (int i = 1; i < count; i++) {
        int option = 0;
        while (option < 5 && strcmp(arguments[i], names[option])) option++;
        if (option < 5 && i + 1 < count) given[option] = arguments[++i];
        else if (!strcmp(arguments[i], "--pause")) paused = 1;
        else if (arguments[i][0] != '-' && !folder) folder = arguments[i];
        else usage();
    }
    if (!folder || !given[0] || !given[1]) usage();

    char path[4096];
    if (snprintf(path, sizeof path, "%s/checkpoint.safetensors", folder) >= (int)sizeof path) fail("the path of the artifact is too long");
    char manifest_path[4096];
    snprintf(manifest_path, sizeof manifest_path, "%s/manifest.json", folder);
    const Json *manifest = json_parse(read_file(manifest_path), manifest_path);
    if (strcmp(json_member(manifest, "target", JSON_STRING)->text, "onnxruntime"))
        fail("%s is no artifact for any ONNX Runtime: compile with --target onnxruntime", folder);
    int steps = number_argument(given[2], 10);
    int threads = number_argument(given[3], (int)json_member(manifest, "threads", JSON_NUMBER)->number);

    load_runtime(given[0], manifest);
    OrtSessionOptions *options = session_options(manifest, threads);
    const Json *claim = json_find(manifest, "arena_claim");
    if (claim && claim->kind == JSON_OBJECT) claim_arena(folder, claim, options);
    TensorFile checkpoint = open_tensors(path);
    Training training = {0};
    prepare(&training, folder, manifest, &checkpoint, options);
    Data data = {.file = open_tensors(given[1])};
    add_data(&data, &training, json_member(manifest, "inputs", JSON_ARRAY));
    add_data(&data, &training, json_member(manifest, "labels", JSON_ARRAY));

    if (paused) pause_for_enter();
    for (int step = 0; step < steps; step++) {
        read_batch(&data, step);
        printf("%.9g\n", train_step(&training));
    }
    if (paused) pause_for_enter();
    if (given[4]) rewrite_tensors(&checkpoint, given[4], trained, &training);
    return 0;
}
