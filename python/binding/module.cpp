// flash_attention._core: Python's tensors in, the library's calls out. Everything that decides lies on either side.
#include <nanobind/nanobind.h>

#include "call.h"
#include "diagnosis.h"
#include "flash_attention/runtime.h"
#include "flash_attention/version.h"

namespace flash_attention::python {

#ifdef FLASH_ATTENTION_JAX
void add_jax(nb::module_& module);
#endif

namespace {

PyObject* python_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return PyExc_ValueError;
    case ErrorCode::unsupported:
      return PyExc_NotImplementedError;
    case ErrorCode::out_of_memory:
      return PyExc_MemoryError;
    default:
      return PyExc_RuntimeError;
  }
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(python_type(error.code()), error.what());
  }
}

void run_forward(nb::tuple tensors, nb::tuple scalars, nb::handle out, nb::handle lse, std::uint64_t seed,
                 std::uint64_t offset, std::uintptr_t stream, nb::handle allocate) {
  Call call(tensors, scalars);
  call.set_forward(out, lse, seed, offset);
  call.run(false, stream, allocate);
}

void run_backward(nb::tuple tensors, nb::tuple scalars, nb::tuple results, nb::tuple gradients, std::uint64_t seed,
                  std::uint64_t offset, std::uintptr_t stream, nb::handle allocate) {
  Call call(tensors, scalars);
  call.set_backward(results, gradients, seed, offset);
  call.run(true, stream, allocate);
}

std::string explain_call(nb::tuple tensors, nb::tuple scalars, bool backward) {
  const Call call(tensors, scalars);
  return explain(call.problem, call.pass(backward), call.options);
}

void prewarm_call(nb::tuple tensors, nb::tuple scalars, bool backward) {
  const Call call(tensors, scalars);
  nb::gil_scoped_release released;
  prewarm(call.problem, call.pass(backward), call.options);
}

/// Writes which scores dropout keeps into `out`, bool [batch, heads_q, seq_q, seq_kv], dense.
void fill_dropout_mask(nb::handle out, std::uint64_t seed, std::uint64_t offset, float dropout_p) {
  const Tensor mask = tensor_of(out, "out", true);
  auto* element = static_cast<std::uint8_t*>(mask.data);
  nb::gil_scoped_release released;
  for (std::int64_t b = 0; b < mask.sizes[0]; ++b) {
    for (std::int64_t h = 0; h < mask.sizes[1]; ++h) {
      for (std::int64_t i = 0; i < mask.sizes[2]; ++i) {
        for (std::int64_t j = 0; j < mask.sizes[3]; ++j) {
          *element++ = dropout_keeps(seed, offset, dropout_p, b, h, mask.sizes[1], i, j);
        }
      }
    }
  }
}

}  // namespace

NB_MODULE(_core, module) {
  using namespace nb::literals;
  nb::register_exception_translator(translate);
  module.attr("version") = FLASH_ATTENTION_VERSION;
  module.def("forward", run_forward, "tensors"_a, "scalars"_a, "out"_a, "lse"_a.none(), "seed"_a, "offset"_a, "stream"_a,
             "allocate"_a);
  module.def("backward", run_backward, "tensors"_a, "scalars"_a, "results"_a, "gradients"_a, "seed"_a, "offset"_a,
             "stream"_a, "allocate"_a);
  module.def("explain", explain_call, "tensors"_a, "scalars"_a, "backward"_a);
  module.def("prewarm", prewarm_call, "tensors"_a, "scalars"_a, "backward"_a);
  module.def("fill_dropout_mask", fill_dropout_mask, "out"_a, "seed"_a, "offset"_a, "dropout_p"_a);
  add_diagnosis(module);
#ifdef FLASH_ATTENTION_JAX
  add_jax(module);
#endif
}

}  // namespace flash_attention::python
