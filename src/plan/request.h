#pragma once

#include <optional>
#include <string>
#include <variant>

#include "abi/config.h"
#include "flash_attention/plan.h"
#include "plan/program.h"

namespace flash_attention::plan {

/// What every kernel is asked while one problem is planned. What it needs to know of the problem is found out once.
struct Request {
  const Problem& problem;  // normalised
  const DeviceInfo& device;
  abi::Features features;
  ProgramTraits program;
  std::optional<TileSize> tile{};      // instead of the kernel's choice
  std::optional<BackwardPart> part{};  // instead of the whole pass
  int num_stages = 0;                  // instead of the kernel's choice; 0: its own
  int num_splits = 0;
};

/// Throws Error(invalid_argument) for a tile or part that is none.
Request make_request(const Problem& problem, const DeviceInfo& device, std::optional<TileSize> tile = {},
                     std::optional<BackwardPart> part = {});

/// Why a kernel cannot take a request.
struct Refusal {
  std::string reason;
};

/// How a kernel takes it.
struct Offer {
  Plan plan;
  std::string prefers_prefill{};  // not empty: why another kernel for many queries is better, if one takes the request
};

using Answer = std::variant<Offer, Refusal>;

/// The plan that `lay_out` returns, unless there is a reason against it.
template <class LayOut>
Answer offer_unless(std::string reason, const LayOut& lay_out) {
  if (!reason.empty()) return Refusal{std::move(reason)};
  return Offer{lay_out()};
}

/// A tile that was requested and that the kernel does not have.
Refusal refuse_tile(const TileSize& tile, const std::string& reason);

}  // namespace flash_attention::plan
