#include "cli/problem/cases.h"

#include "cli/problem/problem_flags.h"

namespace flash_attention::cli {
namespace {

/// A square problem; the user's flags win over the set's numbers.
class Shapes {
 public:
  Shapes(Device device, const Arguments& arguments)
      : on_cpu_(device_traits(device).host_memory), arguments_(arguments), base_(problem_from(arguments)) {
    if (!arguments.given("heads")) base_.heads_q = on_cpu_ ? 8 : 16;
    if (!arguments.given("kv-heads")) base_.heads_kv = base_.heads_q;
    if (!on_cpu_ && !arguments.given("dtype")) base_.dtype = Dtype::bfloat16;
    if (!on_cpu_ && !arguments.given("head-dim")) base_.head_dim = 128;
    if (!arguments.given("head-dim-v")) base_.head_dim_v = base_.head_dim;
  }

  /// On a GPU the batch grows as sequences get shorter, so that every case has the same number of tokens.
  Problem square(std::int64_t length) const {
    Problem problem = base_;
    problem.seq_q = problem.seq_kv = length;
    if (!on_cpu_ && !arguments_.given("batch")) problem.batch = std::max<std::int64_t>(1, 16384 / length);
    return problem;
  }

  std::vector<std::int64_t> lengths(std::int64_t cpu_longest) const {
    if (arguments_.given("seq-q")) return {arguments_.integer("seq-q", 0)};
    std::vector<std::int64_t> lengths;
    for (std::int64_t n = on_cpu_ ? 256 : 512; n <= (on_cpu_ ? cpu_longest : 16384); n *= 2) lengths.push_back(n);
    return lengths;
  }

  std::vector<std::int64_t> head_dims() const {
    return arguments_.given("head-dim") ? std::vector{base_.head_dim} : std::vector<std::int64_t>{64, 128};
  }

  std::vector<Dtype> dtypes() const {
    if (arguments_.given("dtype")) return {base_.dtype};
    if (on_cpu_) return {Dtype::float32, Dtype::float16, Dtype::bfloat16};
    return {Dtype::float16, Dtype::bfloat16};
  }

  std::vector<bool> causals() const { return base_.causal ? std::vector{true} : std::vector{false, true}; }

