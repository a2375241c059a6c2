#ifndef FLASH_ATTENTION_C_API_H
#define FLASH_ATTENTION_C_API_H

/* The library for C, and for languages that call C. The structs mirror Problem, Buffers and Options of attention.h, which
 * explains each field. Call the _init functions first: they set every default and `size`. Fields are only added at the
 * end, so with `size` a program built against an older header works with a newer library. Languages that cannot read this
 * header call the _init_sized functions with the size of their struct. Every call returns FLASH_ATTENTION_OK or an error
 * code; flash_attention_last_error() then returns the message of this thread. */

#include <stddef.h>
#include <stdint.h>

#include "flash_attention/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum flash_attention_status {
  FLASH_ATTENTION_OK = 0,
  FLASH_ATTENTION_INVALID_ARGUMENT = 1,
  FLASH_ATTENTION_UNSUPPORTED = 2,
  FLASH_ATTENTION_UNAVAILABLE = 3,
  FLASH_ATTENTION_OUT_OF_MEMORY = 4,
  FLASH_ATTENTION_COMPILE_FAILED = 5,
  FLASH_ATTENTION_DEVICE_FAILED = 6,
  FLASH_ATTENTION_INTERNAL = 7
} flash_attention_status;

enum { FLASH_ATTENTION_FLOAT32 = 0, FLASH_ATTENTION_FLOAT16 = 1, FLASH_ATTENTION_BFLOAT16 = 2 }; /* dtype */
enum { FLASH_ATTENTION_E4M3 = 3, FLASH_ATTENTION_E5M2 = 4, FLASH_ATTENTION_INT8 = 5 };           /* of caches */
enum {
  FLASH_ATTENTION_NO_SCALES = 0,
  FLASH_ATTENTION_TENSOR_SCALE = 1, /* scales */
  FLASH_ATTENTION_HEAD_SCALES = 2,
  FLASH_ATTENTION_TOKEN_SCALES = 3
};
enum { FLASH_ATTENTION_BOTTOM_RIGHT = 0, FLASH_ATTENTION_TOP_LEFT = 1 }; /* alignment */
enum {
  FLASH_ATTENTION_PRECISION_IEEE = 0,
  FLASH_ATTENTION_PRECISION_FAST = 1, /* precision */
  FLASH_ATTENTION_PRECISION_AUTO = 2, /* the default */
  FLASH_ATTENTION_PRECISION_TF32 = 3
};
enum { FLASH_ATTENTION_CPU = 0, FLASH_ATTENTION_CUDA = 1, FLASH_ATTENTION_EMULATOR = 2 }; /* device_kind */
enum {
  FLASH_ATTENTION_FORWARD = 0,
  FLASH_ATTENTION_BACKWARD = 1, /* pass */
  FLASH_ATTENTION_STANDARD_FORWARD = 2,
  FLASH_ATTENTION_STANDARD_BACKWARD = 3,
  FLASH_ATTENTION_TANGENT = 4,
  FLASH_ATTENTION_SECOND = 5
};
enum {
  FLASH_ATTENTION_PART_WHOLE = 0, /* part: BackwardPart of plan.h */
  FLASH_ATTENTION_PART_ROWS = 1,
  FLASH_ATTENTION_PART_BLOCK = 2,
  FLASH_ATTENTION_PART_DQ = 3
};

/* Strides in elements; INT64_MIN = dense. */
typedef struct flash_attention_strides {
  int64_t batch, seq, head;
} flash_attention_strides;

typedef struct flash_attention_score_tensor {
  int32_t present, dtype;
  int64_t batch_stride, head_stride, q_stride;
} flash_attention_score_tensor;

