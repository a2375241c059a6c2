#include <gtest/gtest.h>

#include <tuple>

#include "support/cases/programs.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

using Kernels = std::tuple<const char*, const char*, int>;  // forward, backward, arch

/// The output and its gradients.
void expect_close(const ProgramResults& got, const ProgramResults& expected, double tolerance, const std::string& what) {
  EXPECT_LT(difference(got.out, expected.out), tolerance) << what;
  EXPECT_LT(difference(got.dq, expected.dq), tolerance) << what;
  EXPECT_LT(difference(got.dk, expected.dk), tolerance) << what;
  EXPECT_LT(difference(got.dv, expected.dv), tolerance) << what;
}

class EmulatedPrograms : public ::testing::TestWithParam<Kernels> {};

// Random programs through each kernel that takes them, forward and backward, against fp64.
TEST_P(EmulatedPrograms, AgreeWithFp64) {
  const auto [forward_kernel, backward_kernel, arch] = GetParam();
  const bool narrow = std::string(forward_kernel) != "forward/portable";
  for (unsigned seed = 0; seed < 3; ++seed) {
    if (!with_long_tail() && seed != 0) continue;  // the first has a score and a mask
    const RandomProgram random(2000 + seed, seed != 1, seed != 2);
    Problem problem{.batch = 1,
                    .seq_q = 37,
                    .seq_kv = 150,
                    .heads_q = 2,
                    .heads_kv = 1 + seed % 2,
                    .head_dim = 16,
                    .dtype = narrow ? Dtype::float16 : Dtype::float32};
    problem.causal = seed == 0;
    Options options;
    options.device = {DeviceKind::emulator, 0, arch};
    const ProgramResults got = run_program(problem, random, options, seed, {forward_kernel, backward_kernel});
    const ProgramResults expected = exact_program(problem, random, seed);
    const std::string text = random.text + "seed " + std::to_string(seed);
    const double tolerance = narrow ? 8e-3 : 2e-4;
    expect_close(got, expected, tolerance, text);
    EXPECT_LT(difference(got.lse, expected.lse), tolerance) << text;
    EXPECT_LT(difference(got.dreals, expected.dreals), narrow ? 8e-3 : 2e-3) << text;
  }
}

// NaN and Inf behind what a program hides, by its mask or by a score of -inf, reach no result.
TEST_P(EmulatedPrograms, NanBehindAProgramIsHarmless) {
  const auto [forward_kernel, backward_kernel, arch] = GetParam();
  const bool narrow = std::string(forward_kernel) != "forward/portable";
  for (const bool by_mask : {true, false}) {
    if (!with_long_tail() && by_mask && arch != 90) continue;
    const RandomProgram given(std::string("m = mod j 5\nv = ne m 0\n") +
                              (by_mask ? "visible = v" : "s = where v score -inf\nscore = s"));
    const Problem problem{.batch = 1,
                          .seq_q = 37,
                          .seq_kv = 150,
                          .heads_q = 2,
                          .heads_kv = 1,
                          .head_dim = 16,
                          .dtype = narrow ? Dtype::float16 : Dtype::float32};
    Options options;
    options.device = {DeviceKind::emulator, 0, arch};
    const KernelPair poisoned{forward_kernel, backward_kernel, 5};
    const ProgramResults got = run_program(problem, given, options, 3, poisoned);
    ProgramResults expected = exact_program(problem, given, 3);
    const double tolerance = narrow ? 8e-3 : 2e-4;
    expect_close(got, expected, tolerance, given.text);
  }
}

// Masks of division and remainder, of which interval arithmetic knows little: most tiles are tested.
TEST(EmulatedSm90Programs, MasksOfDivisionAndRemainder) {
  const RandomProgram tiles(
      "x = mod i 40\ny = floordiv i 40\nu = mod j 40\nv = floordiv j 40\np = sub x u\nq = sub y v\nr = abs p\n"
      "s = abs q\nnear = le r 9\nclose = le s 1\nsee = and near close\nvisible = see");
  for (const std::int64_t head_dim : {32, 128}) {
    if (!with_long_tail() && head_dim == 32) continue;
    const Problem problem{.batch = 1,
                          .seq_q = 150,
                          .seq_kv = 200,
                          .heads_q = 2,
                          .heads_kv = 1,
                          .head_dim = head_dim,
                          .dtype = Dtype::float16};
    Options options;
    options.device = {DeviceKind::emulator, 0, 90};
    const ProgramResults got = run_program(problem, tiles, options, 5, {"forward/sm90", "backward/sm90"});
    const ProgramResults expected = exact_program(problem, tiles, 5);
    expect_close(got, expected, 8e-3, "head_dim " + std::to_string(head_dim));
  }
}

