#pragma once

#include <nanobind/nanobind.h>

#include "call/call.h"

// The arguments of attention() as Python gives them: those of flash_attention.attention(), attention_packed() and
// attention_over_cache() together.

namespace flash_attention::python {

// clang-format off
/// The arguments other than the tensors of Slot and FLASH_ATTENTION_NAMED_OPTIONS.
#define FLASH_ATTENTION_CALL_ARGUMENTS(X)                                                                     \
  X(causal) X(window) X(softcap) X(scale) X(dropout_p) X(deterministic) X(layout) X(alignment)                \
  X(return_lse) X(out) X(caller) /* flash_attention.routes.Caller */                                          \
  X(seed) X(offset) X(max_seqlen_q) X(max_seqlen_kv)                                                          \
  X(kernel) X(tile) X(score_mod) X(mask_mod)                                                     \
  X(q_descale) X(k_descale) X(v_descale) X(out_dtype) X(cache_dtype) X(latent) X(key_block_size)
// clang-format on

/// The tensors have the numbers of Slot.
enum Argument {
#define FLASH_ATTENTION_ARGUMENT(name) arg_##name,
#define FLASH_ATTENTION_OPTION(kind, name, ...) arg_##name,
  FLASH_ATTENTION_CALL_TENSORS(FLASH_ATTENTION_ARGUMENT) FLASH_ATTENTION_CALL_ARGUMENTS(FLASH_ATTENTION_ARGUMENT)
      FLASH_ATTENTION_NAMED_OPTIONS(FLASH_ATTENTION_OPTION) num_arguments
#undef FLASH_ATTENTION_OPTION
#undef FLASH_ATTENTION_ARGUMENT
};

/// (q, k, v, *first, rest, *, name=value, ...). `first` and the tuple `rest` are the first arguments, in the order of
/// attention() or, for a cache, of attention_over_cache(); both may be left out.
class Given {
 public:
  /// As a C function of METH_FASTCALL | METH_KEYWORDS gets them.
  Given(PyObject* const* args, Py_ssize_t count, PyObject* names);

  bool known() const { return known_; }  ///< q, k, v, and no name but those above
  bool over_cache() const { return of_caller(0) == Py_True; }
  PyObject* names_of_caller() const { return of_caller(1); }  ///< {argument: the caller's name of it}, None or null
  PyObject* operator[](int argument) const { return values_[argument]; }
  PyObject* const* qkv() const { return values_; }

  /// Whether an argument is left out, None, False or 0.
  bool is_off(int argument) const;

 private:
  PyObject* of_caller(int field) const;

  PyObject* values_[num_arguments] = {};  ///< null: left out
  bool known_ = true;
};

/// Adds `arguments` and `cache_arguments`, the names in those orders, and `named_options`, the last of `options`.
void add_arguments(nb::module_& module);

}  // namespace flash_attention::python
