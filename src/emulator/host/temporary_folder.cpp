#include "emulator/host/temporary_folder.h"

#include "flash_attention/error.h"
#include "support/files.h"

namespace flash_attention::emulator {

const std::filesystem::path& temporary_folder() {
  static const std::filesystem::path process = [] {  // one that throws is tried again
    auto outcome = support::private_temporary_folder();
    if (const auto* problem = std::get_if<std::string>(&outcome)) {
      throw Error(ErrorCode::unavailable, "the emulator has no folder for temporary files: " + *problem +
                                              "; set TMPDIR to one that can be written");
    }
    return std::get<std::filesystem::path>(outcome);
  }();
  return process;
}

}  // namespace flash_attention::emulator
