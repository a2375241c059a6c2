#include <cstdio>
#include <ctime>

#include "cli/output/format.h"
#include "cli/verb.h"
#include "flash_attention/error.h"
#include "flash_attention/version.h"

// The man page and the shells' completions, written from the verbs themselves, so that they cannot be behind.
namespace flash_attention::cli {
namespace {

/// Text for troff: a backslash is a command there, a point or an apostrophe too at the start of a line; dashes stay dashes.
std::string troff(std::string_view text) {
  std::string out;
  bool line_start = true;
  for (const char c : text) {
    if (line_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    line_start = c == '\n';
  }
  return out;
}

std::string man_page() {
  std::string page =
      format(".TH FLASH\\-ATTENTION 1 \"\" \"flash_attention %s\" \"User Commands\"\n", FLASH_ATTENTION_VERSION);
  page += ".SH NAME\nflash\\-attention \\- exact attention in O(seq) memory on CPUs and NVIDIA GPUs\n";
  page += ".SH SYNOPSIS\n.B flash\\-attention\n.I VERB\n[flags]\n.SH VERBS\n";
  for (const Verb* verb : all_verbs()) {
    page += ".SS " + troff(verb->name) + "\n" + troff(verb->summary) + "\n.PP\n.nf\n" + troff(verb->about) + ".fi\n";
    for (const Flag& flag : verb->flags) {
      page += ".TP\n.B \\-\\-" + troff(flag.name) + "\n";
      if (!flag.value.empty()) page.insert(page.size() - 1, " " + troff(flag.value));
      page += troff(flag.help) + (flag.fallback.empty() ? "" : " [" + troff(flag.fallback) + "]") + "\n";
    }
  }
  page +=
      ".SH EXIT STATUS\n0 good, 1 a check failed, 2 a request that cannot be served, 3 device or compiler missing, 4 out\n"
      "of memory, 5 a kernel does not compile, 6 the device failed, 7 a bug of this library, 8 the output could not be\n"
      "written, 130 interrupted.\n";
  return page + ".SH ENVIRONMENT\nThe variables FLASH_ATTENTION_* are listed in docs/jit.md.\n";
}

/// The allowed values of a flag, if they are a short list.
std::string_view values_of(std::string_view flag) {
  if (flag == "dtype") return "float32 float16 bfloat16";
  if (flag == "device") return "best cpu cuda emulator";
  if (flag == "arch") return "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121";
  return "";
}

std::string flags_of(const Verb& verb) {
  std::string words = "--help";
  for (const Flag& flag : verb.flags) words += " --" + std::string(flag.name);
  return words;
}

std::string bash_completion() {
  std::string names, cases;
  for (const Verb* verb : all_verbs()) {
    names += std::string(verb->name) + " ";
    cases += "    " + std::string(verb->name) + ") flags=\"" + flags_of(*verb) + "\" ;;\n";
  }
  std::string values;
  for (const char* flag : {"dtype", "device", "arch"}) {
    values += format("    --%s) COMPREPLY=($(compgen -W \"%s\" -- \"$current\")); return ;;\n", flag,
                     std::string(values_of(flag)).c_str());
  }
  return "# Completion of flash-attention for bash; written by `flash-attention generate bash`.\n"
         "_flash_attention() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags=\n"
         "  if [ \"$COMP_CWORD\" = 1 ]; then\n"
         "    COMPREPLY=($(compgen -W \"" +
         names +
         "--help --version\" -- \"$current\"))\n"
         "    return\n"
         "  fi\n"
         "  case $before in\n" +
         values +
         "  esac\n"
         "  case ${COMP_WORDS[1]} in\n" +
         cases +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$flags\" -- \"$current\"))\n"
         "}\n"
         "complete -o default -F _flash_attention flash-attention\n";
}

std::string zsh_completion() {
  return "#compdef flash-attention\n"
         "# Completion of flash-attention for zsh, by way of bash's; written by `flash-attention generate zsh`.\n"
         "autoload -U +X bashcompinit && bashcompinit\n" +
         bash_completion();
}

int generate(const Arguments& arguments) {
  const std::string what = arguments.words().empty() ? "" : arguments.words().front();
  if (what == "man") {
    std::fputs(man_page().c_str(), stdout);
  } else if (what == "bash") {
    std::fputs(bash_completion().c_str(), stdout);
  } else if (what == "zsh") {
    std::fputs(zsh_completion().c_str(), stdout);
  } else {
    throw Error(ErrorCode::invalid_argument, "generate: got '" + what + "', allowed: man, bash, zsh");
  }
  return ok;
}

}  // namespace

const Verb generate_verb{"generate",
                         "prints the man page, or the completion for a shell: man, bash or zsh",
                         "An installed package has all three. By hand:\n"
                         "\n"
                         "  flash-attention generate man > flash-attention.1\n"
                         "  source <(flash-attention generate bash)\n",
                         1,
                         {},
                         generate};

}  // namespace flash_attention::cli
