#include "support/cases/contract.h"
#include "support/cases/make_case.h"

namespace flash_attention::testing {
namespace {

/// [batch, heads, seq, dim] in memory.
void heads_first(Problem& p) {
  const std::int64_t dv = p.head_dim_v ? p.head_dim_v : p.head_dim;
  const auto strides = [](std::int64_t heads, std::int64_t seq, std::int64_t dim) {
    return Strides{heads * seq * dim, dim, seq * dim};
  };
  p.q_strides = p.dq_strides = strides(p.heads_q, p.seq_q, p.head_dim);
  p.k_strides = p.dk_strides = strides(p.heads_kv, p.seq_kv, p.head_dim);
  p.v_strides = p.dv_strides = strides(p.heads_kv, p.seq_kv, dv);
  p.out_strides = p.dout_strides = strides(p.heads_q, p.seq_q, dv);
}

/// Gaps between heads, rows and batch entries, all multiples of 8 elements.
void with_gaps(Problem& p) {
  const auto strides = [](std::int64_t heads, std::int64_t seq, std::int64_t dim) {
    const std::int64_t head = dim + 8, row = heads * head + 16;
    return Strides{seq * row + 24, row, head};
  };
  p.q_strides = p.dq_strides = strides(p.heads_q, p.seq_q, p.head_dim);
  p.k_strides = p.dk_strides = strides(p.heads_kv, p.seq_kv, p.head_dim);
  p.v_strides = p.dv_strides = strides(p.heads_kv, p.seq_kv, p.head_dim);
  p.out_strides = p.dout_strides = strides(p.heads_q, p.seq_q, p.head_dim);
}

}  // namespace

std::vector<Case> contract_cases(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    change(c, c.problem);
    cases.push_back(std::move(c));
  };

  // Sizes
  add("plain", [](Case&, Problem&) {});
  add("tile_multiple", [](Case&, Problem& p) { p.seq_q = 128, p.seq_kv = 128; });
  add("long_keys", [](Case&, Problem& p) { p.batch = 1, p.seq_q = 17, p.seq_kv = 521; });
  add("long_queries", [](Case&, Problem& p) { p.batch = 1, p.seq_q = 521, p.seq_kv = 67; });  // rings of slots come round
  add("one_query", [](Case&, Problem& p) { p.seq_q = 1; });
  add("one_key", [](Case&, Problem& p) { p.seq_kv = 1; });
  add("one_by_one", [](Case&, Problem& p) { p.seq_q = p.seq_kv = 1; });
  add("no_query", [](Case&, Problem& p) { p.seq_q = 0; });
  add("no_key", [](Case&, Problem& p) { p.seq_kv = 0; });
  add("head_dim_8", [](Case&, Problem& p) { p.head_dim = 8; });
  add("head_dim_40", [](Case&, Problem& p) { p.head_dim = 40, p.causal = true; });
  add("head_dim_96", [](Case&, Problem& p) { p.head_dim = 96, p.batch = 1; });
  add("head_dim_128", [](Case&, Problem& p) { p.head_dim = 128, p.batch = 1, p.causal = true; });
  add("head_dim_256", [](Case&, Problem& p) { p.head_dim = 256, p.batch = 1, p.causal = true; });
  add("head_dim_64_32", [](Case&, Problem& p) { p.head_dim_v = 32; });
  add("head_dim_32_96", [](Case&, Problem& p) { p.head_dim = 32, p.head_dim_v = 96; });
  add("head_dim_192_128", [](Case&, Problem& p) { p.head_dim = 192, p.head_dim_v = 128, p.batch = 1, p.causal = true; });
  add("head_dim_512",
      [](Case&, Problem& p) { p.head_dim = 512, p.batch = 1, p.heads_q = 2, p.heads_kv = 1, p.causal = true; });
  add("head_dim_320", [](Case&, Problem& p) { p.head_dim = 320, p.batch = 1, p.softcap = 1.5f, p.window_left = 40; });
  add("head_dim_264_512", [](Case&, Problem& p) { p.head_dim = 264, p.head_dim_v = 512, p.batch = 1, p.dropout_p = 0.2f; });
  add("head_dim_512_256", [](Case& c, Problem& p) {
    p.head_dim = 512, p.head_dim_v = 256, p.heads_q = p.heads_kv = 1, p.sink = c.dsink = true;
  });
  add("head_dim_59", [](Case&, Problem& p) { p.head_dim = 59, p.batch = 1, p.causal = true; });
  add("head_dim_7_131", [](Case&, Problem& p) { p.head_dim = 7, p.head_dim_v = 131, p.batch = 1; });
  add("head_dim_571_1", [](Case&, Problem& p) { p.head_dim = 571, p.head_dim_v = 1, p.batch = 1, p.heads_q = p.heads_kv; });
  add("gqa", [](Case&, Problem& p) { p.heads_q = 6, p.heads_kv = 2, p.batch = 1; });
  add("mqa_causal", [](Case&, Problem& p) { p.heads_q = 4, p.heads_kv = 1, p.batch = 1, p.causal = true; });
  add("decode_chunk",
      [](Case&, Problem& p) { p.seq_q = 1, p.seq_kv = 521, p.heads_q = 8, p.heads_kv = 2, p.attention_chunk = 100; });
  add("decode_gqa", [](Case&, Problem& p) { p.seq_q = 1, p.seq_kv = 521, p.heads_q = 8, p.heads_kv = 2, p.causal = true; });

