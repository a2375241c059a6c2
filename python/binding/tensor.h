#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "flash_attention/attention.h"

namespace flash_attention::python {

namespace nb = nanobind;

/// Memory, type, sizes and strides of a Python tensor. For libraries without the C exchange it owns the exported array,
/// otherwise nothing.
struct Tensor {
  static constexpr int max_rank = 5;

  const char* name = "";  ///< the argument, for messages
  void* data = nullptr;
  int rank = -1;  ///< -1: there is no tensor
  std::int64_t sizes[max_rank] = {};
  std::int64_t strides[max_rank] = {};  ///< in elements
  nb::dlpack::dtype dtype{};
  Device device;
  void* stream = nullptr;                      ///< only of q: the CUDA stream to run on
  Precision precision = Precision::automatic;  ///< only of q: how its library multiplies float32
  nb::ndarray<> keep_alive;

  bool is_dtype(nb::dlpack::dtype_code code, int bits) const;
  bool present() const { return rank >= 0; }
  bool empty() const { return std::find(sizes, sizes + std::max(rank, 0), 0) != sizes + std::max(rank, 0); }
  std::string describe() const;  ///< "float32[2, 16, 4, 64]"
};

/// Reads a tensor through DLPack: by its library's C table if there is one (no allocation, no Python call), else by
/// __dlpack__ or the buffer protocol. `writable` refuses read-only arrays. Throws WrongType.
Tensor tensor_of(nb::handle object, const char* name, bool writable = false);

/// The same; for None, an absent tensor.
Tensor optional_tensor(nb::handle object, const char* name, bool writable = false);

/// The current CUDA stream of the object's library, if the library tells; else null.
void* current_stream(nb::handle object, Device device);

/// The element type of q, k, v or a bias, if the library supports it.
std::optional<Dtype> known_dtype(const Tensor& tensor);

/// The same; throws WrongType.
Dtype dtype_of(const Tensor& tensor);

}  // namespace flash_attention::python
