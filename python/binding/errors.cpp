#include "errors.h"

#include "flash_attention/error.h"

namespace flash_attention::python {

namespace nb = nanobind;

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

}  // namespace

void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(python_type(error.code()), error.what());
  }
}

void set_python_error(const std::exception_ptr& pointer) {
  try {
    translate_error(pointer, nullptr);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(error.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace flash_attention::python
