#include "errors.h"

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

void raise(PyObject* type, const Error& error) {
  const nb::object raised = nb::handle(type)(nb::str(error.what()));
  if (!error.argument().empty()) {  // flash_attention/arguments/names.py reads these
    const std::string_view argument = error.argument(), sentence = error.sentence();
    raised.attr("argument") = nb::str(argument.data(), argument.size());
    raised.attr("sentence") = nb::str(sentence.data(), sentence.size());
  }
  PyErr_SetObject(type, raised.ptr());
}

}  // namespace

void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const WrongType& error) {
    raise(PyExc_TypeError, error);
  } catch (const Error& error) {
    raise(python_type(error.code()), error);
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
