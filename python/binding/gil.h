#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace flash_attention::python {

/// Other threads may run Python while it lives. Where the interpreter has ended meanwhile (the call is a daemon thread's),
/// CPython unwinds the stack of a thread that comes back: here, in a destructor, that would abort the process. Such a
/// thread sleeps until the process is gone, as CPython has it from 3.14 on.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flash_attention::python
