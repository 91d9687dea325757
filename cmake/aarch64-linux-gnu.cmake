# Toolchain file: builds for 64-bit Arm with a cross compiler, and runs the tests by user-mode emulation (on Debian:
# g++-aarch64-linux-gnu, qemu-user). tools/dev.py test uses it where both are installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
find_program(QEMU_AARCH64 qemu-aarch64 REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU_AARCH64};-L;/usr/aarch64-linux-gnu)
