#include "cli/problem/common_problems.h"

#include "cli/problem/problem_flags.h"

namespace flash_attention::cli {
namespace {

struct Size {
  std::int64_t batch, heads_q, heads_kv, seq;
};

// Short and long, few heads and many, grouped and not: the planner chooses tiles, splits and schedules by these.
constexpr Size training_sizes[] = {{2, 16, 16, 4096}, {8, 32, 8, 1024}, {1, 32, 8, 16384}, {64, 12, 12, 197},
                                   {1, 8, 8, 512},    {4, 16, 4, 2048}, {1, 12, 12, 512},  {2, 16, 16, 8192},
                                   {4, 32, 32, 128},  {16, 16, 16, 77}, {1, 64, 8, 8192},  {32, 16, 16, 512}};
constexpr std::int64_t window = 1024;
constexpr std::int64_t groups[] = {1, 2, 4, 5, 6, 7, 8};  // query heads of a key head in models that are served much

Problem sized(const Size& size, Dtype dtype, std::int64_t head_dim, bool causal) {
  Problem problem;
  problem.batch = size.batch;
  problem.heads_q = size.heads_q;
  problem.heads_kv = size.heads_kv;
  problem.seq_q = problem.seq_kv = size.seq;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.dtype = dtype;
  problem.causal = causal;
  return problem;
}

void add(std::vector<CommonCall>& calls, Problem problem, bool packed) {
  if (packed) {
    problem.packed = true;
    problem.total_q = problem.total_kv = problem.batch * problem.seq_q;
  }
  for (const Pass pass : {Pass::forward, Pass::backward}) calls.push_back({problem, pass});
}

/// Full, causal, and causal with a sliding window; packed where the type has 16 bits.
void add_training(std::vector<CommonCall>& calls, Dtype dtype, std::int64_t head_dim) {
  for (const Size& size : training_sizes) {
    for (const bool causal : {false, true}) {
      const Problem problem = sized(size, dtype, head_dim, causal);
      add(calls, problem, false);
      if (dtype != Dtype::float32) add(calls, problem, true);
    }
    if (dtype == Dtype::float32 || size.seq <= window) continue;
    Problem sliding = sized(size, dtype, head_dim, true);
    sliding.window_left = window;
    add(calls, sliding, false);
  }
}

/// One query of each sequence against a cache whose lengths the device reads; dense and in pages.
void add_decoding(std::vector<CommonCall>& calls, Dtype dtype, std::int64_t head_dim) {
  for (const std::int64_t group : groups) {
    for (const std::int64_t page_size : {0, 16}) {
      Problem problem = sized({8, 8 * group, 8, 4096}, dtype, head_dim, true);
      problem.seq_q = 1;
      problem.seqused_kv = true;
      put_in_pages(problem, page_size);
      calls.push_back({problem, Pass::forward});
    }
  }
}

}  // namespace

std::vector<CommonCall> common_calls() {
  std::vector<CommonCall> calls;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const std::int64_t head_dim : {128, 64, 256, 96, 192}) {
      add_training(calls, dtype, head_dim);
      add_decoding(calls, dtype, head_dim);
    }
  }
  for (const std::int64_t head_dim : {128, 64}) add_training(calls, Dtype::float32, head_dim);
  return calls;
}

std::vector<AppendProblem> common_appends() {
  std::vector<AppendProblem> problems;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {  // rows of other widths have the lanes of one of these
      for (const std::int64_t page_size : {0, 16}) {
        AppendProblem problem{.batch = 8,
                              .seq_new = 1,
                              .seq_q = 1,
                              .heads_q = 32,
                              .heads_kv = 8,
                              .head_dim = head_dim,
                              .dtype = dtype,
                              .capacity = 4096,
                              .page_size = page_size};
        if (page_size > 0) problem.num_pages = problem.batch * problem.capacity / page_size;
        problems.push_back(problem);
        problem.rotary_dim = head_dim;
        problem.rotary_dtype = dtype;
        problem.rotary_positions = problem.capacity;
        for (const bool interleaved : {false, true}) {
          problem.rotary_interleaved = interleaved;
          problems.push_back(problem);
        }
      }
    }
  }
  return problems;
}

}  // namespace flash_attention::cli
