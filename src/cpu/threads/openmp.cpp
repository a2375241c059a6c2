#include "cpu/threads/openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string_view>
#include <vector>

namespace flash_attention::cpu {

/// A loop on a team. As in ThreadPool, each thread begins with its own range and then takes from the ranges of others.
struct OpenMp::Team {
  static constexpr int most = 256;  // ranges; with more threads, some begin in the same range

  struct alignas(64) Range {
    std::atomic<std::int64_t> next;
    std::int64_t end;
  };

  const OpenMp& runtime;
  Body body;
  void* context;
  int num_threads, num_ranges;
  std::atomic<int> num_begun{0};                      // threads that have arrived
  std::chrono::steady_clock::time_point caller_done;  // if some had not begun when the caller had nothing more to do
  bool some_missing = false;
  Range ranges[most];

  Team(const OpenMp& team_runtime, Body loop_body, void* loop_context, std::int64_t count, int threads)
      : runtime(team_runtime), body(loop_body), context(loop_context), num_threads(threads) {
    num_ranges = static_cast<int>(std::min<std::int64_t>({threads, most, count}));
    for (int i = 0; i < num_ranges; ++i) {
      ranges[i].next.store(count * i / num_ranges, std::memory_order_relaxed);
      ranges[i].end = count * (i + 1) / num_ranges;
    }
  }
};

void OpenMp::work(void* of_team) {
  Team& team = *static_cast<Team*>(of_team);
  const int self = team.runtime.thread_num_();
  team.num_begun.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < team.num_ranges; ++i) {
    Team::Range& range = team.ranges[(self + i) % team.num_ranges];
    while (range.next.load(std::memory_order_relaxed) < range.end) {
      const std::int64_t index = range.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= range.end) break;
      team.body(team.context, index);
    }
  }
  if (self == 0 && team.num_begun.load(std::memory_order_relaxed) < team.num_threads) {  // the caller
    team.some_missing = true;
    team.caller_done = std::chrono::steady_clock::now();
  }
}

void OpenMp::work_of_kmpc(std::int32_t* /*thread*/, std::int32_t* /*in_team*/, void* team) { work(team); }

int OpenMp::threads() const {
  if (in_parallel_() != 0) return 1;
  return std::max(torch_threads_ != nullptr ? torch_threads_() : max_threads_(), 1);
}

bool OpenMp::run(std::int64_t count, Body body, void* context, int threads) const {
  Team team(*this, body, context, count, threads);
  // The team always has its full size, even for a short loop: GCC's runtime ends the threads that a smaller team leaves
  // out, and starts new ones later.
  if (gomp_parallel_ != nullptr) {
    gomp_parallel_(work, &team, static_cast<unsigned>(threads), 0);
  } else {
    run_by_kmpc(team);
  }
  // much longer than it takes to wake a thread if a processor is free
  constexpr std::chrono::milliseconds long_wait{1};
  return !team.some_missing || std::chrono::steady_clock::now() - team.caller_done < long_wait;
}

void OpenMp::run_by_kmpc(Team& team) const {
  struct Where {  // ident_t: the place of the loop in a source
    std::int32_t reserved_1 = 0, flags = 2, reserved_2 = 0, reserved_3 = 0;
    const char* source = ";unknown;unknown;0;0;;";
  };
  static Where where;
  kmpc_fork_call_(&where, 1, work_of_kmpc, &team);
}

bool OpenMp::find_entries(void* library) {
  const auto find = [&](auto& entry, const char* name) {
    entry = reinterpret_cast<std::decay_t<decltype(entry)>>(dlsym(library, name));
    return entry != nullptr;
  };
  const bool parallel = find(gomp_parallel_, "GOMP_parallel") || find(kmpc_fork_call_, "__kmpc_fork_call");
  if (!parallel || !find(max_threads_, "omp_get_max_threads") || !find(thread_num_, "omp_get_thread_num") ||
      !find(in_parallel_, "omp_in_parallel")) {
    return false;
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(max_threads_), &info) != 0 && info.dli_fname != nullptr) library_ = info.dli_fname;
  dlopen(library_.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // so that it stays loaded
  return true;
}

