#include <algorithm>
#include <array>
#include <numeric>

#include "abi/forward_sm90.h"
#include "abi/key_bounds.h"
#include "abi/tensor_maps.h"
#include "plan/families/forward_sm90/tile.h"
#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/tensor_maps.h"
#include "plan/workspace.h"

namespace flash_attention::plan {

namespace {

/// Rows of a tensor, or of its pages. Dimensions of size one need no stride.
struct Sizes {
  std::int64_t rows, heads, batch;
};
Sizes key_sizes(const Problem& p) {
  if (p.page_size != 0) return {p.page_size, p.heads_kv, p.num_pages};
  return {p.packed ? p.total_kv : p.seq_kv, p.heads_kv, p.packed ? 1 : p.batch};
}

std::string reject_strides(Dtype dtype, const char* name, const Strides& strides, const Sizes& sizes) {
  struct Axis {
    const char* name;
    std::int64_t size, stride;
  };
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const Axis axes[3] = {
      {"seq", sizes.rows, strides.seq}, {"head", sizes.heads, strides.head}, {"batch", sizes.batch, strides.batch}};
  for (const Axis& axis : axes) {
    if (axis.size <= 1) continue;
    const std::int64_t bytes = axis.stride * element;
    if (bytes > 0 && bytes % 16 == 0 && bytes < (std::int64_t{1} << 40)) continue;
    return std::string(name) + " has a " + axis.name + " stride of " + std::to_string(axis.stride) +
           " elements; TMA needs positive multiples of 16 bytes below 2^40";
  }
  return {};
}

}  // namespace

std::string reject_tma_strides(const Problem& p, Pass pass) {
  const Sizes q{p.packed ? p.total_q : p.seq_q, p.heads_q, p.packed ? 1 : p.batch};
  std::string reason = reject_strides(*p.q_dtype, "q", p.q_strides, q);
  if (reason.empty()) reason = reject_tma_cache(p);
  if (reason.empty()) reason = reject_strides(p.dtype, "out", p.out_strides, q);
  if (reason.empty() && pass == Pass::backward) reason = reject_strides(p.dtype, "dout", p.dout_strides, q);
  return reason;
}

std::string reject_tma_cache(const Problem& p) {
  const std::string reason = reject_strides(*p.kv_dtype, "k", p.k_strides, key_sizes(p));
  return reason.empty() ? reject_strides(*p.kv_dtype, "v", p.v_strides, key_sizes(p)) : reason;
}

bool has_no_key_rows(const Problem& p) { return p.page_size != 0 ? p.num_pages == 0 : p.total_kv == 0; }

int rows_of_page_box(const Problem& p, int block_kv) {
  return static_cast<int>(std::gcd(p.page_size, static_cast<std::int64_t>(block_kv)));
}

namespace {

bool is_wide(const Problem& p) {
  return abi::forward_sm90_is_wide(static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v));
}

}  // namespace

bool has_bias_boxes(const Request& r) {
  const Problem& p = r.problem;
  const ScoreTensor& bias = p.bias;
  const auto fits = [](std::int64_t stride) { return stride >= 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 39); };
  return r.features.bias && size_of(bias.dtype) == 2 && !is_wide(p) && count_score_options(r.features) == 1 && p.seq_q > 1 &&
         bias.q_stride > 0 && fits(bias.q_stride) && fits(bias.head_stride) && fits(bias.batch_stride);
}

namespace {

/// Keys of a box of K: the largest box that divides a page and the keys that a block of a cluster loads.
int page_rows_of(const Problem& p, int block_q, int block_kv) {
  const int cluster = abi::forward_sm90_cluster(static_cast<int>(p.head_dim), static_cast<int>(p.head_dim_v), block_q);
  return rows_of_page_box(p, block_kv / cluster);
}

}  // namespace

