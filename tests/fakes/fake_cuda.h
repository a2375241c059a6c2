#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "abi/args.h"

namespace flash_attention::testing {

/// What the stand-in for libcuda saw, and how it is to behave. Stream handles are small numbers times 0x1000: stream
/// 0x1000 * (n + 1) belongs to GPU n.
struct FakeCuda {
  struct Launch {
    unsigned grid[3];
    unsigned block;
    unsigned shared_bytes;
    unsigned cluster;  // 0: no attribute
    bool early;        // it may begin before the launch before it has ended
    void* stream;
    std::string image;  // that the kernel came from
    int device;         // where it ran
    abi::AttentionArgs args;
  };
  struct Attribute {
    int which;
    int value;
    int device;
  };

  std::vector<Launch> launches;
  std::vector<std::string> calls;       // names, without those of the hot path where `quiet`
  std::vector<std::string> loaded;      // images
  std::vector<Attribute> attributes;    // set on kernels
  std::map<std::string, int> failures;  // function name -> status it returns
  std::string too_new;                  // an image that this driver is too old for
  std::vector<void*> contexts;          // of the calling thread, the last one is current
  int device_count = 2;
  int version = 13000;
  bool stream_get_device = true;  // false: a driver older than 12.8
  bool capturing = false;
  // Another thread captures in global mode: what is unsafe then breaks that capture, unless this thread's mode is relaxed.
  bool captured_globally_elsewhere = false;
  std::vector<std::string> broke_capture;  // the calls that did
  int capture_mode = 0;                    // of the calling thread: 0 global, 1 thread-local, 2 relaxed
  bool quiet = false;                      // records nothing: for measuring
  std::uint64_t num_launches = 0;
};

inline constexpr std::uintptr_t fake_stream_of(int device) { return 0x1000 * static_cast<std::uintptr_t>(device + 1); }

/// Opens the stand-in and gives its state, shared with whoever else opens it.
FakeCuda& fake_cuda();
inline constexpr char fake_cuda_path[] = FLASH_ATTENTION_FAKES "/libfake_cuda.so";

}  // namespace flash_attention::testing
