#pragma once

#include <memory>
#include <vector>

#include "support/oracle/case.h"
#include "support/oracle/memory.h"
#include "support/oracle/oracle.h"

namespace flash_attention::testing {

/// A Case laid out in a device's memory: every tensor with the strides its Problem asks for, gaps and outputs filled with
/// NaN, so that an element left unwritten or written in a gap is found.
class Tensors {
 public:
  Tensors(const Case& c, const Inputs& in, Memory& memory);

  /// For backward: the out and lse of a forward pass.
  void set_forward(const Results& results);

  /// Tangents, laid out as what they are tangents of, and room for those of the results.
  void add_tangents(const Inputs& tangents);

  const Buffers& buffers() const { return buffers_; }
  Results read(bool backward);

  /// Names a gap that was written, or "" where all are untouched.
  std::string written_gap();

 private:
  struct Tensor {
    const char* name;
    Dtype dtype;
    std::vector<std::int64_t> sizes{}, strides{};  // elements; last stride 1
    void* base = nullptr;                          // start of the allocation
    std::int64_t first = 0;                        // offset of element 0 (negative strides)
    std::int64_t elements = 0;                     // of the allocation
    bool output = false;
  };

  void* place(Tensor tensor, const std::vector<double>* values, const void** slot);
  /// K or V: as place(), or spread over the pages of the case.
  void* place_keys(Tensor tensor, const Case& c, const std::vector<double>& values, const void** slot);
  void place_scales(const Case& c, const Inputs& in);
  void place_query_scales(const Inputs& in);
  void place_program(const Case& c, const Inputs& in);
  std::vector<double> values(const char* name);
  const std::uint8_t* place_mask(const ScoreTensor& mask, const std::vector<std::uint8_t>& values);
  template <class T>
  const T* place_plain(const std::vector<T>& values);

  const Shape shape_;
  Memory& memory_;
  std::vector<Tensor> tensors_;
  Buffers buffers_;
  const void* program_tensor_ = nullptr;  // the buffers point at these
  float* program_gradient_ = nullptr;
  std::vector<double> program_scalars_;
};

}  // namespace flash_attention::testing
