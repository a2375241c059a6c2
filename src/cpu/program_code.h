#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "flash_attention/attention.h"
#include "launch/program_view.h"
#include "program/classes.h"
#include "program/program.h"
#include "program/sizes.h"

namespace flash_attention::cpu {

/// The part of a program's code that depends only on the problem and the pass: a kernel makes it once. Refuses a
/// program that needs more slots than there are.
class CompiledProgram {
 public:
  CompiledProgram(const Problem& problem, Pass pass, const ProgramRunner& runner);
  CompiledProgram(const CompiledProgram&) = delete;

 private:
  friend class ProgramCall;
  Code compile(std::vector<program::Node> nodes, std::vector<int> roots);
  void compile_gradients(const Problem& problem);

  std::shared_ptr<const program::Program> known_;
  const program::Program& program_;
  std::vector<std::unique_ptr<std::vector<Instruction>>> codes_;
  std::vector<program::Node> mask_nodes_;
  int visible_ = -1;                   // of mask_nodes_
  program::GradientLayout sums_ = {};  // of the gradients of tensors, in the workspace
  ProgramView view_;                   // without the data of a call
};

/// A compiled program with the tensors, scalars and intervals of one call.
class ProgramCall {
 public:
  /// workspace: of the sums of gradients, where the plan has placed them.
  ProgramCall(const CompiledProgram& compiled, const Buffers& buffers, char* workspace);
  ProgramCall(const ProgramCall&) = delete;

  const ProgramView* view() const { return &view_; }

 private:
  std::optional<program::Classes> classes_;
  int visible_ = -1;
  ProgramView view_;
};

}  // namespace flash_attention::cpu
