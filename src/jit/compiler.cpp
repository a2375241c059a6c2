#include "jit/compiler.h"

#include "jit/cached.h"

namespace flash_attention::jit {
namespace {

/// Kernels made ahead of time are searched first: if one fits, the compiler is not even opened.
std::optional<Artifact> find_ahead_of_time(const Compiler& compiler, const Unit& unit) {
  const ProductCache& cache = product_cache();
  if (cache.ahead_of_time().empty()) return std::nullopt;
  return cache.find_ahead_of_time(compiler.prepare(unit, Compiler::Maker::anyone).recipe);
}

}  // namespace

Unit unit_of(const KernelKey& key) {
  return {to_string(key), file_stem(key), emit(key, file_of_unit(key.unit, support::settings().kernel_dir)), key.arch};
}

void Job::make_recipe(const std::string& kind, const std::string& identity) {
  recipe = {unit.name, unit.stem, kind, unit.text, identity};
  for (const std::string& option : options) recipe.content += '\0' + option;
  for (const SourceFile& source : sources) recipe.content += '\0' + source.name + '\0' + source.text;
}

Artifact build(const Compiler& compiler, const Unit& unit, bool quiet) {
  if (auto artifact = find_ahead_of_time(compiler, unit)) return std::move(*artifact);
  return build_here(compiler, unit, quiet);
}

Artifact build_here(const Compiler& compiler, const Unit& unit, bool quiet) {
  const Job job = compiler.prepare(unit, Compiler::Maker::this_compiler);
  return product_cache().get(
      job.recipe, [&] { return compiler.compile(job); }, quiet);
}

std::optional<Artifact> find_built(const Compiler& compiler, const Unit& unit) {
  if (auto artifact = find_ahead_of_time(compiler, unit)) return artifact;
  return product_cache().find(compiler.prepare(unit, Compiler::Maker::this_compiler).recipe);
}

Error compile_error(const std::string& compiler, const std::string& what, const std::string& source,
                    const std::string& log) {
  return Error(ErrorCode::compile_failed, compiler + " could not compile " + what + "\nsource: " + source + "\n" + log);
}

}  // namespace flash_attention::jit
