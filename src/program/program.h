#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "program/op.h"

/// Scores as programs: what Problem::program says, parsed and checked. docs/numerics.md defines the text.
namespace flash_attention::program {

struct Node {
  Op op;
  Type type;
  std::array<int, 4> args{-1, -1, -1, -1};  // nodes before this one
  int index = -1;                           // of the tensor or the scalar
  std::int32_t integer = 0;                 // a literal: an int, or 0 and 1 for false and true
  float real = 0;                           // a literal
  int line = 0;                             // of the text, from 1; 0: made by this library
};

struct TensorDeclaration {
  Element element;
  int rank;
};

struct Program {
  std::vector<TensorDeclaration> tensors;
  std::vector<Type> scalars;
  std::vector<Node> nodes;
  int score = -1;    // the node that is the new score; -1: the score stays
  int visible = -1;  // the node that says whether a key is visible; -1: it is
  bool visible_by_head = false, visible_by_batch = false;

  bool operator==(const Program&) const = delete;
};

/// Refuses a text that is no program, and names the line. An empty text is no program either.
Program parse(std::string_view text);

/// The same, remembered, since every call of a problem needs its program.
std::shared_ptr<const Program> parsed(std::string_view text);

/// The nodes that `roots` need, in order; roots become their new numbers.
std::vector<Node> slice(const std::vector<Node>& nodes, std::vector<int>& roots);

/// Replaces each use of a `slope`, roots included, by its value, so that slices have none. Called after the last
/// derivative.
void keep_values(std::vector<Node>& nodes, std::vector<int>& roots);

/// Appends the derivative of node `of` by node `by`, as nodes; returns its number, -1 if it is 0 everywhere.
int derive(std::vector<Node>& nodes, int of, int by);

int num_args(Op op);
std::string_view name_of(Op op);
std::string_view name_of(Type type);
std::string_view name_of(Element element);
std::int64_t size_of(Element element);
bool is_real(Element element);

}  // namespace flash_attention::program