  // Layouts
  add("heads_first", [](Case&, Problem& p) { heads_first(p); });
  add("gaps", [](Case&, Problem& p) { with_gaps(p), p.causal = true; });
  add("shared_keys", [](Case&, Problem& p) { p.k_strides = {0, 128, 64}, p.v_strides = {0, 128, 64}; });

  // Masks
  add("causal_square", [](Case&, Problem& p) { p.seq_q = p.seq_kv = 113, p.causal = true; });
  add("causal", [](Case&, Problem& p) { p.causal = true; });
  add("causal_more_queries", [](Case&, Problem& p) { p.seq_q = 131, p.seq_kv = 67, p.causal = true; });
  add("causal_top_left", [](Case&, Problem& p) { p.causal = true, p.alignment = Alignment::top_left; });
  add("causal_top_left_more_queries",
      [](Case&, Problem& p) { p.seq_q = 131, p.seq_kv = 67, p.causal = true, p.alignment = Alignment::top_left; });
  add("window", [](Case&, Problem& p) { p.window_left = 20, p.window_right = 7; });
  add("window_causal", [](Case&, Problem& p) { p.seq_q = p.seq_kv = 193, p.window_left = 33, p.causal = true; });
  add("window_right_only", [](Case&, Problem& p) { p.seq_q = 131, p.window_right = 5; });
  add("window_top_left", [](Case&, Problem& p) {
    p.seq_q = 131, p.seq_kv = 67, p.window_left = 3, p.window_right = 11, p.alignment = Alignment::top_left;
  });
  add("chunk", [](Case&, Problem& p) { p.attention_chunk = 37; });
  add("chunk_causal",
      [](Case&, Problem& p) { p.batch = 1, p.seq_q = p.seq_kv = 193, p.attention_chunk = 64, p.causal = true; });
  add("chunk_window_more_queries", [](Case&, Problem& p) {  // queries before the first key see nothing
    p.seq_q = 131, p.seq_kv = 67, p.attention_chunk = 29, p.window_left = 20, p.window_right = 7;
  });
  add("chunk_top_left",
      [](Case&, Problem& p) { p.attention_chunk = 50, p.causal = true, p.alignment = Alignment::top_left; });
  add("chunk_of_one", [](Case&, Problem& p) { p.attention_chunk = 1; });
  add("window_of_one", [](Case&, Problem& p) { p.window_left = 0, p.window_right = 0; });
  // Edges one key before or after the border of a tile, for every tile size: the first row of a tile sees all keys of
  // another but the last, the last row all but the first; a tile of which one query sees one key.
  add("causal_edge", [](Case&, Problem& p) { p.batch = 1, p.seq_q = 130, p.seq_kv = 256, p.causal = true; });
  add("window_edge", [](Case&, Problem& p) { p.batch = 1, p.seq_q = 130, p.seq_kv = 256, p.window_left = 124; });
  add("window_causal_edge",
      [](Case&, Problem& p) { p.batch = 1, p.seq_q = 130, p.seq_kv = 259, p.window_left = 130, p.causal = true; });
  add("mask_full", [](Case&, Problem& p) { p.mask = over(p, true, true, true); });
  add("mask_shared", [](Case&, Problem& p) { p.mask = over(p, false, false, true), p.causal = true; });
  add("mask_keys", [](Case&, Problem& p) { p.mask = over(p, true, false, false); });
  add("key_lengths", [](Case& c, Problem& p) { p.key_lengths = true, c.key_lengths = {77, 0}; });
  add("key_lengths_causal", [](Case& c, Problem& p) { p.key_lengths = true, c.key_lengths = {100, 131}, p.causal = true; });
  add("seqused", [](Case& c, Problem& p) {
    p.seqused_q = p.seqused_kv = true, c.seqused_q = {67, 33}, c.seqused_kv = {70, 131}, p.causal = true;
  });
  add("seqused_empty", [](Case& c, Problem& p) {
    p.seqused_q = p.seqused_kv = true, c.seqused_q = {0, 50}, c.seqused_kv = {131, 0};
  });

