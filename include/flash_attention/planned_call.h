#pragma once

#include <cstddef>
#include <memory>

#include "flash_attention/attention.h"

namespace flash_attention {

namespace api {
class Prepared;
}

/// A call in two steps: workspace_bytes(), then forward() or backward(). The caller allocates the workspace between
/// them, and the call is looked up only once. The problem must not change until the call has run.
class PlannedCall {
 public:
  FLASH_ATTENTION_API PlannedCall(const Problem& problem, Pass pass, const Options& options = {});

  FLASH_ATTENTION_API std::size_t workspace_bytes(const PreparedMask& mask = {}) const;

  /// `options`: those of the constructor, with a workspace.
  FLASH_ATTENTION_API void run(const Buffers& buffers, const Options& options) const;

 private:
  const Problem& problem_;
  std::shared_ptr<const api::Prepared> prepared_;
};

}  // namespace flash_attention
