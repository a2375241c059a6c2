#include "api/prepared.h"

#include <pthread.h>

#include <array>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "api/backends.h"
#include "api/checks/program_options.h"
#include "api/checks/validate.h"
#include "api/qualify.h"
#include "plan/kernel_table.h"
#include "support/settings.h"
#include "tuning/recorder.h"
#include "tuning/store.h"

namespace flash_attention::api {
namespace {

struct Key {
  Problem problem;  // as the caller gave it
  Pass pass;
  Device device;
  int workers;  // threads of the CPU, SMs given to the emulator: the plan depends on them; 0 elsewhere
  std::uint64_t epoch;  // of the facts about devices
  std::string kernel;
  std::optional<TileSize> tile;
  std::optional<BackwardPart> part;
};

/// The same without a copy of the name, so that a hit allocates nothing.
struct KeyView {
  const Problem& problem;
  Pass pass;
  Device device;
  int workers;
  std::uint64_t epoch;
  std::string_view kernel;
  std::optional<TileSize> tile;
  std::optional<BackwardPart> part;
};

KeyView view(const Key& key) {
  return {key.problem, key.pass, key.device, key.workers, key.epoch, key.kernel, key.tile, key.part};
}
const KeyView& view(const KeyView& key) { return key; }
Key owned(const KeyView& key) {
  return {key.problem, key.pass, key.device, key.workers, key.epoch, std::string(key.kernel), key.tile, key.part};
}

struct Hash {
  using is_transparent = void;
  std::size_t operator()(const auto& key) const {
    const KeyView& v = view(key);
    const std::size_t rest = static_cast<std::size_t>(v.pass) + 8 * static_cast<std::size_t>(v.device.kind) +
                             64 * static_cast<std::size_t>(v.device.index) +
                             4096 * static_cast<std::size_t>(v.device.emulated_arch) +
                             (std::size_t{1} << 24) * static_cast<std::size_t>(v.workers);
    return hash_value(v.problem) ^ (rest * 0x9E3779B97F4A7C15ull) ^ std::hash<std::string_view>{}(v.kernel);
  }
};

struct Equal {
  using is_transparent = void;
  bool operator()(const auto& a, const auto& b) const {
    const KeyView &x = view(a), &y = view(b);
    return x.pass == y.pass && x.device == y.device && x.workers == y.workers && x.epoch == y.epoch &&
           x.kernel == y.kernel && x.tile == y.tile && x.part == y.part && x.problem == y.problem;
  }
};

/// The only mutable state of the library, besides the kernel cache on disk.
struct Cache {
  static constexpr std::size_t capacity = 4096;  // variable lengths make new problems all the time

  std::shared_mutex mutex;
  std::unordered_map<Key, std::shared_ptr<const Prepared>, Hash, Equal> entries;
};

/// Never destroyed: at the end of the process, a destructor or another thread may still make a call.
Cache& cache() {
  static Cache& instance = *new Cache;
  return instance;
}

/// The lock is held during fork(), so that no other thread holds it when the process is copied. The child makes a new
/// mutex, because the copy is locked by a thread of the parent.
const int fork_safe = pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); },
                                     [] { new (&cache().mutex) std::shared_mutex; });

/// This thread's last calls, forward and backward: a repeated call is found without a hash and without the lock.
class Recent {
 public:
  const std::shared_ptr<const Prepared>* find(const KeyView& key) const {
    const auto& [known, prepared] = entries_[slot(key.pass)];
    return prepared && Equal{}(known, key) ? &prepared : nullptr;
  }
  void remember(const KeyView& key, const std::shared_ptr<const Prepared>& prepared) {
    entries_[slot(key.pass)] = {owned(key), prepared};
  }

 private:
  static std::size_t slot(Pass pass) { return pass == Pass::backward || pass == Pass::standard_backward; }

  std::array<std::pair<Key, std::shared_ptr<const Prepared>>, 2> entries_;
};

/// Null after the destructors of this thread's variables have run. Later calls of the thread do without it.
Recent* recent() {
  thread_local bool gone = false;
  struct Owner {
    Recent entries;
    ~Owner() { gone = true; }
  };
  if (gone) return nullptr;
  thread_local Owner owner;
  return &owner.entries;
}

}  // namespace