  // Each row sees one key, which dropout takes away from most.
  add("nan_query_dropped",
      [](Case& c, Problem& p) { p.window_left = p.window_right = 0, p.dropout_p = 0.9f, c.nan_query = 40; });

  // Packed
  add("packed", [](Case& c, Problem&) { pack(c, {33, 1, 0, 70, 5}, {67, 20, 9, 0, 130}); });
  add("packed_causal", [](Case& c, Problem& p) { pack(c, {65, 0, 31, 129}, {65, 0, 80, 129}), p.causal = true; });
  add("packed_chunk", [](Case& c, Problem& p) {
    pack(c, {65, 0, 31, 129}, {65, 0, 80, 200}), p.heads_q = 4, p.attention_chunk = 48, p.causal = true;
  });
  add("packed_gqa_window", [](Case& c, Problem& p) {
    pack(c, {40, 97}, {40, 97}), p.heads_q = 4, p.window_left = 19, p.causal = true;
  });
  add("packed_seqused", [](Case& c, Problem& p) {
    pack(c, {40, 70}, {64, 97});
    p.seqused_q = p.seqused_kv = true, c.seqused_q = {17, 70}, c.seqused_kv = {64, 90}, p.causal = true;
  });

  add("packed_tail", [](Case& c, Problem& p) {  // rows that belong to no sequence
    pack(c, {33, 0, 20}, {40, 9, 65}), p.total_q += 70, p.total_kv += 65, p.sink = c.dsink = true;
  });
  add("packed_tail_few", [](Case& c, Problem& p) { pack(c, {1, 0, 2}, {40, 9, 65}), p.total_q += 5, p.total_kv += 3; });

  // Sizes of 0 with what is summed over them
  add("no_query_bias", [](Case& c, Problem& p) { p.seq_q = 0, p.bias = over(p, true, true, true), c.dbias = true; });
  add("no_query_bias_keys", [](Case& c, Problem& p) { p.seq_q = 0, p.bias = over(p, true, true, false), c.dbias = true; });
  add("no_key_bias", [](Case& c, Problem& p) { p.seq_kv = 0, p.bias = over(p, true, true, true), c.dbias = true; });
  add("no_batch", [](Case& c, Problem& p) {
    p.batch = 0, p.bias = over(p, false, true, true), p.sink = true, c.dbias = c.dsink = true;
  });
  add("no_batch_slopes", [](Case&, Problem& p) {  // so that there are none
    p.batch = 0, p.alibi = true, p.alibi_batch_stride = p.heads_q;
  });
  add("packed_no_query_bias", [](Case& c, Problem& p) {
    pack(c, {0, 0}, {3, 60}), p.seq_q = 2, p.bias = over(p, true, true, true), p.sink = true, c.dbias = c.dsink = true;
  });
  add("packed_no_key_bias", [](Case& c, Problem& p) {
    pack(c, {3, 60}, {0, 0}), p.seq_kv = 5, p.bias = over(p, false, true, true), c.dbias = true;
  });

  // Scores
  add("scale", [](Case&, Problem& p) { p.scale = 0.3f; });
  add("softcap", [](Case&, Problem& p) { p.softcap = 1.5f, p.causal = true; });
  add("alibi", [](Case&, Problem& p) { p.alibi = true; });
  add("alibi_per_batch_causal", [](Case&, Problem& p) { p.alibi = true, p.alibi_batch_stride = 2, p.causal = true; });
  add("bias_full", [](Case& c, Problem& p) { p.bias = over(p, true, true, true), c.dbias = true; });
  add("bias_heads",
      [](Case& c, Problem& p) { p.bias = over(p, false, true, true, p.dtype), c.dbias = true, p.causal = true; });
  add("bias_shared", [](Case& c, Problem& p) { p.bias = over(p, false, false, true, p.dtype), c.dbias = true; });
  add("bias_keys", [](Case& c, Problem& p) { p.bias = over(p, true, false, false), c.dbias = true; });
  add("bias_head_keys", [](Case& c, Problem& p) { p.bias = over(p, false, true, false), c.dbias = true, p.softcap = 3; });
  add("bias_without_gradient", [](Case&, Problem& p) { p.bias = over(p, true, false, true); });
  add("bias_infinite",
      [](Case& c, Problem& p) { p.bias = over(p, false, true, true, p.dtype), c.infinite_bias = c.dbias = true; });
  add("bias_lowest", [](Case& c, Problem& p) { p.bias = over(p, false, true, true), c.lowest_bias = c.dbias = true; });
  add("bias_lowest_softcap", [](Case& c, Problem& p) {  // blocks inside of the edges, few queries
    p.seq_q = 9, p.seq_kv = 400, p.softcap = 30, p.bias = over(p, false, false, true), c.lowest_bias = true;
  });
  add("sink", [](Case& c, Problem& p) { p.sink = true, c.dsink = true, p.causal = true; });
  add("sink_empty_rows",
      [](Case& c, Problem& p) { p.seq_q = 131, p.seq_kv = 67, p.sink = true, c.dsink = true, p.causal = true; });
  add("lse_gradient", [](Case& c, Problem& p) { c.dlse = true, p.causal = true; });
  add("lse_gradient_sink", [](Case& c, Problem& p) { c.dlse = true, p.sink = true, c.dsink = true; });

