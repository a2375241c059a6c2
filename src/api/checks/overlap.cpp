#include "api/checks/overlap.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "api/checks/refuse.h"

namespace flash_attention::api {
namespace {

bool empty(const Extent& e) {
  return e.data == nullptr || std::any_of(e.sizes.begin(), e.sizes.end(), [](std::int64_t size) { return size == 0; });
}

ByteRange range(const Extent& e) {
  std::int64_t low = 0, high = 1;
  for (int axis = 0; axis < 4; ++axis) {
    const std::int64_t reach = (e.sizes[axis] - 1) * e.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::intptr_t>(e.data);
  return {base + low * e.element_bytes, base + high * e.element_bytes};
}

bool cross(const ByteRange& a, const ByteRange& b) { return a.first < b.last && b.first < a.last; }

/// Whether the axes nest, the largest stride first: each step is longer than the whole reach of the axes after it.
bool nested(const Extent& a, const Extent& b, const std::array<std::int64_t, 4>& strides, const std::array<int, 4>& order) {
  std::int64_t reach = 0;
  for (int axis = 3; axis >= 0; --axis) {
    const int index = order[axis];
    const std::int64_t stride = std::abs(strides[index]), steps = std::max(a.sizes[index], b.sizes[index]) - 1;
    if (stride == 0) continue;
    if (stride <= reach) return false;
    reach += stride * steps;
  }
  return true;
}

/// Whether `distance` = index_b - index_a along the axes from `axis` on, for some indices inside both tensors. If the
/// axes nest, a step can only be the quotient or its neighbour, whatever the signs of the strides, so three tries are
/// enough.
bool reachable(const Extent& a, const Extent& b, const std::array<std::int64_t, 4>& strides,
               const std::array<int, 4>& order, int axis, std::int64_t distance) {
  if (axis == 4) return distance == 0;
  const int index = order[axis];
  const std::int64_t stride = strides[index];
  if (stride == 0) return reachable(a, b, strides, order, axis + 1, distance);
  const std::int64_t quotient = distance / stride;
  for (const std::int64_t step : {quotient - 1, quotient, quotient + 1}) {
    if (step > a.sizes[index] - 1 || -step > b.sizes[index] - 1) continue;
    if (reachable(a, b, strides, order, axis + 1, distance - step * stride)) return true;
  }
  return false;
}

}  // namespace

bool overlaps(const Extent& a, const Extent& b) {
  if (empty(a) || empty(b)) return false;
  if (!cross(range(a), range(b))) return false;
  const std::intptr_t bytes = b.data - a.data;
  if (a.element_bytes != b.element_bytes || bytes % a.element_bytes != 0) return true;
  std::array<std::int64_t, 4> strides;  // of both; the stride of an axis of size 1 has no effect
  for (int axis = 0; axis < 4; ++axis) {
    strides[axis] = a.sizes[axis] > 1 ? a.strides[axis] : b.sizes[axis] > 1 ? b.strides[axis] : 0;
    if (a.sizes[axis] > 1 && b.sizes[axis] > 1 && a.strides[axis] != b.strides[axis]) return true;
  }
  std::array<int, 4> order{0, 1, 2, 3};
  std::sort(order.begin(), order.end(), [&](int x, int y) { return std::abs(strides[x]) > std::abs(strides[y]); });
  if (!nested(a, b, strides, order)) return true;
  return reachable(a, b, strides, order, 0, bytes / a.element_bytes);
}

void Memory::add(const Extent& extent) {
  if (empty(extent)) return;
  ranges_.at(count_) = range(extent);
  extents_[count_++] = extent;
}

void Memory::refuse_overlap() const {
  for (std::size_t a = 0; a < num_outputs_; ++a) {
    for (std::size_t b = a + 1; b < count_; ++b) {
      if (!cross(ranges_[a], ranges_[b])) continue;
      const Extent &output = extents_[a], &other = extents_[b];
      if (!overlaps(output, other)) continue;
      if (b < num_outputs_)
        refuse(other.name, std::string("memory shared with ") + output.name, "outputs must not overlap");
      refuse(output.name, std::string("memory shared with ") + other.name, "an output must not overlap an input");
    }
  }
}

void refuse_overlap(std::initializer_list<Extent> outputs, std::initializer_list<Extent> inputs) {
  Memory memory;
  for (const Extent& output : outputs) memory.output(output);
  for (const Extent& input : inputs) memory.input(input);
  memory.refuse_overlap();
}

void refuse_self_overlap(const char* argument, const Strides& strides, std::int64_t batch, std::int64_t seq,
                         std::int64_t heads, std::int64_t dim) {
  if (std::min({batch, seq, heads}) == 0) return;
  std::array<std::pair<std::int64_t, std::int64_t>, 3> axes{
      {{std::abs(strides.head), heads}, {std::abs(strides.seq), seq}, {std::abs(strides.batch), batch}}};
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = dim;  // elements that the smaller axes span
  for (const auto& [stride, size] : axes) {
    if (size <= 1) continue;
    if (stride < reach) {
      refuse(argument,
             "(" + std::to_string(strides.batch) + ", " + std::to_string(strides.seq) + ", " +
                 std::to_string(strides.head) + ")",
             "an output must not overlap itself");
    }
    reach += stride * (size - 1);
  }
}

}  // namespace flash_attention::api
