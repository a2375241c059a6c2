#pragma once

#include <string>
#include <vector>

namespace flash_attention::cli {

/// Catches Ctrl-C: long loops ask interrupted() and stop with what they have. A second Ctrl-C ends the program at once.
void catch_interrupts();
bool interrupted();

/// Whether somebody reads stderr.
bool on_terminal();

/// One line of progress on stderr; shown only if stderr is a terminal, and erased at the end.
class Progress {
 public:
  Progress() = default;
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }
  void show(const std::string& text);
  void clear();

 private:
  bool shown_ = false;
};

/// Rows of text in aligned columns: numbers to the right, words to the left.
class Table {
 public:
  explicit Table(std::vector<std::string> head) : rows_{std::move(head)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace flash_attention::cli