  // Dropout
  add("dropout", [](Case&, Problem& p) { p.dropout_p = 0.2f; });
  add("dropout_gqa_causal", [](Case&, Problem& p) { p.heads_q = 4, p.batch = 2, p.dropout_p = 0.5f, p.causal = true; });
  add("dropout_packed", [](Case& c, Problem& p) { pack(c, {40, 97}, {33, 131}), p.dropout_p = 0.1f; });

  // Ranges
  add("large", [](Case& c, Problem&) { c.draw = Draw::large; });
  add("peaked", [](Case& c, Problem& p) { c.draw = Draw::peaked, p.causal = true; });
  add("growing", [](Case& c, Problem&) { c.draw = Draw::growing; });
  add("growing_causal", [](Case& c, Problem& p) { c.draw = Draw::growing, p.causal = true, p.seq_q = p.seq_kv = 193; });
  add("spike", [](Case& c, Problem& p) { c.draw = Draw::spike, p.seq_kv = 259; });

  // A NaN that some queries see and others do not
  add("nan_key", [](Case& c, Problem& p) { c.nan_key = 120, p.causal = true; });
  add("nan_value", [](Case& c, Problem& p) { c.nan_value = 120, p.causal = true; });
  add("nan_value_scale_zero", [](Case& c, Problem& p) { c.nan_value = 120, p.causal = true, p.scale = 0.0f; });
  add("nan_value_sink", [](Case& c, Problem& p) {
    c.nan_value = 20, p.causal = true, p.sink = true, c.strong_sink = true;
    p.seqused_q = true, c.seqused_q = {67, 33};
  });
  add("nan_value_window", [](Case& c, Problem& p) { c.nan_value = 75, p.window_left = 9, p.window_right = 9; });
  add("nan_value_mask", [](Case& c, Problem& p) { c.nan_value = 30, p.mask = over(p, false, false, true); });
  add("nan_key_sink", [](Case& c, Problem& p) { c.nan_key = 120, p.causal = true, p.sink = true; });
  add("nan_key_seqused", [](Case& c, Problem& p) {  // the rows past the used length have no gradient at all
    c.nan_key = 20, p.seqused_q = true, c.seqused_q = {67, 33}, p.key_lengths = true, c.key_lengths = {15, 131};
  });

  // Together
  add("everything", [](Case& c, Problem& p) {
    p.heads_q = 4, p.heads_kv = 2, p.head_dim = 40, p.head_dim_v = 24;
    p.softcap = 4, p.alibi = true, p.sink = true, p.dropout_p = 0.15f, p.window_left = 90, p.window_right = 3;
    p.bias = over(p, false, true, true), p.mask = over(p, true, false, true);
    p.key_lengths = true, c.key_lengths = {120, 131}, p.deterministic = true;
    c.dlse = c.dbias = c.dsink = true;
    heads_first(p);
  });
  add("alibi_top_left", [](Case&, Problem& p) {  // distances count from the other diagonal than the mask
    p.alibi = p.causal = true, p.alignment = Alignment::top_left;
  });
  add("softcap_far", [](Case& c, Problem& p) { p.softcap = 20, c.draw = Draw::large; });  // dot products of six caps
  add("softcap_negative_scale", [](Case&, Problem& p) { p.softcap = 1.5f, p.scale = -0.3f, p.seq_q = p.seq_kv = 131; });
  return cases;
}

}  // namespace flash_attention::testing
