#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "flash_attention/attention.h"

namespace flash_attention::python {

namespace nb = nanobind;

/// What a Python tensor is made of. Owns nothing but, for libraries without the C exchange, the exported array.
struct Tensor {
  static constexpr int max_rank = 5;

  const char* name = "";  ///< the argument, for messages
  void* data = nullptr;
  int rank = -1;  ///< -1: there is no tensor
  std::int64_t sizes[max_rank] = {};
  std::int64_t strides[max_rank] = {};  ///< in elements
  nb::dlpack::dtype dtype{};
  Device device;
  void* stream = nullptr;                      ///< of q alone: the CUDA stream to run on
  Precision precision = Precision::automatic;  ///< of q alone: how its library multiplies float32
  nb::ndarray<> keep_alive;

  bool is_dtype(nb::dlpack::dtype_code code, int bits) const;
  bool present() const { return rank >= 0; }
  bool empty() const { return std::find(sizes, sizes + std::max(rank, 0), 0) != sizes + std::max(rank, 0); }
  std::string describe() const;  ///< "float32[2, 16, 4, 64]"
};

/// Reads a tensor through DLPack: by its library's C table where there is one (no allocation, no Python call), else by
/// __dlpack__ or the buffer protocol. `writable` refuses read-only arrays. Throws WrongType.
Tensor tensor_of(nb::handle object, const char* name, bool writable = false);

/// The same, or a tensor that is not present for None.
Tensor optional_tensor(nb::handle object, const char* name, bool writable = false);

/// The CUDA stream that is current in the object's library, where the library tells; else null.
void* current_stream(nb::handle object, Device device);

/// The element type of q, k, v or a bias, if it is one that the library takes.
std::optional<Dtype> known_dtype(const Tensor& tensor);

/// The same; throws WrongType.
Dtype dtype_of(const Tensor& tensor);

}  // namespace flash_attention::python
