#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "flash_attention/attention.h"
#include "launch/program_view.h"
#include "program/classes.h"
#include "program/program.h"

namespace flash_attention::cpu {

/// The code of a problem's program, for one call. Refuses one that needs more slots than there are.
class ProgramCode {
 public:
  /// workspace: of the sums of gradients, where the plan put them.
  ProgramCode(const Problem& problem, Pass pass, const Buffers& buffers, const ProgramRunner& runner, char* workspace);
  ProgramCode(const ProgramCode&) = delete;

  const ProgramView* view() const { return &view_; }

 private:
  Code compile(std::vector<program::Node> nodes, std::vector<int> roots);
  void compile_gradients(const Problem& problem, const Buffers& buffers, char* workspace);

  std::shared_ptr<const program::Program> known_;
  const program::Program& program_;
  std::vector<std::unique_ptr<std::vector<Instruction>>> codes_;
  std::optional<program::Classes> classes_;
  int visible_ = -1;
  ProgramView view_;
};

}  // namespace flash_attention::cpu
