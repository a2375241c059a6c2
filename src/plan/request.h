#pragma once

#include <optional>
#include <string>
#include <variant>

#include "abi/config.h"
#include "flash_attention/plan.h"
#include "plan/program.h"

namespace flash_attention::plan {

/// The question to every kernel while one problem is planned. Facts about the problem are computed once.
struct Request {
  const Problem& problem;  // normalised
  const DeviceInfo& device;
  abi::Features features;
  ProgramTraits program;
  std::optional<TileSize> tile{};      // requested; otherwise the kernel chooses
  std::optional<BackwardPart> part{};  // requested; otherwise the whole pass
  int num_stages = 0;                  // requested; 0: the kernel chooses
  int num_splits = 0;
};

/// Throws Error(invalid_argument) for an impossible tile or part.
Request make_request(const Problem& problem, const DeviceInfo& device, std::optional<TileSize> tile = {},
                     std::optional<BackwardPart> part = {});

/// Why a kernel cannot take a request.
struct Refusal {
  std::string reason;
};

/// A kernel's plan for a request.
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

/// Refuses a requested tile that the kernel does not have.
Refusal refuse_tile(const TileSize& tile, const std::string& reason);

}  // namespace flash_attention::plan