typedef struct flash_attention_problem {
  size_t size; /* set by flash_attention_problem_init */
  int64_t batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, head_dim_v;
  int64_t total_q, total_kv;
  int32_t dtype, packed;
  flash_attention_strides q_strides, k_strides, v_strides, out_strides;
  flash_attention_strides dout_strides, dq_strides, dk_strides, dv_strides;
  flash_attention_score_tensor bias, mask;
  float scale; /* NaN = 1 / sqrt(head_dim) */
  float softcap, dropout_p;
  int32_t alibi;
  int64_t alibi_batch_stride;
  int64_t window_left, window_right;
  int32_t causal, alignment, key_lengths, seqused_q, seqused_kv, sink, deterministic;
  int32_t left_padding;
  int64_t page_size, num_pages, page_table_stride; /* page_size 0 = no pages */
  int32_t hidden_bounds;                           /* 0 = no hidden_rows; 1, 2 or 4 */
  int64_t hidden_batch_stride, hidden_head_stride;
  int64_t mask_block_q, mask_block_kv; /* mask_block_q 0 = no block_mask */
  int64_t block_mask_batch_stride, block_mask_head_stride, block_mask_q_stride;
  const char* program; /* text; NULL = none */
  int64_t program_sizes[8][4];
  uint32_t program_gradients;
  int32_t invariant;
  int32_t kv_dtype, kv_scales; /* kv_dtype -1 = dtype */
  flash_attention_strides k_scale_strides, v_scale_strides;
  int32_t latent;            /* k has the columns of a key after those of its value */
  int32_t q_dtype, q_scales; /* q_dtype -1 = dtype */
  flash_attention_strides q_scale_strides;
  int64_t attention_chunk; /* 0 = none */
  int32_t precision;
  int32_t key_list_kind; /* lists of keys, KeyList of problem.h: 0 = none, 1 = of keys, 2 = of blocks */
  int64_t key_list_entries, key_list_heads, key_list_block_q, key_list_block_kv;
  int32_t key_list_counts;                                   /* buffers have key_counts */
  int32_t return_max_logit, return_key_mass, return_entropy; /* statistics; 0 = off */
  int32_t bit_mask_kind; /* BitMask of problem.h: 0 = none, 1 = of keys, 2 = of drafts */
  int64_t bit_mask_row_bytes;
  int32_t bit_mask_offsets; /* buffers have bit_mask_offsets */
  int32_t sequence_windows;
  int64_t kv_group; /* of 4-bit k and v; 0 = the format's */
  flash_attention_strides k_group_strides, v_group_strides;
} flash_attention_problem;

typedef struct flash_attention_buffers {
  size_t size; /* set by flash_attention_buffers_init */
  const void *q, *k, *v;
  void* out;
  float* lse;
  const void* bias;
  const uint8_t* mask;
  const float *alibi_slopes, *sink;
  const int32_t *cu_seqlens_q, *cu_seqlens_kv, *seqused_q, *seqused_kv, *key_lengths;
  const void* dout;
  const float* dlse;
  void *dq, *dk, *dv, *dbias;
  float* dsink;
  const int32_t *left_padding, *page_table;
  const int32_t* hidden_rows;
  const uint8_t* block_mask;
  const void* const* program_tensors;
  const double* program_scalars;
  float* const* program_gradients;
  const float *k_scale, *v_scale;
  const float* q_scale;
  const int32_t *key_list, *key_counts;
  float* row_max;
  float *max_logit, *key_mass, *entropy;
  const float *dkey_mass, *dentropy;
  const void *q_tangent, *k_tangent, *v_tangent, *bias_tangent; /* of flash_attention_tangent and _second */
  const float* sink_tangent;
  void* out_tangent;
  float* lse_tangent;
  const uint8_t* bit_mask;
  const int32_t *bit_mask_offsets, *sequence_windows;
  const void *k_group_scale, *v_group_scale, *k_group_zero, *v_group_zero; /* of 4-bit k and v */
} flash_attention_buffers;

typedef struct flash_attention_options {
  size_t size; /* set by flash_attention_options_init */
  int32_t device_kind, device_index, emulated_arch;
  void* stream;
  void* workspace;
  size_t workspace_bytes;
  uint64_t seed, offset;
  const char* kernel;        /* NULL = the planner's choice */
  const void* prepared_mask; /* NULL = none; flash_attention_prepare_mask */
  uint64_t prepared_mask_stamp;
  int32_t tile_q, tile_kv; /* 0 = the kernel's choice */
  int32_t part;            /* of a backward pass */
  int32_t part_rows, part_first, part_number;
} flash_attention_options;

