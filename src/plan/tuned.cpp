#include "plan/tuned.h"

#include <algorithm>
#include <bit>

namespace flash_attention::plan {
namespace {

/// The end of the range that a length is in.
std::int64_t end_of_range(std::int64_t length) {
  if (length <= 16) return length;
  const std::int64_t unit = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(length - 1))) / 8;
  return (length + unit - 1) / unit * unit;
}

}  // namespace

std::string to_string(const Choice& choice) {
  std::string text = choice.kernel;
  if (choice.block_q > 0) text += ", " + std::to_string(choice.block_q) + " x " + std::to_string(choice.block_kv);
  if (choice.num_stages > 0)
    text += ", " + std::to_string(choice.num_stages) + (choice.num_stages == 1 ? " stage" : " stages");
  if (choice.num_splits > 1) text += ", keys in " + std::to_string(choice.num_splits) + " parts";
  if (choice.num_splits == 1) text += ", keys in one part";
  return text;
}

Problem tuning_form(const Problem& normalised) {
  Problem p = normalised;
  for (Strides* strides : {&p.q_strides, &p.k_strides, &p.v_strides, &p.out_strides, &p.dout_strides, &p.dq_strides,
                           &p.dk_strides, &p.dv_strides, &p.k_scale_strides, &p.v_scale_strides, &p.q_scale_strides})
    *strides = {};
  p.causal = p.window_right == 0;
  p.scale.reset();
  if (p.softcap != 0) p.softcap = 1;
  if (p.dropout_p != 0) p.dropout_p = 0.5f;
  if (p.page_size != 0) p.num_pages = p.total_kv = 0;  // of the whole cache
  p.page_table_stride = 0;
  if (p.packed) {
    for (std::int64_t* length : {&p.seq_q, &p.seq_kv, &p.total_q, &p.total_kv}) *length = end_of_range(*length);
  } else {
    p.total_q = p.total_kv = 0;
  }
  if (p.kv_dtype == p.dtype) p.kv_dtype.reset();
  if (p.q_dtype == p.dtype) p.q_dtype.reset();
  return p;
}

Tuned::Tuned(const DeviceInfo& device, const std::vector<Entry>& entries, std::vector<Verdict> verdicts)
    : arch_(device.arch),
      num_sms_(device.num_sms),
      threads_(device.threads),
      isa_(device.isa),
      verdicts_(std::move(verdicts)) {
  for (const Entry& entry : entries) choices_.insert_or_assign(Key{entry.problem, entry.pass}, entry.tuned);
}

bool Tuned::serves(const DeviceInfo& device) const {
  return device.arch == arch_ && device.num_sms == num_sms_ && device.threads == threads_ && device.isa == isa_;
}

const TunedChoice* Tuned::find(const Problem& normalised, Pass pass) const {
  if (choices_.empty() || normalised.invariant) return nullptr;
  const auto found = choices_.find(Key{tuning_form(normalised), pass});
  return found == choices_.end() || found->second.choice.kernel.empty() ? nullptr : &found->second;
}

const Verdict* Tuned::verdict(std::string_view kernel, Pass pass) const {
  const auto found =
      std::ranges::find_if(verdicts_, [&](const Verdict& one) { return one.kernel == kernel && one.pass == pass; });
  return found == verdicts_.end() ? nullptr : &*found;
}

std::vector<Tuned::Entry> Tuned::entries() const {
  std::vector<Entry> all;
  all.reserve(choices_.size());
  for (const auto& [key, tuned] : choices_) all.push_back({key.problem, key.pass, tuned});
  return all;
}

}  // namespace flash_attention::plan
