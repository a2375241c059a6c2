#pragma once

#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "flash_attention/error.h"

namespace flash_attention::api {

/// Runs a call of the public interface. Error is the only exception that leaves the library: exceptions of the standard
/// library (no memory, no thread, an unreadable folder) are converted here.
template <class Call>
decltype(auto) guarded(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory, "out of memory on the host");
  } catch (const std::filesystem::filesystem_error& error) {
    throw Error(ErrorCode::unavailable, error.path1().string() + ": " + error.code().message());
  } catch (const std::system_error& error) {  // for example a thread that could not be started
    throw Error(ErrorCode::unavailable, std::string("the system refused: ") + error.what());
  } catch (const std::exception& error) {
    throw Error(ErrorCode::internal, std::string("unexpected: ") + error.what());
  }
}

}  // namespace flash_attention::api
