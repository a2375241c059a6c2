#include "flash_attention/append.h"

#include <array>
#include <memory>
#include <vector>

#include "api/backends.h"
#include "api/checks/append_problem.h"
#include "api/guard.h"
#include "launch/append.h"
#include "plan/append.h"

namespace flash_attention {
namespace {

/// A prepared call: its problem with every default, and on a GPU its kernel.
struct PreparedAppend {
  AppendProblem asked;
  Device device;
  AppendProblem problem;
  Launch launch;
  std::unique_ptr<LaunchedKernel> kernel;  // null: the backend appends without a kernel, or there is nothing to do
  std::vector<Launch> back;                // of the gradients, after the first call that needs them
  std::vector<std::unique_ptr<LaunchedKernel>> back_kernels;
};

/// Loads the kernels that append_backward launches.
void prepare_gradients(PreparedAppend& prepared, bool weights, const Options& options) {
  if (prepared.back.size() >= (weights ? 2 : 1) || prepared.launch.grid[0] == 0) return;
  const DeviceInfo device = device_info(options.device);
  prepared.back = plan::lay_out_append_gradients(prepared.problem, weights);
  prepared.back_kernels.clear();
  for (const Launch& launch : prepared.back)
    prepared.back_kernels.push_back(api::backend_of(options.device).load_launch(launch, device, options.stream));
}

/// The last few calls of this thread: one for each kind of layer of a model. The process loads each kernel once, so
/// forgetting a call costs little.
class RecentAppends {
 public:
  PreparedAppend& find(const AppendProblem& problem, const Options& options) {
    for (const auto& entry : entries_) {
      if (entry && entry->device == options.device && entry->asked == problem) return *entry;
    }
    auto made = std::make_unique<PreparedAppend>();
    made->asked = problem;
    made->device = options.device;
    made->problem = api::normalise(problem);
    if (const Backend& backend = api::backend_of(options.device); backend.append == nullptr) {
      const DeviceInfo device = device_info(options.device);
      made->launch = plan::lay_out_append(made->problem);
      if (made->launch.grid[0] > 0) made->kernel = backend.load_launch(made->launch, device, options.stream);
    }
    auto& place = entries_[next_++ % entries_.size()];
    place = std::move(made);
    return *place;
  }

 private:
  std::array<std::unique_ptr<PreparedAppend>, 8> entries_;
  std::size_t next_ = 0;
};

/// Calls use() with this thread's memory of calls, or with a new one if the thread's variables are already destroyed.
template <class Use>
void with_recent(Use use) {
  thread_local bool gone = false;
  struct Owner {
    RecentAppends recent;
    ~Owner() { gone = true; }
  };
  if (gone) {
    RecentAppends own;
    return use(own);
  }
  thread_local Owner owner;
  use(owner.recent);
}

}  // namespace

void append(const AppendProblem& problem, const AppendBuffers& buffers, const Options& options) {
  api::guarded([&] {
    with_recent([&](RecentAppends& recent) {
      const PreparedAppend& prepared = recent.find(problem, options);
      api::validate(prepared.problem, buffers, options);
      if (const auto append_rows = api::backend_of(options.device).append; append_rows != nullptr) {
        append_rows(prepared.problem, buffers);
      } else if (prepared.kernel) {
        abi::AppendArgs args = launch::make_arguments(prepared.problem, buffers);
        prepared.kernel->launch(prepared.launch, &args, options.stream);
      }
    });
  });
}

void append_backward(const AppendProblem& problem, const AppendBuffers& buffers, const AppendGradients& gradients,
                     const Options& options) {
  api::guarded([&] {
    with_recent([&](RecentAppends& recent) {
      PreparedAppend& prepared = recent.find(problem, options);
      api::validate(prepared.problem, buffers, gradients, options.device);
      const Backend& backend = api::backend_of(options.device);
      if (backend.append_backward != nullptr) return backend.append_backward(prepared.problem, buffers, gradients);
      const bool weights = gradients.dq_norm_weight != nullptr || gradients.dk_norm_weight != nullptr;
      prepare_gradients(prepared, weights, options);
      abi::AppendGradientArgs args = launch::make_arguments(prepared.problem, buffers, gradients);
      for (std::size_t i = 0; i < prepared.back_kernels.size() && (i == 0 || weights); ++i)
        prepared.back_kernels[i]->launch(prepared.back[i], &args, options.stream);
    });
  });
}

std::size_t append_backward_workspace(const AppendProblem& problem) {
  const AppendProblem p = api::normalise(problem);
  return 2 * static_cast<std::size_t>(plan::append_gradient_blocks(p)) * static_cast<std::size_t>(p.head_dim) *
         sizeof(float);
}

void prewarm(const AppendProblem& problem, const Options& options) {
  api::guarded([&] { with_recent([&](RecentAppends& recent) { recent.find(problem, options); }); });
}

}  // namespace flash_attention