std::vector<MapLayout> forward_sm90_maps(const Problem& p, int block_q, int block_kv, bool bias_boxes) {
  using enum MapSource;
  using namespace abi::forward_sm90_maps;
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
  const int cluster = abi::forward_sm90_cluster(head_dim, head_dim_v, block_q);  // each block loads its part
  const int keys = p.page_size != 0 ? page_rows_of(p, block_q, block_kv) : block_kv / cluster;
  const MapRows values = key_rows(p, v, p.v_strides, p.head_dim_v);
  std::vector<MapLayout> maps;
  maps.reserve(5);
  maps.push_back(rows_map(map_Q, query_rows(p, q, p.q_strides, p.head_dim), map_warpgroup_rows));
  maps.push_back(rows_map(map_K, key_rows(p, k, p.k_strides, p.head_dim), keys));
  maps.push_back(is_wide(p) ? wide_map(map_V, values, cluster) : rows_map(map_V, values, keys));
  maps.push_back(rows_map(map_O, query_rows(p, out, p.out_strides, p.head_dim_v), map_warpgroup_rows));
  if (bias_boxes) maps.push_back(bias_map(map_bias, p, block_kv));
  return maps;
}

std::string reject_sm90(const Problem& p, const DeviceInfo& device) {
  if (device.arch != 90) return "wgmma needs sm_90; this is sm_" + std::to_string(device.arch);
  if (device.shared_bytes < abi::forward_sm90_max_shared_bytes) return "a block needs 227 KiB of shared memory";
  if (p.dtype == Dtype::float32) return "wgmma takes float16 and bfloat16, not float32";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (p.total_q == 0 || p.total_kv == 0) return "there is nothing to load";
  return reject_grid(p);
}

namespace {

/// As many tiles of biases as fit beside two stages of keys, at most three.
void add_bias_stages(const Request& r, abi::ForwardConfig& config) {
  if (!has_bias_boxes(r)) return;
  config.num_stages = 2;
  config.bias_stages = 3;
  while (config.bias_stages > 0 && abi::forward_sm90_layout(config).shared_bytes > abi::forward_sm90_max_shared_bytes)
    --config.bias_stages;
}

/// Wide heads: two warpgroups share 64 rows. Otherwise each warpgroup has 64 rows.
int warps_of(const Problem& p, int block_q) { return is_wide(p) ? 12 : (block_q / 64 + 1) * 4; }

/// Why two blocks with 64 rows each cannot share the keys that they load: both must see all keys from the first on.
std::string reject_cluster(const abi::Features& f, const Problem& p) {
  const bool from_the_first = !f.window_left && !f.alibi && !f.left_padding && !f.score_program;
  if (!from_the_first || f.has_mask_data() || f.mask || f.packed || p.page_size % (abi::forward_sm90_wide_keys / 2) != 0)
    return "two blocks share the keys of a head wider than 256 only without ALiBi, programs, a left edge, masks, packed "
           "sequences and pages but of a multiple of 64 keys";
  return {};
}

}  // namespace

abi::ForwardConfig asked_config(const Request& r, const TileSize& asked, int most_stages) {
  const Problem& p = r.problem;
  const auto [block_q, block_kv] = asked;
  abi::ForwardConfig config{.features = r.features,
                            .head_dim = static_cast<int>(p.head_dim),
                            .head_dim_v = static_cast<int>(p.head_dim_v),
                            .block_q = block_q,
                            .block_kv = block_kv,
                            .num_warps = warps_of(p, block_q),
                            .num_stages = is_wide(p) ? 9 : most_stages,
                            .page_rows = p.page_size != 0 ? page_rows_of(p, block_q, block_kv) : 0};
  config.loop.mask_words = choose_mask_words(config);
  add_bias_stages(r, config);
  const int fits = (r.device.shared_bytes + 1024) / abi::forward_sm90_blocks_per_sm(config) - 1024;
  while (config.num_stages > 1 && abi::forward_sm90_layout(config).shared_bytes > fits) --config.num_stages;
  return config;
}

