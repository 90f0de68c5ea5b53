/* The part of ONNX Runtime's C interface that train.c uses, for those who have its library but not its header: the node package and the
 * Python wheels ship none.  Types, functions and their order are documented at https://onnxruntime.ai/docs/api/c; the table of functions
 * only ever grows at its end, so a function's position is the same in every version.  With the official header, define
 * ONNXRUNTIME_HEADER to its name instead: cc '-DONNXRUNTIME_HEADER="onnxruntime_c_api.h"' ...
 */
#ifndef ONNXRUNTIME_SUBSET_H
#define ONNXRUNTIME_SUBSET_H
#include <stddef.h>
#include <stdint.h>

typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;
typedef struct OrtValue OrtValue;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtArenaCfg OrtArenaCfg;
typedef enum { ORT_LOGGING_LEVEL_ERROR = 3 } OrtLoggingLevel;
typedef enum { ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_EXTENDED = 2, ORT_ENABLE_ALL = 99 } GraphOptimizationLevel;
typedef enum { ORT_SEQUENTIAL = 0, ORT_PARALLEL = 1 } ExecutionMode;
typedef enum { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7 } ONNXTensorElementDataType;
typedef enum { OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum { OrtMemTypeDefault = 0 } OrtMemType;

enum { ORT_API_VERSION = 16 };

typedef void Unused(void);

typedef struct {
    Unused *unused_0[2];
    const char *(*GetErrorMessage)(const OrtStatus *);
    OrtStatus *(*CreateEnv)(OrtLoggingLevel, const char *name, OrtEnv **);
    Unused *unused_4[3];
    OrtStatus *(*CreateSession)(const OrtEnv *, const char *path, const OrtSessionOptions *, OrtSession **);
    Unused *unused_8;
    OrtStatus *(*Run)(OrtSession *, const OrtRunOptions *, const char *const *input_names, const OrtValue *const *inputs, size_t input_count,
                      const char *const *output_names, size_t output_count, OrtValue **outputs);
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
    Unused *unused_11[2];
    OrtStatus *(*SetSessionExecutionMode)(OrtSessionOptions *, ExecutionMode);
    Unused *unused_14[3];
    OrtStatus *(*DisableMemPattern)(OrtSessionOptions *);
    Unused *unused_18[4];
    OrtStatus *(*SetSessionLogSeverityLevel)(OrtSessionOptions *, int level);
    OrtStatus *(*SetSessionGraphOptimizationLevel)(OrtSessionOptions *, GraphOptimizationLevel);
    OrtStatus *(*SetIntraOpNumThreads)(OrtSessionOptions *, int);
    Unused *unused_25[5];
    OrtStatus *(*SessionGetInputCount)(const OrtSession *, size_t *);
    OrtStatus *(*SessionGetOutputCount)(const OrtSession *, size_t *);
    Unused *unused_32;
    OrtStatus *(*SessionGetInputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
    OrtStatus *(*SessionGetOutputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
    Unused *unused_35;
    OrtStatus *(*SessionGetInputName)(const OrtSession *, size_t, OrtAllocator *, char **);
    OrtStatus *(*SessionGetOutputName)(const OrtSession *, size_t, OrtAllocator *, char **);
    Unused *unused_38[11];
    OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape, size_t rank,
                                                 ONNXTensorElementDataType, OrtValue **);
    Unused *unused_50;
    OrtStatus *(*GetTensorMutableData)(OrtValue *, void **data);
    Unused *unused_52[3];
    OrtStatus *(*CastTypeInfoToTensorInfo)(const OrtTypeInfo *, const OrtTensorTypeAndShapeInfo **);
    Unused *unused_56[4];
    OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, ONNXTensorElementDataType *);
    OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
    OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
    Unused *unused_63[5];
    OrtStatus *(*CreateMemoryInfo)(const char *name, OrtAllocatorType, int id, OrtMemType, OrtMemoryInfo **);
    Unused *unused_69[9];
    OrtStatus *(*GetAllocatorWithDefaultOptions)(OrtAllocator **);
    Unused *unused_79[16];
    void (*ReleaseSession)(OrtSession *);
    void (*ReleaseValue)(OrtValue *);
    Unused *unused_97;
    void (*ReleaseTypeInfo)(OrtTypeInfo *);
    Unused *unused_99[31];
    OrtStatus *(*AddSessionConfigEntry)(OrtSessionOptions *, const char *key, const char *value);
    Unused *unused_131[13];
    OrtStatus *(*CreateAndRegisterAllocator)(OrtEnv *, const OrtMemoryInfo *, const OrtArenaCfg *);
    Unused *unused_145[19];
    OrtStatus *(*CreateArenaCfgV2)(const char *const *keys, const size_t *values, size_t count, OrtArenaCfg **);
} OrtApi;

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;
#endif
