#include "api/checks/groups.h"

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

}  // namespace flash_attention::api