namespace {

/// Whether the problem has a narrow window beside a mask: a tile of 64 queries sees three or four tiles of 64 keys.
/// Then small tiles compute fewer hidden scores, and with two blocks of one warpgroup on an SM, one ends its tile while
/// the other computes (docs/lab/masks.md).
bool sees_few_tiles(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  return f.has_mask_data() && count_score_options(f) == 0 && dim > 64 && dim <= 128 && f.window_left &&
         f.window_right && p.window_left + p.window_right <= 2 * abi::mask_unit;
}

Sm90Tile choose_tile(const Request& r) {
  const Problem& p = r.problem;
  if (is_wide(p)) {
    const std::int64_t row_tiles = (p.seq_q + 63) / 64;
    // Few rows are lost. With pages, clusters were slower when they were timed: docs/lab/forward_sm90_wide.md.
    const bool in_pairs = (row_tiles % 2 == 0 || row_tiles > 8) && p.page_size == 0;
    const int block_q = in_pairs && reject_cluster(r.features, p).empty() ? 128 : 64;
    return {block_q, abi::forward_sm90_wide_keys, asked_config(r, {64, abi::forward_sm90_wide_keys}).num_stages};
  }
  const Sm90Tile small{64, 64};
  if (sees_few_tiles(r) && has_precomputed_mask_bits(p, asked_config(r, {small.block_q, small.block_kv})))
    return small;
  return choose_sm90_tile(r);
}

/// The keys of a tile are given by the order. The number of queries has no effect on bits.
Sm90Tile ordered_tile(const Request& r, const FixedOrder& order) {
  const std::int64_t dim = std::max(r.problem.head_dim, r.problem.head_dim_v);
  const abi::Features& f = r.features;
  const bool lengths = f.packed || f.seqused_q || f.seqused_kv || f.key_lengths || f.left_padding || f.paged;
  if (dim <= 64 && order.block_kv == 128 && count_score_options(f) == 0 && !lengths) return {192, 128, 4};
  return {128, order.block_kv, dim <= 64 || (order.block_kv == 64 && dim <= 128) ? 4 : 2};
}

std::string reject_forward_tile(const Request& r, const TileSize& asked) {
  const Problem& p = r.problem;
  const auto [block_q, block_kv] = asked;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if (is_wide(p) && block_q == 128 && block_kv == 128) return reject_cluster(r.features, p);
  if (is_wide(p)) return block_q == 64 && block_kv == 128 ? "" : "heads wider than 256 have tiles of 64 x 128 or 128 x 128";
  if (block_q != 64 && block_q != 128 && block_q != 192) return "allowed are 64, 128 and 192 queries";
  if (block_q == 192 && dim > 64) return "192 queries fit in registers up to a head_dim of 64";
  if (block_kv != 32 && block_kv != 64 && block_kv != 128) return "allowed are 32, 64 and 128 keys";
  if (block_kv == 128 && dim > 128) return "128 keys fit in registers up to a head_dim of 128";
  const bool masked = r.features.hidden_bounds != 0 || r.features.block_mask;
  if (masked && block_kv < abi::mask_unit) return "masks are known for blocks of 64 keys";
  return asked_config(r, asked).num_stages >= 2 ? "" : "two stages do not fit in shared memory";
}

/// A stage has all columns of some values, which must be in one page.
std::string reject_wide_pages(const Problem& p) {
  const int keys = abi::wide_stage_rows(static_cast<int>(p.head_dim_v));
  if (p.page_size % keys == 0) return {};
  return "with heads wider than 256 takes pages of a multiple of " + std::to_string(keys) + " keys, got " +
         std::to_string(p.page_size);
}

std::string reject_forward(const Request& r) {
  const Problem& p = r.problem;
  std::string reason = reject_sm90(p, r.device);
  if (reason.empty() && p.head_dim_v > 512) reason = "needs a head_dim_v up to 512";
  // Found by random problems, repeated on an H200; the emulator does not show it: docs/lab/masks.md.
  const bool masked = r.features.has_mask_data() || r.features.mask;
  if (reason.empty() && masked && p.page_size != 0) reason = "takes no masks of keys in pages";
  if (reason.empty() && is_wide(p) && p.page_size != 0) reason = reject_wide_pages(p);
  if (reason.empty() && is_wide(p) && r.features.has_statistics())
    reason = "computes no statistics of heads wider than 256";
  if (reason.empty() && !(*p.scale > 0)) reason = "scale must be positive: the maximum is taken before scaling";
  if (reason.empty() && p.invariant && is_wide(p)) reason = "bits of heads wider than 256 depend on the call";
  if (reason.empty() && p.page_size % 8 != 0) {
    reason = "TMA brings pages in boxes of 8 keys or more: page_size must be a multiple of 8, got " +
             std::to_string(p.page_size);
  }
  if (reason.empty()) reason = reject_tma_strides(p, Pass::forward);
  return reason;
}

/// Reserves the parts of kernels/forward/sm90/merge.cuh.
void reserve_parts(const Problem& p, int num_splits, Plan& plan) {
  const std::int64_t heads = num_splits * p.batch * p.heads_q;
  const std::int64_t rows = abi::forward_sm90_part_groups(static_cast<int>(p.seq_q)) * 64;
  plan.num_splits = num_splits;
  reserve(plan, abi::ForwardSm90Region::O, heads * rows * ((p.head_dim_v + 31) / 32 * 32) * 4);
  reserve(plan, abi::ForwardSm90Region::statistics, heads * p.seq_q * 2 * 4);
}

void add_merge_launch(const Problem& p, abi::Type dtype, Plan& plan) {
  const std::int64_t warps = p.batch * p.heads_q * ((p.seq_q + 7) / 8) * ((p.head_dim_v + 63) / 64);
  const abi::ForwardConfig config{
      .features = {.dtype = dtype}, .head_dim_v = static_cast<int>(p.head_dim_v), .num_warps = 8};
  add_launch(plan,
             {.unit = "forward/sm90/merge",
              .entry = "forward_sm90_merge",
              .config = launch_config(config),
              .block = config.num_warps * 32,
              .programmatic_launch = true},
             (warps + config.num_warps - 1) / config.num_warps);
}

/// order: the order of sums, if bits are invariant.
Plan lay_out_forward(const Request& r, const Sm90Tile& tile, const std::optional<FixedOrder>& order) {
  const Problem& p = r.problem;
  const DeviceInfo& device = r.device;
  const abi::Features& f = r.features;
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  plan.maps = forward_sm90_maps(p, tile.block_q, tile.block_kv, has_bias_boxes(r));
  const std::int64_t row_tiles = (p.seq_q + tile.block_q - 1) / tile.block_q;
  // Under a causal mask row tiles differ in length. Blocks take the longest remaining tile by a counter. If that costs
  // more than it gains, they take a long and a short tile as a pair. A block remembers up to 256 of its tiles. Masks
  // that are data or programs are often causal in parts (prefixes, spans, block diffusion), and pairs cost nothing if
  // there are many.
  const bool many = row_tiles * p.heads_q * p.batch >= 7LL * device.num_sms;
  const bool masked = f.has_mask_data() || f.mask;
  const bool splits = tile.num_splits > 1;
  const bool imbalanced = !splits && (f.window_right || (masked && many)) && !f.window_left && row_tiles > 1;
  const bool mapped = tile.block_kv >= abi::mask_unit && !order;  // the fixed order tests each pair of a boolean mask
  abi::ForwardConfig config{.features = mapped ? with_map(f) : f,
                            .head_dim = static_cast<int>(p.head_dim),
                            .head_dim_v = static_cast<int>(p.head_dim_v),
                            .block_q = tile.block_q,
                            .block_kv = tile.block_kv,
                            .num_warps = warps_of(p, tile.block_q),
                            .num_stages = tile.num_stages,
                            .split_tiles = order ? order->segment_blocks : 0,
                            .page_rows = p.page_size != 0 ? page_rows_of(p, tile.block_q, tile.block_kv) : 0,
                            .split_keys = splits};
  config.features = forward_features(config.features);
  config.loop.mask_words = choose_mask_words(config);
  // A plan does not know how long the row tiles of a program or a boolean mask are. So these are always taken by the
  // counter, whatever their number: a program is then compiled once for all sizes.
  const std::int64_t all_tiles = row_tiles * p.heads_q * p.batch, sms = device.num_sms;
  const bool unknown = config.loop.mask_words != abi::MaskWords::none || has_precomputed_mask_bits(p, config);
  const int blocks_per_sm = abi::forward_sm90_blocks_per_sm(config);
  const int cluster = abi::forward_sm90_cluster(config.head_dim, config.head_dim_v, config.block_q);
  // There are no pairs if each tile has an SM; nor with two row tiles, if all run at the same time, or if the second is
  // short and blocks take the tiles alternately. A program is not worth another compilation.
  const bool apart = all_tiles * cluster <= sms && !f.has_program();
  const bool two =
      row_tiles == 2 && !f.has_program() && (all_tiles * cluster <= blocks_per_sm * sms || p.seq_q % tile.block_q != 0);
  // The first row tiles of a window are short, too. In the order of the heads, blocks would end up to a tenth apart.
  const bool windowed = f.window_left && !masked && row_tiles > 1 && all_tiles >= 4 * sms && !is_wide(p);
  const bool counted = windowed || (imbalanced && tile.block_q == 192 && !apart);
  const bool dynamic_scheduler = unknown || (counted && all_tiles <= 200 * sms);
  config.dynamic_scheduler = dynamic_scheduler;
  config.pair_tiles = imbalanced && !dynamic_scheduler && !apart && !two;
  add_bias_stages(r, config);
  const std::int64_t units = (config.pair_tiles ? (row_tiles + 1) / 2 : row_tiles) * p.heads_q * p.batch * tile.num_splits;
  if (dynamic_scheduler) plan.workspace_bytes = 256, plan.zeroed_bytes = sizeof(unsigned);
  if (splits) reserve_parts(p, tile.num_splits, plan);
  if (!order) config = with_precomputed_mask_bits(p, config, plan);
  config.loop = choose_loop(config);
  const std::int64_t blocks =
      std::min<std::int64_t>(units, std::max(blocks_per_sm * device.num_sms / cluster, 1)) * cluster;
  if (order && p.seq_kv > order->block_kv * order->segment_blocks && abi::forward_sm90_layout(config).totals_bytes == 0)
    reserve(plan, abi::ForwardSm90Region::totals,
            blocks * tile.block_q * 2 * abi::forward_sm90_total_floats(config.head_dim_v) * 4);
  add_max_logit_launch(p, plan);
  add_launch(plan,
             {.unit = "forward/sm90",
              .entry = "forward_sm90_kernel",
              .config = launch_config(config),
              .block = config.num_warps * 32,
              .cluster = cluster,
              .shared_bytes = abi::forward_sm90_layout(config).shared_bytes,
              .min_blocks_per_sm = blocks_per_sm,
              .programmatic_launch = (masked || p.return_max_logit) && !order},
             blocks);
  if (splits) add_merge_launch(p, f.dtype, plan);
  add_sm90_key_mass_launch(p, plan);
  return plan;
}

/// Why stages and splits that were requested in addition to a tile are not possible.
std::string reject_stages_and_splits(const Request& r, const Sm90Tile& tile) {
  const Problem& p = r.problem;
  if (is_wide(p)) return "heads wider than 256 have one way";
  const int fits = asked_config(r, {tile.block_q, tile.block_kv}, r.num_stages).num_stages;
  if (r.num_stages == 1 || fits < r.num_stages) return "so many stages do not fit, or they are fewer than two";
  if (r.num_stages > 4 && tile.block_q > 64) return "the barriers of more than four stages do not fit beside so many rows";
  if (r.num_splits <= 1) return "";
  if (!splits_keys(r)) return "keys are split where there are no options, lengths, masks or edges, and more than 64 queries";
  return r.num_splits <= (p.seq_kv + tile.block_kv - 1) / tile.block_kv ? "" : "there are fewer tiles of keys";
}

Answer plan_forward(const Request& r) {
  std::string reason = reject_forward(r);
  if (!reason.empty()) return Refusal{std::move(reason)};
  if (r.features.key_list) return plan_sm90_lists(r);
  const std::optional<FixedOrder> order = fixed_order(r);
  if (r.problem.invariant && r.features.has_statistics()) return Refusal{"computes no statistics where bits are invariant"};
  if (r.problem.invariant && !order) return Refusal{"where bits are invariant it takes what decode/sm80 takes"};
  Sm90Tile tile = order ? ordered_tile(r, *order) : choose_tile(r);
  // parts of a row are merged without its statistics
  if (r.features.max_logit || r.features.entropy) tile.num_splits = 1;
  if (r.features.has_mask_data() && tile.block_kv < abi::mask_unit)
    return Refusal{"with these options blocks have 32 keys, and masks are known for 64"};
  if (r.tile) {
    reason = reject_forward_tile(r, *r.tile);
    if (order && r.tile->block_kv != order->block_kv) reason = "the order of sums has blocks of other keys";
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    tile = {r.tile->block_q, r.tile->block_kv, asked_config(r, *r.tile).num_stages};
  }
  if (r.num_stages > 0 || r.num_splits > 0) {
    reason = reject_stages_and_splits(r, tile);
    if (reason.empty() && order && r.num_splits > 1) reason = "the order of sums has no splits";
    if (!reason.empty()) return Refusal{std::move(reason)};
    if (r.num_stages > 0) tile.num_stages = r.num_stages;
    if (r.num_splits > 0) tile.num_splits = r.num_splits;
  }
  Offer offer{lay_out_forward(r, tile, order)};
  if (is_short_for_sm90(r)) offer.prefers_prefill = "few short rows are over sooner in forward/sm80's tiles of 32 queries";
  return offer;
}

}  // namespace

