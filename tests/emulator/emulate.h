#pragma once

#include <cstdlib>
#include <memory>

#include "emulator/host/module.h"
#include "emulator/instructions/tensor_map.h"
#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// sizeof(SharedStorage) as the compiler sees it is not known here; every case fits.
constexpr int shared_bytes_of_a_case = 48 * 1024;

/// Runs a case's kernel in the emulator, that number of the module; returns its output. Throws what the emulator throws.
inline Bytes emulate(const emulator::Module& module, int which, const WrapperCase& c, std::uint64_t seed) {
  const auto aligned = [](const Bytes& bytes) {
    const std::size_t size = (bytes.size() + 1023) / 256 * 256;
    std::unique_ptr<unsigned char, void (*)(void*)> memory(static_cast<unsigned char*>(std::aligned_alloc(256, size)),
                                                           std::free);
    if (!bytes.empty()) std::memcpy(memory.get(), bytes.data(), bytes.size());
    return memory;
  };
  const auto input = aligned(c.input);
  const auto output = aligned(c.before.empty() ? Bytes(c.expected.size()) : c.before);
  WrapperArgs args{{}, input.get(), output.get(), which};
  for (const WrapperCase::Map& map : c.maps) {
    launch::TensorMapSpec spec = map.spec;
    spec.data = (map.of_output ? output.get() : input.get()) + reinterpret_cast<std::uintptr_t>(spec.data);
    args.maps[spec.slot] = emulator::encode(spec);
  }
  emulator::LaunchShape shape = c.shape;
  if (!c.storage.empty() && shape.shared_bytes == 0) shape.shared_bytes = shared_bytes_of_a_case;
  shape.workspace = output.get(), shape.workspace_bytes = c.expected.size();
  emulator::run_grid(module, shape, &args, {.seed = seed, .workers = 2});
  return Bytes(output.get(), output.get() + c.expected.size());
}

/// The same, compiled by itself.
inline Bytes emulate(const WrapperCase& c, std::uint64_t seed) {
  return emulate(*emulator::load_module({c.name, "test_" + c.name, text_of(c), c.arch}), 0, c, seed);
}

}  // namespace flash_attention::testing
