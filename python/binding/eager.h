#pragma once

#include <nanobind/nanobind.h>

namespace flash_attention::python {

/// Adds attend(), the fast path of a plain torch call, and what it needs for a gradient.
void add_eager(nanobind::module_& module);

/// Adds attend_cache(), the same over a cache of keys and values.
void add_eager_cache(nanobind::module_& module);

/// Adds attend_program() and attend_program_backward(), the same with a program.
void add_eager_program(nanobind::module_& module);

}  // namespace flash_attention::python
