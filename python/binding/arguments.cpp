#include "arguments.h"

#include <array>
#include <span>
#include <vector>

namespace flash_attention::python {
namespace {

constexpr const char* names_of_arguments[] = {
#define FLASH_ATTENTION_NAME(name) #name,
#define FLASH_ATTENTION_OPTION(kind, name, ...) #name,
    FLASH_ATTENTION_CALL_TENSORS(FLASH_ATTENTION_NAME) FLASH_ATTENTION_CALL_ARGUMENTS(FLASH_ATTENTION_NAME)
        FLASH_ATTENTION_NAMED_OPTIONS(FLASH_ATTENTION_OPTION)
#undef FLASH_ATTENTION_OPTION
#undef FLASH_ATTENTION_NAME
};

#define FLASH_ATTENTION_OPTION(kind, name, ...) arg_##name,
constexpr int order_of_named[] = {FLASH_ATTENTION_NAMED_OPTIONS(FLASH_ATTENTION_OPTION)};

// clang-format off
constexpr int order_of_attention[] = {
    arg_causal,        arg_window,     arg_softcap,     arg_alibi_slopes, arg_bias,       arg_mask,
    arg_hidden_rows,   arg_block_mask, arg_key_lengths, arg_seqused_q,    arg_seqused_kv, arg_sink,
    arg_dropout_p,     arg_seed,       arg_offset,      arg_scale,        arg_layout,     arg_alignment,
    arg_deterministic, arg_return_lse, arg_kernel,      arg_score_mod,    arg_mask_mod,   arg_tile,
    arg_q_descale,     arg_k_descale,  arg_v_descale,   arg_out_dtype,
    FLASH_ATTENTION_NAMED_OPTIONS(FLASH_ATTENTION_OPTION)
    arg_key_indices,   arg_key_blocks, arg_key_counts,  arg_key_block_size};
// clang-format on
#undef FLASH_ATTENTION_OPTION

constexpr int order_of_cache[] = {arg_seqused_kv,
                                  arg_page_table,
                                  arg_left_padding,
                                  arg_cu_seqlens_q,
                                  arg_max_seqlen_q,
                                  arg_seqused_q,
                                  arg_causal,
                                  arg_window,
                                  arg_softcap,
                                  arg_alibi_slopes,
                                  arg_mask,
                                  arg_sink,
                                  arg_scale,
                                  arg_return_lse,
                                  arg_kernel,
                                  arg_invariant,
                                  arg_k_scale,
                                  arg_v_scale,
                                  arg_cache_dtype,
                                  arg_latent,
                                  arg_attention_chunk,
                                  arg_out,
                                  arg_key_indices,
                                  arg_key_blocks,
                                  arg_key_counts,
                                  arg_key_block_size,
                                  arg_bit_mask,
                                  arg_sequence_windows,
                                  arg_k_zero,
                                  arg_v_zero,
                                  arg_k_global_scale,
                                  arg_v_global_scale};

/// The number of the argument of each of a call's keywords; -1 for an unknown keyword.
std::vector<int> places_of(PyObject* names) {
  static PyObject* interned[num_arguments];
  if (interned[0] == nullptr) {
    for (int i = 0; i < num_arguments; ++i) interned[i] = PyUnicode_InternFromString(names_of_arguments[i]);
  }
  std::vector<int> places;
  for (Py_ssize_t n = 0, count = PyTuple_Size(names); n < count; ++n) {
    PyObject* const name = PyTuple_GetItem(names, n);
    int place = -1;
    for (int i = 3; i < num_arguments && place < 0; ++i) {
      if (name == interned[i] || PyUnicode_Compare(name, interned[i]) == 0) place = i;
    }
    places.push_back(place);
  }
  return places;
}

/// The same, remembered: a call in a Python program passes the same tuple of keywords every time.
const std::vector<int>& known_places(PyObject* names) {
  struct Known {
    PyObject* names = nullptr;
    std::vector<int> places;
  };
  static std::array<Known, 32> all;  // guarded by the GIL
  static std::size_t next = 0;
  for (const Known& known : all) {
    if (known.names == names) return known.places;
  }
  Known& known = all[next++ % all.size()];
  Py_INCREF(names);
  Py_XDECREF(known.names);
  known = {names, places_of(names)};
  return known.places;
}

}  // namespace

Given::Given(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  known_ = count == 3 || (count > 3 && PyTuple_CheckExact(args[count - 1]));
  for (Py_ssize_t i = 0; i < count && i < 3; ++i) values_[i] = args[i];
  if (names != nullptr) {
    PyObject* const* value = args + count;
    for (const int place : known_places(names)) {
      if (place >= 0) {
        values_[place] = *value;
      } else {
        known_ = false;
      }
      ++value;
    }
  }
  if (!known_ || count == 3) return;
  const std::span<const int> order = over_cache() ? std::span<const int>(order_of_cache) : order_of_attention;
  const Py_ssize_t first = count - 4, rest = PyTuple_Size(args[count - 1]);
  known_ = first + rest <= static_cast<Py_ssize_t>(order.size());
  if (!known_) return;
  const int* place = order.data();
  for (Py_ssize_t i = 0; i < first; ++i) values_[*place++] = args[3 + i];
  for (Py_ssize_t i = 0; i < rest; ++i) values_[*place++] = PyTuple_GetItem(args[count - 1], i);
}

PyObject* Given::of_caller(int field) const {
  PyObject* const caller = values_[arg_caller];
  return caller != nullptr && PyTuple_Check(caller) ? PyTuple_GetItem(caller, field) : nullptr;
}

bool Given::is_off(int argument) const {
  PyObject* const value = values_[argument];
  if (value == nullptr || value == Py_None || value == Py_False) return true;
  return PyLong_CheckExact(value) && PyObject_IsTrue(value) == 0;
}

void add_arguments(nb::module_& module) {
  const auto names = [](std::span<const int> order) {
    nb::list list;
    for (const int argument : order) list.append(nb::str(names_of_arguments[argument]));
    return nb::tuple(list);
  };
  module.attr("arguments") = names(order_of_attention);
  module.attr("cache_arguments") = names(order_of_cache);
  module.attr("named_options") = names(order_of_named);
}

}  // namespace flash_attention::python
