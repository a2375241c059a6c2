#include "cli/problem/common_problems.h"

#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "cli/problem/problem_flags.h"

namespace flash_attention::cli {
namespace {

struct Size {
  std::int64_t batch, heads_q, heads_kv, seq;
};

// The planner chooses tiles, splits and schedules by these. What they give twice is dropped.
constexpr std::int64_t batches[] = {1, 2, 4, 8, 16, 32, 64};
constexpr std::pair<std::int64_t, std::int64_t> heads[] = {{8, 8}, {16, 16}, {32, 32}, {12, 12}, {16, 4}, {32, 8}, {64, 8}};
constexpr std::int64_t lengths[] = {77, 128, 197, 512, 1024, 2048, 4096, 8192, 16384, 32768};
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

/// Calls, each of which needs a kernel that none before it does.
class Calls {
 public:
  explicit Calls(const DeviceInfo& device) : device_(device) {}

  void add(const Problem& problem, Pass pass) {
    bool asks_for_new = false;
    for (const Launch& launch : make_plan(problem, pass, device_).launches) {
      const std::tuple kernel{launch.unit, launch.entry, to_source(launch.config), launch.block, launch.min_blocks_per_sm};
      asks_for_new = seen_.insert(kernel).second || asks_for_new;
    }
    if (asks_for_new) found_.push_back({problem, pass});
  }

  std::vector<CommonCall> take() { return std::move(found_); }

 private:
  const DeviceInfo& device_;
  std::set<std::tuple<std::string, std::string, std::string, int, int>> seen_;
  std::vector<CommonCall> found_;
};

void add_both(Calls& calls, Problem problem, bool packed) {
  if (packed) {
    problem.packed = true;
    problem.total_q = problem.total_kv = problem.batch * problem.seq_q;
  }
  for (const Pass pass : {Pass::forward, Pass::backward}) calls.add(problem, pass);
}

using AddSized = void(Calls& calls, Dtype dtype, std::int64_t head_dim, const Size& size);

/// Full and causal. Wheels have at most 3 MB: the backward pass is that of bfloat16, in which most models are trained, and
/// short sequences, which have tiles of their own, are left out.
void add_core(Calls& calls, Dtype dtype, std::int64_t head_dim, const Size& size) {
  if (size.seq < 512) return;
  for (const bool causal : {false, true}) {
    const Problem problem = sized(size, dtype, head_dim, causal);
    calls.add(problem, Pass::forward);
    if (dtype == Dtype::bfloat16) calls.add(problem, Pass::backward);
  }
}

/// The same, and causal with a sliding window; packed where the type has 16 bits.
void add_sized(Calls& calls, Dtype dtype, std::int64_t head_dim, const Size& size) {
  for (const bool causal : {false, true}) {
    const Problem problem = sized(size, dtype, head_dim, causal);
    add_both(calls, problem, false);
    if (dtype != Dtype::float32) add_both(calls, problem, true);
  }
  if (dtype == Dtype::float32 || size.seq <= window) return;
  Problem sliding = sized(size, dtype, head_dim, true);
  sliding.window_left = window;
  add_both(calls, sliding, false);
}

void add_training(Calls& calls, Dtype dtype, std::int64_t head_dim, AddSized& add = add_sized) {
  for (const std::int64_t batch : batches) {
    for (const auto& [heads_q, heads_kv] : heads) {
      for (const std::int64_t length : lengths) add(calls, dtype, head_dim, {batch, heads_q, heads_kv, length});
    }
  }
}

/// One query of each sequence against a cache whose lengths the device reads; dense and in pages.
void add_decoding(Calls& calls, Dtype dtype, std::int64_t head_dim) {
  for (const std::int64_t group : groups) {
    for (const std::int64_t page_size : {0, 16}) {
      Problem problem = sized({8, 8 * group, 8, 4096}, dtype, head_dim, true);
      problem.seq_q = 1;
      problem.seqused_kv = true;
      put_in_pages(problem, page_size);
      calls.add(problem, Pass::forward);
    }
  }
}

/// Forward with a boolean mask. Its main kernel reads words of bits, and is that of every program that hides keys and of
/// all sizes, too: what is left to compile for a new program is the small kernel that makes the words.
void add_masked(Calls& calls, std::int64_t head_dim) {
  for (const bool causal : {false, true}) {
    Problem problem = sized({1, 16, 16, 4096}, Dtype::bfloat16, head_dim, causal);
    problem.mask.present = true;
    problem.mask.q_stride = problem.seq_kv;
    calls.add(problem, Pass::forward);
  }
}

}  // namespace

std::vector<CommonCall> common_calls(const DeviceInfo& device) {
  Calls calls(device);
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const std::int64_t head_dim : {128, 64, 256, 96, 192}) {
      add_training(calls, dtype, head_dim);
      add_decoding(calls, dtype, head_dim);
    }
  }
  for (const std::int64_t head_dim : {128, 64}) add_masked(calls, head_dim);
  for (const std::int64_t head_dim : {128, 64}) add_training(calls, Dtype::float32, head_dim);
  return calls.take();
}

std::vector<CommonCall> core_calls(const DeviceInfo& device) {
  Calls calls(device);
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const std::int64_t head_dim : {128, 64}) {
      add_training(calls, dtype, head_dim, add_core);
      add_decoding(calls, dtype, head_dim);
    }
  }
  add_masked(calls, 128);
  return calls.take();
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
