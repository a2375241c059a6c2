# A toolchain: for 64-bit Arm on another machine, by the compiler of Debian's g++-aarch64-linux-gnu; what is built runs there, or
# under QEMU.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
