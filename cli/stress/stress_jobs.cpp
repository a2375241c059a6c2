#include "cli/stress/stress_jobs.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <memory>

#include "cli/output/format.h"
#include "cli/verb.h"
#include "flash_attention/error.h"

extern char** environ;

namespace flash_attention::cli {
namespace {

constexpr double last_problem = 15;  // seconds for the problem that is under way when the time is up

/// A process and the last that it has said.
class Job {
 public:
  explicit Job(const std::vector<std::string>& words) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw Error(ErrorCode::internal, "no pipe for a process of stress");
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    std::vector<char*> texts;
    for (const std::string& word : words) texts.push_back(const_cast<char*>(word.c_str()));
    texts.push_back(nullptr);
    const int failed = ::posix_spawn(&process_, texts[0], &actions, nullptr, texts.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = ends[0];
    if (failed != 0) {
      ::close(output_);
      throw Error(ErrorCode::internal, "a process of stress could not be started: " + words[0]);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    end();
    ::close(output_);
  }

  bool running() const { return process_ != 0; }
  int output() const { return output_; }

  /// Takes what can be read; at its end the process is waited for.
  void read() {
    std::array<char, 1 << 16> block;
    const ssize_t size = ::read(output_, block.data(), block.size());
    if (size > 0) {
      text_.append(block.data(), static_cast<std::size_t>(size));
      for (std::size_t at = 0; (at = text_.find('\n')) != std::string::npos; text_.erase(0, at + 1))
        take(text_.substr(0, at));
    } else if (size == 0) {
      wait();
    }
  }

  void end() {
    if (!running()) return;
    ::kill(process_, SIGKILL);
    ended_ = true;
    while (running()) read();  // what it has said before counts
  }

  StressReport report() const {
    StressReport result = report_line_.empty() ? StressReport{} : report_from(JsonValue::parse(report_line_, "a report"));
    if (running() || ended_) return result;
    const auto add = [&](std::string line) {
      result.differences.push_back(
          {.text = "a process of stress", .lines = {std::move(line)}, .command = running_command_});
    };
    if (WIFSIGNALED(status_)) add(format("it was ended by signal %d", WTERMSIG(status_)));
    if (WIFEXITED(status_) && WEXITSTATUS(status_) > check_failed)
      add(format("it gave up with exit code %d; what it said is above", WEXITSTATUS(status_)));
    return result;
  }

  /// It gave up before its first problem.
  bool refused() const {
    return !running() && report_line_.empty() && WIFEXITED(status_) && WEXITSTATUS(status_) > check_failed;
  }
  int exit_status() const { return WEXITSTATUS(status_); }

 private:
  void take(const std::string& line) {
    if (line.starts_with("{\"running\"") || line.starts_with("{  \"running\""))
      running_command_ = JsonValue::parse(line, "a line")["running"].text();
    else
      report_line_ = line;
  }
  void wait() {
    ::waitpid(process_, &status_, 0);
    process_ = 0;
  }

  pid_t process_ = 0;
  int output_ = -1, status_ = 0;
  bool ended_ = false;
  std::string text_, report_line_, running_command_;
};

std::string on_one_line(std::string text) {
  std::erase(text, '\n');
  return text;
}

}  // namespace

std::string line_of(const StressReport& report) { return on_one_line(to_json(report, true).text()); }

std::string line_of_running(const std::string& command) {
  return on_one_line(Json::object().add("running", command).text());
}

StressReport run_jobs(const std::vector<std::vector<std::string>>& commands, std::int64_t max_problems, double seconds,
                      const std::function<void(const StressReport&)>& progress, const std::function<bool()>& stop) {
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::vector<std::unique_ptr<Job>> jobs;
  for (const std::vector<std::string>& words : commands) jobs.push_back(std::make_unique<Job>(words));
  const auto sum = [&] {
    StressReport all;
    for (const std::unique_ptr<Job>& job : jobs) add(all, job->report());
    all.seconds = elapsed();
    return all;
  };
  StressReport report;
  bool cut_off = false;
  while (!cut_off && (max_problems == 0 || report.problems < max_problems)) {
    std::vector<pollfd> ends;
    std::vector<Job*> of_end;
    for (const std::unique_ptr<Job>& job : jobs) {
      if (!job->running()) continue;
      ends.push_back({job->output(), POLLIN, 0});
      of_end.push_back(job.get());
    }
    if (ends.empty()) break;
    if (::poll(ends.data(), ends.size(), 200) > 0) {
      for (std::size_t n = 0; n < ends.size(); ++n)
        if (ends[n].revents != 0) of_end[n]->read();
    }
    if (elapsed() > report.seconds + 0.1) progress(report = sum());
    cut_off = stop() || elapsed() > seconds + last_problem;
  }
  for (const std::unique_ptr<Job>& job : jobs) job->end();
  for (const std::unique_ptr<Job>& job : jobs) {
    if (job->refused())
      throw Error(ErrorCode::unavailable,
                  "a process of stress could not begin (exit code " + std::to_string(job->exit_status()) + ")");
  }
  report = sum();
  report.cut_off = cut_off;
  return report;
}

}  // namespace flash_attention::cli
