#include "cuda/backend.h"
#include "cuda/driver.h"
#include "cuda/status.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

DeviceInfo query(const Driver& cu, int index) {
  DeviceHandle handle = 0;
  check(cu, cu.DeviceGet(&handle, index), "cuDeviceGet");
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    check(cu, cu.DeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
    return value;
  };
  char name[256] = {};
  check(cu, cu.DeviceGetName(name, sizeof(name), handle), "cuDeviceGetName");
  std::size_t memory = 0;
  check(cu, cu.DeviceTotalMem(&memory, handle), "cuDeviceTotalMem");

  DeviceInfo info;
  info.device = {DeviceKind::cuda, index, 0};
  info.name = name;
  info.arch =
      10 * attribute(DeviceAttribute::compute_capability_major) + attribute(DeviceAttribute::compute_capability_minor);
  info.num_sms = attribute(DeviceAttribute::multiprocessor_count);
  info.shared_bytes = attribute(DeviceAttribute::max_shared_memory_per_block_optin);
  info.l2_bytes = attribute(DeviceAttribute::l2_cache_size);
  info.memory_bytes = static_cast<std::int64_t>(memory);
  return info;
}

int count(const Driver& cu) {
  int devices = 0;
  check(cu, cu.DeviceGetCount(&devices), "cuDeviceGetCount");
  return devices;
}

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  try {
    const Driver& cu = driver();
    for (int index = 0, end = count(cu); index < end; ++index) found.push_back(query(cu, index));
  } catch (const Error&) {
    found.clear();  // without a driver there are no GPUs; diagnose() says why
  }
  return found;
}

DeviceInfo info(int index) {
  const Driver& cu = driver();
  const int devices = count(cu);
  if (index < 0 || index >= devices) {
    throw Error(ErrorCode::unavailable, "device: cuda:" + std::to_string(index) + " does not exist; this process sees " +
                                            std::to_string(devices) + " GPU(s), counted from 0 (see CUDA_VISIBLE_DEVICES)");
  }
  return query(cu, index);
}

std::vector<Finding> diagnose() {
  std::vector<Finding> findings;
  try {
    const Driver& cu = driver();
    findings.push_back({"driver", true, "CUDA " + version_text(cu.version) + ", " + cu.path.string(), ""});
    for (int index = 0, end = count(cu); index < end; ++index) {
      const DeviceInfo gpu = query(cu, index);
      findings.push_back({"cuda:" + std::to_string(index), true,
                          gpu.name + ", sm_" + std::to_string(gpu.arch) + ", " + std::to_string(gpu.num_sms) + " SMs, " +
                              std::to_string(gpu.memory_bytes >> 20) + " MiB",
                          ""});
    }
  } catch (const Error& error) {
    findings.push_back({"driver", false, error.what(), "the CPU backend and the emulator work without a GPU"});
  }
  return findings;
}

}  // namespace flash_attention::cuda
