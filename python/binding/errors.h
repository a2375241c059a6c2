#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "flash_attention/error.h"

namespace flash_attention::python {

/// A refusal that is a TypeError in Python.
struct WrongType : Error {
  WrongType(const std::string& argument, const std::string& sentence)
      : Error(ErrorCode::invalid_argument, argument, sentence) {}
};

[[noreturn]] inline void refuse_value(const std::string& argument, const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, argument, sentence);
}

[[noreturn]] inline void refuse_type(const std::string& argument, const std::string& sentence) {
  throw WrongType(argument, sentence);
}

/// Turns the library's errors into Python's, with the attributes `argument` and `sentence` if an argument is refused.
/// Rethrows other exceptions.
void translate_error(const std::exception_ptr& pointer, void*);

/// Turns any exception into Python's, for functions that nanobind does not wrap.
void set_python_error(const std::exception_ptr& pointer);

}  // namespace flash_attention::python
