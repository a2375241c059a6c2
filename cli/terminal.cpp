#include "cli/terminal.h"

#include <unistd.h>

#include <algorithm>
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

void Progress::show(const std::string& text) {
  static const bool is_terminal = isatty(STDERR_FILENO) != 0;
  if (!is_terminal) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t i = 0; i < rows_[r].size(); ++i) {
      const std::string pad(widths[i] - rows_[r][i].size(), ' ');
      text += (i ? "  " : "") + (i ? pad + rows_[r][i] : rows_[r][i] + pad);
    }
    text += "\n";
    if (r == 0) {
      for (std::size_t i = 0; i < widths.size(); ++i) text += (i ? "  " : "") + std::string(widths[i], '-');
      text += "\n";
    }
  }
  return text;
}

}  // namespace flash_attention::cli
