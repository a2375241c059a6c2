#include "plan/tuned.h"

#include <algorithm>
#include <bit>

namespace flash_attention::plan {
namespace {

/// The end of the range that contains a length.
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
  Problem form = normalised;
  for (Strides* strides : {&form.q_strides, &form.k_strides, &form.v_strides, &form.out_strides, &form.dout_strides,
                           &form.dq_strides, &form.dk_strides, &form.dv_strides, &form.k_scale_strides,
                           &form.v_scale_strides, &form.q_scale_strides, &form.k_group_strides, &form.v_group_strides})
    *strides = {};
  form.causal = form.window_right == 0;
  form.scale.reset();
  if (form.softcap != 0) form.softcap = 1;
  if (form.dropout_p != 0) form.dropout_p = 0.5f;
  if (form.page_size != 0) form.num_pages = form.total_kv = 0;  // they are those of the whole cache
  form.page_table_stride = 0;
  if (form.packed) {
    for (std::int64_t* length : {&form.seq_q, &form.seq_kv, &form.total_q, &form.total_kv}) *length = end_of_range(*length);
  } else {
    form.total_q = form.total_kv = 0;
  }
  if (form.kv_dtype == form.dtype) form.kv_dtype.reset();
  if (form.q_dtype == form.dtype) form.q_dtype.reset();
  return form;
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
