/* A CUDA driver without a GPU: device memory is the host's.  What the tests need of cuda.h, with the same names and types. */
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t CUdeviceptr;
static size_t in_use = 0, all = (size_t)1 << 30;
static int current = -1;
static struct { void *at; size_t size; } blocks[4096];

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *v) { *v = 11080; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Fake %d", d); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(intptr_t)(d + 1); return d < 2 ? 0 : 101; }
int cuCtxSetCurrent(void *c) { current = (int)(intptr_t)c; return 0; }
int cuCtxSynchronize(void) { return current > 0 ? 0 : 201; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = all - in_use; *t = all; return current > 0 ? 0 : 201; }
int cuMemAlloc_v2(CUdeviceptr *p, size_t n) {
    if (current <= 0) return 201;
    if (in_use + n > all) return 2;
    for (int i = 0; i < 4096; i++)
        if (!blocks[i].at) {
            blocks[i].at = malloc(n);
            memset(blocks[i].at, 0xAB, n);
            blocks[i].size = n;
            in_use += n;
            *p = (CUdeviceptr)(uintptr_t)blocks[i].at;
            return 0;
        }
    return 2;
}
int cuMemFree_v2(CUdeviceptr p) {
    for (int i = 0; i < 4096; i++)
        if (blocks[i].at == (void *)(uintptr_t)p) {
            in_use -= blocks[i].size;
            free(blocks[i].at);
            blocks[i].at = 0;
            return 0;
        }
    return 1;
}
int cuMemcpyHtoD_v2(CUdeviceptr d, const void *s, size_t n) { memcpy((void *)(uintptr_t)d, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, CUdeviceptr s, size_t n) { memcpy(d, (void *)(uintptr_t)s, n); return 0; }
int cuMemsetD8_v2(CUdeviceptr d, unsigned char v, size_t n) { memset((void *)(uintptr_t)d, v, n); return 0; }
int cuMemAllocHost_v2(void **p, size_t n) { *p = malloc(n); return *p ? 0 : 2; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuGetErrorString(int code, const char **s) { *s = code == 201 ? "invalid device context" : "invalid value"; return 0; }
