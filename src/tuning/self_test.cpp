#include "tuning/self_test.h"

#include <algorithm>
#include <future>
#include <limits>
#include <optional>

#include "flash_attention/error.h"
#include "plan/kernel_table.h"

namespace flash_attention::tuning {
namespace {

Problem base(Dtype dtype, std::int64_t head_dim) {
  Problem p{.batch = 2, .seq_q = 83, .seq_kv = 211, .heads_q = 4, .heads_kv = 2, .head_dim = head_dim};
  p.dtype = dtype;
  return p;
}

template <class Change>
Problem changed(Problem problem, const Change& change) {
  change(problem);
  return problem;
}

/// Describes what is wrong with the kernel's results of a call; empty if nothing.
std::string wrong(const Call& call, const Plan& plan, const Kernel& kernel, const Machine& machine, const Machine& host) {
  const auto plan_on_host = [&](const Problem& problem, Pass pass) {
    DeviceInfo by_rules = host.device;
    by_rules.tuned.reset();
    return plan::choose(problem, pass, by_rules);
  };
  const auto run_on_host = [&](Rig& rig, const Problem& problem, Pass pass) {
    const Plan usual = plan_on_host(problem, pass);
    rig.run(*host.backend.load(problem, usual, host.device, nullptr), usual);
  };
  Rig expected(call, host.device, host.backend, Inputs::hostile);
  Rig tested(call, machine.device, machine.backend, Inputs::hostile);
  if (call.pass == Pass::backward || call.pass == Pass::second) {
    run_on_host(expected, call.forward, Pass::forward);
    tested.take_forward_results(expected);
  }
  run_on_host(expected, call.problem, call.pass);
  for (int round = 0; round < 3; ++round) {  // a race does not show every time
    tested.clear_results();
    tested.run(kernel, plan);
    std::string found = difference(call.problem, tested.results(), expected.results());
    if (!found.empty()) return found + " (" + to_string(call.problem) + ")";
  }
  return {};
}

double best_of_five(const Call& call, const Plan& plan, const Kernel& kernel, const Machine& machine) {
  Rig rig(call, machine.device, machine.backend, Inputs::usual);
  rig.run(kernel, plan);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 5; ++i) best = std::min(best, rig.seconds(kernel, plan));
  return best;
}

}  // namespace

std::vector<Problem> hostile_problems(Pass pass) {
  std::vector<Problem> problems{
      changed(base(Dtype::bfloat16, 128), [](Problem& p) { p.causal = true; }),
      changed(base(Dtype::float16, 64), [](Problem& p) { p.seq_q = 211, p.seq_kv = 83, p.causal = true; }),  // empty rows
      changed(base(Dtype::bfloat16, 64), [](Problem& p) { p.packed = true, p.total_q = 131, p.total_kv = 307; }),
      changed(base(Dtype::bfloat16, 256), [](Problem& p) { p.seqused_kv = true, p.softcap = 10; }),
      changed(base(Dtype::float16, 128), [](Problem& p) { p.window_left = 40, p.alibi = true, p.dropout_p = 0.2f; }),
      changed(base(Dtype::float32, 64), [](Problem& p) { p.causal = true, p.head_dim_v = 96; }),
      changed(base(Dtype::float32, 64), [](Problem& p) { p.window_left = 50, p.precision = Precision::ieee; }),
  };
  if (pass != Pass::forward) return problems;
  const auto decode = [&](Dtype dtype, std::int64_t head_dim, const auto& change) {
    Problem p = base(dtype, head_dim);
    p.seq_q = 1, p.heads_q = 8, p.seq_kv = 731, p.seqused_kv = p.causal = true;
    change(p);
    problems.push_back(p);
  };
  decode(Dtype::bfloat16, 128, [](Problem&) {});
  decode(Dtype::bfloat16, 64, [](Problem& p) { p.seq_q = 5, p.page_size = 16, p.num_pages = 97, p.softcap = 20; });
  decode(Dtype::float16, 128, [](Problem& p) { p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head; });
  decode(Dtype::bfloat16, 576, [](Problem& p) {
    p.head_dim_v = 512, p.latent = true, p.heads_q = 16, p.heads_kv = 1;
  });
  problems.push_back(changed(base(Dtype::bfloat16, 128), [](Problem& p) {
    p.causal = true, p.q_dtype = p.kv_dtype = Dtype::float8_e4m3, p.q_scales = p.kv_scales = ScaleKind::head;
  }));
  problems.push_back(changed(base(Dtype::float16, 64), [](Problem& p) {
    p.q_dtype = p.kv_dtype = Dtype::float8_e5m2, p.alibi = true, p.softcap = 10, p.window_left = 70, p.head_dim_v = 96;
  }));
  return problems;
}

Problem timed_problem(const Problem& model) {
  Problem p = base(model.dtype, std::min<std::int64_t>(model.head_dim, 256));
  p.batch = 1, p.heads_q = p.heads_kv = 8, p.seq_q = p.seq_kv = 1024;
  if (model.q_dtype.value_or(model.dtype) != model.dtype) p.q_dtype = p.kv_dtype = model.q_dtype;
  if (model.seq_q <= 16) p.seq_q = 1, p.seq_kv = 8192;
  return p;
}

plan::Verdict self_test(std::string_view kernel, Pass pass, const std::vector<Call>& calls, const Call* timed,
                        std::string_view stand_in, const Machine& machine, const Machine& host, const Load& load) {
  plan::Verdict verdict{.kernel = std::string(kernel), .pass = pass, .passed = false, .reason = {}};
  DeviceInfo trusting = machine.device;  // so that the plan is the kernel's, even if it is untested here
  trusting.tuned.reset();
  trusting.proven_only = false;
  struct Taken {
    const Call& call;
    Plan plan;
    std::future<std::unique_ptr<Kernel>> kernel;
  };
  std::vector<Taken> taken;
  for (const Call& call : calls) {
    std::optional<Plan> plan = plan::plan_choice(call.problem, pass, trusting, {.kernel = std::string(kernel)});
    if (!plan) continue;
    auto loading = std::async(std::launch::async, load, call.problem, *plan);
    taken.push_back({call, *std::move(plan), std::move(loading)});
  }
  if (taken.empty()) throw Error(ErrorCode::unavailable, "no problem of the self-test is one that it takes");
  try {
    for (Taken& one : taken) {
      verdict.reason = wrong(one.call, one.plan, *one.kernel.get(), machine, host);
      if (!verdict.reason.empty()) return verdict;
    }
    if (timed != nullptr && machine.backend.clock != nullptr) {
      const auto seconds = [&](std::string_view name) {
        const std::optional<Plan> plan = plan::plan_choice(timed->problem, pass, trusting, {.kernel = std::string(name)});
        return plan ? best_of_five(*timed, *plan, *load(timed->problem, *plan), machine) : 0;
      };
      const double own = seconds(kernel), other = seconds(stand_in);
      if (own > 0 && other > 0 && own > other) {
        verdict.reason = "it is slower than " + std::string(stand_in) + ", by " +
                         std::to_string(static_cast<int>(100 * (own / other - 1))) + " %";
        return verdict;
      }
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::unavailable || error.code() == ErrorCode::out_of_memory) throw;  // not the kernel's fault
    const std::string_view message = error.what();
    verdict.reason = message.substr(0, message.find('\n'));
    return verdict;
  }
  verdict.passed = true;
  return verdict;
}

}  // namespace flash_attention::tuning
