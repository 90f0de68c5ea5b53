/* One line on what went wrong, and memory that is there. */
#ifndef FAIL_H
#define FAIL_H
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static inline _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("train: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

/* Zeroed memory for so many items; aligned as ONNX Runtime's own tensors are where `bytes` is large. */
static inline void *allocate(size_t count, size_t bytes) {
    void *memory = calloc(count ? count : 1, bytes);
    if (!memory) fail("there is no memory for %zu x %zu bytes", count, bytes);
    return memory;
}
#endif
