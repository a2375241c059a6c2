#pragma once

#include "abi/interval.h"
#include "program/program.h"

namespace flash_attention::program {

/// A captured tensor in host memory, dense.
struct HostTensor {
  const void* data = nullptr;
  std::array<std::int32_t, max_rank> sizes{};
};

/// Which values the indices may take; each range without its end.
struct Area {
  std::int64_t b_begin, b_end, h_begin, h_end, i_begin, i_end, j_begin, j_end;
};

/// The values of a node over an area.
struct Range {
  abi::interval::Ints ints{0, 0};
  abi::interval::Reals reals{0, 0, false};
  abi::interval::Bools bools{false, false};
};

/// Interval arithmetic on the nodes of a program: every range holds all that can occur. Without tensors nothing is known of
/// what they hold.
class Classes {
 public:
  Classes(std::vector<Node> nodes, std::vector<TensorDeclaration> declarations, std::vector<HostTensor> tensors,
          std::vector<float> scalars);

  /// The range of each node over an area; `into` is as long as there are nodes.
  void ranges(const Area& area, std::vector<Range>& into) const;

  /// The values of a boolean node. If remainders start again inside of the area, its pieces are examined.
  abi::interval::Bools of(int node, const Area& area) const;

  const std::vector<Node>& nodes() const { return nodes_; }

 private:
  Range load(const Node& node, const std::vector<Range>& ranges) const;
  int period(Op index) const;

  std::vector<Node> nodes_;
  std::vector<TensorDeclaration> declarations_;
  std::vector<HostTensor> tensors_;
  std::vector<float> scalars_;  // of an int its bits
  int i_period_, j_period_;     // of remainders; 0: none
};

}  // namespace flash_attention::program