Prepared::Prepared(const Problem& given, const Problem& normalised, Plan chosen, DeviceInfo where)
    : problem(normalised),
      plan(std::move(chosen)),
      device(std::move(where)),
      slopes(slopes_of_program(given, normalised)),
      mask_form(form_of(problem, plan)) {}

const Kernel& Prepared::kernel(void* stream) const {
  if (const Kernel* kernel = ready_.load(std::memory_order_acquire)) return *kernel;
  std::call_once(loaded_, [this, stream] {
    kernel_ = backend_of(device.device).load(problem, plan, device, stream);
    ready_.store(kernel_.get(), std::memory_order_release);
  });
  return *kernel_;
}

namespace {

/// Whether a stream is being captured and the kernel must be tested first. Then the plan avoids that kernel, and is not
/// kept.
bool waits_for_test(const Plan& plan, const KeyView& key, void* stream) {
  const Backend& backend = backend_of(key.device);
  return plan.unproven && key.kernel.empty() && backend.is_captured != nullptr && backend.is_captured(stream);
}

std::shared_ptr<const Prepared> find_or_make(const KeyView& key, void* stream) {
  Cache& c = cache();
  {
    const std::shared_lock lock(c.mutex);
    if (const auto found = c.entries.find(key); found != c.entries.end()) return found->second;
  }
  if (const auto& file = support::settings().record; !file.empty()) tuning::record(file, key.problem, key.pass);
  DeviceInfo device = device_info(key.device);
  if (key.workers > 0) (backend_of(key.device).threads != nullptr ? device.threads : device.num_sms) = key.workers;
  const Problem normalised = normalise(key.problem, key.pass);
  const auto choose = [&] { return plan::choose(normalised, key.pass, device, key.kernel, key.tile, key.part); };
  Plan plan = choose();
  if (waits_for_test(plan, key, stream)) [[unlikely]] {
    device.proven_only = true;
    return std::make_shared<const Prepared>(key.problem, normalised, choose(), device);
  }
  // The next kernel may be unproven, too.
  for (int i = 0; i < 4 && plan.unproven && key.kernel.empty() && qualify(normalised, plan, device); ++i) {
    device.tuned = device_info(key.device).tuned;
    plan = choose();
  }
  auto prepared = std::make_shared<const Prepared>(key.problem, normalised, std::move(plan), device);
  const std::unique_lock lock(c.mutex);
  if (c.entries.size() >= Cache::capacity) c.entries.clear();
  return c.entries.try_emplace(owned(key), prepared).first->second;
}

}  // namespace

std::shared_ptr<const Prepared> prepare(const Problem& problem, Pass pass, const Options& options) {
  const Backend& backend = backend_of(options.device);
  int (*const workers)() = backend.threads != nullptr ? backend.threads : backend.num_sms;
  const KeyView key{problem,          pass,           options.device, workers != nullptr ? workers() : 0,
                    tuning::epoch(),  options.kernel, options.tile,   options.part};
  Recent* last = recent();
  if (const auto* found = last != nullptr ? last->find(key) : nullptr) return *found;
  std::shared_ptr<const Prepared> prepared = find_or_make(key, options.stream);
  const bool lasts = !prepared->device.proven_only || support::settings().qualify == support::Qualify::never;
  if (last != nullptr && lasts) last->remember(key, prepared);
  return prepared;
}

std::shared_ptr<const Prepared> prepare_to_run(const Problem& problem, Pass pass, const Options& options) {
  std::shared_ptr<const Prepared> wanted = prepare(problem, pass, options);
  const auto fits = [&](const Prepared& prepared) { return prepared.plan.workspace_bytes <= options.workspace_bytes; };
  if (backend_of(options.device).threads == nullptr || options.workspace == nullptr || fits(*wanted)) return wanted;
  for (int threads = wanted->device.threads / 2; threads >= 1; threads /= 2) {
    auto fewer =
        find_or_make({problem, pass, options.device, threads, tuning::epoch(), options.kernel, options.tile, options.part},
                     options.stream);
    if (fits(*fewer)) return fewer;
  }
  return wanted;
}

}  // namespace flash_attention::api