const OpenMp* OpenMp::keep(const OpenMp& found) {
  static std::atomic<const OpenMp*> last{nullptr};
  auto* kept = new OpenMp(found);
  kept->kept_before_ = last.load();
  while (!last.compare_exchange_weak(kept->kept_before_, kept)) {
  }
  return kept;
}

const OpenMp* OpenMp::in(void* library) {
  OpenMp found;
  return found.find_entries(library) ? keep(found) : nullptr;
}

/// Searches the libraries of the process.
class Search {
 public:
  Search() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* self) {
          static_cast<Search*>(self)->take(info->dlpi_name);
          return 0;
        },
        this);
  }

  bool has_torch() const { return !torch_.empty(); }

  /// The runtime that every library sees comes first, since torch is bound to it. Torch's wheels contain a runtime with
  /// its own name, which perhaps only torch sees: it comes next. The runtimes of other libraries come last.
  const OpenMp* runtime(const OpenMp* known) const {
    void* torch = has_torch() ? dlopen(torch_.c_str(), RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    OpenMp found;
    bool good = found.find_entries(RTLD_DEFAULT) || (torch != nullptr && found.find_entries(torch));
    for (std::size_t i = 0; !good && i < runtimes_.size(); ++i) {
      if (void* library = dlopen(runtimes_[i].c_str(), RTLD_LAZY | RTLD_NOLOAD)) good = found.find_entries(library);
    }
    if (!good) return known;
    if (torch != nullptr) {
      found.torch_threads_ = reinterpret_cast<int (*)()>(dlsym(torch, "_ZN2at15get_num_threadsEv"));
    }
    const bool same =
        known != nullptr && known->library_ == found.library_ && known->torch_threads_ == found.torch_threads_;
    return same ? known : OpenMp::keep(found);
  }

 private:
  void take(const char* path) {
    const std::string_view whole(path != nullptr ? path : ""), name = whole.substr(whole.rfind('/') + 1);
    if (name.starts_with("libtorch_cpu.")) torch_ = whole;
    for (const std::string_view runtime : {"libgomp", "libiomp", "libomp"}) {
      if (name.starts_with(runtime)) runtimes_.emplace_back(whole);
    }
  }

  std::string torch_;
  std::vector<std::string> runtimes_;
};

namespace {

std::atomic<const OpenMp*> the_runtime{nullptr};
std::atomic<bool> settled{false}, looking{false};
std::atomic<std::int64_t> next_look{0};        // steady clock
std::atomic<unsigned long long> last_adds{0};  // libraries loaded so far, at the last search

unsigned long long libraries_added() {
  unsigned long long adds = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        *static_cast<unsigned long long*>(to) = info->dlpi_adds;
        return 1;
      },
      &adds);
  return adds;
}

}  // namespace

const OpenMp* OpenMp::loaded() {
  if (settled.load(std::memory_order_acquire)) return the_runtime.load(std::memory_order_acquire);
  const std::int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  if (now >= next_look.load(std::memory_order_relaxed) && !looking.exchange(true)) {
    if (const unsigned long long adds = libraries_added(); adds != last_adds.exchange(adds)) {
      const Search search;
      const OpenMp* found = search.runtime(the_runtime.load());
      the_runtime.store(found, std::memory_order_release);
      if (found != nullptr && search.has_torch()) settled.store(true, std::memory_order_release);
    }
    next_look.store(now + std::chrono::nanoseconds(std::chrono::milliseconds(100)).count(), std::memory_order_relaxed);
    looking.store(false);
  }
  return the_runtime.load(std::memory_order_acquire);
}

void OpenMp::after_fork() { looking = false; }

}  // namespace flash_attention::cpu
