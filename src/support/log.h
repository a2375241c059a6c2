#pragma once

#include <string_view>

namespace flash_attention::support {

/// Passes a message to the callback of set_log_callback (runtime.h). Without a callback it is dropped.
void log(std::string_view message);

}  // namespace flash_attention::support