// H200, bfloat16, 64 columns, us, forward/sm80 in 32 x 64, forward/sm90, cuDNN: 16 x 16 heads x 64 tokens 9.5, 12.0, 12.2; x 77
// 11.3, 13.3, 13.2, causal 11.5, 12.7, 13.2; x 96 11.7, 13.2, 13.4; x 128 16.5, 13.4, 13.7; 1 x 16 x 77 8.5, 9.4, 8.9; 4 x 16 x 77
// 9.2, 9.9, 9.4; 8 x 12 x 128 10.3, 10.6, 10.1; 4 x 32 x 128 10.7, 11.0, 10.7; 64 x 16 x 77 30.5, 24.8, 25.2. 128 columns lose.
bool is_short_for_sm90(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  if (r.device.arch != 90 || r.tile || r.num_stages > 0 || r.num_splits > 0 || p.invariant) return false;
  if (std::max({p.seq_q, p.seq_kv}) > 128 || std::max(p.head_dim, p.head_dim_v) > 64) return false;
  if (f.touches_scores() || f.window_left || f.has_lengths() || f.has_statistics() || f.sink || p.page_size != 0) return false;
  return p.batch * p.heads_q * ((p.seq_q + 31) / 32) <= 6 * r.device.num_sms;
}

std::span<const KernelEntry> sm90_kernels() {
  static const std::array<KernelEntry, 2> rows{
      KernelEntry{.name = "forward/sm90",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_90; float16 or bfloat16; strides that TMA can take; pages of a multiple of 8 keys; "
                                  "every option but bit masks; of lists those of blocks of 64 keys and more, without score options but a "
                                  "soft cap, packing and pages",
                  .takes = {.pages = true,
                            .left_padding = true,
                            .invariant = true,
                            .hidden_rows = true,
                            .block_mask = true,
                            .programs = true,
                            .tile = true,
                            .stages = true,
                            .splits = true,
                            .key_list = true,
                            .statistics = true,
                            .sequence_windows = true},
                  .proven = run_on_h200,
                  .prefill = true,
                  .counts_repairs = true,
                  .plan = plan_forward},
      sm90_backward_kernel()};
  return rows;
}

}  // namespace flash_attention::plan
