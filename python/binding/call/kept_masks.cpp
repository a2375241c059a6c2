#include "call/kept_masks.h"

#include <algorithm>

#include "gil.h"

namespace flash_attention::python {
namespace {

constexpr Slot slots_of_masks[] = {Slot::mask, Slot::hidden_rows, Slot::block_mask, Slot::cu_seqlens_q,
                                   Slot::cu_seqlens_kv};

/// torch's count of changes in place, which all views of a memory share; -1 if it is not counted (inference mode).
long long version_of(nb::handle tensor) {
  PyObject* const found = PyObject_GetAttrString(tensor.ptr(), "_version");
  if (found == nullptr) {
    PyErr_Clear();
    return -1;
  }
  const long long version = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return version;
}

}  // namespace

nb::object KeptMasks::use(Call& call, bool backward, nb::handle tensors, nb::handle captured) {
  if (device_traits(call.options.device).host_memory) return nb::none();
  const MaskPreparation needed = mask_preparation(call.problem, call.pass(backward), call.buffers, call.options);
  if (needed.bytes == 0) return nb::none();
  std::vector<Source> sources;
  const auto add = [&](nb::handle tensor) {
    if (!tensor.is_none()) sources.push_back({nb::borrow(tensor), version_of(tensor)});
  };
  if (!tensors.is_none()) {
    const auto all = nb::cast<nb::tuple>(tensors);
    for (const Slot slot : slots_of_masks) {
      if (static_cast<std::size_t>(slot) < nb::len(all)) add(all[static_cast<std::size_t>(slot)]);
    }
  }
  if (needed.tensors != 0) {
    const auto all = nb::cast<nb::tuple>(captured);
    for (std::size_t n = 0; n < nb::len(all); ++n) {
      if ((needed.tensors >> n & 1u) != 0) add(all[n]);
    }
  }
  if (std::ranges::any_of(sources, [](const Source& source) { return source.version < 0; })) return nb::none();
  const auto is_this = [&](const Entry& entry) {
    return entry.stamp == needed.stamp && entry.stream == call.options.stream && entry.device == call.options.device &&
           std::ranges::equal(entry.sources, sources, {}, &Source::version, &Source::version);
  };
  if (const auto found = std::ranges::find_if(entries_, is_this); found != entries_.end()) {
    call.options.prepared_mask = {found->data, found->stamp};
    return found->memory;
  }
  const nb::object memory = allocate_(needed.bytes + Call::workspace_alignment, call.options.device.index);
  const auto address = reinterpret_cast<std::uintptr_t>(tensor_of(memory, "a prepared mask", true).data);
  constexpr std::uintptr_t unit = Call::workspace_alignment;
  void* const data = reinterpret_cast<void*>((address + unit - 1) / unit * unit);
  {
    const GilRelease released;  // the launch may have to be compiled
    call.options.prepared_mask =
        prepare_mask(call.problem, call.pass(backward), call.buffers, data, needed.bytes, call.options);
  }
  ++made_;
  Entry made{call.options.device, call.options.stream, needed.stamp, std::move(sources), memory, data};
  // If the mask has changed, its earlier state never returns.
  const auto earlier = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.stamp == made.stamp && entry.stream == made.stream && entry.device == made.device;
  });
  if (earlier != entries_.end()) {
    *earlier = std::move(made);
  } else if (entries_.size() < most) {
    entries_.push_back(std::move(made));
  } else {
    entries_[next_++ % most] = std::move(made);
  }
  return memory;
}

nb::object use_kept(nb::handle kept, Call& call, bool backward, nb::handle tensors, nb::handle captured) {
  return kept.is_none() ? nb::none() : nb::cast<KeptMasks&>(kept).use(call, backward, tensors, captured);
}

void add_kept_masks(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<KeptMasks>(module, "KeptMasks")
      .def(nb::init<nb::object>(), "allocate"_a)
      .def_prop_ro("made", &KeptMasks::made)
      .def("__len__", &KeptMasks::size)
      .def("__reduce__", [](nb::handle self) {  // a copy begins empty
        return nb::make_tuple(self.type(), nb::make_tuple(nb::cast<KeptMasks&>(self).allocate()));
      });
}

}  // namespace flash_attention::python