 private:
  bool on_cpu_;
  const Arguments& arguments_;
  Problem base_;
};

void add_grid(std::vector<Case>& cases, const Shapes& shapes, std::string_view set, Pass pass) {
  for (const Dtype dtype : shapes.dtypes()) {
    for (const std::int64_t head_dim : shapes.head_dims()) {
      for (const bool causal : shapes.causals()) {
        for (const std::int64_t length : shapes.lengths(4096)) {
          if (length < 512) continue;
          Problem problem = shapes.square(length);
          problem.dtype = dtype;
          problem.head_dim = problem.head_dim_v = head_dim;
          problem.causal = causal;
          cases.push_back({std::string(set), problem, pass});
        }
      }
    }
  }
}

/// Decoding as servers do it: a long context, or many sequences; contiguous, and in pages.
void add_serving(std::vector<Case>& cases, const Arguments& arguments) {
  struct Serving {
    std::int64_t batch, heads_q, heads_kv, keys, page_size;
  };
  constexpr Serving all[] = {{1, 32, 8, 1024, 0},   {1, 32, 8, 8192, 0},   {1, 32, 8, 131072, 0}, {16, 32, 8, 8192, 0},
                             {64, 32, 8, 4096, 0},  {256, 32, 8, 1024, 0}, {32, 8, 1, 16384, 0},  {1, 32, 8, 8192, 16},
                             {64, 32, 8, 4096, 16}, {64, 32, 8, 4096, 64}, {64, 32, 8, 4096, 256}};
  const Problem given = problem_from(arguments);
  for (const Serving& serving : all) {
    Problem problem = given;
    if (!arguments.given("batch")) problem.batch = serving.batch;
    if (!arguments.given("heads")) problem.heads_q = serving.heads_q, problem.heads_kv = serving.heads_kv;
    if (!arguments.given("seq-q")) problem.seq_q = 1;
    if (!arguments.given("seq-kv")) problem.seq_kv = serving.keys;
    if (!arguments.given("head-dim")) problem.head_dim = problem.head_dim_v = 128;
    if (!arguments.given("dtype")) problem.dtype = Dtype::bfloat16;
    put_in_pages(problem, arguments.given("page-size") ? arguments.integer("page-size", 0) : serving.page_size);
    const Case line{"decode", problem, Pass::forward};
    if (cases.empty() || !(cases.back().problem == problem)) cases.push_back(line);
  }
}

/// The forty shapes of bench/benchmark_decode.py, which times other libraries on them.
void add_forty(std::vector<Case>& cases, const Arguments& arguments) {
  struct Shape {
    std::int64_t batch, heads_q, heads_kv, keys, head_dim, queries;
  };
  constexpr Shape all[] = {
      {1, 32, 8, 128, 128, 1},     {1, 32, 8, 1024, 128, 1},  {1, 32, 8, 8192, 128, 1},   {1, 32, 8, 32768, 128, 1},
      {1, 32, 8, 131072, 128, 1},  {8, 32, 8, 1024, 128, 1},  {8, 32, 8, 16384, 128, 1},  {16, 32, 8, 8192, 128, 1},
      {64, 32, 8, 128, 128, 1},    {64, 32, 8, 4096, 128, 1}, {256, 32, 8, 1024, 128, 1}, {1, 8, 1, 4096, 128, 1},
      {32, 8, 1, 16384, 128, 1},   {256, 8, 1, 2048, 128, 1}, {1, 32, 32, 2048, 128, 1},  {8, 32, 32, 4096, 128, 1},
      {128, 32, 32, 2048, 128, 1}, {1, 64, 4, 16384, 128, 1}, {16, 64, 4, 8192, 128, 1},  {128, 64, 4, 1024, 128, 1},
      {1, 32, 8, 4096, 128, 4},    {8, 32, 8, 1024, 128, 4},  {8, 32, 8, 8192, 128, 4},   {16, 8, 1, 1024, 128, 4},
      {1, 64, 4, 32768, 128, 4},   {8, 64, 4, 1024, 128, 4},  {4, 32, 32, 4096, 128, 4},  {1, 32, 8, 1024, 64, 1},
      {64, 32, 8, 128, 64, 1},     {64, 32, 8, 1024, 64, 1},  {8, 32, 32, 8192, 64, 1},   {8, 64, 4, 8192, 64, 1},
      {32, 8, 1, 32768, 64, 1},    {8, 32, 8, 4096, 64, 4},   {4, 64, 4, 16384, 64, 4},   {1, 32, 8, 8192, 256, 1},
      {16, 32, 8, 4096, 256, 1},   {64, 8, 1, 4096, 256, 1},  {8, 32, 8, 2048, 256, 4},   {4, 8, 1, 16384, 256, 4}};
  const Problem given = problem_from(arguments);
  for (const Shape& shape : all) {
    Problem problem = given;
    problem.batch = shape.batch, problem.heads_q = shape.heads_q, problem.heads_kv = shape.heads_kv;
    problem.seq_q = shape.queries, problem.seq_kv = shape.keys;
    problem.head_dim = problem.head_dim_v = shape.head_dim;
    if (!arguments.given("dtype")) problem.dtype = Dtype::bfloat16;
    put_in_pages(problem, arguments.given("page-size") ? arguments.integer("page-size", 0) : 0);
    cases.push_back({"decode-40", problem, Pass::forward});
  }
}

}  // namespace

const std::vector<CaseSet>& case_sets() {
  static const std::vector<CaseSet> sets{
      {"lengths", "flash against standard attention, forward, by length"},
      {"lengths-backward", "the same for the backward pass"},
      {"forward", "forward pass: every element type, head_dim 64 and 128, full and causal, by length"},
      {"backward", "backward pass: the same grid"},
      {"decode", "one query against a long context, heads and grouped heads: GB/s of K and V"},
      {"small", "16 queries and keys: the cost of a call"},
  };
  return sets;
}

std::vector<Case> make_cases(std::string_view set, Device device, const Arguments& arguments) {
  const Shapes shapes(device, arguments);
  std::vector<Case> cases;
  if (set == "lengths" || set == "lengths-backward") {
    const bool backward = set == "lengths-backward";
    for (const std::int64_t length : shapes.lengths(backward ? 4096 : 8192)) {
      Problem all_keys = shapes.square(length);
      all_keys.key_list = {};  // which standard attention does not take
      cases.push_back({std::string(set), all_keys, backward ? Pass::standard_backward : Pass::standard_forward});
      cases.push_back({std::string(set), shapes.square(length), backward ? Pass::backward : Pass::forward});
    }
  } else if (set == "forward") {
    add_grid(cases, shapes, set, Pass::forward);
  } else if (set == "backward") {
    add_grid(cases, shapes, set, Pass::backward);
  } else if (set == "decode" && !device_traits(device).host_memory) {
    add_serving(cases, arguments);
  } else if (set == "decode-40") {
    add_forty(cases, arguments);
  } else if (set == "decode") {
    for (const Dtype dtype : shapes.dtypes()) {
      for (const std::int64_t group : {1, 4}) {
        Problem problem = shapes.square(32768);
        problem.seq_q = 1;
        problem.heads_kv = std::max<std::int64_t>(1, problem.heads_q / group);
        problem.dtype = dtype;
        cases.push_back({std::string(set), problem, Pass::forward});
      }
    }
  } else if (set == "small") {
    for (const Dtype dtype : shapes.dtypes()) {
      Problem problem = shapes.square(16);
      problem.batch = 1;
      problem.dtype = dtype;
      cases.push_back({std::string(set), problem, Pass::forward});
    }
  } else {
    std::string names;
    for (const CaseSet& known : case_sets()) names += std::string(known.name) + ", ";
    throw Error(ErrorCode::invalid_argument, "bench: got '" + std::string(set) + "', allowed: " + names + "decode-40, all");
  }
  return cases;
}

}  // namespace flash_attention::cli
