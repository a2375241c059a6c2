#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace flash_attention::python {

/// The library's errors as Python's; throws on what is not one of the library's.
void translate_error(const std::exception_ptr& pointer, void*);

/// Any exception as Python's, for functions that nanobind does not wrap.
void set_python_error(const std::exception_ptr& pointer);

}  // namespace flash_attention::python
