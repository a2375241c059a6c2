// The words of mask programs that are made before the kernel (mask/program_rows.cuh), against fp64.
#include <gtest/gtest.h>

#include <cstdint>

#include "emulator/checks/paths.h"
#include "support/cases/programs.h"

namespace flash_attention::testing {
namespace {

/// A mask of what every random program captures: t0 float32 [11], t1 int32 [3, 17], s0 int, s1 float.
RandomProgram with_captures(const std::string& lines) {
  RandomProgram result(11, false, true);
  result.text = "t0 = tensor float32 1\nt1 = tensor int32 2\ns0 = scalar int\ns1 = scalar float\n" + lines;
  result.parsed = program::parse(result.text);
  result.scalars = {37, 0.75};
  return result;
}

void expect_words(const RandomProgram& program, std::int64_t seq_q, std::int64_t seq_kv, std::int64_t head_dim = 64) {
  const Problem problem{.batch = 1,
                        .seq_q = seq_q,
                        .seq_kv = seq_kv,
                        .heads_q = 8,  // as many as make words worth while
                        .heads_kv = 1,
                        .head_dim = head_dim,
                        .dtype = Dtype::float16};
  KernelPair forward_alone;
  forward_alone.call = [](const Problem& described, Pass pass, const Buffers& buffers) {
    if (pass != Pass::forward) return;
    Options options;
    options.device = {DeviceKind::emulator, 0, 90};
    options.kernel = "forward/sm90";
    const std::size_t bytes = workspace_bytes(described, pass, options);
    std::vector<char> memory(bytes + 256, '\x55');  // words and tiles that are not made differ from those of zeros
    options.workspace = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    options.workspace_bytes = bytes;
    forward(described, buffers, options);
  };
  const ProgramResults got = run_program(problem, program, {}, 5, forward_alone);
  EXPECT_LT(difference(got.out, exact_program(problem, program, 5).out), 8e-3) << program.text;
  EXPECT_TRUE(emulator::paths_taken().contains("mask/tile_map words of a program"));
}

// Two terms: rows that the first tells apart are not those of the second. A prime, so that runs end anywhere.
TEST(EmulatedProgramWords, TermsOfDivisionByAPrime) {
  expect_words(with_captures("x = mod i s0\nu = mod j s0\na = floordiv x 5\nc = floordiv u 5\np = sub a c\nq = abs p\n"
                             "near = le q 1\ny = floordiv i s0\nv = floordiv j s0\nr = sub y v\ns = abs r\nclose = le s 1\n"
                             "see = and near close\nvisible = see"),
               200, 333);
}

// Ints that rows and keys read, a float of the row, a bool of the key alone, one of the row alone, negative operands: more
// terms than are kept apart.
TEST(EmulatedProgramWords, CapturedTensorsNegativeOperandsManyTerms) {
  expect_words(
      with_captures(
          "z = floordiv i 9\nw = floordiv j 13\na = mod z 17\nc = mod w 17\nx = load t1 1 a\n"
          "u = load t1 1 c\np = sub x u\nq = abs p\nt = le q 5\nzz = mod z 11\nf = load t0 zz\ng = float j\n"
          "k = mul g s1\nl = ge k f\nm = mod j 7\nn = ne m 3\no = mod i 50\nr = ne o 49\n"
          "y = sub i j\ne = mod y -11\nd = ne e -4\nk0 = sub i 100\ns = floordiv k0 -7\nv = add w s\nbb = ge v -9\n"
          "c0 = and t l\nc1 = and n r\nc2 = and d bb\nc3 = and c0 c1\nc4 = and c3 c2\nvisible = c4"),
      140, 260);
}

// What tensors hold in the keys of a tile is found before the tiles are classified: documents that come back.
TEST(EmulatedProgramWords, CapturedIntsOfTiles) {
  expect_words(with_captures("z = floordiv i 9\nw = floordiv j 17\nx = load t1 1 z\nu = load t1 1 w\nt = eq x u\n"
                             "visible = t"),
               150, 280);
}

// More keys than a block of the launch takes, and a single row tile, whose blocks of keys several blocks share.
TEST(EmulatedProgramWords, ManyKeysOfFewRows) {
  expect_words(with_captures("a = sub j 16000\nc = abs a\nd = le c 600\ne = mod j 3\nf = floordiv i 6\ng = mod f 3\n"
                             "k = eq e g\nm = and d k\nvisible = m"),
               21, 16700, 16);
}

}  // namespace
}  // namespace flash_attention::testing