/* AppendProblem and AppendBuffers of append.h. */
typedef struct flash_attention_append_problem {
  size_t size; /* set by flash_attention_append_problem_init */
  int64_t batch, seq_new, seq_q, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t dtype, cache_dtype, rotary_dtype; /* cache_dtype -1 = dtype */
  int32_t packed_new, packed_q, placed;
  int64_t total_new, total_q;
  flash_attention_strides q_strides, q_out_strides, k_strides, v_strides, k_cache_strides, v_cache_strides;
  int64_t capacity, page_size, num_pages, page_table_stride;
  int64_t rotary_dim, rotary_positions, rotary_stride;
  int32_t rotary_interleaved, rotary_offsets, rotary_one_query, scales;
  flash_attention_strides k_scale_strides, v_scale_strides;
  int32_t q_norm, k_norm, norm_plus_one, norm_dtype;
  float norm_eps;
  int32_t rotary_sections[4], sections_interleaved, in_rows;
  int64_t angle_sections;
  flash_attention_strides dq_out_strides, dk_out_strides, dq_strides, dk_strides;
  int64_t cache_group; /* of a 4-bit cache */
  flash_attention_strides k_group_strides, v_group_strides;
} flash_attention_append_problem;

typedef struct flash_attention_append_buffers {
  size_t size; /* set by flash_attention_append_buffers_init */
  const void* q;
  void* q_out;
  const void *k, *v;
  void *k_cache, *v_cache;
  const void *cos, *sin;
  const int32_t *lengths, *rotary_offsets, *cu_seqlens_new, *cu_seqlens_q, *sequences, *positions, *page_table;
  float *k_scale, *v_scale;
  const void *q_norm_weight, *k_norm_weight;
  const int32_t* angle_positions;
  void *k_group_scale, *v_group_scale, *k_group_zero, *v_group_zero; /* of a 4-bit cache */
} flash_attention_append_buffers;

typedef struct flash_attention_append_gradients {
  size_t size; /* set by flash_attention_append_gradients_init */
  const void *dq_out, *dk_out;
  void *dq, *dk;
  float *dq_norm_weight, *dk_norm_weight;
  void* workspace;
} flash_attention_append_gradients;

FLASH_ATTENTION_API void flash_attention_append_problem_init_sized(flash_attention_append_problem* problem, size_t size);
static inline void flash_attention_append_problem_init(flash_attention_append_problem* problem) {
  flash_attention_append_problem_init_sized(problem, sizeof *problem);
}
FLASH_ATTENTION_API void flash_attention_append_buffers_init_sized(flash_attention_append_buffers* buffers, size_t size);
static inline void flash_attention_append_buffers_init(flash_attention_append_buffers* buffers) {
  flash_attention_append_buffers_init_sized(buffers, sizeof *buffers);
}

FLASH_ATTENTION_API void flash_attention_append_gradients_init_sized(flash_attention_append_gradients* gradients,
                                                                     size_t size);
static inline void flash_attention_append_gradients_init(flash_attention_append_gradients* gradients) {
  flash_attention_append_gradients_init_sized(gradients, sizeof *gradients);
}

/* Writes new rows to a cache, with the norms and the rotary embedding of queries and keys. */
FLASH_ATTENTION_API flash_attention_status flash_attention_append(const flash_attention_append_problem* problem,
                                                                  const flash_attention_append_buffers* buffers,
                                                                  const flash_attention_options* options);
/* Gradients of q, k and the norms' weights, if problem->in_rows. */
FLASH_ATTENTION_API flash_attention_status flash_attention_append_backward(
    const flash_attention_append_problem* problem, const flash_attention_append_buffers* buffers,
    const flash_attention_append_gradients* gradients, const flash_attention_options* options);