// A narrow window of many heads: words that were made before, in tiles of 64 queries and 64 keys.
TEST(EmulatedSm90Programs, SmallTilesInANarrowWindow) {
  const RandomProgram every_third(
      "d = sub i j\na = abs d\nw = le a 60\nm = mod d 3\no = eq m 0\nx = floordiv i 70\ny = mod x 2\np = eq y 1\n"
      "q = or o p\nv = and w q\nvisible = v");
  const Problem problem{
      .batch = 1, .seq_q = 230, .seq_kv = 230, .heads_q = 8, .heads_kv = 2, .head_dim = 80, .dtype = Dtype::float16};
  Options options;
  options.device = {DeviceKind::emulator, 0, 90};
  const ProgramResults got = run_program(problem, every_third, options, 5, {"forward/sm90", "backward/sm90"});
  expect_close(got, exact_program(problem, every_third, 5), 8e-3, every_third.text);
}

struct Sm90Program {
  const char* text;
  bool gradients = true;  // a row whose lse is below -1e7 has none
};

// Distances in floats, masks that are windows from the first key on, and scores that overflow or underflow relative to the
// reference: rows whose scores are all finite and huge, one huge score after the blocks that have set the reference.
TEST(EmulatedSm90Programs, DistancesWindowsAndHugeScores) {
  const Sm90Program programs[] = {
      {"d = sub i j\na = abs d\nf = float a\ny = mul f 0.125\nz = sub score y\np = ge d -100\nq = le d 90\nm = mod j 7\n"
       "n = ne m 3\nx = and p n\nv = and x q\nscore = z\nvisible = v"},
      {"x = div score 3.0\ny = tanh x\nw = detach y\nu = mul w y\nz = add y u\np = ge i j\nscore = z\nvisible = p"},
      {"m = mod i 3\np = eq m 0\nt = where p -3.4e38 score\nq = eq m 1\no = eq j 10\nv = and q o\n"
       "s = where v 3.2e38 t\nscore = s",
       false},
  };
  const Problem problem{
      .batch = 1, .seq_q = 150, .seq_kv = 400, .heads_q = 2, .heads_kv = 1, .head_dim = 16, .dtype = Dtype::float16};
  Options options;
  options.device = {DeviceKind::emulator, 0, 90};
  for (const Sm90Program& program : programs) {
    const RandomProgram given{std::string(program.text)};
    const ProgramResults got = run_program(problem, given, options, 7, {"forward/sm90", "backward/sm90"});
    const ProgramResults expected = exact_program(problem, given, 7);
    EXPECT_LT(difference(got.out, expected.out), 8e-3) << program.text;
    if (!program.gradients) continue;
    EXPECT_LT(difference(got.lse, expected.lse), 8e-3) << program.text;
    EXPECT_LT(difference(got.dq, expected.dq), 8e-3) << program.text;
    EXPECT_LT(difference(got.dk, expected.dk), 8e-3) << program.text;
    EXPECT_LT(difference(got.dv, expected.dv), 8e-3) << program.text;
  }
}

// Short programs at 128, where the kernel of dK and dV makes dQ, too; several tiles of queries and keys, grouped heads.
TEST(EmulatedSm90Programs, ShortOnesWithDqInTheSameKernel) {
  for (const char* const text :
       {"d = sub i j\nf = float d\na = abs f\ny = mul a 0.0625\nz = sub score y\np = ge i j\nscore = z\nvisible = p",
        "x = div score 0.5\ny = tanh x\nz = mul y 0.75\nscore = z",
        "d = sub i j\nf = float d\ny = mul f score\nw = sigmoid y\nz = add w score\nscore = z"}) {
    if (!with_long_tail() && text[0] == 'x') continue;  // a program like it goes through the kernel of wide heads
    const RandomProgram given{std::string(text)};
    const Problem problem{.batch = 1,
                          .seq_q = 200,
                          .seq_kv = 200,
                          .heads_q = 2,
                          .heads_kv = text[0] == 'x' ? 1 : 2,
                          .head_dim = 128,
                          .dtype = Dtype::float16};
    Options options;
    options.device = {DeviceKind::emulator, 0, 90};
    const ProgramResults got = run_program(problem, given, options, 11, {"forward/sm90", "backward/sm90"});
    const ProgramResults expected = exact_program(problem, given, 11);
    expect_close(got, expected, 8e-3, text);
  }
}

