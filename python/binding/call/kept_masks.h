#pragma once

#include <vector>

#include "call/call.h"

namespace flash_attention::python {

/// The prepared masks (prepare_mask) of one mask object, kept for its later calls: one for each pass, size, kernel and
/// stream. Each stream has its own, so that no stream waits for another, and memory returns to the stream's pool.
///
/// Only torch's version of a tensor tells that its memory has changed: with another version the mask is prepared again.
/// The tensors that it was made from stay alive, so that no other tensor gets their addresses.
class KeptMasks {
 public:
  /// `allocate(bytes, device index)` gives a uint8 tensor on that GPU.
  explicit KeptMasks(nb::object allocate) : allocate_(std::move(allocate)) {}

  /// Sets the call's prepared mask, which is made now if there is none for these masks. `tensors` are those of Slots,
  /// `captured` those of a program; either may be None. Returns the object that must outlive the call.
  nb::object use(Call& call, bool backward, nb::handle tensors, nb::handle captured);

  nb::object allocate() const { return allocate_; }
  int made() const { return made_; }  ///< times that a mask was prepared
  std::size_t size() const { return entries_.size(); }

 private:
  struct Source {
    nb::object tensor;
    long long version;
  };
  struct Entry {
    Device device;
    void* stream = nullptr;
    std::uint64_t stamp = 0;
    std::vector<Source> sources;
    nb::object memory;
    const void* data = nullptr;
  };
  static constexpr std::size_t most = 16;  // a model has few shapes; the oldest goes

  nb::object allocate_;
  std::vector<Entry> entries_;
  std::size_t next_ = 0;  // the entry that a new one replaces
  int made_ = 0;
};

/// KeptMasks::use if there is such an object; else None.
nb::object use_kept(nb::handle kept, Call& call, bool backward, nb::handle tensors, nb::handle captured);

void add_kept_masks(nb::module_& module);

}  // namespace flash_attention::python
