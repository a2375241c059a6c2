// The fast path of a plain call over a cache of keys and values, in pages or not: a step of decoding. As eager.cpp, without
// gradients.
#include <algorithm>

#include "eager.h"
#include "flash_attention/error.h"
#include "plain_call.h"
#include "torch_functions.h"

namespace flash_attention::python {
namespace {

enum CacheArgument { arg_seqused_kv = arg_alibi_slopes, arg_page_table, arg_return_lse, arg_out, num_cache_arguments };

/// None, or a tensor; false where it is neither.
bool read_optional(PyObject* argument, Slot slot, Slots& out) {
  if (argument == Py_None) return true;
  if (!are_tensors(&argument, 1)) return false;
  out[slot] = tensor_of(argument, slot_names[slot]);
  return true;
}

/// None, or a tensor of the type and shape of q, as which the call writes it; false where it is neither.
bool fits_out(PyObject* argument, const Tensor& q) {
  if (argument == Py_None) return true;
  if (!are_tensors(&argument, 1)) return false;
  const Tensor out = tensor_of(argument, "out");
  return is_plain(out, q) && known_dtype(out) == known_dtype(q) && std::equal(out.sizes, out.sizes + 4, q.sizes);
}

/// attend_cache(q, k, v, causal, window, softcap, scale, dropout_p, deterministic, layout, alignment, seqused_kv,
/// page_table, return_lse, out) -> out, (out, lse), or None where the call is not plain or something is wrong with it: the
/// long way says what.
nb::object attend_cache(PyObject* const* args, Py_ssize_t count) {
  if (count != num_cache_arguments) throw nb::type_error("attend_cache: expected 15 arguments");
  CallOptions options;
  Slots slots;
  try {
    if (!read_options(args, options) || !read_tensors(args, slots) || is_intercepted(slots[Slot::q].device) ||
        !read_optional(args[arg_seqused_kv], Slot::seqused_kv, slots) ||
        !read_optional(args[arg_page_table], Slot::page_table, slots) || !fits_out(args[arg_out], slots[Slot::q])) {
      return nb::none();
    }
    const bool with_lse = args[arg_return_lse] == Py_True;
    const Results results = run_plain(args, slots, options, {.lse = with_lse, .into = args[arg_out]});
    return with_lse ? nb::object(nb::make_tuple(results.out, results.lse)) : results.out;
  } catch (const nb::builtin_exception&) {
    return nb::none();
  } catch (const Error&) {
    return nb::none();
  }
}

}  // namespace

void add_eager_cache(nb::module_& module) { add_fast<attend_cache>(module, "attend_cache"); }

}  // namespace flash_attention::python
