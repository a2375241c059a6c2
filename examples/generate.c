/* The loop of a small inference engine: each step puts a token's key and value into a cache and attends over all so far. */
#include <flash_attention/c_api.h>
#include <stdio.h>

enum { layers = 2, heads = 8, kv_heads = 2, dim = 64, context = 128 };

static float k_cache[layers][context][kv_heads * dim], v_cache[layers][context][kv_heads * dim];
static float q[heads * dim], out[heads * dim];

/* Stands in for the projections of a model. */
static float number(int a, int b, int c) { return (float)((a * 31 + b * 57 + c * 37) % 101) / 50 - 1; }

static void project(int token, int layer) {
  for (int c = 0; c < heads * dim; ++c) q[c] = number(token, layer, c);
  for (int c = 0; c < kv_heads * dim; ++c) k_cache[layer][token][c] = number(c, token, layer);
  for (int c = 0; c < kv_heads * dim; ++c) v_cache[layer][token][c] = (float)(c % dim);
}

int main(void) {
  flash_attention_problem problem;
  flash_attention_buffers buffers;
  flash_attention_options options;
  flash_attention_problem_init(&problem);
  flash_attention_buffers_init(&buffers);
  flash_attention_options_init(&options);
  int32_t length = 0; /* read at each call: the problem, and so its plan, is the same in every step */
  problem.seq_q = 1, problem.seq_kv = context, problem.seqused_kv = 1;
  problem.heads_q = heads, problem.heads_kv = kv_heads, problem.head_dim = dim;
  buffers.q = q, buffers.out = out, buffers.seqused_kv = &length;

  /* What is not written yet must not count: it would spoil every average. */
  for (int n = 0; n < layers * context * kv_heads * dim; ++n) (&v_cache[0][0][0])[n] = 1e30f;
  int wrong = 0;
  for (int token = 0; token < context; ++token) {
    for (int layer = 0; layer < layers; ++layer) {
      project(token, layer);
      length = token + 1;
      buffers.k = k_cache[layer], buffers.v = v_cache[layer];
      if (flash_attention_forward(&problem, &buffers, &options) != FLASH_ATTENTION_OK) {
        fprintf(stderr, "%s\n", flash_attention_last_error());
        return 1;
      }
      /* Every row of v is 0, 1, ..., 63, so any average of rows is, too. */
      for (int c = 0; c < heads * dim; ++c) {
        const float error = out[c] - (float)(c % dim);
        wrong += !(error > -1e-3f && error < 1e-3f);
      }
    }
  }
  printf("%d tokens, %d layers, %d wrong\n", context, layers, wrong);
  return wrong != 0;
}
