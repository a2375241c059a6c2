#include "cli/output/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>

namespace flash_attention::cli {
namespace {

volatile std::sig_atomic_t interrupt_seen = 0;

void on_interrupt(int) {
  interrupt_seen = 1;
  std::signal(SIGINT, SIG_DFL);
}

}  // namespace

void catch_interrupts() { std::signal(SIGINT, on_interrupt); }
bool interrupted() { return interrupt_seen != 0; }

bool on_terminal() {
  static const bool is_terminal = isatty(STDERR_FILENO) != 0;
  return is_terminal;
}

void Progress::show(const std::string& text) {
  if (!on_terminal()) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

std::string Table::text() const {
  const std::size_t columns = rows_.front().size();
  std::vector<std::size_t> widths(columns, 0);
  std::vector<bool> numbers(columns, false);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < columns; ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (std::size_t i = 0; i < columns && rows_.size() > 1; ++i) numbers[i] = std::isdigit(rows_[1][i][0]) != 0;
  std::string text;
  const auto add_line = [&](const auto& cell) {
    std::string line;
    for (std::size_t i = 0; i < columns; ++i) {
      const std::string value = cell(i), pad(widths[i] - value.size(), ' ');
      line += (i ? "  " : "") + (numbers[i] ? pad + value : value + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    add_line([&](std::size_t i) { return rows_[r][i]; });
    if (r == 0) add_line([&](std::size_t i) { return std::string(widths[i], '-'); });
  }
  return text;
}

}  // namespace flash_attention::cli
