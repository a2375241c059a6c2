// A stand-in for libnvrtc. "Compiling" gives an image that repeats the options and headers; FAKE_NVRTC_LOG names a file
// that gets a line for each compilation, FAKE_NVRTC_SLEEP is how long one takes in milliseconds. A source with the word
// "#error" in it does not compile.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

namespace {

struct Program {
  std::string source;
  std::string image;
  std::string log;
};

constexpr int archs[] = {75, 80, 90, 100};

int copy_out(const std::string& text, char* to) {
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}

int size_out(const std::string& text, std::size_t* size) {
  *size = text.size() + 1;
  return 0;
}

}  // namespace

extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = MAJOR;
  *minor = MINOR;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(archs));
  return 0;
}
int nvrtcGetSupportedArchs(int* out) {
  std::memcpy(out, archs, sizeof(archs));
  return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char*, int num_headers, const char* const* headers,
                       const char* const* names) {
  auto* made = new Program{source, "image", ""};
  for (int i = 0; i < num_headers; ++i) {
    made->image += std::string(" ") + names[i];
    made->source += headers[i];
  }
  *program = made;
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  return 0;
}
int nvrtcCompileProgram(void* handle, int num_options, const char* const* options) {
  auto& program = *static_cast<Program*>(handle);
  for (int i = 0; i < num_options; ++i) program.image += std::string(" ") + options[i];
  if (const char* path = std::getenv("FAKE_NVRTC_LOG")) std::ofstream(path, std::ios::app) << ::getpid() << std::endl;
  if (const char* sleep = std::getenv("FAKE_NVRTC_SLEEP"))
    std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(sleep)));
  if (program.source.find("#error") != std::string::npos) {
    program.log = "unit.cu(3): error: there is a mistake here";
    return 6;
  }
  program.log = "ptxas info    : Used 42 registers, used 1 barriers, 1024 bytes smem";
  return 0;
}
int nvrtcGetProgramLogSize(void* program, std::size_t* size) { return size_out(static_cast<Program*>(program)->log, size); }
int nvrtcGetProgramLog(void* program, char* log) { return copy_out(static_cast<Program*>(program)->log, log); }
int nvrtcGetCUBINSize(void* program, std::size_t* size) { return size_out(static_cast<Program*>(program)->image, size); }
int nvrtcGetCUBIN(void* program, char* image) { return copy_out(static_cast<Program*>(program)->image, image); }
int nvrtcGetPTXSize(void* program, std::size_t* size) {
  return size_out("ptx of " + static_cast<Program*>(program)->image, size);
}
int nvrtcGetPTX(void* program, char* image) { return copy_out("ptx of " + static_cast<Program*>(program)->image, image); }
const char* nvrtcGetErrorString(int status) { return status == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
}
