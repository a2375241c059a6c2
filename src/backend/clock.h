#pragma once

#include <functional>

namespace flash_attention {

/// Measures calls on a device: the time of the work itself, not of handing it over.
class Clock {
 public:
  virtual ~Clock() = default;
  /// `queue_work` queues it on the stream.
  virtual double seconds(void* stream, const std::function<void()>& queue_work) = 0;
};

}  // namespace flash_attention
