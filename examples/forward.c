/* One forward pass from C: grouped heads, a sliding window, and a mistake that is refused with a message. */
#include <flash_attention/c_api.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  flash_attention_problem problem;
  flash_attention_problem_init(&problem);
  problem.seq_q = problem.seq_kv = 512;
  problem.heads_q = 8;
  problem.heads_kv = 2;
  problem.head_dim = 64;
  problem.window_left = 128;
  problem.window_right = 0;

  const size_t q_count = 512 * 8 * 64, kv_count = 512 * 2 * 64;
  float* memory = malloc((2 * q_count + 2 * kv_count) * sizeof(float));
  if (memory == NULL) return 1;
  float *q = memory, *out = q + q_count, *k = out + q_count, *v = k + kv_count;
  for (size_t n = 0; n < q_count; ++n) q[n] = (float)(n * 37 % 101) / 50 - 1;
  for (size_t n = 0; n < kv_count; ++n) k[n] = (float)(n * 53 % 97) / 48 - 1, v[n] = (float)(n % 64);

  flash_attention_buffers buffers;
  flash_attention_buffers_init(&buffers);
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.out = out;

  flash_attention_options options;
  flash_attention_options_init(&options);
  if (flash_attention_forward(&problem, &buffers, &options) != FLASH_ATTENTION_OK) {
    fprintf(stderr, "%s\n", flash_attention_last_error());
    return 1;
  }
  /* Every row of v is 0, 1, ..., 63, so any average of rows is, too. */
  printf("flash_attention %s: out = %.3f %.3f ... %.3f\n", flash_attention_version(), out[0], out[1], out[63]);
  const int right = out[63] > 62.999f && out[63] < 63.001f;

  problem.head_dim = 600;
  const flash_attention_status status = flash_attention_forward(&problem, &buffers, &options);
  printf("status %d: %s\n", status, flash_attention_last_error());
  free(memory);
  return right && status == FLASH_ATTENTION_INVALID_ARGUMENT ? 0 : 1;
}