// The derivative of a score, in the kernel of wide heads.
TEST(EmulatedSm90Programs, SlopesOfWideHeads) {
  const RandomProgram cap{std::string("x = div score 0.5\ny = tanh x\nz = mul y 0.75\nscore = z")};
  const Problem problem{
      .batch = 1, .seq_q = 70, .seq_kv = 90, .heads_q = 1, .heads_kv = 1, .head_dim = 192, .dtype = Dtype::float16};
  Options options;
  options.device = {DeviceKind::emulator, 0, 90};
  const ProgramResults got = run_program(problem, cap, options, 9, {"forward/sm90", "backward/sm90"});
  const ProgramResults expected = exact_program(problem, cap, 9);
  expect_close(got, expected, 8e-3, cap.text);
}

// Masks that eight heads share: backward's words of them are made before, once. With a window and lengths that are no
// multiple of a tile, NaN and Inf in keys that are hidden, and a head_dim with and without registers to spare.
TEST(EmulatedSm90Programs, WordsOfAllHeads) {
  const char* const neighbours =
      "x = mod i 12\ny = floordiv i 12\nu = mod j 12\nw = floordiv j 12\na = sub x u\nb0 = abs a\np = le b0 2\n"
      "c = sub y w\nd = abs c\nq = le d 3\ns = and p q\nm = mod j 5\nn = ne m 0\nt = and s n\n";
  for (const bool windowed : {false, true}) {
    const std::string text = std::string(neighbours) + (windowed ? "e = ge i j\nv = and t e\nvisible = v" : "visible = t");
    const RandomProgram given{text};
    const Problem problem{.batch = 1,
                          .seq_q = windowed ? 150 : 190,
                          .seq_kv = windowed ? 150 : 170,
                          .heads_q = 8,
                          .heads_kv = 8,
                          .head_dim = windowed ? 128 : 16,
                          .dtype = Dtype::float16};
    Options options;
    options.device = {DeviceKind::emulator, 0, 90};
    Problem described = problem;
    given.describe(described);
    EXPECT_NE(explain(described, Pass::backward, options).find("mask/mask_bits"), std::string::npos);
    const ProgramResults got = run_program(problem, given, options, 7, {"forward/sm90", "backward/sm90", 5});
    const ProgramResults expected = exact_program(problem, given, 7);
    expect_close(got, expected, 8e-3, text);
  }
}

// Scores that are options: ALiBi with slopes from a tensor of the program, a soft cap.
TEST(EmulatedSm90Programs, ScoresThatAreOptions) {
  for (const char* const text :
       {"t0 = tensor float32 1\nu = div score 0.75\nt = tanh u\nc = mul t 0.75\nx = load t0 h\nd = sub i j\na = abs d\n"
        "f = float a\ny = mul x f\nz = sub c y\nscore = z",
        "t0 = tensor float32 1\nx = load t0 h\nd = sub j i\nf = float d\ny = mul x f\nz = add score y\nv = ge i j\n"
        "score = z\nvisible = v"}) {
    RandomProgram given{std::string(text)};
    given.with_gradient = false;
    const Problem problem{
        .batch = 1, .seq_q = 150, .seq_kv = 150, .heads_q = 2, .heads_kv = 1, .head_dim = 16, .dtype = Dtype::float16};
    Options options;
    options.device = {DeviceKind::emulator, 0, 90};
    const ProgramResults got = run_program(problem, given, options, 7, {"forward/sm90", "backward/sm90"});
    ProgramResults expected = exact_program(problem, given, 7);
    expected.dreals.assign(expected.dreals.size(), 0);  // without gradients of slopes
    expect_close(got, expected, 8e-3, text);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EmulatedPrograms,
                         ::testing::Values(Kernels{"forward/portable", "backward/portable", 80},
                                           Kernels{"forward/sm80", "backward/sm80", 80},
                                           Kernels{"forward/sm90", "backward/sm90", 90}));

}  // namespace
}  // namespace flash_attention::testing
