#include "api/checks/narrow.h"

#include <string>

#include "api/checks/refuse.h"

namespace flash_attention::api {

std::int64_t check_group(const char* argument, Dtype dtype, std::int64_t given, std::int64_t head_dim,
                         std::int64_t head_dim_v) {
  if (!has_groups(dtype)) {
    require(given == 0, argument, given, "it belongs to nvfp4, mxfp4 and int4");
    return 0;
  }
  const std::int64_t of_format = columns_of_group(dtype, 0), group = columns_of_group(dtype, given);
  const bool wide = dtype == Dtype::int4 && (group == 64 || group == 128);
  if (group != of_format && !wide) {
    refuse(argument, std::to_string(given),
           "allowed are " + std::string(dtype == Dtype::nvfp4   ? "16 with nvfp4"
                                        : dtype == Dtype::mxfp4 ? "32 with mxfp4"
                                                                : "32, 64 and 128 with int4"));
  }
  for (const std::int64_t dim : {head_dim, head_dim_v}) {
    if (dim % group == 0) continue;
    refuse(dim == head_dim ? "head_dim" : "head_dim_v", std::to_string(dim),
           std::string(to_string(dtype)) + " takes multiples of its group, " + std::to_string(group));
  }
  return group;
}

void check_scales_of_groups(const char* argument, Dtype dtype, ScaleKind kind) {
  if (!has_groups(dtype) || kind == ScaleKind::none) return;
  if (dtype == Dtype::nvfp4 && kind == ScaleKind::tensor) return;
  refuse(argument, std::string(to_string(kind)),
         std::string(to_string(dtype)) +
             (dtype == Dtype::nvfp4 ? " takes none and tensor beside those of groups" : " has those of groups alone"));
}

namespace {

/// Groups of columns, and what does not go together with them yet.
void check_groups(Problem& p, Pass pass, const RowAxes& of_kv) {
  const std::string got(to_string(*p.kv_dtype));
  if (has_groups(*p.kv_dtype)) {
    if (pass != Pass::forward) refuse("kv_dtype", got, "only forward takes 4 bits");
    if (p.latent) refuse("kv_dtype", got, "latent keys take 8 bits, and no 4");
    if (p.invariant) refuse("kv_dtype", got, "invariant takes 8 bits, and no 4");
  }
  p.kv_group = check_group("kv_group", *p.kv_dtype, p.kv_group, p.head_dim, p.head_dim_v);
  check_scales_of_groups("kv_scales", *p.kv_dtype, p.kv_scales);
  if (p.kv_group == 0) {
    p.k_group_strides = p.v_group_strides = Strides{0, 0, 0};
    return;
  }
  p.k_group_strides = resolve("k_group_strides", p.k_group_strides, of_kv, p.heads_kv, p.head_dim / p.kv_group);
  p.v_group_strides = resolve("v_group_strides", p.v_group_strides, of_kv, p.heads_kv, p.head_dim_v / p.kv_group);
}

}  // namespace

void check_narrow_keys(Problem& p, Pass pass, const RowAxes& of_kv) {
  if (!p.kv_dtype) p.kv_dtype = p.dtype;
  const bool narrow = size_of(*p.kv_dtype) == 1 && *p.kv_dtype <= Dtype::int4;
  if (!narrow && *p.kv_dtype != p.dtype) {
    refuse("kv_dtype", std::string(to_string(*p.kv_dtype)),
           "allowed are dtype, " + std::string(to_string(p.dtype)) +
               ", float8_e4m3, float8_e5m2, int8, nvfp4, mxfp4 and int4");
  }
  check_groups(p, pass, of_kv);
  if (narrow && pass != Pass::forward) refuse("kv_dtype", std::string(to_string(*p.kv_dtype)), "only forward takes 8 bits");
  require(p.kv_scales <= ScaleKind::token, "kv_scales", static_cast<std::int64_t>(p.kv_scales),
          "allowed are none, tensor, head and token");
  if (p.kv_scales != ScaleKind::none && !narrow) {
    refuse(
        "kv_scales", std::string(to_string(p.kv_scales)),
        "they belong to float8_e4m3, float8_e5m2, int8 and nvfp4, and k and v are " + std::string(to_string(*p.kv_dtype)));
  }
  const auto strides = [&](const char* argument, Strides given) {
    if (p.kv_scales == ScaleKind::none || p.kv_scales == ScaleKind::tensor) return Strides{0, 0, 0};
    if (p.kv_scales == ScaleKind::token) return resolve(argument, given, of_kv, p.heads_kv, 1);
    if (given.batch == Strides::dense) given.batch = p.heads_kv;
    given.seq = 0;
    return resolve(argument, given, {false, p.batch, 1}, p.heads_kv, 1);
  };
  p.k_scale_strides = strides("k_scale_strides", p.k_scale_strides);
  p.v_scale_strides = strides("v_scale_strides", p.v_scale_strides);
}

void check_narrow_queries(Problem& p, Pass pass) {
  if (!p.q_dtype) p.q_dtype = p.dtype;
  const bool narrow = *p.q_dtype != p.dtype;
  const std::string got(to_string(*p.q_dtype));
  if (narrow && *p.q_dtype != Dtype::float8_e4m3 && *p.q_dtype != Dtype::float8_e5m2) {
    refuse("q_dtype", got, "allowed are dtype, " + std::string(to_string(p.dtype)) + ", float8_e4m3 and float8_e5m2");
  }
  if (narrow && pass != Pass::forward) refuse("q_dtype", got, "only forward takes 8 bits");
  if (narrow && *p.q_dtype != *p.kv_dtype) {
    refuse("q_dtype", got, "it goes with k and v of the same type, and they are " + std::string(to_string(*p.kv_dtype)));
  }
  if (narrow && p.latent) refuse("q_dtype", got, "latent keys take queries of 16 or 32 bits");
  require(p.q_scales <= ScaleKind::head, "q_scales", static_cast<std::int64_t>(p.q_scales),
          "allowed are none, tensor and head");
  if (p.q_scales != ScaleKind::none && !narrow) {
    refuse("q_scales", std::string(to_string(p.q_scales)),
           "they belong to float8_e4m3 and float8_e5m2, and q is " + std::string(to_string(*p.q_dtype)));
  }
  if (p.q_scales != ScaleKind::head) {
    p.q_scale_strides = {0, 0, 0};
    return;
  }
  if (p.q_scale_strides.batch == Strides::dense) p.q_scale_strides.batch = p.heads_kv;
  p.q_scale_strides.seq = 0;
  p.q_scale_strides = resolve("q_scale_strides", p.q_scale_strides, {false, p.batch, 1}, p.heads_kv, 1);
}

}  // namespace flash_attention::api
