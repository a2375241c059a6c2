#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/plan.h"

namespace flash_attention::cli {

/// A step of the teaching ladder and what the head of its file says about it.
struct Rung {
  std::string kernel;  ///< "ladder/06_mma"
  std::string name;    ///< "06_mma"
  Pass pass = Pass::forward;
  DeviceKind device = DeviceKind::cuda;
  bool narrow = false;  ///< takes Q, K and V in 8 bits
  std::string file;     ///< below the source's root: "kernels/ladder/06_mma.cu"
  std::string source;   ///< its text
  std::string idea;     ///< the first line of the head
  std::string from;     ///< "05": the rung that it changes, by the second line; empty for the first
};

/// Whether a kernel is a rung: its name begins with "ladder/".
bool is_rung(std::string_view kernel);

/// Every rung of the library, in the order in which they are climbed.
std::vector<Rung> rungs();

/// Those whose names begin with one of the words ("06"); all if there are no words. Throws where a word names none.
std::vector<Rung> rungs_named(const std::vector<std::string>& words);

/// A line of one text, of the other, or of both.
struct DiffLine {
  char mark;  ///< '-', '+' or ' '
  std::string_view text;
};

/// The fewest lines that turn one text into the other, between the lines that stay. Views into both texts.
std::vector<DiffLine> diff(std::string_view from, std::string_view to);

/// Lines of `to` that are not in `from`.
int added_lines(std::string_view from, std::string_view to);

}  // namespace flash_attention::cli
