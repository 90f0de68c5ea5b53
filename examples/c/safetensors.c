#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "safetensors.h"

#include <errno.h>
#include <string.h>

#include "fail.h"

static const struct { const char *name; int type; size_t bytes; } DTYPES[] = {
    {"F32", 1, 4}, {"U8", 2, 1}, {"I8", 3, 1}, {"I32", 6, 4}, {"I64", 7, 8}, {"BOOL", 9, 1}, {"F16", 10, 2}, {"F64", 11, 8}, {"BF16", 16, 2},
};
enum { DTYPE_COUNT = sizeof DTYPES / sizeof *DTYPES };

size_t element_bytes(int type) {
    for (int i = 0; i < DTYPE_COUNT; i++)
        if (DTYPES[i].type == type) return DTYPES[i].bytes;
    fail("tensors of ONNX element type %d are not supported here", type);
}

static FILE *open_or_fail(const char *path, const char *mode) {
    FILE *file = fopen(path, mode);
    if (!file) fail("%s: %s", path, strerror(errno));
    return file;
}

static void read_or_fail(FILE *file, const char *path, int64_t from, void *data, size_t bytes) {
    if (fseeko(file, from, SEEK_SET) || fread(data, 1, bytes, file) != bytes) fail("%s is damaged: it ends too early", path);
}

char *read_file(const char *path) {
    FILE *file = open_or_fail(path, "rb");
    fseeko(file, 0, SEEK_END);
    off_t size = ftello(file);
    if (size < 0) fail("%s: %s", path, strerror(errno));
    char *text = allocate((size_t)size + 1, 1);
    read_or_fail(file, path, 0, text, (size_t)size);
    fclose(file);
    return text;
}

TensorFile open_tensors(const char *path) {
    TensorFile opened = {.path = path, .file = open_or_fail(path, "rb")};
    unsigned char bytes[8];
    read_or_fail(opened.file, path, 0, bytes, 8);
    uint64_t length = 0;
    for (int i = 8; i--;) length = length << 8 | bytes[i];
    if (length > 100000000) fail("%s is no safetensors file", path);
    char *text = allocate(length + 1, 1);
    read_or_fail(opened.file, path, 8, text, length);
    opened.header = json_parse(text, path);
    opened.begin = 8 + (int64_t)length;
    return opened;
}

int find_tensor(const TensorFile *file, const char *name, TensorPlace *place) {
    const Json *entry = json_find(file->header, name);
    if (!entry) return 0;
    const Json *dtype = json_find(entry, "dtype"), *shape = json_find(entry, "shape"), *offsets = json_find(entry, "data_offsets");
    if (!dtype || !dtype->text || !shape || !offsets || !offsets->first || !offsets->first->next)
        fail("%s is damaged: '%s' has no dtype, shape and data_offsets", file->path, name);
    int i = 0;
    while (i < DTYPE_COUNT && strcmp(DTYPES[i].name, dtype->text)) i++;
    if (i == DTYPE_COUNT) fail("'%s' in %s has dtype %s, which is not supported here", name, file->path, dtype->text);
    *place = (TensorPlace){.type = DTYPES[i].type, .element_bytes = DTYPES[i].bytes};
    place->begin = (int64_t)offsets->first->number;
    place->end = (int64_t)offsets->first->next->number;
    for (const Json *dim = shape->first; dim; dim = dim->next) {
        if (place->rank == MAX_RANK) fail("'%s' in %s has more than %d dimensions", name, file->path, MAX_RANK);
        place->shape[place->rank++] = (int64_t)dim->number;
    }
    return 1;
}

void read_tensor(const TensorFile *file, const char *name, const TensorPlace *place, int64_t skip, void *data, size_t bytes) {
    if (skip + (int64_t)bytes > place->end - place->begin) fail("'%s' in %s has fewer elements than are wanted", name, file->path);
    read_or_fail(file->file, file->path, file->begin + place->begin + skip, data, bytes);
}

static void copy(const TensorFile *file, FILE *out, int64_t from, int64_t bytes) {
    static char block[1 << 16];
    for (int64_t done = 0; done < bytes;) {
        size_t size = bytes - done < (int64_t)sizeof block ? (size_t)(bytes - done) : sizeof block;
        read_or_fail(file->file, file->path, from + done, block, size);
        fwrite(block, 1, size, out);
        done += (int64_t)size;
    }
}

void rewrite_tensors(const TensorFile *file, const char *path, const void *(*data)(void *, const char *), void *context) {
    size_t length = strlen(path) + sizeof ".part";
    char *part = allocate(length, 1);
    snprintf(part, length, "%s.part", path);
    FILE *out = open_or_fail(part, "wb");
    copy(file, out, 0, file->begin);
    for (const Json *entry = file->header->first; entry; entry = entry->next) {
        TensorPlace place;
        if (!strcmp(entry->key, "__metadata__") || !find_tensor(file, entry->key, &place)) continue;
        const void *bytes = data(context, entry->key);
        fseeko(out, file->begin + place.begin, SEEK_SET);
        if (bytes) fwrite(bytes, 1, (size_t)(place.end - place.begin), out);
        else copy(file, out, file->begin + place.begin, place.end - place.begin);
    }
    if (ferror(out) || fclose(out) || rename(part, path)) fail("%s: %s", path, strerror(errno));
    free(part);
}