/* *bytes = workspace that flash_attention_append_backward needs. */
FLASH_ATTENTION_API flash_attention_status
flash_attention_append_backward_workspace(const flash_attention_append_problem* problem, size_t* bytes);

FLASH_ATTENTION_API void flash_attention_problem_init_sized(flash_attention_problem* problem, size_t size);
static inline void flash_attention_problem_init(flash_attention_problem* problem) {
  flash_attention_problem_init_sized(problem, sizeof *problem);
}
FLASH_ATTENTION_API void flash_attention_buffers_init_sized(flash_attention_buffers* buffers, size_t size);
static inline void flash_attention_buffers_init(flash_attention_buffers* buffers) {
  flash_attention_buffers_init_sized(buffers, sizeof *buffers);
}
FLASH_ATTENTION_API void flash_attention_options_init_sized(flash_attention_options* options, size_t size);
static inline void flash_attention_options_init(flash_attention_options* options) {
  flash_attention_options_init_sized(options, sizeof *options);
}

FLASH_ATTENTION_API flash_attention_status flash_attention_forward(const flash_attention_problem* problem,
                                                                   const flash_attention_buffers* buffers,
                                                                   const flash_attention_options* options);
FLASH_ATTENTION_API flash_attention_status flash_attention_backward(const flash_attention_problem* problem,
                                                                    const flash_attention_buffers* buffers,
                                                                    const flash_attention_options* options);
FLASH_ATTENTION_API flash_attention_status flash_attention_standard_forward(const flash_attention_problem* problem,
                                                                            const flash_attention_buffers* buffers,
                                                                            const flash_attention_options* options);
FLASH_ATTENTION_API flash_attention_status flash_attention_standard_backward(const flash_attention_problem* problem,
                                                                             const flash_attention_buffers* buffers,
                                                                             const flash_attention_options* options);
/* tangent and second of attention.h. */
FLASH_ATTENTION_API flash_attention_status flash_attention_tangent(const flash_attention_problem* problem,
                                                                   const flash_attention_buffers* buffers,
                                                                   const flash_attention_options* options);
FLASH_ATTENTION_API flash_attention_status flash_attention_second(const flash_attention_problem* problem,
                                                                  const flash_attention_buffers* buffers,
                                                                  const flash_attention_options* options);

/* *bytes = workspace that the call needs. */
FLASH_ATTENTION_API flash_attention_status flash_attention_workspace_bytes(const flash_attention_problem* problem,
                                                                           int32_t pass,
                                                                           const flash_attention_options* options,
                                                                           size_t* bytes);

/* MaskPreparation and PreparedMask of attention.h. *bytes = the memory that prepare_mask needs, 0 if there is nothing to
 * prepare; *stamp = the stamp that it will return. */
FLASH_ATTENTION_API flash_attention_status flash_attention_mask_preparation(const flash_attention_problem* problem,
                                                                            int32_t pass,
                                                                            const flash_attention_buffers* buffers,
                                                                            const flash_attention_options* options,
                                                                            size_t* bytes, uint64_t* stamp);
/* Fills `memory`. For later calls with these masks, set options.prepared_mask = memory and options.prepared_mask_stamp =
 * *stamp. If there is nothing to prepare, *stamp = 0: set neither. */
FLASH_ATTENTION_API flash_attention_status
flash_attention_prepare_mask(const flash_attention_problem* problem, int32_t pass, const flash_attention_buffers* buffers,
                             void* memory, size_t bytes, const flash_attention_options* options, uint64_t* stamp);

/* Writes at most `capacity` bytes of text, with a final zero; *needed (may be NULL) = bytes of the whole text. */
FLASH_ATTENTION_API flash_attention_status flash_attention_explain(const flash_attention_problem* problem, int32_t pass,
                                                                   const flash_attention_options* options, char* text,
                                                                   size_t capacity, size_t* needed);

/* The message of this thread's last failed call; "" if none has failed. */
FLASH_ATTENTION_API const char* flash_attention_last_error(void);
FLASH_ATTENTION_API const char* flash_attention_version(void);

#ifdef __cplusplus
}
#endif
#endif
