/* A custom operator of ONNX Runtime on this library: domain "flash_attention", operator "Attention".
 *
 *   inputs      q [batch, seq_q, heads_q, dim], k and v [batch, seq_kv, heads_kv, dim]; float or float16
 *   attributes  causal (int, 0), scale (float, 1 / sqrt(dim))
 *   output      out, as q
 *
 *   cc -O2 -shared -fPIC attention_op.c -I/path/to/onnxruntime/include $(pkg-config --cflags --libs flash_attention) \
 *      -o libattention_op.so
 *
 * In Python: options = onnxruntime.SessionOptions(); options.register_custom_ops_library("libattention_op.so") */
#include <flash_attention/c_api.h>
#include <math.h>
#include <onnxruntime_c_api.h>
#include <stdlib.h>

typedef struct Kernel {
  const OrtApi* api;
  int64_t causal;
  float scale;
} Kernel;

typedef struct Operator {
  OrtCustomOp base; /* the first member: a pointer to one is a pointer to the other */
  ONNXTensorElementDataType type;
} Operator;

/* Hands an error of ONNX Runtime on to the caller. */
#define CHECK(call)                    \
  do {                                 \
    OrtStatus* const failed = (call);  \
    if (failed != NULL) return failed; \
  } while (0)

static OrtStatus* refuse(const OrtApi* api, const char* message) {
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

/* The memory of an input and its four sizes. */
static OrtStatus* read_input(const OrtApi* api, const OrtKernelContext* context, size_t index, const void** data,
                             int64_t sizes[4]) {
  const OrtValue* value = NULL;
  CHECK(api->KernelContext_GetInput(context, index, &value));
  OrtTensorTypeAndShapeInfo* info = NULL;
  CHECK(api->GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = api->GetDimensionsCount(info, &rank);
  if (status == NULL) status = rank == 4 ? api->GetDimensions(info, sizes, 4) : refuse(api, "q, k and v need four axes");
  api->ReleaseTensorTypeAndShapeInfo(info);
  if (status != NULL) return status;
  void* memory = NULL;
  CHECK(api->GetTensorMutableData((OrtValue*)value, &memory));
  *data = memory;
  return NULL;
}

static OrtStatus* compute(const Kernel* kernel, OrtKernelContext* context, int32_t dtype) {
  const OrtApi* api = kernel->api;
  flash_attention_problem problem;
  flash_attention_buffers buffers;
  flash_attention_options options;
  flash_attention_problem_init(&problem);
  flash_attention_buffers_init(&buffers);
  flash_attention_options_init(&options);
  int64_t q[4], k[4], v[4];
  CHECK(read_input(api, context, 0, &buffers.q, q));
  CHECK(read_input(api, context, 1, &buffers.k, k));
  CHECK(read_input(api, context, 2, &buffers.v, v));
  if (k[0] != q[0] || v[0] != q[0] || v[1] != k[1] || v[2] != k[2] || k[3] != q[3]) {
    return refuse(api, "k and v need the batch of q and each other's length and heads, k the width of q");
  }
  const int64_t out[4] = {q[0], q[1], q[2], v[3]};
  OrtValue* result = NULL;
  CHECK(api->KernelContext_GetOutput(context, 0, out, 4, &result));
  CHECK(api->GetTensorMutableData(result, &buffers.out));
  problem.batch = q[0], problem.seq_q = q[1], problem.heads_q = q[2], problem.head_dim = q[3];
  problem.seq_kv = k[1], problem.heads_kv = k[2], problem.head_dim_v = v[3];
  problem.dtype = dtype, problem.causal = kernel->causal != 0, problem.scale = kernel->scale;
  if (flash_attention_forward(&problem, &buffers, &options) == FLASH_ATTENTION_OK) return NULL;
  return refuse(api, flash_attention_last_error());
}

static OrtStatus* ORT_API_CALL compute_float(void* kernel, OrtKernelContext* context) {
  return compute(kernel, context, FLASH_ATTENTION_FLOAT32);
}
static OrtStatus* ORT_API_CALL compute_float16(void* kernel, OrtKernelContext* context) {
  return compute(kernel, context, FLASH_ATTENTION_FLOAT16);
}

/* An attribute that is not given is an error of ONNX Runtime, and keeps its default here. */
static OrtStatus* ORT_API_CALL create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  (void)op;
  Kernel* made = malloc(sizeof *made);
  if (made == NULL) return api->CreateStatus(ORT_FAIL, "out of memory");
  *made = (Kernel){.api = api, .causal = 0, .scale = NAN};
  OrtStatus* missing = api->KernelInfoGetAttribute_int64(info, "causal", &made->causal);
  if (missing != NULL) api->ReleaseStatus(missing), made->causal = 0;
  missing = api->KernelInfoGetAttribute_float(info, "scale", &made->scale);
  if (missing != NULL) api->ReleaseStatus(missing), made->scale = NAN;
  *kernel = made;
  return NULL;
}
static void ORT_API_CALL destroy(void* kernel) { free(kernel); }

static const char* ORT_API_CALL name(const OrtCustomOp* op) { return (void)op, "Attention"; }
static const char* ORT_API_CALL provider(const OrtCustomOp* op) { return (void)op, "CPUExecutionProvider"; }
static size_t ORT_API_CALL three(const OrtCustomOp* op) { return (void)op, 3; }
static size_t ORT_API_CALL one(const OrtCustomOp* op) { return (void)op, 1; }
static ONNXTensorElementDataType ORT_API_CALL type_of(const OrtCustomOp* op, size_t index) {
  return (void)index, ((const Operator*)op)->type;
}
static OrtCustomOpInputOutputCharacteristic ORT_API_CALL required(const OrtCustomOp* op, size_t index) {
  return (void)op, (void)index, INPUT_OUTPUT_REQUIRED;
}
static OrtMemType ORT_API_CALL memory(const OrtCustomOp* op, size_t index) {
  return (void)op, (void)index, OrtMemTypeDefault;
}
static int ORT_API_CALL first_version(const OrtCustomOp* op) { return (void)op, 1; }
static int ORT_API_CALL last_version(const OrtCustomOp* op) { return (void)op, 1; }

#define OPERATOR(compute_function)                                                                              \
  {                                                                                                             \
    .version = ORT_API_VERSION, .GetName = name, .GetExecutionProviderType = provider, .GetInputType = type_of, \
    .GetInputTypeCount = three, .GetOutputType = type_of, .GetOutputTypeCount = one, .KernelDestroy = destroy,  \
    .GetInputCharacteristic = required, .GetOutputCharacteristic = required, .GetInputMemoryType = memory,      \
    .CreateKernelV2 = create, .KernelComputeV2 = compute_function, .GetStartVersion = first_version,            \
    .GetEndVersion = last_version                                                                               \
  }

static const Operator operators[] = {
    {OPERATOR(compute_float), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {OPERATOR(compute_float16), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
};

/* ONNX Runtime looks for this name. */
__attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                 const OrtApiBase* base) {
  static OrtCustomOpDomain* domain = NULL; /* lives as long as the sessions that use it: as long as the process */
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (domain == NULL) {
    CHECK(api->CreateCustomOpDomain("flash_attention", &domain));
    for (size_t n = 0; n < sizeof operators / sizeof *operators; ++n) {
      CHECK(api->CustomOpDomain_Add(domain, &operators[n].base));
    }
  }
  return api->AddCustomOpDomain(options, domain);
}
