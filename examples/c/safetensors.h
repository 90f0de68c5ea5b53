/* Tensors in a file: eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, then the bytes
 * (https://github.com/huggingface/safetensors#format).  Tensors are read one at a time, so a file may be larger than memory. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H
#include <stdint.h>
#include <stdio.h>

#include "json.h"

enum { MAX_RANK = 16 };

typedef struct {
    const char *path;
    FILE *file;
    Json *header;
    int64_t begin; /* where the bytes of the tensors begin */
} TensorFile;

typedef struct {
    int type; /* ONNXTensorElementDataType */
    size_t rank, element_bytes;
    int64_t shape[MAX_RANK], begin, end; /* place in the file */
} TensorPlace;

/* All of a file, with a zero behind it. */
char *read_file(const char *path);
TensorFile open_tensors(const char *path);
/* Where a tensor is; 0 where the file has none of that name. */
int find_tensor(const TensorFile *file, const char *name, TensorPlace *place);
/* Read `bytes` from the place of a tensor, after the first `skip`; ends the program where there are not so many. */
void read_tensor(const TensorFile *file, const char *name, const TensorPlace *place, int64_t skip, void *data, size_t bytes);
/* A copy of a file into which `data` gives the bytes of each tensor (NULL: as they are), whole or not at all. */
void rewrite_tensors(const TensorFile *file, const char *path, const void *(*data)(void *context, const char *name), void *context);
size_t element_bytes(int type);
#endif
