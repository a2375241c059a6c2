#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "abi/config.h"
#include "flash_attention/plan.h"
#include "plan/program.h"

namespace flash_attention::plan {

/// Queries and keys of a tile.
struct TileSize {
  int block_q = 0;
  int block_kv = 0;
};

/// A backward pass that is done block by block, with one sum of dQ over all blocks in the workspace that they share:
///
///     "@rows:R"        statistics of R rows, and their sums of dQ = 0
///     "@block:R+F/N"   dK and dV of one block, whose queries are rows F, F + 1, ... of the R, and its share of dQ; N is
///     the
///                      block's number, since blocks may run at once
///     "@dq:R"          dQ of the R rows, of which the problem has all
struct BackwardPart {
  enum class Kind : std::uint8_t { rows, block, dq } kind = Kind::rows;
  int rows = 0;
  int first = 0;
  int number = 0;
};

/// What Options::kernel asks for: "NAME", "NAME@QxKV" or "@QxKV", a tile of Q queries and KV keys for an experiment, or a
/// part of a backward pass.
struct NamedKernel {
  std::string_view kernel;  // empty: the planner's choice
  std::optional<TileSize> tile;
  std::optional<BackwardPart> part;
};

/// Throws Error(invalid_argument) for a tile or part that is none.
NamedKernel parse_kernel(std::string_view text);

/// What every kernel is asked while one problem is planned. What it needs to know of the problem is found out once.
struct Request {
  const Problem& problem;  // normalised
  const DeviceInfo& device;
  abi::Features features;
  ProgramTraits program;
  std::optional<TileSize> tile;      // instead of the kernel's choice
  std::optional<BackwardPart> part;  // instead of the whole pass
};

Request make_request(const Problem& problem, const DeviceInfo& device);

/// Why a kernel cannot take a request.
struct Refusal {
  std::string reason;
};

/// How a kernel takes it.
struct Offer {
  Plan plan;
  std::string prefers_prefill{};  // not empty: why a kernel for many queries is better, if one takes the request
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
